"""Rows of entries and their frames: their keys, how a frame is stored, and how each becomes an `Entry`.

**Keys.** The store's indexes hold 64-bit keys of strings and hints instead of long text. The hash is keyed with
a secret of the database, so no one can make values collide on purpose. Every look-up compares the full value as
well, so a collision costs time but never gives a wrong answer.

**The stored form of frames** is lossless and compressed, in tables that scans never touch. A frame without a
bloom filter, or with a small one, is compressed with a dictionary that is part of this package. The filter of
any other frame is stored as its difference from a *reference*, a filter in a row of its own, and the rest is
compressed as a small frame (`sdstore.sds.framecodec`; docs/decisions/0003). So a damaged row of `frames` costs
its own message, and a damaged reference costs filters, never content.

`FrameUnpacker.unpack` does no I/O: it is a generator that asks for the references it needs and
is sent them, so that a node's event loop, its writer's thread and a Spark task can use it.

**Reading.** If a frame is wrong, the writer
is asked to read it a second time. If that fails too, a frame whose rest has the entry's digest is served
and stored without its filter (`Entry.filter_is_lost`). Any other entry is left out of answers: it has
*lost content* and a row in `lost_content` (docs/decisions/0010).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Generator, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from itertools import accumulate, starmap
from typing import Any, NamedTuple, Protocol

import orjson
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Integer,
    Select,
    bindparam,
    exists,
    func,
    select,
)
from zstandard import (
    ZstdCompressionDict,
    ZstdCompressor,
    ZstdDecompressor,
    ZstdError,
    frame_content_size,
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
from app.store.schema import (
    ByteText,
    channels,
    filter_references,
    frames,
    lost_content,
    messages,
    retired_content,
)
from recon.elements import order_of_lamport
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.framecodec import FILTER_BYTES_MAX, Split, read_difference
from sdstore.sds.model import Dialect, Message, Rank, entry_digest, frame_hash, is_disproved, rank
from sdstore.sds.model import frame_hash as hash_of_frame

# ---- keys

_KEY_BYTES = 8


class Keys:
    """The keyed hash of one database."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._hasher = blake2b(digest_size=_KEY_BYTES, key=secret)

    def __reduce__(self) -> tuple[type[Keys], tuple[bytes]]:
        # Hashers cannot be pickled.
        return Keys, (self.secret,)

    def of_text(self, text: str) -> int:
        """Signed 64-bit key of a string's UTF-8 bytes."""
        return self.of_bytes(text.encode())

    def of_met(self, channel_id: str, message_id: str) -> int:
        """Key of a row of `met_ids`; no ID holds U+0000, so the pair is unambiguous."""
        return self.of_text(f"{channel_id}\0{message_id}")

    def of_bytes(self, value: bytes) -> int:
        """Signed 64-bit key, as BIGINT columns hold it."""
        hasher = self._hasher.copy()
        hasher.update(value)
        return int.from_bytes(hasher.digest(), "big", signed=True)


# ---- the stored form of frames

REFERENCES_BYTES_MAX = 16 * 1024 * 1024
"""References ready for reading: some 850 filters of js-waku."""

FRAMES_PER_STEP = 64
"""Frames unpacked at a time: all references that they need are in memory together."""

FRAMES_ONE_BY_ONE = 32
"""Up to here frames are compressed one after the other: one call for all costs 60 µs more."""

_BUILT_IN = ZstdCompressionDict(files(__package__).joinpath("frames.zdict").read_bytes())
_LEVEL = 1  # 0.3 % larger than level 3 for frames of 300 bytes, in 60 % of the time


class Codec(IntEnum):
    """The encoding of a frame's data. The numbers are stored; they never change.

    2 was that of revisions before 0009, which compressed frames against others.
    """

    RAW = 0
    BUILT_IN = 1
    """zstd with the dictionary of this package, `frames.zdict`, which never changes either."""
    DIFFERENCE = 3
    """The difference of the filter from the reference `reference_no`, then the rest as in `FILTER_LOST`."""
    FILTER_LOST = 4
    """A frame whose filter could not be read: the rest, as in `BUILT_IN` and with zstd's checksum."""
    RETIRED = 5
    """No frame: the `Tombstone` of a retired entry."""


# Comparing with members of an enumeration costs a tenth of the reading of a small frame.
_RAW_NO, _BUILT_IN_NO, _DIFFERENCE_NO, _FILTER_LOST_NO, _RETIRED_NO = map(int, Codec)


class StoredFrame(NamedTuple):
    """The columns of a frame."""

    codec: int
    reference_no: int | None
    data: bytes


