"""Channels, and pages of their entries in log order or in arrival order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import starmap
from operator import attrgetter
from typing import Any, Literal

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    LargeBinary,
    Select,
    bindparam,
    select,
    tuple_,
)

from app.entries import Entry, Token
from app.store.database import Database, ManyQuery, Query, SqlDialect, constant
from app.store.entryrows import (
    PREFIX_BYTES,
    EntryRow,
    FrameReader,
    LeftOut,
    Position,
    arrived_after,
    entries_by_seq,
    entry_rows,
    fitting_count,
    left_out,
    select_entries_with_frames,
)
from app.store.schema import ByteText, channels, messages
from recon.agreement import Interest
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN

_SEQ_MAX = 2**63 - 1

NUMBERS_PER_LOOK_UP = 16
"""Of a channel, for the feed of a caller that reads some channels only."""


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """A channel, the number of its entries, and their first and last Lamport timestamps."""

    channel_id: str
    channel_no: int
    count: int
    lamport_first: int
    lamport_last: int


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in order; `next` is None at the end.

    `last`: the place of the last entry of the page, left out or not; None on an empty page.
    """

    entries: list[Entry]
    next: Position | None
    left_out: tuple[LeftOut, ...] = ()
    last: Token | None = None

    @property
    def in_order(self) -> Sequence[Entry | LeftOut]:
        """The items of a page in arrival order, left out or not, in this order."""
        if not self.left_out:
            return self.entries
        return sorted([*self.entries, *self.left_out], key=attrgetter("seq"))

    @property
    def last_seq(self) -> int | None:
        """The sequence number of `last`."""
        return None if self.last is None else self.last.number


