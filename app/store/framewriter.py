"""Chooses what each frame is compressed against, and writes both copies of references.

A channel has *bases*, stored by themselves, and *references*, stored against a base; every other
large frame is stored against a reference. One is renewed when going on with it costs more than it
did on average so far, its own two copies included (`Wear`): the point from which the average would
rise. The writer remembers only what was committed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, starmap
from typing import NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Integer, exists, select

from app.entries import NewEntry, WriteResult
from app.store.database import ManyQuery, Row, SqlDialect, Transaction, constant
from app.store.entryrows import FRAME_COLUMNS, lost_after, stored_frames
from app.store.frames import (
    Ask,
    FramePacker,
    FrameRow,
    FrameUnpacker,
    PackedFrame,
    Reference,
    StoredFrame,
    is_referable,
)
from app.store.schema import FORMER_REFERENCE, frame_references, frames, lost_content, messages
from sdstore.sds.digest import frame_hash

CHANNELS_BYTES_MAX = 64 * 1024 * 1024
"""References ready for writing: about 50 conversations at once; others are read again."""

_REFERENCE_BYTES = 256 * 1024  # zstd's own state

LOST_NEAR_MAX = 2_048
"""Lost frames around a mended one that are read again at once: a reference and most of its dependents
came in one group or soon after it. The others are read again in turn (`app.lostcontent`)."""

CHANNEL_REFERENCES_MAX = 4
"""References of one channel that the writer chooses from: one conversation and what comes late."""

T = TypeVar("T")
Written = tuple[NewEntry, WriteResult]


class _ReferenceRow(NamedTuple):
    """A reference as the database holds it; `reference_no` is its base."""

    channel_no: int
    lamport: int
    seq: int
    frame_bytes: int
    frame_hash: bytes
    codec: int
    reference_no: int | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A frame for an entry with an unreadable frame; `is_same` if it equals that one, byte for byte.

    `is_reference`: others are known to be compressed against the one that cannot be read.
    """

    seq: int
    channel_no: int
    frame: bytes
    is_same: bool
    is_reference: bool = False


@dataclass(slots=True)
class Wear:
    """The cost of a reference so far in bytes, with its own copies, and the number of frames that used it."""

    spent: int
    uses: int = 1

    def is_out(self, size: int) -> bool:
        """Whether another use at this price would raise the average."""
        return size * self.uses > self.spent

    def use(self, size: int) -> None:
        """One more."""
        self.spent += size
        self.uses += 1


@dataclass(slots=True)
class Known:
    """A reference of a channel; bases have none themselves."""

    lamport: int
    frames: Reference
    base: Known | None
    wear: Wear
    wear_as_base: Wear

    @classmethod
    def of(cls, lamport: int, frames: Reference, base: Known | None, size: int) -> Known:
        """One that has cost its two copies of `size` bytes so far."""
        return cls(lamport, frames, base, Wear(2 * size), Wear(2 * size))


@dataclass(slots=True)
class Channel:
    """The references for a channel's next frames.

    `candidate` becomes the first base when the frame after it turns out to be alike.
    """

    known: list[Known] = field(default_factory=list)
    candidate: tuple[int, int, bytes, StoredFrame] | None = None

    def nearest(self, lamport: int) -> Known | None:
        """The reference whose clock is closest: filters grow with time, in any order of arrival."""
        return min(self.known, key=lambda known: abs(known.lamport - lamport), default=None)

    def add(self, known: Known) -> None:
        """One more; the oldest is no longer chosen."""
        self.known = [*self.known[1 - CHANNEL_REFERENCES_MAX :], known]

    @property
    def seqs(self) -> set[int]:
        """The messages whose frames are in use, without the candidate."""
        return {e.frames.seq for known in self.known for e in (known, known.base) if e}

    @property
    def bytes(self) -> int:
        """Approximate memory."""
        kept = {e.frames.seq: e for known in self.known for e in (known, known.base) if e}
        candidate = len(self.candidate[2]) if self.candidate else 0
        return candidate + sum(len(each.frames.frame) + _REFERENCE_BYTES for each in kept.values())


