"""Rows of entries and their frames: how they are selected, and how each becomes an `Entry`.

A frame is read from its own tables (`app.store.frames` gives their format). If it is wrong, the writer
is asked to read it a second time. If that fails too, a frame whose rest has the entry's digest is served
and stored without its filter (`Entry.filter_is_lost`). Any other entry is left out of answers: it has
*lost content* and a row in `lost_content` (docs/decisions/0010).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from enum import Enum
from functools import cache
from itertools import accumulate, starmap
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Integer,
    Select,
    bindparam,
    func,
    select,
)

from app.entries import Entry, Token
from app.errors import Code, Problem
from app.store.database import (
    Arguments,
    Database,
    Keyed,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    constant,
)
from app.store.frames import Codec, FrameUnpacker, Packed, PackedFrame, Unpacked
from app.store.schema import (
    ByteText,
    channels,
    filter_references,
    frames,
    lost_content,
    messages,
)
from recon.elements import order_of_lamport
from sdstore.sds.digest import frame_hash as hash_of_frame
from sdstore.sds.model import Dialect

Position = tuple[int | str, ...]
"""A reader's place: log `(lamport, message ID, digest in hex)`, arrival and feed a `Token`, hint
`(rank, number, seq)`, gaps `(message ID,)`, ancestors `(lamport, message ID, digest in hex, waiting,
late)` with sets of sequence numbers in the form that `app.store.ancestry` writes."""

Recheck = Callable[[Sequence[int]], Awaitable["Rechecked"]]

SMALL_FRAME_BYTES_MAX = 2 * 1024
"""Stored bytes of frames that come with the rows of entries: a thousand make 2 MiB."""

DAMAGES_TOLD_MAX = 1_000
"""Lines of the log: repeated reads of damaged frames must not fill the disk."""

MARKS_REMEMBERED_MAX = 65_536
"""Lost entries that a reader remembers: 6 MiB. The others are found again."""

PREFIX_BYTES = 8
"""Bytes of digests and claim elements that the indexes hold."""

_log = logging.getLogger(__name__)

_new_tuple = tuple.__new__
# Looking a member up by value costs more than reading the row.
_DIALECTS = {int(dialect): dialect for dialect in Dialect}


# ---- rows


class EntryRow(NamedTuple):
    """The columns of an entry, and those of its frame where the row has them."""

    seq: int
    channel_id: str
    message_id: str
    lamport: int
    digest: bytes
    frame_hash: bytes
    dialect: int
    received_at_ms: int
    arrival_sum: int
    frame_bytes: int
    codec: int | None = None
    reference_no: int | None = None
    data: bytes | None = None

    def entry(self, frame: bytes, *, filter_is_lost: bool = False) -> Entry:
        """The entry of this row."""
        seq, channel_id, message_id, lamport, digest, frame_hash, number, at_ms, arrival_sum = self[
            :9
        ]
        dialect = _DIALECTS[number]
        if filter_is_lost:
            frame_hash = hash_of_frame(frame)
        # As in `entry_rows`.
        return _new_tuple(
            Entry,
            (seq, channel_id, message_id, lamport, digest, frame_hash, dialect, at_ms, frame, arrival_sum,
             filter_is_lost),
        )  # fmt: skip


_ENTRY_COLUMNS = (
    messages.c.seq,
    channels.c.channel_id,
    messages.c.message_id,
    messages.c.lamport,
    messages.c.digest,
    messages.c.frame_hash,
    messages.c.dialect,
    messages.c.received_at_ms,
    messages.c.arrival_sum,
    messages.c.frame_bytes,
)
FRAME_COLUMNS = (frames.c.codec, frames.c.reference_no, frames.c.data)

IN_CHANNELS = messages.c.channel_no == channels.c.channel_no
_ENTRIES = messages.join(channels, IN_CHANNELS)

ID_ARGUMENTS: Arguments = {"id_key": BigInteger(), "message_id": ByteText}
SERVED_FIRST = (messages.c.unverified, messages.c.seq)
"""The order of entries under one ID: those whose ID verifies, then the first seen."""


def entry_rows(rows: Sequence[Row]) -> list[EntryRow]:
    """Rows of a select of entries."""
    if rows and len(rows[0]) == len(EntryRow._fields):
        # A third of the time of the class's own constructor, on the way of every message that is read.
        return [_new_tuple(EntryRow, row) for row in rows]
    return list(starmap(EntryRow, rows))


def select_entries(joined: FromClause = _ENTRIES) -> Select[Any]:
    """Entries without their frames; `joined` holds `messages` and their `channels`."""
    return select(*_ENTRY_COLUMNS).select_from(joined)


def select_entries_with_frames(joined: FromClause = _ENTRIES) -> Select[Any]:
    """Entries, each with the columns of its frame if that is small, otherwise with None for them.

    Most frames are small, and a second query would be a second round trip. Large frames are read once
    it is known which of them fit into the reply, so the bytes of one statement stay bounded.
    """
    small = (frames.c.seq == messages.c.seq) & (
        func.length(frames.c.data) <= constant(SMALL_FRAME_BYTES_MAX)
    )
    return select(*_ENTRY_COLUMNS, *FRAME_COLUMNS).select_from(joined.outerjoin(frames, small))


def with_id(key: Keyed) -> ColumnElement[bool]:
    """Messages with an ID."""
    return (messages.c.id_key == key["id_key"]) & (messages.c.message_id == key["message_id"])


def prefixes(ids: Iterable[bytes]) -> list[bytes]:
    """The indexed bytes of digests or claim elements, each once."""
    return list({each[:PREFIX_BYTES] for each in ids})


def fitting_count(rows: Sequence[EntryRow], bytes_max: int) -> int:
    """The number of rows whose frames fit into `bytes_max`; at least one, so that every page advances."""
    sizes = accumulate(row.frame_bytes for row in rows)
    return max(1, sum(1 for size in sizes if size <= bytes_max))


class LeftOut(NamedTuple):
    """An entry that belongs to an answer but is left out, because its content is lost."""

    seq: int
    arrival_sum: int
    channel_id: str
    message_id: str
    digest: bytes

    @property
    def place(self) -> Token:
        """The entry's place in arrival order."""
        return Token(self.seq, self.arrival_sum)