class Channels:
    """The channels of one open store. Callers bound the limits."""

    def __init__(self, database: Database, frame_reader: FrameReader) -> None:
        self._database = database
        self._sql = database.sql
        self._frames = frame_reader

    # ---- channels

    async def named(self, channel_id: str) -> ChannelInfo | None:
        """One channel; None if the store holds nothing of it."""
        rows = await self._database.few(_named(self._sql), channel_id=channel_id)
        return ChannelInfo(*rows[0]) if rows else None

    async def after(
        self, name: str | None, limit: int, prefix: str | None = None
    ) -> list[ChannelInfo]:
        """Channels whose names follow `name`, by name as UTF-8 bytes; only those with the prefix."""
        begin = prefix or ""
        # No channel ID holds U+0000, so this is the first possible one after `name`.
        first = begin if name is None else max(begin, f"{name}\x01", key=str.encode)
        rows = await self._database.rows(_from_name(self._sql), first=first, limit=limit)
        return [each for each in starmap(ChannelInfo, rows) if each.channel_id.startswith(begin)]

    async def within(
        self, part: Interest, after: str | None, limit: int, prefix: str | None = None
    ) -> list[ChannelInfo]:
        """As `after`, as if the store held no other channels than those of `part`."""
        begin = prefix or ""
        found: dict[str, ChannelInfo] = {}
        names = [each for each in part.channels if each.startswith(begin)]
        for name in [each for each in names if after is None or each > after]:
            channel = await self.named(name)
            if channel is not None:
                found[name] = channel
            if len(found) == limit:
                break
        # A listed channel does not begin with one of the prefixes, and no prefix with another.
        for each in part.prefixes:
            if each.startswith(begin) or begin.startswith(each):
                listed = await self.after(after, limit, max(begin, each, key=len))
                found |= {channel.channel_id: channel for channel in listed}
        return [found[name] for name in sorted(found)[:limit]]

    async def numbered_after(self, channel_no: int, limit: int) -> list[ChannelInfo]:
        """Channels in the order in which their first entries came."""
        rows = await self._database.rows(_from_number(self._sql), after=channel_no, limit=limit)
        return list(starmap(ChannelInfo, rows))

    # ---- pages

    async def page(
        self,
        channel_id: str,
        *,
        order: Literal["log", "arrival"] = "log",
        direction: Literal["asc", "desc"] = "asc",
        after: Position | None = None,
        before: Position | None = None,
        lamport_from: int | None = None,
        lamport_to: int | None = None,
        limit: int,
        bytes_max: int,
    ) -> Page:
        """A page of a channel; `after` and `before` (exclusive) count in the reading direction.

        It ends early at `bytes_max`, and `next` says where to go on. Entries with lost content are in
        `left_out`.
        """
        is_descending = direction == "desc"
        low, high = (before, after) if is_descending else (after, before)
        lamports = (
            LAMPORT_MIN if lamport_from is None else lamport_from,
            LAMPORT_MAX if lamport_to is None else lamport_to,
        )
        if order == "log":
            rows = await self.log_rows(channel_id, low, high, lamports, limit + 1, is_descending)
        else:
            found = await self._database.rows(
                _arrival_page(self._sql, is_descending),
                channel_id=channel_id,
                low=0 if low is None else low[0],
                high=_SEQ_MAX if high is None else high[0],
                lamport_from=lamports[0],
                lamport_to=lamports[1],
                limit=limit + 1,
            )
            rows = entry_rows(found)
        return await self._page(rows, limit, bytes_max, in_log_order=order == "log")

    async def feed(
        self,
        after_seq: int,
        limit: int,
        bytes_max: int,
        *,
        channel_nos: Sequence[int] | None = None,
    ) -> Page:
        """All channels, or some, in arrival order, up to the last commit."""
        if channel_nos is not None:
            seqs = await self._first_after(after_seq, channel_nos, limit + 1)
            some = await self._database.among(entries_by_seq(self._sql), seqs)
            rows = sorted(entry_rows(some), key=attrgetter("seq"))
            return await self._page(rows, limit, bytes_max, in_log_order=False)
        query = arrived_after(self._sql)
        found = await self._database.rows(query, after=after_seq, limit=limit + 1)
        return await self._page(entry_rows(found), limit, bytes_max, in_log_order=False)

    async def _first_after(
        self, after_seq: int, channel_nos: Sequence[int], limit: int
    ) -> list[int]:
        """The numbers of the first entries of some channels, ascending: a merge of their orders.

        The cost follows the number of channels and of entries found, whatever other channels hold.
        """
        query = _numbers_after(self._sql)
        rows = await self._database.each(query, [(each, after_seq) for each in channel_nos])
        waiting: dict[int, deque[int]] = {}
        for which, seq in rows:
            waiting.setdefault(channel_nos[which], deque()).append(seq)
        heads = [(seqs[0], channel_no) for channel_no, seqs in waiting.items()]
        heapify(heads)
        found: list[int] = []
        while heads and len(found) < limit:
            seq, channel_no = heads[0]
            found.append(seq)
            seqs = waiting[channel_no]
            seqs.popleft()
            if not seqs:
                more = await self._database.each(query, [(channel_no, seq)])
                seqs.extend(each for _, each in more)
            if seqs:
                heapreplace(heads, (seqs[0], channel_no))
            else:
                heappop(heads)
        return found

    async def log_rows(
        self,
        channel_id: str,
        low: Position | None,
        high: Position | None,
        lamports: tuple[int, int],
        limit: int,
        is_descending: bool,
    ) -> list[EntryRow]:
        """Rows with small frames, in log order, between two positions (exclusive) and two Lamport
        timestamps (inclusive)."""
        # The tighter bound of each end alone goes into the query: the index then begins right there.
        low_is_position = low is not None and int(low[0]) >= lamports[0]
        high_is_position = high is not None and int(high[0]) <= lamports[1]
        found = await self._database.rows(
            _log_page(self._sql, is_descending, low_is_position, high_is_position),
            channel_id=channel_id,
            limit=limit,
            **_log_bound("low", low if low_is_position else None, lamports[0]),
            **_log_bound("high", high if high_is_position else None, lamports[1]),
        )
        return entry_rows(found)

    async def _page(
        self, rows: Sequence[EntryRow], limit: int, bytes_max: int, *, in_log_order: bool
    ) -> Page:
        if not rows:
            return Page([], None)
        count = min(limit, fitting_count(rows, bytes_max))
        taken = rows[:count]
        found = await self._frames.read(taken)
        last = taken[-1]
        place = Token(last.seq, last.arrival_sum)
        after: Position = place
        if in_log_order:
            after = (last.lamport, last.message_id, last.digest.hex())
        following = None if count == len(rows) else after
        return Page(found.entries, following, left_out(taken, found), place)