class FrameWriter:
    """Writes the frames of groups. Writer's thread only."""

    def __init__(self, sql: SqlDialect) -> None:
        self._sql = sql
        self._packer = FramePacker()
        self._channels: OrderedDict[int, Channel] = OrderedDict()

    def write(self, transaction: Transaction, written: Sequence[Written]) -> None:
        """The frames of new entries."""
        copies: list[Row] = []
        large = [each for each in written if is_referable(each[0].frame)]
        small = [each for each in written if not is_referable(each[0].frame)]
        packed = self._packer.pack_small([entry.frame for entry, _ in small])
        rows: list[Row] = [
            (result.seq, *stored) for (_, result), stored in zip(small, packed, strict=True)
        ]
        if large:
            self._make_ready(transaction, {result.channel_no for _, result in large})
            large.sort(key=_in_log_order)
            for channel_no, entries in groupby(large, lambda each: each[1].channel_no):
                self._pack_channel(channel_no, entries, rows, copies)
            rows.sort()
            self._trim()
        transaction.many(self._sql.insert(frames), rows)
        transaction.many(self._sql.insert(frame_references), copies)

    def forget(self) -> None:
        """Forget all references: a group was rolled back, a frame is lost, or the database lost commits."""
        self._channels.clear()

    def remembered(self, lost: Mapping[int, PackedFrame]) -> list[Lost]:
        """The lost frames that are still intact as references in memory."""
        found = {}
        for channel_no, channel in self._channels.items():
            for known in channel.known:
                for each in (known, known.base):
                    if each is not None and (packed := lost.get(each.frames.seq)) is not None:
                        frame = each.frames.frame
                        if frame_hash(frame) == packed.frame_hash:
                            found[packed.seq] = Lost(packed.seq, channel_no, frame, True, True)
        return list(found.values())

    # ---- lost frames that arrive again

    def mend(self, transaction: Transaction, lost: Sequence[Lost]) -> set[int]:
        """Remove the rows of lost frames and restore those that others are compressed against.

        Such a frame is stored by itself, in both copies. A frame that differs from the lost one cannot
        replace it as a reference: the rest of the lost one stays as the second copy, for dependents that
        can still be read. Returns the sequence numbers of the others; write those as new frames.
        """
        self.forget()
        sql, seqs = self._sql, [each.seq for each in lost]
        first = {row[0] for row in transaction.among(stored_frames(sql, frames), seqs)}
        second = {row[0] for row in transaction.among(stored_frames(sql, frame_references), seqs)}
        former = {seq for (seq,) in transaction.among(_former_references(sql), seqs)}
        channels = sorted({each.channel_no for each in lost})
        needed = {base for (base,) in transaction.among(_bases(sql), channels)}
        needed |= {reference for _, reference in self.lost_near(transaction, min(seqs))}
        rows: list[Row] = []
        copies: list[Row] = []
        others: set[int] = set()
        for each in lost:
            is_reference = (
                each.is_reference
                or each.seq in second
                or each.seq in needed
                # without its row it could have been a reference
                or (each.seq not in first and is_referable(each.frame))
            )
            if not is_reference:
                others.add(each.seq)
                continue
            stored = self._packer.pack(each.frame)
            rows.append((each.seq, *stored))
            if each.seq in former:
                continue
            if each.is_same:
                copies.append((each.seq, each.channel_no, *stored))
            elif contents := _answered(
                transaction, sql, FrameUnpacker(is_silent=True).contents(each.seq)
            ):
                copies.append((each.seq, FORMER_REFERENCE, *self._packer.pack(contents[0])))
        transaction.many(sql.delete_each(frames, "seq"), [(seq,) for seq in seqs])
        transaction.many(
            sql.delete_each(frame_references, "seq"), [(seq,) for seq in seqs if seq not in former]
        )
        transaction.many(sql.insert(frames), rows)
        transaction.many(sql.insert(frame_references), copies)
        return others

    def lost_near(self, transaction: Transaction, first_seq: int) -> list[tuple[int, int]]:
        """(sequence number, reference) of lost frames that need one and came around `first_seq`
        or later."""
        near = transaction.rows(
            lost_after(self._sql), after=first_seq - LOST_NEAR_MAX, limit=LOST_NEAR_MAX
        )
        rows = transaction.among(_needed_references(self._sql), [row[0] for row in near])
        return [(seq, reference_no) for seq, reference_no in rows]

    def _trim(self) -> None:
        size = sum(channel.bytes for channel in self._channels.values())
        while size > CHANNELS_BYTES_MAX:
            _, oldest = self._channels.popitem(last=False)
            size -= oldest.bytes

    # ---- one channel

    def _pack_channel(
        self, channel_no: int, entries: Iterable[Written], rows: list[Row], copies: list[Row]
    ) -> None:
        channel = self._channels.setdefault(channel_no, Channel())
        self._channels.move_to_end(channel_no)
        for entry, result in entries:
            stored, copied = self._pack(channel, entry, result.seq)
            rows.append((result.seq, *stored))
            copies += [(seq, channel_no, *copy) for seq, copy in copied]

    def _pack(
        self, channel: Channel, entry: NewEntry, seq: int
    ) -> tuple[StoredFrame, list[tuple[int, StoredFrame]]]:
        """The stored form of a frame, and the second copies of references that it makes."""
        lamport = entry.message.lamport_timestamp or 0
        nearest = channel.nearest(lamport)
        if nearest is None:
            return self._pack_first(channel, entry, seq)
        stored = nearest.frames.pack(entry.frame)
        size = _size(stored, entry)
        if not nearest.wear.is_out(size):
            nearest.wear.use(size)
            return stored, []
        stored, base = self._pack_reference(nearest.base or nearest, entry)
        reference = Reference(seq, entry.frame)
        channel.add(Known.of(lamport, reference, base, _size(stored, entry)))
        return stored, [(seq, stored)]

    def _pack_reference(self, base: Known, entry: NewEntry) -> tuple[StoredFrame, Known | None]:
        stored = base.frames.pack(entry.frame)
        size = 2 * _size(stored, entry)
        if base.wear_as_base.is_out(size):
            return self._packer.pack(entry.frame), None
        base.wear_as_base.use(size)
        return stored, base

    def _pack_first(
        self, channel: Channel, entry: NewEntry, seq: int
    ) -> tuple[StoredFrame, list[tuple[int, StoredFrame]]]:
        alone = self._packer.pack(entry.frame)
        candidate, lamport = channel.candidate, entry.message.lamport_timestamp or 0
        channel.candidate = (seq, lamport, entry.frame, alone)
        if candidate is None:
            return alone, []
        candidate_seq, candidate_lamport, frame, copy = candidate
        reference = Reference(candidate_seq, frame)
        stored = reference.pack(entry.frame)
        if 2 * len(stored.data) > len(alone.data):
            return alone, []
        channel.candidate = None
        channel.add(Known.of(candidate_lamport, reference, None, len(copy.data)))
        return stored, [(candidate_seq, copy)]

    # ---- the channels' references in the database

    def _make_ready(self, transaction: Transaction, channel_numbers: set[int]) -> None:
        """Forget references that are gone, and read those of channels that are not in memory."""
        self._forget_gone(transaction, channel_numbers)
        unknown = sorted(channel_numbers - self._channels.keys())
        # The latest comes first in each channel, and has to be added last.
        found = transaction.each(_latest_references(self._sql), [(each,) for each in unknown])
        latest = [_ReferenceRow(*columns) for _, *columns in reversed(found)]
        missing = {row.reference_no for row in latest} - {row.seq for row in latest} - {None}
        bases = transaction.among(_references_named(self._sql), sorted(missing))
        rows = [*starmap(_ReferenceRow, bases), *latest]
        packed = [PackedFrame(*row[2:]) for row in rows]
        whole = _answered(transaction, self._sql, FrameUnpacker().unpack(packed))
        known: dict[int, Known] = {}
        for row in rows:
            base_no, seq = row.reference_no, row.seq
            if seq not in whole or (base_no is not None and base_no not in known):
                continue
            base = None if base_no is None else known[base_no]
            reference = Reference(seq, whole[seq])
            known[seq] = Known.of(row.lamport, reference, base, len(row.data))
            self._channels.setdefault(row.channel_no, Channel()).add(known[seq])

    def _forget_gone(self, transaction: Transaction, channel_numbers: set[int]) -> None:
        channels = {n: self._channels[n] for n in channel_numbers & self._channels.keys()}
        asked = sorted(set().union(*(channel.seqs for channel in channels.values())))
        here = {seq for (seq,) in transaction.among(_usable_references(self._sql), asked)}
        candidates = [each.candidate[0] for each in channels.values() if each.candidate]
        here |= {seq for (seq,) in transaction.among(_usable_frames(self._sql), candidates)}
        for number, channel in channels.items():
            if channel.candidate and channel.candidate[0] not in here:
                channel.candidate = None
            if not channel.seqs <= here:
                del self._channels[number]