def left_out(rows: Sequence[EntryRow], entries: Iterable[Entry]) -> tuple[LeftOut, ...]:
    """The rows without an entry."""
    read = {entry.seq for entry in entries}
    return tuple(
        LeftOut(row.seq, row.arrival_sum, row.channel_id, row.message_id, row.digest)
        for row in rows
        if row.seq not in read
    )


# ---- frames


class ContentState(Enum):
    """The reason why the content of a known entry cannot be served."""

    LOST = "lost"
    """Its frame was read twice and was wrong each time, or has no row."""


class LostElement(NamedTuple):
    """An entry whose content is lost, as reconciliation knows it: its order value and digest."""

    order: int
    digest: bytes
    channel_no: int
    seq: int


class Rechecked(NamedTuple):
    """Sequence numbers of frames that were read again: the lost ones, and the whole ones."""

    lost: frozenset[int]
    whole: frozenset[int]


class Verified(NamedTuple):
    """Frames that were read to see whether they are whole: their number, and the last sequence number.

    `entries`: those with whole frames. `lost`: the sequence numbers of the others.
    """

    frames_count: int
    last_seq: int
    entries: list[Entry]
    lost: list[int]


class FrameReader:
    """The frames of one open store, and the entries whose frames are lost.

    `recheck` gets the sequence numbers of frames that could not be read, or that were read although they
    are marked as lost: the writer reads them again and marks or unmarks them. The group committer sets
    it; None where nobody writes. `lost` holds the marks that this process knows, so that most reads need
    no query for them; the table decides.
    """

    def __init__(self, database: Database) -> None:
        self.recheck: Recheck | None = None
        self.lost: set[int] = set()
        self._told: set[int] = set()
        self._database = database
        self._sql = database.sql
        self._unpacker = FrameUnpacker()
        # Remembers no references: those in memory prove nothing about the disk.
        self._verifier = FrameUnpacker()

    async def entry(self, row: EntryRow) -> Entry:
        """The entry of a row with the columns of its frame. Raises `Problem` CONTENT_LOST."""
        if not self.lost:
            # No query: the hot path of reading.
            frame = self._unpacker.unpack_at_hand(row)
            if frame is not None and row.codec != Codec.FILTER_LOST:
                return row.entry(frame)
        entries = await self.entries([row])
        if not entries:
            raise content_lost(row.digest)
        return entries[0]

    async def entries(self, rows: Sequence[EntryRow]) -> list[Entry]:
        """The entries of these rows, in their order, without those whose frames cannot be read.

        Reads the frames that the rows lack.
        """
        return await self._read(rows, self._unpacker)

    async def verify(self, after_seq: int, limit: int, bytes_max: int) -> Verified:
        """Read the frames after a sequence number, up to `limit` and until they pass `bytes_max`.

        Trusts nothing that earlier reads left in memory.
        """
        found = await self._database.rows(arrived_after(self._sql), after=after_seq, limit=limit)
        if not found:
            return Verified(0, after_seq, [], [])
        rows = entry_rows(found)
        rows = rows[: fitting_count(rows, bytes_max)]
        self._verifier.forget_references()
        entries = await self._read(rows, self._verifier)
        read = {entry.seq for entry in entries}
        return Verified(
            len(rows), rows[-1].seq, entries, [row.seq for row in rows if row.seq not in read]
        )

    async def _read(self, rows: Sequence[EntryRow], unpacker: FrameUnpacker) -> list[Entry]:
        """The entries that can be read; brings the marks of lost content up to date."""
        packed: Sequence[Packed] = rows
        if absent := [row.seq for row in rows if row.codec is None]:
            found = await self._database.among(stored_frames(self._sql), absent)
            stored = {seq: columns for seq, *columns in found}
            packed = [
                PackedFrame(row.seq, row.frame_bytes, row.frame_hash, row.digest, *stored[row.seq])
                if row.seq in stored
                else row
                for row in rows
            ]
        whole, without_filter = unpacked = await self._unpack(unpacker, packed)
        if len(whole) < len(rows) or self.lost:
            await self._settle(rows, unpacked)
        stripped = {each.seq for each in packed if each.codec == Codec.FILTER_LOST}
        return [
            row.entry(whole[row.seq], filter_is_lost=row.seq in stripped)
            if row.seq in whole
            else row.entry(without_filter[row.seq], filter_is_lost=True)
            for row in rows
            if row.seq in whole or row.seq in without_filter
        ]

    async def _unpack(self, unpacker: FrameUnpacker, packed: Sequence[Packed]) -> Unpacked:
        unpacking = unpacker.unpack(packed)
        try:
            numbers = next(unpacking)
            while True:
                rows = await self._database.among(stored_references(self._sql), numbers)
                numbers = unpacking.send([(number, data) for number, data in rows])
        except StopIteration as end:
            found: Unpacked = end.value
            return found

    async def _settle(self, rows: Sequence[EntryRow], unpacked: Unpacked) -> None:
        """Have the writer bring marks up to date that contradict this reading."""
        whole, without_filter = unpacked
        doubted = [
            row.seq
            for row in rows
            if row.seq in without_filter or (row.seq in whole) == (row.seq in self.lost)
        ]
        if not doubted:
            return
        wrong = [row for row in rows if row.seq not in whole]
        if self.recheck is None:
            self._tell(wrong, without_filter)
            return
        try:
            found = await self.recheck(doubted)
        except Problem as problem:
            # The next reader asks again.
            _log.warning("frames that cannot be read were not marked: %s", problem)
            return
        self._tell(
            [r for r in wrong if r.seq in found.lost | without_filter.keys()], without_filter
        )
        self.lost -= found.whole
        if len(self.lost) < MARKS_REMEMBERED_MAX:
            self.lost |= found.lost

    def _tell(self, rows: Iterable[EntryRow], without_filter: Container[int]) -> None:
        """Log damage, once for each frame; `sdstore check --deep` lists all."""
        for row in rows:
            if row.seq in self._told or len(self._told) >= DAMAGES_TOLD_MAX:
                continue
            self._told.add(row.seq)
            what = "bloom filter" if row.seq in without_filter else "content"
            _log.error(
                "the %s of message %r of channel %r is lost: frame %d cannot be read (digest %s)",
                what,
                row.message_id,
                row.channel_id,
                row.seq,
                row.digest.hex(),
            )

    # ---- lost content

    async def lost_elements(self, limit: int, after: int = 0) -> list[LostElement]:
        """Entries whose content is lost, in order of their sequence numbers, from `after` on."""
        rows = await self._database.rows(lost_after(self._sql), after=after, limit=limit)
        return [
            LostElement(order_of_lamport(lamport), digest, channel_no, seq)
            for seq, channel_no, lamport, digest in rows
        ]

    async def lost_count(self) -> int:
        """The number of entries with lost content."""
        ((count,),) = await self._database.rows(_lost_count(self._sql))
        return int(count)

    async def left_out(self, digests: Sequence[bytes]) -> list[LeftOut]:
        """Those of these entries whose content is lost."""
        rows = await self._database.among(_lost_by_digest(self._sql), prefixes(digests))
        wanted = set(digests)
        return [lost for lost in starmap(LeftOut, rows) if lost.digest in wanted]

    async def content_states(self, digests: Sequence[bytes]) -> dict[bytes, ContentState]:
        """The known entries among these that cannot be served, each with the reason.

        Call it after `Lookups.by_digest`, which leaves them out.
        """
        return {each.digest: ContentState.LOST for each in await self.left_out(digests)}

    async def follow_marks(self) -> int:
        """Learn what other processes marked as lost; returns the number of lost entries."""
        marked = await self.lost_elements(MARKS_REMEMBERED_MAX)
        self.lost = {each.seq for each in marked}
        return len(marked) if len(marked) < MARKS_REMEMBERED_MAX else await self.lost_count()

    async def retry_lost(self, after_seq: int, limit: int) -> int:
        """Read lost frames again, in turn; returns the place for the next call.

        A frame whose rows were repaired is whole again.
        """
        lost = await self.lost_elements(limit, after_seq)
        rows = await self._database.among(entries_by_seq(self._sql), [each.seq for each in lost])
        await self._read(entry_rows(rows), FrameUnpacker())
        return lost[-1].seq if len(lost) == limit else 0


