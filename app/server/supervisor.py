"""The supervisor of a node's background tasks: it logs, counts and restarts those that fail.

A task that raises, or returns, is logged, counted (`sdstore_task_failures_total`), and started again after
a pause that doubles. While it fails, `/readyz` names it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from app.errors import Code, Problem

PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 5.0
"""Pauses before a failed task starts again: soon, and in the long run less than 1 % of a core."""

OUTAGE_PAUSE_S = 1.0
"""The pause after a `Problem`, which does not grow: a database that is back is noticed within a second."""

STEADY_S = 10.0
"""A task that has run for this long works. Its next failure is a new one."""

_log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[object]]


class EndedError(Exception):
    """A background task returned, though it has no end."""


class Supervisor:
    """See the module. Tasks belong to the event loop that runs; each ends when its owner cancels it.

    Names of tasks are labels of metrics, so they come from a closed set. `failures` counts by name.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._running: set[_Kept] = set()

    @property
    def failing(self) -> list[str]:
        """The names of tasks that failed and do not work yet."""
        return sorted({each.name for each in self._running if each.failures})

    def keep(self, name: str, work: Work) -> asyncio.Task[None]:
        """Run `work`, which has no end, until the task is cancelled."""
        kept = _Kept(name, self.failures)
        return self._start(kept, kept.run(work))

    def repeat(self, name: str, do: Work, interval_s: float) -> asyncio.Task[None]:
        """Call `do` after pauses of `interval_s`, until the task is cancelled."""
        kept = _Kept(name, self.failures)

        async def work() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await do()
                kept.works()

        return self._start(kept, kept.run(work))

    @asynccontextmanager
    async def keeping(self, name: str, work: Work) -> AsyncIterator[None]:
        """As `keep`, while the block runs."""
        task = self.keep(name, work)
        try:
            yield
        finally:
            await ended(task)

    @asynccontextmanager
    async def repeating(self, name: str, do: Work, interval_s: float) -> AsyncIterator[None]:
        """As `repeat`, while the block runs."""
        task = self.repeat(name, do, interval_s)
        try:
            yield
        finally:
            await ended(task)

    def _start(self, kept: _Kept, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(running, name=kept.name)
        self.failures[kept.name] += (
            0  # a metric that exists before the first failure can be watched
        )
        self._running.add(kept)
        task.add_done_callback(lambda _: self._running.discard(kept))
        return task


async def ended(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    there = [each for each in tasks if each is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


class _Kept:
    """One task. `failures`: in a row, since it last worked."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.name = name
        self.failures = 0
        self._counts = counts
        self._failing_since_s = 0.0

    async def run(self, work: Work) -> None:
        """Do `work` until this task is cancelled."""
        while True:
            steady = asyncio.get_running_loop().call_later(STEADY_S, self.works)
            try:
                await work()
                error: BaseException = EndedError("it returned")
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                error = cancelled  # something that it waited for was cancelled, not this task
            except Exception as raised:  # noqa: BLE001 - whatever it is, the task must go on
                error = raised
            finally:
                steady.cancel()
            self._failed(error)
            pause_s = min(PAUSE_S_MIN * 2 ** min(self.failures - 1, 16), PAUSE_S_MAX)
            await asyncio.sleep(OUTAGE_PAUSE_S if isinstance(error, Problem) else pause_s)

    def works(self) -> None:
        """The work succeeded, or went on for long enough."""
        if self.failures:
            seconds = time.monotonic() - self._failing_since_s
            _log.info("the task %r works again after %.1f s", self.name, seconds)
        self.failures = 0

    def _failed(self, error: BaseException) -> None:
        """Count a failure, and log the first in a row."""
        self._counts[self.name] += 1
        self.failures += 1
        if self.failures > 1:
            return
        self._failing_since_s = time.monotonic()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        is_expected = isinstance(error, Problem)
        # Readiness reports a database that is away, once and not for each task.
        level = logging.DEBUG if _is_outage(error) else logging.WARNING
        _log.log(
            level,
            "the background task %r failed and will be restarted: %s",
            self.name,
            reason,
            exc_info=None if is_expected else error,
        )


def _is_outage(error: BaseException) -> bool:
    return isinstance(error, Problem) and error.code in (Code.STORE_UNAVAILABLE, Code.NOT_READY)
