"""Writes the frames of groups: which filter is stored as a difference from which reference.

Each channel has references of its own (`sdstore.sds.framecodec.References` chooses). The writer
remembers only what was committed, and checks in each transaction that the references it used still
exist, because other processes can write to the same PostgreSQL database.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cache

from sqlalchemy import Integer, select

from app.entries import NewEntry, WriteResult
from app.store.database import ManyQuery, Row, SqlDialect, Transaction, constant
from app.store.entryrows import FRAME_COLUMNS, stored_references
from app.store.frames import (
    Codec,
    FramePacker,
    FrameUnpacker,
    PackedFrame,
    ReferenceRow,
    StoredFrame,
    Unpacked,
    reference_filter,
    rest_data,
)
from app.store.schema import filter_references, frames, messages
from sdstore.sds.digest import frame_hash
from sdstore.sds.framecodec import REFERENCES_MAX, References, Split, difference, split

CHANNELS_BYTES_MAX = 64 * 1024 * 1024
"""References ready for writing: at least 50 conversations at once; others are read again."""

Written = tuple[NewEntry, WriteResult]


class _Filtered:
    """The frames of a group whose filters are stored as differences, and the references they make."""

    def __init__(self) -> None:
        self.frames: list[Row] = []
        self.references: dict[int, tuple[int, bytes]] = {}  # channel number, data; by number
        self.used: dict[int, int] = {}  # the last sequence number; by number of the reference


class FrameWriter:
    """Writes the frames of groups. Writer's thread only."""

    def __init__(self, sql: SqlDialect) -> None:
        self._sql = sql
        self._packer = FramePacker()
        self._channels: OrderedDict[int, References] = OrderedDict()

    def write(self, transaction: Transaction, written: Sequence[Written]) -> None:
        """The frames of new entries, and of known ones that are mended."""
        whole: list[Written] = []
        parted: list[tuple[Written, Split]] = []
        for each in written:
            parts = split(each[0].frame)
            if parts is None:
                whole.append(each)
            else:
                parted.append((each, parts))
        if parted:
            parted.sort(key=_in_log_order)
            self._write_parted(transaction, parted, whole)
        packed = self._packer.pack_whole([entry.frame for entry, _ in whole])
        rows: list[Row] = [
            (result.seq, *stored) for (_, result), stored in zip(whole, packed, strict=True)
        ]
        transaction.many(self._sql.insert(frames), rows)

    def forget(self) -> None:
        """Forget all references: a group was rolled back, a frame is lost, or the database lost commits."""
        self._channels.clear()

    def leave_filters_out(
        self,
        transaction: Transaction,
        unreadable: Mapping[int, PackedFrame],
        rests: Mapping[int, bytes],
    ) -> None:
        """Store frames without their filters, which cannot be read, and delete damaged references."""
        self.forget()
        changed = sorted(rests)
        transaction.many(
            self._sql.update_each(messages, "seq", "frame_bytes", "frame_hash"),
            [(len(rests[seq]), frame_hash(rests[seq]), seq) for seq in changed],
        )
        transaction.many(self._sql.delete_each(frames, "seq"), [(seq,) for seq in changed])
        transaction.many(
            self._sql.insert(frames),
            [
                (seq, int(Codec.FILTER_LOST), None, rest_data(unreadable[seq].data or b""))
                for seq in changed
            ],
        )
        numbers = sorted({unreadable[seq].reference_no or 0 for seq in changed})
        rows = transaction.among(stored_references(self._sql), numbers)
        damaged = [(number,) for number, data in rows if reference_filter(data) is None]
        transaction.many(self._sql.delete_each(filter_references, "reference_no"), damaged)

    # ---- filters as differences

    def _write_parted(
        self,
        transaction: Transaction,
        parted: Sequence[tuple[Written, Split]],
        whole: list[Written],
    ) -> None:
        """Appends to `whole` what cannot be stored as a difference."""
        channels = {result.channel_no for (_, result), _ in parted}
        self._read_references(transaction, sorted(channels - self._channels.keys()))
        packed, left = self._pack(parted)
        here = self._last_uses(transaction, packed)
        if len(here) < len(packed.used.keys() - packed.references.keys()):
            # Some were deleted since the group before.
            self._channels = OrderedDict(
                (number, each) for number, each in self._channels.items() if number not in channels
            )
            self._read_references(transaction, sorted(channels))
            packed, left = self._pack(parted)
            here = self._last_uses(transaction, packed)
        whole += left
        transaction.many(self._sql.insert(frames), packed.frames)
        transaction.many(
            self._sql.insert(filter_references),
            [
                (number, channel_no, packed.used[number], data)
                for number, (channel_no, data) in packed.references.items()
            ],
        )
        transaction.many(
            self._sql.update_each(filter_references, "reference_no", "last_seq"),
            [(packed.used[number], number) for number, last in here if packed.used[number] > last],
        )
        self._trim()

    def _pack(self, parted: Iterable[tuple[Written, Split]]) -> tuple[_Filtered, list[Written]]:
        """The rows of these frames, and the entries whose frames must be stored whole."""
        packed, whole = _Filtered(), list[Written]()
        for written, parts in parted:
            stored = self._pack_one(written[1], parts, packed)
            if stored is None:
                whole.append(written)
            else:
                packed.frames.append((written[1].seq, *stored))
        packed.frames.sort()
        return packed, whole

    def _pack_one(self, result: WriteResult, parts: Split, packed: _Filtered) -> StoredFrame | None:
        references = self._channels.get(result.channel_no)
        if references is None:
            references = self._channels[result.channel_no] = References()
        self._channels.move_to_end(result.channel_no)
        seq = result.seq
        found = references.difference(parts)
        if found is None:
            if not result.is_new:
                return None  # its number can be that of a reference
            references.add(seq, parts.bloom_filter)
            data = self._packer.pack_reference(parts.bloom_filter)
            packed.references[seq] = result.channel_no, data
            found = seq, difference(parts, parts.bloom_filter)
        number, written = found
        packed.used[number] = max(packed.used.get(number, 0), seq)
        return self._packer.pack_difference(parts, number, written)

    def _last_uses(self, transaction: Transaction, packed: _Filtered) -> list[tuple[int, int]]:
        """(number, last sequence number) of the references in the database that were used now."""
        old = sorted(packed.used.keys() - packed.references.keys())
        return [(number, last) for number, last in transaction.among(_last_seqs(self._sql), old)]

    def _read_references(self, transaction: Transaction, channel_numbers: Sequence[int]) -> None:
        """The references of channels that are not in memory."""
        if not channel_numbers:
            return
        found = transaction.each(
            _latest_references(self._sql), [(each,) for each in channel_numbers]
        )
        # The latest comes first in each channel, and has to be added last.
        for place, number, data in reversed(found):
            bloom_filter = reference_filter(data)
            if bloom_filter is not None:
                references = self._channels.setdefault(channel_numbers[place], References())
                references.add(number, bloom_filter, is_new=False)

    def _trim(self) -> None:
        size = sum(references.memory_bytes for references in self._channels.values())
        while size > CHANNELS_BYTES_MAX:
            _, oldest = self._channels.popitem(last=False)
            size -= oldest.memory_bytes