def content_lost(digest: bytes) -> Problem:
    """The refusal to serve an entry with lost content."""
    return Problem(
        Code.CONTENT_LOST,
        f"the stored frame of entry {digest.hex()} cannot be read; publish it again or sync with a "
        f"node that has it (`sdstore check --deep` lists all such)",
    )


# ---- statements that several subjects share


@cache
def entries_by_seq(sql: SqlDialect) -> ManyQuery:
    """`EntryRow`s without frames, by sequence number."""
    return sql.among(messages.c.seq, lambda among: select_entries().where(among))


@cache
def entries_numbered(sql: SqlDialect, entries_max: int) -> ManyQuery:
    """`EntryRow`s without frames under many (ID key, message ID, channel number)."""
    return sql.each(
        {**ID_ARGUMENTS, "channel_no": Integer()},
        lambda key: (
            select_entries()
            .where(with_id(key), messages.c.channel_no == key["channel_no"])
            .order_by(*SERVED_FIRST)
            .limit(constant(entries_max))
        ),
    )


@cache
def arrived_after(sql: SqlDialect) -> Query:
    """`EntryRow`s with small frames after a sequence number, in arrival order."""
    after: Any = bindparam("after", type_=BigInteger())
    feed = select_entries_with_frames().where(messages.c.seq > after).order_by(messages.c.seq)
    return sql.query(feed.limit(bindparam("limit", type_=Integer())))


