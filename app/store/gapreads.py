"""Gaps of a channel: what its histories name and the store lacks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from app.limits import Limits
from app.store.database import Database
from app.store.keys import Keys
from app.store.records import Gap, GapPage, Position
from app.store.statements import ReadStatements


class GapReads:
    """Pages of gaps."""

    def __init__(
        self, database: Database, statements: ReadStatements, keys: Keys, limits: Limits
    ) -> None:
        self._database = database
        self._statements = statements
        self._keys = keys
        self._limits = limits

    async def page(self, channel_id: str, after: Position | None, limit: int) -> GapPage:
        """Missing IDs as UTF-8 bytes sort, each with the hints that histories give for it."""
        channel = await self._database.rows(self._statements.channel, channel_id=channel_id)
        if not channel:
            return GapPage([], None)
        number = int(channel[0][1])
        begin = "" if after is None else str(after[0])
        rows = await self._database.rows(
            self._statements.gaps, channel_no=number, after=begin, limit=limit + 1
        )
        missing = [message_id for (message_id,) in rows[:limit]]
        asked = [(self._keys.of_text(each), number, each) for each in missing]
        hints: list[list[bytes]] = [[] for _ in missing]
        for which, hint in await self._database.each(self._statements.history_hints, asked):
            hints[which].append(hint)
        met = await self._met(channel_id, missing)
        gaps = [
            Gap(each, tuple(found), met_as_sync=each in met)
            for each, found in zip(missing, hints, strict=True)
        ]
        sizes = accumulate(gap.shown_bytes for gap in gaps)
        fitting = sum(1 for size in sizes if size <= self._limits.reply_bytes_max)
        gaps = gaps[: max(1, fitting)]
        return GapPage(gaps, (gaps[-1].message_id,) if len(gaps) < len(rows) else None)

    async def _met(self, channel_id: str, message_ids: Sequence[str]) -> set[str]:
        """Those that were met as IDs of sync messages."""
        asked = [(self._keys.of_met(channel_id, each), channel_id, each) for each in message_ids]
        rows = await self._database.each(self._statements.is_met, asked)
        return {message_ids[row[0]] for row in rows}
