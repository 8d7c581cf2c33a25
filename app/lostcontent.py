"""Lost content: follows the marks that all processes of a node make, and reads lost frames again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from app.errors import Problem
from app.store.store import Store
from app.supervisor import Supervisor

MARKS_INTERVAL_S = 10.0
"""The maximum age of this process's knowledge of marks: other processes make marks too."""

LOST_RETRIED_COUNT = 256
"""Lost frames that are read again in each such interval, in case their rows were repaired."""


class LostContent:
    """See the module. `lost_count` is a recent number of entries that are marked as lost."""

    def __init__(self, store: Store) -> None:
        self.lost_count = 0
        self._store = store
        self._retried_seq = 0

    @asynccontextmanager
    async def followed(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Learn the marks, and follow them while the block runs."""
        await self._follow_marks()
        async with supervisor.repeating("lost content", self._follow_marks, MARKS_INTERVAL_S):
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