def read_frames(
    transaction: Transaction,
    sql: SqlDialect,
    unpacker: FrameUnpacker,
    seqs: Sequence[int],
    known: Mapping[bytes, bytes] | None = None,
) -> tuple[Unpacked, dict[int, PackedFrame]]:
    """The frames of entries, and the rows of those that are not whole, by sequence number."""
    packed = [PackedFrame(*row) for row in transaction.among(_held_frames(sql), seqs)]
    asking: Generator[list[int], list[ReferenceRow], Unpacked] = unpacker.unpack(packed, known)
    try:
        numbers = next(asking)
        while True:
            rows = transaction.among(stored_references(sql), numbers)
            numbers = asking.send([(number, data) for number, data in rows])
    except StopIteration as end:
        found: Unpacked = end.value
    return found, {each.seq: each for each in packed if each.seq not in found.whole}


def _in_log_order(parted: tuple[Written, Split]) -> tuple[int, int, int]:
    (entry, result), _ = parted
    return result.channel_no, entry.message.lamport_timestamp or 0, result.seq


# ---- statements


@cache
def _held_frames(sql: SqlDialect) -> ManyQuery:
    """`PackedFrame`s of entries."""
    m = messages.c
    held = select(m.seq, m.frame_bytes, m.frame_hash, m.digest, *FRAME_COLUMNS)
    held = held.select_from(messages.outerjoin(frames, frames.c.seq == messages.c.seq))
    return sql.among(messages.c.seq, held.where)


@cache
def _latest_references(sql: SqlDialect) -> ManyQuery:
    """(reference number, data) of a channel's newest references."""
    columns = filter_references.c
    return sql.each(
        {"channel_no": Integer()},
        lambda key: (
            select(columns.reference_no, columns.data)
            .where(columns.channel_no == key["channel_no"])
            .order_by(columns.reference_no.desc())
            .limit(constant(REFERENCES_MAX))
        ),
    )


@cache
def _last_seqs(sql: SqlDialect) -> ManyQuery:
    """(reference number, last sequence number) of many references."""
    columns = filter_references.c
    return sql.among(columns.reference_no, select(columns.reference_no, columns.last_seq).where)
