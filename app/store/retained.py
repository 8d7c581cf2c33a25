"""What retention reads: the entries of a channel that have content, by arrival.

A retired entry has a frame of 0 bytes in its row, and no other entry has one. Every query reads a bounded part,
so that it takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Integer, bindparam, func, select

from app.store.database import Database, Query, SqlDialect
from app.store.schema import channels, messages

BLOCK_ENTRIES = 10_000
"""Entries that one query looks at: some 5 ms."""


class ChannelCount(NamedTuple):
    """A channel, and the number of its entries, retired ones included."""

    channel_no: int
    channel_id: str
    entries_count: int


class Bounds(NamedTuple):
    """What is kept of a channel; None keeps everything. `cutoff_ms`: what arrived up to then is too old."""

    cutoff_ms: int | None
    entries_max: int | None
    bytes_max: int | None


class Cut(NamedTuple):
    """The last sequence number that goes (0: none), the bound that it is beyond, and when to look again.

    `due_ms`: the arrival of the oldest entry that is kept; None if no bound of age is given, or nothing kept.
    """

    seq: int
    bound: str
    due_ms: int | None


class Retained(NamedTuple):
    """An entry with content."""

    seq: int
    digest: bytes
    frame_bytes: int
    received_at_ms: int


class RetainedEntries:
    """See the module. `floor` is a sequence number up to which all entries of a channel are retired."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = database.sql

    async def channels_after(self, channel_no: int, limit: int) -> list[ChannelCount]:
        """Channels in order of their numbers."""
        rows = await self._database.rows(_channels_after(self._sql), after=channel_no, limit=limit)
        return [ChannelCount(*row) for row in rows]

    async def oldest(self, channel_no: int, floor: int, cut: int, limit: int) -> list[Retained]:
        """Entries above the floor and up to the cut, in the order they arrived."""
        found = _oldest(self._sql)
        rows = await self._database.rows(
            found, channel_no=channel_no, floor=floor, cut=cut, limit=limit
        )
        return [Retained(*row) for row in rows]

    async def cut(self, channel_no: int, floor: int, bounds: Bounds, now_ms: int) -> Cut:
        """Where the bounds cut a channel."""
        due_ms = None
        by_age = by_size = 0
        bound = ""
        if bounds.cutoff_ms is not None:
            by_age, due_ms = await self._cut_by_age(channel_no, floor, bounds.cutoff_ms, now_ms)
        if bounds.entries_max is not None or bounds.bytes_max is not None:
            by_size, bound = await self._cut_by_size(channel_no, max(floor, by_age), bounds)
        return Cut(max(by_age, by_size), bound or "max_age_s", due_ms)

    async def _cut_by_age(
        self, channel_no: int, floor: int, cutoff_ms: int, now_ms: int
    ) -> tuple[int, int | None]:
        """An entry is as old as the youngest that arrived no later, so a clock that was behind for a while
        makes nothing old; arrivals in the future, of a clock that was ahead, do not count.
        """
        among = {"channel_no": channel_no, "floor": floor, "cutoff": cutoff_ms}
        young = await self._database.rows(_first_young(self._sql), **among, now=now_ms)
        end, due_ms = young[0] if young else (2**63 - 1, None)
        ((cut,),) = await self._database.rows(_last_old(self._sql), **among, end=end)
        return cut or 0, due_ms

    async def _cut_by_size(self, channel_no: int, floor: int, bounds: Bounds) -> tuple[int, str]:
        count, size, before = 0, 0, 2**63 - 1
        while True:
            among = {"channel_no": channel_no, "floor": floor, "before": before}
            [(some, some_bytes, first)] = await self._database.rows(_block(self._sql), **among)
            if not some:
                return 0, ""
            if _beyond(count + some, size + int(some_bytes), bounds):
                break
            count, size, before = count + some, size + int(some_bytes), first
        for seq, frame_bytes in await self._database.rows(_newest(self._sql), **among):
            count, size = count + 1, size + frame_bytes
            if bound := _beyond(count, size, bounds):
                return seq, bound
        return 0, ""  # some were retired meanwhile


def _beyond(count: int, size: int, bounds: Bounds) -> str:
    if bounds.entries_max is not None and count > bounds.entries_max:
        return "max_count"
    return "max_bytes" if bounds.bytes_max is not None and size > bounds.bytes_max else ""


# ---- statements


def _numbers(*names: str) -> Iterator[Any]:
    return (bindparam(name, type_=BigInteger()) for name in names)


@cache
def _channels_after(sql: SqlDialect) -> Query:
    columns = channels.c
    (after,) = _numbers("after")
    found = select(columns.channel_no, columns.channel_id, columns.count)
    found = found.where(columns.channel_no > after).order_by(columns.channel_no)
    return sql.query(found.limit(bindparam("limit", type_=Integer())))


def _with_content(*columns: Any) -> Any:
    """Entries of a channel above its floor."""
    channel_no, floor = _numbers("channel_no", "floor")
    m = messages.c
    return select(*columns).where(m.channel_no == channel_no, m.seq > floor, m.frame_bytes > 0)


@cache
def _oldest(sql: SqlDialect) -> Query:
    m = messages.c
    (cut,) = _numbers("cut")
    found = _with_content(m.seq, m.digest, m.frame_bytes, m.received_at_ms).where(m.seq <= cut)
    return sql.query(found.order_by(m.seq).limit(bindparam("limit", type_=Integer())))


@cache
def _first_young(sql: SqlDialect) -> Query:
    """(seq, arrival) of the first entry that arrived after the cutoff."""
    m = messages.c
    cutoff, now = _numbers("cutoff", "now")
    found = _with_content(m.seq, m.received_at_ms)
    found = found.where(m.received_at_ms > cutoff, m.received_at_ms <= now)
    return sql.query(found.order_by(m.seq).limit(1))


@cache
def _last_old(sql: SqlDialect) -> Query:
    """The last entry before `end` that arrived up to the cutoff."""
    m = messages.c
    cutoff, end = _numbers("cutoff", "end")
    return sql.query(_with_content(func.max(m.seq)).where(m.received_at_ms <= cutoff, m.seq < end))


def _before() -> Any:
    m = messages.c
    (before,) = _numbers("before")
    found = _with_content(m.seq, m.frame_bytes).where(m.seq < before)
    return found.order_by(m.seq.desc()).limit(BLOCK_ENTRIES)


@cache
def _newest(sql: SqlDialect) -> Query:
    """(seq, bytes) of the newest entries before a sequence number, the newest first."""
    return sql.query(_before())


@cache
def _block(sql: SqlDialect) -> Query:
    """The number of those, their bytes, and the lowest sequence number."""
    block = _before().subquery()
    return sql.query(
        select(func.count(), func.sum(block.c.frame_bytes), func.min(block.c.seq)).select_from(
            block
        )
    )