def read_frames(
    transaction: Transaction,
    sql: SqlDialect,
    unpacker: FrameUnpacker,
    seqs: Sequence[int],
) -> tuple[dict[int, bytes], dict[int, PackedFrame]]:
    """The frames of entries by sequence number, and the rows of those that cannot be read."""
    packed = [PackedFrame(*row) for row in transaction.among(_held_frames(sql), seqs)]
    found = _answered(transaction, sql, unpacker.unpack(packed))
    return found, {each.seq: each for each in packed if each.seq not in found}


def _answered(
    transaction: Transaction,
    sql: SqlDialect,
    asking: Generator[Ask, list[FrameRow], T],
) -> T:
    """The result of an unpacker, once it is sent the rows it asks for."""
    try:
        ask = next(asking)
        while True:
            table = frame_references if ask.of_references else frames
            ask = asking.send(transaction.among(stored_frames(sql, table), ask.seqs))
    except StopIteration as end:
        found: T = end.value
        return found


def _in_log_order(written: Written) -> tuple[int, int, int]:
    entry, result = written
    return result.channel_no, entry.message.lamport_timestamp or 0, result.seq


def _size(stored: StoredFrame, entry: NewEntry) -> int:
    """The size of a frame without its content, which no reference makes smaller."""
    return max(1, len(stored.data) - len(entry.message.content))