class Packed(Protocol):
    """The stored columns of a frame, with the length, hash and digest that its message's row gives.

    The codec is None if the frame has no row.
    """

    @property
    def seq(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def frame_hash(self) -> bytes: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def codec(self) -> int | None: ...
    @property
    def reference_no(self) -> int | None: ...
    @property
    def data(self) -> bytes | None: ...


class PackedFrame(NamedTuple):
    """A `Packed` by itself."""

    seq: int
    frame_bytes: int
    frame_hash: bytes
    digest: bytes
    codec: int | None
    reference_no: int | None
    data: bytes | None


class Unpacked(NamedTuple):
    """Frames by sequence number. A frame in neither dictionary has *lost content*.

    `whole`: those with the hash of their message's row. `without_filter`: frames whose filter cannot be
    read, each proved by its entry's digest.
    """

    whole: dict[int, bytes]
    without_filter: dict[int, bytes]


ReferenceRow = tuple[int, bytes]
"""Reference number, data."""

Unpacking = Generator[list[int], list[ReferenceRow], Unpacked]
"""Yields the numbers of references, is sent their rows, and returns the frames."""


class FramePacker:
    """Compresses; belongs to one thread."""

    def __init__(self) -> None:
        self._compressor = _compressor(_BUILT_IN, has_checksum=False)
        self._rest_compressor = _compressor(_BUILT_IN, has_checksum=True)
        self._reference_compressor = _compressor(None, has_checksum=True)

    def pack_whole(self, frames: Sequence[bytes]) -> list[StoredFrame]:
        """Frames by themselves: many of them in one call, during which other threads run."""
        if len(frames) <= FRAMES_ONE_BY_ONE:
            return [_smaller(frame, self._compressor.compress(frame)) for frame in frames]
        packed = self._compressor.multi_compress_to_buffer(list(frames))
        return [_smaller(frame, packed[n].tobytes()) for n, frame in enumerate(frames)]

    def pack_difference(self, parts: Split, reference_no: int, difference: bytes) -> StoredFrame:
        """A frame whose filter is stored as a difference."""
        data = difference + self._rest_compressor.compress(parts.rest)
        return StoredFrame(Codec.DIFFERENCE, reference_no, data)

    def pack_reference(self, bloom_filter: bytes) -> bytes:
        """The data of a reference."""
        return self._reference_compressor.compress(bloom_filter)


class FrameUnpacker:
    """Gives frames back byte for byte; belongs to one thread."""

    def __init__(self) -> None:
        self._decompressor = ZstdDecompressor(dict_data=_BUILT_IN)
        self._references: OrderedDict[int, bytes] = OrderedDict()
        self._references_bytes = 0

    def unpack_at_hand(self, packed: Packed) -> bytes | None:
        """One frame, if that needs no query: the hot path of reading."""
        return self._proved(packed, self._references, {})

    def unpack(
        self, frames: Sequence[Packed], known: Mapping[bytes, bytes] | None = None
    ) -> Unpacking:
        """The frames that can be read.

        `known` are frames by hash: comparing with them is cheaper than hashing.
        """
        found = Unpacked({}, {})
        for start in range(0, len(frames), FRAMES_PER_STEP):
            yield from self._unpack_step(
                frames[start : start + FRAMES_PER_STEP], known or {}, found
            )
        return found

    def forget_references(self) -> None:
        """Drop the cached references, so that reads verify those in the database."""
        self._references.clear()
        self._references_bytes = 0

    def _unpack_step(
        self, frames: Sequence[Packed], known: Mapping[bytes, bytes], found: Unpacked
    ) -> Generator[list[int], list[ReferenceRow], None]:
        # Kept in this dictionary: another reader could push them out of the cache between two answers.
        references: dict[int, bytes] = {}
        wanted = {each.reference_no for each in frames if each.reference_no is not None}
        for number in wanted & self._references.keys():
            self._references.move_to_end(number)
            references[number] = self._references[number]
        doubted = self._take(frames, references, known, found) if references else list(frames)
        if not doubted:
            return
        # Also those in memory: after a failover of the database they can be of another history.
        numbers = {each.reference_no for each in doubted if each.reference_no is not None}
        if numbers:
            references = self._read((yield sorted(numbers)))
        for packed in self._take(doubted, references, known, found):
            rest = self._rest_of(packed)
            if rest is not None:
                found.without_filter[packed.seq] = rest

    def _take(
        self,
        frames: Sequence[Packed],
        references: Mapping[int, bytes],
        known: Mapping[bytes, bytes],
        found: Unpacked,
    ) -> list[Packed]:
        """Unpack frames; returns those that are wrong."""
        wrong: list[Packed] = []
        for packed in frames:
            frame = self._proved(packed, references, known)
            if frame is None:
                wrong.append(packed)
            else:
                found.whole[packed.seq] = frame
        return wrong

    def _read(self, rows: Sequence[ReferenceRow]) -> dict[int, bytes]:
        references: dict[int, bytes] = {}
        for number, data in rows:
            if (old := self._references.pop(number, None)) is not None:
                self._references_bytes -= len(old)
            bloom_filter = reference_filter(data)
            if bloom_filter is None:
                continue
            references[number] = self._references[number] = bloom_filter
            self._references_bytes += len(bloom_filter)
            while self._references_bytes > REFERENCES_BYTES_MAX:
                _, oldest = self._references.popitem(last=False)
                self._references_bytes -= len(oldest)
        return references

    def _proved(
        self, packed: Packed, references: Mapping[int, bytes], known: Mapping[bytes, bytes]
    ) -> bytes | None:
        codec, data = packed.codec, packed.data
        if codec is None or data is None:
            return None
        if codec in (_BUILT_IN_NO, _FILTER_LOST_NO):
            frame = self._decompressed(data, packed.frame_bytes)
        elif codec == _RAW_NO:
            frame = data
        elif codec == _DIFFERENCE_NO:
            reference = references.get(packed.reference_no or 0)
            frame = None if reference is None else self._joined(data, reference, packed.frame_bytes)
        else:
            return None
        if frame is None:
            return None
        same = known.get(packed.frame_hash) if known else None
        is_right = frame_hash(frame) == packed.frame_hash if same is None else frame == same
        return frame if is_right else None

    def _joined(self, data: bytes, reference: bytes, bytes_max: int) -> bytes | None:
        try:
            difference = read_difference(data)
            rest = self._decompressed(data[difference.end :], bytes_max)
            return None if rest is None else difference.applied(rest, reference)
        except ValueError:
            return None

    def _decompressed(self, data: bytes, bytes_max: int) -> bytes | None:
        """None for damaged data; never more than `bytes_max`."""
        try:
            is_fitting = 0 <= frame_content_size(data) <= bytes_max
            return self._decompressor.decompress(data) if is_fitting else None
        except ZstdError:
            return None

    def _rest_of(self, packed: Packed) -> bytes | None:
        """A frame without its filter, if it has the entry's digest."""
        if packed.codec != Codec.DIFFERENCE or packed.data is None:
            return None
        try:
            stored = rest_data(packed.data)
            rest = self._decompressed(stored, packed.frame_bytes)
            return rest if rest and entry_digest(decode(rest)[0]) == packed.digest else None
        except (ValueError, MessageError):
            return None


def rest_data(data: bytes) -> bytes:
    """The data for `Codec.FILTER_LOST` in those of `Codec.DIFFERENCE`. Raises ValueError."""
    return data[read_difference(data).end :]


def reference_filter(data: bytes) -> bytes | None:
    """The filter of a reference; None if its row is damaged, which zstd's checksum shows."""
    try:
        is_fitting = 0 <= frame_content_size(data) <= FILTER_BYTES_MAX
        return ZstdDecompressor().decompress(data) if is_fitting else None
    except ZstdError:
        return None


def _smaller(frame: bytes, data: bytes) -> StoredFrame:
    if len(data) < len(frame):
        return StoredFrame(Codec.BUILT_IN, None, data)
    return StoredFrame(Codec.RAW, None, frame)


def _compressor(dictionary: ZstdCompressionDict | None, *, has_checksum: bool) -> ZstdCompressor:
    # The codec names the dictionary, so the data need not; unpacking checks the content size first.
    return ZstdCompressor(
        _LEVEL,
        dict_data=dictionary,
        write_content_size=True,
        write_dict_id=False,
        write_checksum=has_checksum,
    )


# ---- rows

Position = tuple[int | str, ...]
"""A reader's place: log `(lamport, message ID, digest in hex)`, arrival and feed a `Token`, hint
`(rank, number, seq)`, gaps `(message ID,)`, ancestors `(lamport, message ID, digest in hex, waiting,
late)` with sets of sequence numbers in the form that `app.store.histories` writes."""

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

    @property
    def is_retired(self) -> bool:
        """Whether the entry is retired, if the row has the columns of its frame."""
        return self.codec == Codec.RETIRED

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
        (func.length(frames.c.data) <= constant(SMALL_FRAME_BYTES_MAX))
        | (frames.c.codec == constant(int(Codec.RETIRED)))
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


class Tombstone(NamedTuple):
    """What stays of the message of a retired entry, beside the columns of its row.

    `causes`: the IDs of its causal history; None if the history was dropped too, or could not be read.
    `rank` and `is_disproved`: as of the message (`sdstore.sds.model`), whose ID nobody can verify any more.
    """

    sender_id: str
    causes: tuple[str, ...] | None
    rank: Rank
    is_disproved: bool

    @classmethod
    def of(cls, message: Message | None, *, with_history: bool = False) -> Tombstone:
        """The tombstone of a message; None for one that could not be read. `with_history` drops its causes."""
        if message is None:
            return cls("", None, Rank.UNKNOWN, is_disproved=False)
        causes = tuple(dict.fromkeys(each.message_id for each in message.causal_history))
        return cls(
            message.sender_id,
            None if with_history else causes,
            rank(message),
            is_disproved(message),
        )

    def packed(self) -> bytes:
        """The data of the entry's frame."""
        return orjson.dumps([*self])

    @classmethod
    def read(cls, data: bytes | None) -> Tombstone:
        """The inverse of `packed`; damaged data have lost the history."""
        try:
            sender_id, causes, number, disproved = orjson.loads(data or b"")
            names = None if causes is None else tuple(map(str, causes))
            return cls(str(sender_id), names, Rank(number), bool(disproved))
        except (ValueError, TypeError):
            return cls.of(None, with_history=True)


class LeftOut(NamedTuple):
    """An entry that belongs to an answer but is left out, because its content is lost or retired.

    `tombstone`: what is known of a retired one; None if the content is lost.
    """

    seq: int
    arrival_sum: int
    channel_id: str
    message_id: str
    digest: bytes
    tombstone: Tombstone | None = None

    @property
    def place(self) -> Token:
        """The entry's place in arrival order."""
        return Token(self.seq, self.arrival_sum)

    @property
    def state(self) -> ContentState:
        """Why it is left out."""
        return ContentState.LOST if self.tombstone is None else ContentState.RETIRED


def left_out(rows: Sequence[EntryRow], found: Read) -> tuple[LeftOut, ...]:
    """The rows without an entry."""
    read = {entry.seq for entry in found.entries}
    return tuple(
        LeftOut(
            row.seq,
            row.arrival_sum,
            row.channel_id,
            row.message_id,
            row.digest,
            found.tombstones.get(row.seq),
        )
        for row in rows
        if row.seq not in read
    )


# ---- frames


class ContentState(Enum):
    """The reason why the content of a known entry cannot be served."""

    LOST = "lost"
    """Its frame was read twice and was wrong each time, or has no row."""
    RETIRED = "retired"
    """An operator or the retention dropped it."""


class LostElement(NamedTuple):
    """An entry whose content is lost, as reconciliation knows it: its order value and digest."""

    order: int
    digest: bytes
    channel_no: int
    seq: int


class Read(NamedTuple):
    """The entries of some rows that can be read, and the tombstones of retired ones by sequence number."""

    entries: list[Entry]
    tombstones: Mapping[int, Tombstone]


class Rechecked(NamedTuple):
    """Sequence numbers of frames that were read again: the lost ones, and the whole ones."""

    lost: frozenset[int]
    whole: frozenset[int]


class Verified(NamedTuple):
    """Frames that were read to see whether they are whole: their number, and the last sequence number.

    `entries`: those with whole frames. `lost`: the sequence numbers of the others, without retired ones.
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
    no query for them; the table decides. `has_retired`: whether this process knows of a retired entry.
    """

    def __init__(self, database: Database) -> None:
        self.recheck: Recheck | None = None
        self.lost: set[int] = set()
        self.has_retired = False
        self._told: set[int] = set()
        self._database = database
        self._sql = database.sql
        self._unpacker = FrameUnpacker()
        # Remembers no references: those in memory prove nothing about the disk.
        self._verifier = FrameUnpacker()

    async def entry(self, row: EntryRow) -> Entry:
        """The entry of a row with the columns of its frame. Raises `Problem` CONTENT_LOST, RETIRED."""
        if not self.lost:
            # No query: the hot path of reading.
            frame = self._unpacker.unpack_at_hand(row)
            if frame is not None and row.codec != Codec.FILTER_LOST:
                return row.entry(frame)
        entries = await self.entries([row])
        if not entries:
            raise content_gone(row)
        return entries[0]

    async def entries(self, rows: Sequence[EntryRow]) -> list[Entry]:
        """The entries of these rows, in their order, without those whose frames cannot be read.

        Reads the frames that the rows lack.
        """
        return (await self.read(rows)).entries

    async def read(self, rows: Sequence[EntryRow]) -> Read:
        """As `entries`, with the tombstones of retired entries."""
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
        entries, tombstones = await self._read(rows, self._verifier)
        known = tombstones.keys() | {entry.seq for entry in entries}
        return Verified(
            len(rows), rows[-1].seq, entries, [row.seq for row in rows if row.seq not in known]
        )

    async def _read(self, rows: Sequence[EntryRow], unpacker: FrameUnpacker) -> Read:
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
        tombstones = {
            each.seq: Tombstone.read(each.data) for each in packed if each.codec == _RETIRED_NO
        }
        if tombstones:
            packed = [each for each in packed if each.seq not in tombstones]
            rows = [row for row in rows if row.seq not in tombstones]
        whole, without_filter = unpacked = await self._unpack(unpacker, packed)
        if len(whole) < len(rows) or self.lost:
            await self._settle(rows, unpacked)
        stripped = {each.seq for each in packed if each.codec == Codec.FILTER_LOST}
        entries = [
            row.entry(whole[row.seq], filter_is_lost=row.seq in stripped)
            if row.seq in whole
            else row.entry(without_filter[row.seq], filter_is_lost=True)
            for row in rows
            if row.seq in whole or row.seq in without_filter
        ]
        return Read(entries, tombstones)

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
        """Those of these entries whose content is lost or retired."""
        wanted = set(digests)
        lost = await self._database.among(_lost_by_digest(self._sql), prefixes(digests))
        retired = await self._database.among(_retired_entries(self._sql), list(wanted))
        found = [LeftOut(*row) for row in lost]
        found += [LeftOut(*row)._replace(tombstone=Tombstone.read(row[-1])) for row in retired]
        return [each for each in found if each.digest in wanted]

    async def content_states(self, digests: Sequence[bytes]) -> dict[bytes, ContentState]:
        """The known entries among these that cannot be served, each with the reason.

        Call it after `Lookups.by_digest`, which leaves them out.
        """
        return {each.digest: each.state for each in await self.left_out(digests)}

    async def follow_marks(self) -> int:
        """Learn what other processes marked as lost; returns the number of lost entries."""
        ((self.has_retired,),) = await self._database.rows(_has_retired(self._sql))
        marked = await self.lost_elements(MARKS_REMEMBERED_MAX)
        self.lost = {each.seq for each in marked}
        return len(marked) if len(marked) < MARKS_REMEMBERED_MAX else await self.lost_count()

    async def retired_among(self, digests: Sequence[bytes]) -> set[bytes]:
        """The retired ones of these entries; also those that have not arrived."""
        rows = await self._database.among(retired_among(self._sql), list(set(digests)))
        return {digest for (digest,) in rows}

    async def retired_count(self) -> int:
        """The number of retired entries."""
        ((count,),) = await self._database.rows(_retired_count(self._sql))
        return int(count)

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


def content_gone(row: EntryRow) -> Problem:
    """The refusal to serve an entry without content, by its row with the columns of its frame."""
    if not row.is_retired:
        return content_lost(row.digest)
    return Problem(
        Code.RETIRED,
        f"entry {row.digest.hex()} was retired: this node dropped its content on purpose",
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
def retired_among(sql: SqlDialect) -> ManyQuery:
    """The retired ones of many digests."""
    return sql.among(retired_content.c.digest, select(retired_content.c.digest).where)


@cache
def _has_retired(sql: SqlDialect) -> Query:
    return sql.query(select(exists(select(retired_content.c.digest))))


@cache
def _retired_count(sql: SqlDialect) -> Query:
    here = retired_content.c.seq.is_not(None)
    return sql.query(select(func.count()).select_from(retired_content).where(here))


@cache
def _retired_entries(sql: SqlDialect) -> ManyQuery:
    """`LeftOut`s of retired entries, with the data of their tombstones, by digest."""
    known = select(
        messages.c.seq,
        messages.c.arrival_sum,
        channels.c.channel_id,
        messages.c.message_id,
        messages.c.digest,
        frames.c.data,
    )
    known = known.join_from(messages, retired_content, retired_content.c.seq == messages.c.seq)
    known = known.join(channels, IN_CHANNELS).join(frames, frames.c.seq == messages.c.seq)
    return sql.among(retired_content.c.digest, known.where)


@cache
def _lost_count(sql: SqlDialect) -> Query:
    return sql.query(select(func.count()).select_from(lost_content))
