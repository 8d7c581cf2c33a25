"""Chooses what each frame is compressed against, and writes both copies of references.

A channel has *bases*, stored by themselves, and *references*, stored against a base; every other
large frame is stored against a reference. One is renewed when going on with it costs more than it
did on average so far, its own two copies included (`Wear`): the point from which the average would
rise. Nothing here is remembered that was not committed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from app.entries import NewEntry
from app.store.database import Row, Transaction
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
from app.store.records import WriteResult
from app.store.schema import FORMER_REFERENCE
from app.store.writestatements import CHANNEL_REFERENCES_MAX, WriteStatements
from sdstore.sds.digest import frame_hash

CHANNELS_BYTES_MAX = 64 * 1024 * 1024
"""References ready for writing: some 50 conversations at once; another one is read again."""

_REFERENCE_BYTES = 256 * 1024  # zstd's own state

LOST_NEAR_MAX = 2_048
"""Lost frames around a mended one that are looked at: a reference and most of what needs it came
in one group or soon after it. The others are read again in turn (`app.verification`)."""

_SEQ, _REFERENCE_NO = 2, 6  # columns of `latest_references`

T = TypeVar("T")
Written = tuple[NewEntry, WriteResult]


@dataclass(frozen=True, slots=True)
class Lost:
    """A frame for an entry whose own cannot be read; `is_same` if it is that frame, byte for byte.

    `is_reference`: others are known to be compressed against the one that cannot be read.
    """

    seq: int
    channel_no: int
    frame: bytes
    is_same: bool
    is_reference: bool = False


@dataclass(slots=True)
class Wear:
    """What a reference has cost, its own copies included, and how many frames that was for."""

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
    """What a channel's next frames may be compressed against.

    `candidate` becomes the first base when the frame after it turns out to be alike.
    """

    known: list[Known] = field(default_factory=list)
    candidate: tuple[int, int, bytes, StoredFrame] | None = None

    def nearest(self, lamport: int) -> Known | None:
        """The reference whose clock is closest: filters grow with time, in whatever order they come."""
        return min(self.known, key=lambda known: abs(known.lamport - lamport), default=None)

    def add(self, known: Known) -> None:
        """One more; the oldest is no longer chosen."""
        self.known = [*self.known[1 - CHANNEL_REFERENCES_MAX :], known]

    @property
    def seqs(self) -> set[int]:
        """The messages whose frames are in use here, but for the candidate."""
        return {e.frames.seq for known in self.known for e in (known, known.base) if e}

    @property
    def bytes(self) -> int:
        """Memory, about."""
        kept = {e.frames.seq: e for known in self.known for e in (known, known.base) if e}
        candidate = len(self.candidate[2]) if self.candidate else 0
        return candidate + sum(len(each.frames.frame) + _REFERENCE_BYTES for each in kept.values())


class FrameWriter:
    """Writes the frames of groups. Writer's thread only."""

    def __init__(self, statements: WriteStatements) -> None:
        self._statements = statements
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
        transaction.many(self._statements.insert_frames, rows)
        transaction.many(self._statements.insert_copies, copies)

    def forget(self) -> None:
        """References may not be there: a group was rolled back, a frame is lost, or the database lost
        what it had committed."""
        self._channels.clear()

    def remembered(self, lost: Mapping[int, PackedFrame]) -> list[Lost]:
        """Those lost frames that are references in memory, which nothing happened to."""
        found = {}
        for channel_no, channel in self._channels.items():
            for known in channel.known:
                for each in (known, known.base):
                    if each is not None and (packed := lost.get(each.frames.seq)) is not None:
                        frame = each.frames.frame
                        if frame_hash(frame) == packed.frame_hash:
                            found[packed.seq] = Lost(packed.seq, channel_no, frame, True, True)
        return list(found.values())

    # ---- lost frames that came again

    def mend(self, transaction: Transaction, lost: Sequence[Lost]) -> set[int]:
        """Remove the rows of lost frames and restore those that others are compressed against.

        Such a frame is stored by itself, in both copies; one that differs from the lost one is no
        reference: what is left of the lost one stays the second copy, for dependents that can still
        be read. Returns the sequence numbers of the others, to be written as new ones are.
        """
        self.forget()
        statements, seqs = self._statements, [each.seq for each in lost]
        first = {row[0] for row in transaction.among(statements.frames, seqs)}
        second = {row[0] for row in transaction.among(statements.references, seqs)}
        former = {row[0] for row in transaction.among(statements.former_here, seqs)}
        channels = sorted({each.channel_no for each in lost})
        needed = {row[0] for row in transaction.among(statements.bases, channels)}
        needed |= {reference for _, reference in self.lost_near(transaction, min(seqs))}
        rows: list[Row] = []
        copies: list[Row] = []
        others: set[int] = set()
        for each in lost:
            is_reference = (
                each.is_reference
                or each.seq in second
                or each.seq in needed
                # whether it was one, nothing tells
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
                transaction, statements, FrameUnpacker(is_silent=True).contents(each.seq)
            ):
                copies.append((each.seq, FORMER_REFERENCE, *self._packer.pack(contents[0])))
        transaction.many(statements.delete_frames, [(seq,) for seq in seqs])
        transaction.many(statements.delete_copies, [(seq,) for seq in seqs if seq not in former])
        transaction.many(statements.insert_frames, rows)
        transaction.many(statements.insert_copies, copies)
        return others

    def lost_near(self, transaction: Transaction, first_seq: int) -> list[tuple[int, int]]:
        """(sequence number, reference) of lost frames that need one and came around `first_seq`
        or later."""
        near = transaction.rows(
            self._statements.lost_elements,
            after=first_seq - LOST_NEAR_MAX,
            limit=LOST_NEAR_MAX,
        )
        rows = transaction.among(self._statements.needed_references, [row[0] for row in near])
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
        """How the frame is stored, and the second copies of references that this makes."""
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

    # ---- what the database knows of channels

    def _make_ready(self, transaction: Transaction, channel_numbers: set[int]) -> None:
        """Forget what is no longer there, read what channels that are not in memory have."""
        self._forget_gone(transaction, channel_numbers)
        unknown = sorted(channel_numbers - self._channels.keys())
        statements = self._statements
        # The latest comes first in each channel, and has to be added last.
        latest = [
            row[1:]
            for row in reversed(
                transaction.each(statements.latest_references, [(each,) for each in unknown])
            )
        ]
        missing = {row[_REFERENCE_NO] for row in latest} - {row[_SEQ] for row in latest} - {None}
        rows = [*transaction.among(statements.references_named, sorted(missing)), *latest]
        packed = [PackedFrame(*row[_SEQ:]) for row in rows]
        frames = _answered(transaction, statements, FrameUnpacker().unpack(packed))
        known: dict[int, Known] = {}
        for channel_no, lamport, seq, _, _, _, base_no, data in rows:
            if seq not in frames or (base_no is not None and base_no not in known):
                continue
            base = None if base_no is None else known[base_no]
            known[seq] = Known.of(lamport, Reference(seq, frames[seq]), base, len(data))
            self._channels.setdefault(channel_no, Channel()).add(known[seq])

    def _forget_gone(self, transaction: Transaction, channel_numbers: set[int]) -> None:
        channels = {n: self._channels[n] for n in channel_numbers & self._channels.keys()}
        asked = sorted(set().union(*(channel.seqs for channel in channels.values())))
        here = {row[0] for row in transaction.among(self._statements.references_here, asked)}
        candidates = [each.candidate[0] for each in channels.values() if each.candidate]
        here |= {row[0] for row in transaction.among(self._statements.frames_here, candidates)}
        for number, channel in channels.items():
            if channel.candidate and channel.candidate[0] not in here:
                channel.candidate = None
            if not channel.seqs <= here:
                del self._channels[number]


