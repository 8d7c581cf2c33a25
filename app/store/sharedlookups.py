"""Look-ups of one kind that wait at the same time become one query.

As with group commit nothing waits for company: a look-up that finds no query under way starts one
at once, and whatever comes while it runs shares the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from app.errors import Code, Problem
from app.limits import Limits
from app.store.sql import Row

QUERIES_MAX = 2
"""Queries under way at a time: while one is answered, the next one gathers."""

RunEach = Callable[[Sequence[Row]], Awaitable[list[Row]]]
"""Runs many look-ups; each row of the answer begins with the number of its look-up."""

Waiting = tuple[Row, asyncio.Future[list[Row]]]


class SharedLookups:
    """Look-ups of one kind."""

    def __init__(self, run_each: RunEach, limits: Limits) -> None:
        self._run_each = run_each
        self._limits = limits
        self._waiting: list[Waiting] = []
        self._running: set[asyncio.Task[None]] = set()

    async def look_up(self, arguments: Row) -> list[Row]:
        """The rows of one look-up, without its number. Raises `overloaded` where too many wait."""
        if len(self._waiting) >= self._limits.lookups_waiting_max:
            raise Problem(Code.OVERLOADED, "too many look-ups wait", headers={"Retry-After": "1"})
        future: asyncio.Future[list[Row]] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, future))
        if len(self._running) < QUERIES_MAX:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await future

    async def _run(self) -> None:
        most = self._limits.lookups_shared_max
        while self._waiting:
            batch = self._waiting[:most]
            del self._waiting[:most]
            try:
                rows = await self._run_each([arguments for arguments, _ in batch])
            except Exception as error:  # noqa: BLE001 - whatever it is, everybody who waits gets it
                _fail(batch, error)
            else:
                _answer(batch, rows)


def _answer(batch: Sequence[Waiting], rows: Sequence[Row]) -> None:
    answers: list[list[Row]] = [[] for _ in batch]
    for row in rows:
        answers[row[0]].append(row[1:])
    for (_, future), answer in zip(batch, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def _fail(batch: Sequence[Waiting], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