# ---- statements

_LISTED = select(
    channels.c.channel_id,
    channels.c.channel_no,
    channels.c.count,
    channels.c.lamport_first,
    channels.c.lamport_last,
)
_LIMIT: Any = bindparam("limit", type_=Integer())
_LOG_ORDER = (
    messages.c.lamport,
    messages.c.message_id,
    messages.c.digest_prefix,
    messages.c.digest,
)


@cache
def _named(sql: SqlDialect) -> Query:
    return sql.query(_LISTED.where(channels.c.channel_id == bindparam("channel_id")))


@cache
def _from_name(sql: SqlDialect) -> Query:
    listed = _LISTED.where(channels.c.channel_id >= bindparam("first"))
    return sql.query(listed.order_by(channels.c.channel_id).limit(_LIMIT))


@cache
def _from_number(sql: SqlDialect) -> Query:
    listed = _LISTED.where(channels.c.channel_no > bindparam("after"))
    return sql.query(listed.order_by(channels.c.channel_no).limit(_LIMIT))


@cache
def _log_page(
    sql: SqlDialect,
    is_descending: bool,
    low_is_position: bool,
    high_is_position: bool,
) -> Query:
    """`EntryRow`s in log order; each end is a Lamport timestamp (inclusive) or a position (exclusive)."""
    page = _select_page()
    if low_is_position:
        page = page.where(tuple_(*_LOG_ORDER) > _position("low"))
    else:
        page = page.where(messages.c.lamport >= bindparam("low", type_=BigInteger()))
    if high_is_position:
        page = page.where(tuple_(*_LOG_ORDER) < _position("high"))
    else:
        page = page.where(messages.c.lamport <= bindparam("high", type_=BigInteger()))
    order = [column.desc() for column in _LOG_ORDER] if is_descending else _LOG_ORDER
    return sql.query(page.order_by(*order).limit(_LIMIT))


def _position(end: str) -> ColumnElement[Any]:
    """The arguments of `_log_bound`, in the order of `_LOG_ORDER`."""
    return tuple_(
        bindparam(f"{end}_lamport", type_=BigInteger()),
        bindparam(f"{end}_id", type_=ByteText),
        bindparam(f"{end}_prefix", type_=LargeBinary()),
        bindparam(f"{end}_digest", type_=LargeBinary()),
    )


def _log_bound(end: str, position: Position | None, lamport: int) -> dict[str, object]:
    """The arguments of one end of a page in log order."""
    if position is None:
        return {end: lamport}
    digest = bytes.fromhex(str(position[2]))
    return {
        f"{end}_lamport": position[0],
        f"{end}_id": position[1],
        f"{end}_prefix": digest[:PREFIX_BYTES],
        f"{end}_digest": digest,
    }


@cache
def _numbers_after(sql: SqlDialect) -> ManyQuery:
    """The first sequence numbers of a channel behind a number, a few at a time."""
    return sql.each(
        {"channel_no": Integer(), "after": BigInteger()},
        lambda key: (
            select(messages.c.seq)
            .where(messages.c.channel_no == key["channel_no"], messages.c.seq > key["after"])
            .order_by(messages.c.seq)
            .limit(constant(NUMBERS_PER_LOOK_UP))
        ),
    )


@cache
def _arrival_page(sql: SqlDialect, is_descending: bool) -> Query:
    """`EntryRow`s in arrival order, between two sequence numbers (exclusive)."""
    page = _select_page().where(
        messages.c.seq > bindparam("low", type_=BigInteger()),
        messages.c.seq < bindparam("high", type_=BigInteger()),
        messages.c.lamport >= bindparam("lamport_from", type_=BigInteger()),
        messages.c.lamport <= bindparam("lamport_to", type_=BigInteger()),
    )
    order = messages.c.seq.desc() if is_descending else messages.c.seq.asc()
    return sql.query(page.order_by(order).limit(_LIMIT))


def _select_page() -> Select[Any]:
    """Entries of the channel with the name `channel_id`."""
    listed = channels.alias()
    number = select(listed.c.channel_no).where(listed.c.channel_id == bindparam("channel_id"))
    return select_entries_with_frames().where(messages.c.channel_no == number.scalar_subquery())