def read_frames(
    transaction: Transaction,
    statements: WriteStatements,
    unpacker: FrameUnpacker,
    seqs: Sequence[int],
) -> tuple[dict[int, bytes], dict[int, PackedFrame]]:
    """The frames of entries as a transaction finds them, and the rows of those it cannot read."""
    packed = [PackedFrame(*row) for row in transaction.among(statements.held, seqs)]
    found = _answered(transaction, statements, unpacker.unpack(packed))
    return found, {each.seq: each for each in packed if each.seq not in found}


def _answered(
    transaction: Transaction,
    statements: WriteStatements,
    asking: Generator[Ask, list[FrameRow], T],
) -> T:
    """What an unpacker finds that is given the rows it asks for."""
    try:
        ask = next(asking)
        while True:
            query = statements.references if ask.of_references else statements.frames
            ask = asking.send(transaction.among(query, ask.seqs))
    except StopIteration as end:
        found: T = end.value
        return found


def _in_log_order(written: Written) -> tuple[int, int, int]:
    entry, result = written
    return result.channel_no, entry.message.lamport_timestamp or 0, result.seq


def _size(stored: StoredFrame, entry: NewEntry) -> int:
    """What a frame costs apart from its content, which no reference makes smaller."""
    return max(1, len(stored.data) - len(entry.message.content))