# ---- statements

_COPIES = frame_references.c


@cache
def _held_frames(sql: SqlDialect) -> ManyQuery:
    """`PackedFrame`s of entries, from their first copies."""
    held = select(messages.c.seq, messages.c.frame_bytes, messages.c.frame_hash, *FRAME_COLUMNS)
    held = held.select_from(messages.outerjoin(frames, frames.c.seq == messages.c.seq))
    return sql.among(messages.c.seq, held.where)


_NAMED = select(
    _COPIES.channel_no,
    messages.c.lamport,
    _COPIES.seq,
    messages.c.frame_bytes,
    messages.c.frame_hash,
    _COPIES.codec,
    _COPIES.reference_no,
    _COPIES.data,
).join_from(frame_references, messages, _COPIES.seq == messages.c.seq)
"""The columns of `_ReferenceRow`."""


@cache
def _references_named(sql: SqlDialect) -> ManyQuery:
    return sql.among(_COPIES.seq, _NAMED.where)


@cache
def _latest_references(sql: SqlDialect) -> ManyQuery:
    return sql.each(
        {"channel_no": Integer()},
        lambda key: (
            _NAMED.where(_COPIES.channel_no == key["channel_no"])
            .order_by(_COPIES.seq.desc())
            .limit(constant(CHANNEL_REFERENCES_MAX))
        ),
    )


@cache
def _usable_references(sql: SqlDialect) -> ManyQuery:
    """The references among many that new frames can be compressed against."""
    usable = select(_COPIES.seq).where(
        _COPIES.channel_no != constant(FORMER_REFERENCE), ~_is_lost(_COPIES.seq)
    )
    return sql.among(_COPIES.seq, usable.where)


@cache
def _usable_frames(sql: SqlDialect) -> ManyQuery:
    """The frames among many whose content is not lost."""
    return sql.among(frames.c.seq, select(frames.c.seq).where(~_is_lost(frames.c.seq)).where)


def _is_lost(seq: ColumnElement[int]) -> ColumnElement[bool]:
    return exists().where(lost_content.c.seq == seq)


@cache
def _former_references(sql: SqlDialect) -> ManyQuery:
    former = select(_COPIES.seq).where(_COPIES.channel_no == constant(FORMER_REFERENCE))
    return sql.among(_COPIES.seq, former.where)


@cache
def _bases(sql: SqlDialect) -> ManyQuery:
    """The bases of many channels' references."""
    return sql.among(
        _COPIES.channel_no,
        lambda among: (
            select(_COPIES.reference_no).where(among, _COPIES.reference_no.is_not(None)).distinct()
        ),
    )


@cache
def _needed_references(sql: SqlDialect) -> ManyQuery:
    """(seq, reference number) of the frames among many that are compressed against a reference."""
    return sql.among(
        frames.c.seq,
        select(frames.c.seq, frames.c.reference_no).where(frames.c.reference_no.is_not(None)).where,
    )
