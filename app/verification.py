"""Verification: reads every stored frame periodically, to find lost content before a reader does.

It uses a small part of one core. A file beside the data keeps its position across restarts; without the
file a pass starts again, which costs only time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.errors import Problem
from app.limits import Limits
from app.store.store import Store

FRAMES_PER_STEP = 64
BYTES_PER_STEP = 256 * 1024
"""A step is one to two milliseconds of the event loop."""

MARKS_INTERVAL_S = 10.0
"""The maximum age of this process's knowledge of marks: other processes make marks too."""

LOST_RETRIED_COUNT = 256
"""Lost frames that are read again in each such interval, in case their rows were repaired."""

TRY_AGAIN_S = 30.0
"""Pause after a fault of the database."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pass:
    """The position of the verification: frames up to `seq` were read since `began_at_ms`.

    `frames_count` and `lost_count` are counts of this pass; `ended_at_ms` is the end of the last complete
    pass, None before the first.
    """

    seq: int = 0
    began_at_ms: int = 0
    frames_count: int = 0
    lost_count: int = 0
    ended_at_ms: int | None = None


class Verification:
    """See the module. `lost_count` is a recent number of entries that are marked as lost."""

    def __init__(self, store: Store, limits: Limits, path: Path) -> None:
        self.lost_count = 0
        self.frames_total = 0
        self.current = Pass()
        self._store = store
        self._limits = limits
        self._path = path
        self._tasks: list[asyncio.Task[None]] = []
        self._retried_seq = 0
        self._reads_all = False

    async def start(self, *, reads_all: bool) -> None:
        """Follow the marks; with `reads_all`, which one process of a node sets, read all frames too."""
        await self._follow_marks()
        self._tasks.append(asyncio.create_task(self._keep_following(), name="marks"))
        self._reads_all = reads_all
        if reads_all:
            self.current = self._remembered()
            self._tasks.append(asyncio.create_task(self._keep_reading(), name="verification"))

    async def close(self) -> None:
        """Stop, and save the position."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reads_all:
            self._keep_place()

    async def count_lost(self) -> int:
        """The number of entries marked as lost; the last known one if the database is unavailable."""
        with suppress(Problem):
            self.lost_count = await self._store.frames.lost_count()
        return self.lost_count

    async def document(self) -> dict[str, Any]:
        """The part of /v1/info about lost content and verification."""
        # Only one of several workers reads frames; the others know its saved position.
        place = self.current if self._reads_all else self._remembered()
        return {
            "lost": await self.count_lost(),
            "verification": {
                "seq": place.seq,
                "frames_read": place.frames_count,
                "lost_found": place.lost_count,
                "last_pass_ended_at_ms": place.ended_at_ms,
            },
        }

    # ---- marks

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(MARKS_INTERVAL_S)
            try:
                await self._follow_marks()
            except Problem as problem:
                _log.debug("marks of lost content could not be read: %s", problem)
            except Exception:  # noqa: BLE001 - this lives as long as the node does
                _log.warning("marks of lost content could not be read", exc_info=True)

    async def _follow_marks(self) -> None:
        self.lost_count = await self._store.frames.follow_marks()
        if self.lost_count:
            self._retried_seq = await self._store.frames.retry_lost(
                self._retried_seq, LOST_RETRIED_COUNT
            )

    # ---- all frames

    async def _keep_reading(self) -> None:
        await asyncio.sleep(self._limits.verification_delay_s)
        kept_at = time.monotonic()
        while True:
            try:
                await asyncio.sleep(await self._step())
            except Problem as problem:
                _log.debug("frames could not be verified: %s", problem)
                await asyncio.sleep(TRY_AGAIN_S)
            except Exception:  # noqa: BLE001 - as above
                _log.warning("frames could not be verified", exc_info=True)
                await asyncio.sleep(TRY_AGAIN_S)
            if time.monotonic() - kept_at > self._limits.index_save_interval_s:
                kept_at = time.monotonic()
                self._keep_place()

    async def _step(self) -> float:
        """Read a few frames; returns the seconds to rest until the next step."""
        place, began = self.current, time.perf_counter()
        if not place.seq and not place.frames_count:
            place.began_at_ms = time.time_ns() // 1_000_000
        found = await self._store.frames.verify(place.seq, FRAMES_PER_STEP, BYTES_PER_STEP)
        if not found.frames_count:
            return self._end_pass()
        place.seq = found.last_seq
        place.frames_count += found.frames_count
        place.lost_count += found.lost_count
        self.frames_total += found.frames_count
        spent = time.perf_counter() - began
        return spent * (100 / self._limits.verification_percent_max - 1)

    def _end_pass(self) -> float:
        now_ms = time.time_ns() // 1_000_000
        passed_s = (now_ms - self.current.began_at_ms) / 1_000
        if self.current.lost_count:
            _log.warning(
                "%d of %d stored frames cannot be read; `sdstore check --deep` lists them",
                self.current.lost_count,
                self.current.frames_count,
            )
        self.current = Pass(ended_at_ms=now_ms)
        self._keep_place()
        return max(1.0, self._limits.verification_interval_s - passed_s)

    def _remembered(self) -> Pass:
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
            if known.pop("database_id") == self._store.database_id:
                return Pass(**known)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        return Pass()

    def _keep_place(self) -> None:
        known = {"database_id": self._store.database_id, **asdict(self.current)}
        draft = self._path.with_suffix(".new")
        try:
            draft.write_text(json.dumps(known), encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            _log.warning("the position of the verification was not saved: %s", error)