@cache
def stored_frames(sql: SqlDialect) -> ManyQuery:
    """(seq, codec, reference number, data) of many frames."""
    return sql.among(frames.c.seq, select(frames.c.seq, *FRAME_COLUMNS).where)


@cache
def stored_references(sql: SqlDialect) -> ManyQuery:
    """(reference number, data) of many references."""
    columns = filter_references.c
    return sql.among(columns.reference_no, select(columns.reference_no, columns.data).where)


@cache
def lost_after(sql: SqlDialect) -> Query:
    """(seq, channel number, Lamport timestamp, digest) of lost entries after a sequence number."""
    lost = lost_content.c.seq
    elements = select(lost, messages.c.channel_no, messages.c.lamport, messages.c.digest)
    elements = elements.join_from(lost_content, messages, lost == messages.c.seq)
    elements = elements.where(lost > bindparam("after", type_=BigInteger())).order_by(lost)
    return sql.query(elements.limit(bindparam("limit", type_=Integer())))


# ---- statements of the frame reader


@cache
def _lost_by_digest(sql: SqlDialect) -> ManyQuery:
    """`LeftOut`s by digest prefix."""
    known = select(
        lost_content.c.seq,
        messages.c.arrival_sum,
        channels.c.channel_id,
        messages.c.message_id,
        messages.c.digest,
    )
    known = known.join_from(messages, lost_content, lost_content.c.seq == messages.c.seq)
    known = known.join(channels, channels.c.channel_no == messages.c.channel_no)
    return sql.among(messages.c.digest_prefix, known.where)


@cache
def _lost_count(sql: SqlDialect) -> Query:
    return sql.query(select(func.count()).select_from(lost_content))
