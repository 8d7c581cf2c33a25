"""Reading channels and the feed page by page."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.entries import Token
from app.store.database import Database, Row
from app.store.entryrows import entry_row, fitting_count, left_out
from app.store.framereads import FrameReads
from app.store.groupwriter import PREFIX_BYTES
from app.store.records import ChannelInfo, Page, Position
from app.store.statements import ReadStatements
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN

_SEQ_MAX = 2**63 - 1


class PageReads:
    """Pages of entries, and the channels they are in."""

    def __init__(self, database: Database, statements: ReadStatements, frames: FrameReads) -> None:
        self._database = database
        self._statements = statements
        self._frames = frames

    async def channels(
        self, after: str | None, limit: int, prefix: str | None
    ) -> list[ChannelInfo]:
        """Channels after a name, in order of names; with a prefix only those that begin so."""
        begin = prefix or ""
        # No channel ID holds U+0000, so this is the first possible one behind `after`.
        first = begin if after is None else max(begin, f"{after}\x01", key=str.encode)
        rows = await self._database.rows(self._statements.channels, first=first, limit=limit)
        return [ChannelInfo(*row) for row in rows if row[0].startswith(begin)]

    async def channels_among(
        self, names: Collection[str], after: str | None, limit: int, prefix: str | None
    ) -> list[ChannelInfo]:
        """As `channels`, as if the store held no others than these."""
        begin = prefix or ""
        found: list[ChannelInfo] = []
        for name in sorted(names):
            if name.startswith(begin) and (after is None or name > after):
                channel = await self.channel(name)
                found += [] if channel is None else [channel]
                if len(found) == limit:
                    break
        return found

    async def channel(self, channel_id: str) -> ChannelInfo | None:
        """One channel, None where nothing of it is here."""
        rows = await self._database.rows(self._statements.channel, channel_id=channel_id)
        return ChannelInfo(*rows[0]) if rows else None

    async def channels_numbered_after(self, channel_no: int, limit: int) -> list[ChannelInfo]:
        """Channels in the order they came."""
        query = self._statements.channels_numbered
        rows = await self._database.rows(query, after=channel_no, limit=limit)
        return [ChannelInfo(*row) for row in rows]

    async def log_page(
        self,
        channel_id: str,
        *,
        descending: bool,
        after: Position | None,
        before: Position | None,
        lamports: tuple[int, int],
        limit: int,
        bytes_max: int,
    ) -> Page:
        """A page in log order."""
        low, high = (before, after) if descending else (after, before)
        # The tighter bound of each end alone is asked for: the index then begins right there.
        low_is_position = low is not None and int(low[0]) >= lamports[0]
        high_is_position = high is not None and int(high[0]) <= lamports[1]
        query = self._statements.log_page(
            descending=descending,
            low_is_position=low_is_position,
            high_is_position=high_is_position,
        )
        rows = await self._database.rows(
            query,
            channel_id=channel_id,
            limit=limit + 1,
            **position_bound("low", low if low_is_position else None, lamports[0]),
            **position_bound("high", high if high_is_position else None, lamports[1]),
        )
        return await self._page(rows, limit, bytes_max, in_log_order=True)

    async def arrival_page(
        self,
        channel_id: str,
        *,
        descending: bool,
        after: Position | None,
        before: Position | None,
        lamports: tuple[int, int],
        limit: int,
        bytes_max: int,
    ) -> Page:
        """A page in arrival order."""
        low, high = (before, after) if descending else (after, before)
        rows = await self._database.rows(
            self._statements.arrival_page(descending=descending),
            channel_id=channel_id,
            low=0 if low is None else low[0],
            high=_SEQ_MAX if high is None else high[0],
            lamport_from=lamports[0],
            lamport_to=lamports[1],
            limit=limit + 1,
        )
        return await self._page(rows, limit, bytes_max, in_log_order=False)

    async def feed(self, after_seq: int, limit: int, bytes_max: int) -> Page:
        """All channels in arrival order."""
        rows = await self._database.rows(self._statements.feed, after=after_seq, limit=limit + 1)
        return await self._page(rows, limit, bytes_max, in_log_order=False)

    async def _page(
        self, rows: Sequence[Row], limit: int, bytes_max: int, *, in_log_order: bool
    ) -> Page:
        if not rows:
            return Page([], None)
        count = min(limit, fitting_count(rows, bytes_max))
        entries = await self._frames.entries(rows[:count])
        last = entry_row(rows[count - 1])
        place = Token(last.seq, last.arrival_sum)
        after: Position = place
        if in_log_order:
            after = (last.lamport, last.message_id, last.digest.hex())
        following = None if count == len(rows) else after
        return Page(entries, following, left_out(rows[:count], entries), place)


def window(lamport_from: int | None, lamport_to: int | None) -> tuple[int, int]:
    """A Lamport window, both ends inclusive."""
    return (
        LAMPORT_MIN if lamport_from is None else lamport_from,
        LAMPORT_MAX if lamport_to is None else lamport_to,
    )


def position_bound(end: str, position: Position | None, lamport: int) -> dict[str, object]:
    """The arguments of one end of a log page."""
    if position is None:
        return {end: lamport}
    digest = bytes.fromhex(str(position[2]))
    return {
        f"{end}_lamport": position[0],
        f"{end}_id": position[1],
        f"{end}_prefix": digest[:PREFIX_BYTES],
        f"{end}_digest": digest,
    }
