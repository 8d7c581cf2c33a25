"""Lost content: follows the marks that all processes of a node make, and reads lost frames again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from app.errors import Problem
from app.store.store import Store

MARKS_INTERVAL_S = 10.0
"""The maximum age of this process's knowledge of marks: other processes make marks too."""

LOST_RETRIED_COUNT = 256
"""Lost frames that are read again in each such interval, in case their rows were repaired."""

_log = logging.getLogger(__name__)


class LostContent:
    """See the module. `lost_count` is a recent number of entries that are marked as lost."""

    def __init__(self, store: Store) -> None:
        self.lost_count = 0
        self._store = store
        self._following: asyncio.Task[None] | None = None
        self._retried_seq = 0

    async def start(self) -> None:
        """Learn the marks, and follow them from now on."""
        await self._follow_marks()
        self._following = asyncio.create_task(self._keep_following(), name="marks")

    async def close(self) -> None:
        """Stop."""
        if self._following:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def count(self) -> int:
        """The number of entries marked as lost; the last known one if the database is unavailable."""
        with suppress(Problem):
            self.lost_count = await self._store.frames.lost_count()
        return self.lost_count

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
