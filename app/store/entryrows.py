"""Rows of entries and their frames: how they are selected, and how each becomes an `Entry`.

A frame is read from its own tables (`app.store.frames` gives their format). An entry whose frame cannot
be read is left out of answers, and the writer is asked to read the frame a second time; if that fails
too, the entry has *lost content* and a row in `lost_content` (docs/decisions/0010).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
    Table,
    bindparam,
    func,
    select,
    true,
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
from app.store.frames import DAMAGES_TOLD_MAX, FrameUnpacker, Packed, PackedFrame
from app.store.schema import (
    FORMER_REFERENCE,
    ByteText,
    channels,
    frame_references,
    frames,
    lost_content,
    messages,
)
from recon.elements import order_of_lamport
from sdstore.sds.model import Dialect

Position = tuple[int | str, ...]
"""A reader's place: log `(lamport, message ID, digest in hex)`, arrival and feed a `Token`, hint
`(rank, number, seq)`, gaps `(message ID,)`, ancestors `(lamport, message ID, digest in hex, waiting,
late)` with sets of sequence numbers in the form that `app.store.ancestry` writes."""

Recheck = Callable[[Sequence[int]], Awaitable["Rechecked"]]

SMALL_FRAME_BYTES_MAX = 2 * 1024
"""Stored bytes of frames that come with the rows of entries: a thousand make 2 MiB."""

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

    def entry(self, frame: bytes) -> Entry:
        """The entry of this row."""
        seq, channel_id, message_id, lamport, digest, frame_hash, number, at_ms, arrival_sum = self[
            :9
        ]
        dialect = _DIALECTS[number]
        # As in `entry_rows`.
        return _new_tuple(
            Entry,
            (seq, channel_id, message_id, lamport, digest, frame_hash, dialect, at_ms, frame, arrival_sum),
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
            if frame is not None:
                return row.entry(frame)
        entries = await self.entries([row])
        if not entries:
            raise content_lost(row.digest)
        return entries[0]

    async def entries(self, rows: Sequence[EntryRow]) -> list[Entry]:
        """The entries of these rows, in their order, without those whose frames cannot be read.

        Reads the frames that the rows lack.
        """
        found = await self._frames_of(rows, self._unpacker)
        return [row.entry(found[row.seq]) for row in rows if row.seq in found]

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
        whole = await self._frames_of(rows, self._verifier)
        entries = [row.entry(whole[row.seq]) for row in rows if row.seq in whole]
        lost = [row.seq for row in rows if row.seq not in whole]
        return Verified(len(rows), rows[-1].seq, entries, lost)

    async def references_in_doubt(self, limit: int) -> list[int]:
        """Sequence numbers of entries whose frames others are compressed against, if one of the two
        copies is damaged or gone. Reads the row of every frame."""
        rows = await self._database.rows(_references_in_doubt(self._sql), limit=limit)
        return [seq for (seq,) in rows]

    async def _frames_of(
        self, rows: Sequence[EntryRow], unpacker: FrameUnpacker
    ) -> dict[int, bytes]:
        """Frames by sequence number; brings the marks of lost content up to date."""
        packed: Sequence[Packed] = rows
        if absent := [row.seq for row in rows if row.codec is None]:
            found = await self._database.among(stored_frames(self._sql, frames), absent)
            stored = {seq: columns for seq, *columns in found}
            packed = [
                PackedFrame(row.seq, row.frame_bytes, row.frame_hash, *stored[row.seq])
                if row.seq in stored
                else row
                for row in rows
            ]
        whole = await self._unpack(unpacker, packed)
        if len(whole) < len(rows) or self.lost:
            await self._settle(rows, whole)
        return whole

    async def _unpack(self, unpacker: FrameUnpacker, packed: Sequence[Packed]) -> dict[int, bytes]:
        unpacking = unpacker.unpack(packed)
        try:
            ask = next(unpacking)
            while True:
                table = frame_references if ask.of_references else frames
                rows = await self._database.among(stored_frames(self._sql, table), ask.seqs)
                ask = unpacking.send(rows)
        except StopIteration as end:
            found: dict[int, bytes] = end.value
            return found

    async def _settle(self, rows: Sequence[EntryRow], whole: Mapping[int, bytes]) -> None:
        """Have the writer bring marks up to date that contradict this reading."""
        read = {row.seq: row for row in rows}
        doubted = [seq for seq in read if (seq in whole) == (seq in self.lost)]
        if not doubted or self.recheck is None:
            return
        try:
            found = await self.recheck(doubted)
        except Problem as problem:
            # The next reader asks again.
            _log.warning("frames that cannot be read were not marked: %s", problem)
            return
        for seq in sorted(found.lost - self.lost)[: max(DAMAGES_TOLD_MAX - len(self.lost), 0)]:
            row = read[seq]
            _log.error(
                "the content of message %r of channel %r is lost: no copy of frame %d can be read "
                "(digest %s)",
                row.message_id,
                row.channel_id,
                seq,
                row.digest.hex(),
            )
        self.lost -= found.whole
        if len(self.lost) < MARKS_REMEMBERED_MAX:
            self.lost |= found.lost

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
        await self._frames_of(entry_rows(rows), FrameUnpacker(is_silent=True))
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
def stored_frames(sql: SqlDialect, table: Table) -> ManyQuery:
    """(seq, codec, reference number, data) of many frames, from one of the two tables of copies."""
    columns = table.c
    return sql.among(
        columns.seq,
        select(columns.seq, columns.codec, columns.reference_no, columns.data).where,
    )


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


@cache
def _references_in_doubt(sql: SqlDialect) -> Query:
    """Numbers of references whose two copies differ.

    Former references differ rightly: their first copies are other frames.
    """
    columns, copies = frames.c, frame_references.c
    # Either copy can be the one that is gone.
    named = select(columns.reference_no.label("seq")).where(columns.reference_no.is_not(None))
    used = named.union(select(copies.seq)).subquery()
    joined = used.outerjoin(frames, columns.seq == used.c.seq)
    joined = joined.outerjoin(frame_references, copies.seq == used.c.seq)
    is_same = (
        (columns.data == copies.data)
        & (columns.codec == copies.codec)
        & columns.reference_no.is_not_distinct_from(copies.reference_no)
    ) | (copies.channel_no == FORMER_REFERENCE)
    doubtful = select(used.c.seq).select_from(joined).where(is_same.is_not(true()))
    return sql.query(doubtful.order_by(used.c.seq).limit(bindparam("limit", type_=Integer())))
