"""Lost content: follows the marks that all processes of a node make, and finds rot that nobody reads.

One process of a node reads every frame of the store about once a day, on a small share of one core. It
trusts nothing in memory, and a frame that cannot be read is marked as in any other reading. A pass
begins at a random message and keeps no place, so a node that restarts often reaches them all as well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from app.errors import Problem
from app.server.limits import Limits
from app.server.supervisor import Supervisor
from app.store.store import Store

MARKS_INTERVAL_S = 10.0
"""The maximum age of this process's knowledge of marks: other processes make marks too."""

LOST_RETRIED_COUNT = 256
"""Lost frames that are read again in each such interval, in case their rows were repaired."""

FRAMES_PER_STEP = 16
BYTES_PER_STEP = 256 * 1024
"""A step takes one to three milliseconds of the event loop: as long as a request."""

FIRST_PASS_S = 60.0
"""From the start of a node, which reads a lot anyway, to its first pass."""

PASS_REST_S_MIN = 1.0
"""Between two passes, where a pass takes longer than the interval."""


class LostContent:
    """See the module. `lost_count` is a recent number of entries that are marked as lost.

    `read_count`: frames that the passes of this process read. `pass_ended_s`: when the last whole pass
    ended, in seconds since the Unix epoch; 0 before the first.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self.lost_count = 0
        self.read_count = 0
        self.pass_ended_s = 0.0
        self._store = store
        self._limits = limits
        self._retried_seq = 0

    @asynccontextmanager
    async def followed(self, supervisor: Supervisor, *, reads_all: bool) -> AsyncIterator[None]:
        """Learn the marks, and follow them while the block runs.

        `reads_all`: read all frames as well; set by one process of a node.
        """
        await self._follow_marks()
        async with AsyncExitStack() as tasks:
            following = supervisor.repeating("lost content", self._follow_marks, MARKS_INTERVAL_S)
            await tasks.enter_async_context(following)
            if reads_all:
                await tasks.enter_async_context(supervisor.keeping("frames", self._keep_reading))
            yield

    async def count(self) -> int:
        """The number of entries marked as lost; the last known one if the database is unavailable."""
        with suppress(Problem):
            self.lost_count = await self._store.frames.lost_count()
        return self.lost_count

    async def _follow_marks(self) -> None:
        self.lost_count = await self._store.frames.follow_marks()
        if self.lost_count:
            self._retried_seq = await self._store.frames.retry_lost(
                self._retried_seq, LOST_RETRIED_COUNT
            )

    async def _keep_reading(self) -> None:
        await asyncio.sleep(FIRST_PASS_S)
        while True:
            began_s = time.monotonic()
            await self._read_all()
            self.pass_ended_s = time.time()
            passed_s = time.monotonic() - began_s
            await asyncio.sleep(
                max(PASS_REST_S_MIN, self._limits.frames_read_interval_s - passed_s)
            )

    async def _read_all(self) -> None:
        """Read the frame of every message that is there now.

        A fault of the database ends the pass: the supervisor reports it, and begins another one elsewhere.
        """
        last, _ = await self._store.arrivals.watermark()
        first = random.randrange(last + 1)
        for after, until in ((first, last), (0, first)):
            place = after
            while place < until:
                began_s = time.thread_time()
                read = await self._store.frames.verify(place, FRAMES_PER_STEP, BYTES_PER_STEP)
                spent_s = time.thread_time() - began_s
                self.read_count += read.frames_count
                place = read.last_seq if read.frames_count else until
                await asyncio.sleep(spent_s * (100 / self._limits.frames_read_percent_max - 1))
