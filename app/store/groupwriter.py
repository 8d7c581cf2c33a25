"""The writer: one transaction for each group of entries. Runs on the writer's thread alone.

A few queries read the state of the database for the whole group: which digests it has, the numbers of
channels, and which references are unresolved.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import starmap
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Integer,
    bindparam,
    case,
    exists,
    func,
    literal_column,
    select,
    update,
)

from app.entries import (
    NOTHING_ARRIVED,
    Claim,
    MetId,
    NewClaim,
    NewEntry,
    Watermark,
    WriteResult,
)
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.arrivals import (
    ArrivalChain,
    goes_on_from,
    last_of,
    places_at,
    watermark_of,
)
from app.store.claims import claims_by_seq
from app.store.database import (
    Database,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    Transaction,
    chunks,
    constant,
    highest,
)
from app.store.entryrows import (
    FRAME_COLUMNS,
    PREFIX_BYTES,
    Codec,
    FramePacker,
    FrameUnpacker,
    Keys,
    PackedFrame,
    Rechecked,
    ReferenceRow,
    StoredFrame,
    Tombstone,
    Unpacked,
    prefixes,
    reference_filter,
    rest_data,
    retired_among,
    stored_references,
)
from app.store.histories import Reference, ReferenceWriter
from app.store.schema import (
    channels,
    filter_references,
    frames,
    history_claims,
    lost_content,
    messages,
    missing_references,
    published_claims,
    retired_content,
    watermark,
)
from sdstore.sds.codec import decode
from sdstore.sds.framecodec import (
    FILTER_BYTES_MIN,
    REFERENCES_MAX,
    References,
    Split,
    difference,
    split,
)
from sdstore.sds.model import HistoryEntry, Message, claim_id, frame_hash

# ---- frames

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
            frame = each[0].frame
            parts = split(frame) if len(frame) > FILTER_BYTES_MIN else None
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
    # A retired entry has no frame, so none that could be damaged.
    rows_here = transaction.among(_held_frames(sql), seqs)
    packed = [each for each in starmap(PackedFrame, rows_here) if each.codec != Codec.RETIRED]
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


# ---- groups

CHANNEL_NUMBERS_MAX = 65_536
"""Channels whose numbers the writer remembers; another one costs a query."""

FRAMES_PER_READ = 256
"""Stored frames that are read at a time to see whether they are whole."""

RETIRED_HINT = b""
"""In place of the hint of a claim on a retired entry; nobody can publish it."""

_log = logging.getLogger(__name__)


class Retiring(NamedTuple):
    """Entries to retire, by digest. `with_history`: the IDs of their causes go too."""

    digests: Sequence[bytes]
    reason: str
    with_history: bool = False


class Retired(NamedTuple):
    """Counts of entries: retired now, to be retired on arrival, and retired before."""

    retired: int
    ahead: int
    already: int


class _Numbers(NamedTuple):
    """The state of the database when a group begins."""

    seq: int
    entry_sum: int
    claim_no: int
    claim_sum: int
    last_history_no: int
    last_channel_no: int
    has_missing: bool
    has_lost: bool
    has_retired: bool


@dataclass(slots=True)
class Group:
    """The state of one transaction."""

    watermark: Watermark
    last_history_no: int
    last_channel_no: int
    has_missing: bool
    has_lost: bool
    has_retired: bool
    received_at_ms: int
    known: dict[bytes, WriteResult] = field(default_factory=dict)
    channel_numbers: dict[str, int] = field(default_factory=dict)
    written: list[tuple[NewEntry, WriteResult]] = field(default_factory=list)
    mended: set[int] = field(default_factory=set)
    retired: set[bytes] = field(default_factory=set)  # digests, also of entries that arrive now
    tombstones: list[tuple[int, Tombstone]] = field(default_factory=list)
    dropped: dict[bytes, set[bytes]] = field(
        default_factory=dict
    )  # hints beyond the most, by digest
    began_at: Watermark = field(init=False)

    def __post_init__(self) -> None:
        self.began_at = self.watermark


def wall_clock_ms() -> int:
    """The arrival of a message, since the epoch."""
    return time.time_ns() // 1_000_000


class GroupWriter:
    """Writes groups. Remembers only commits that the database still has."""

    def __init__(
        self, database: Database, keys: Keys, limits: Limits, now_ms: Callable[[], int]
    ) -> None:
        self._database = database
        self._keys = keys
        self._limits = limits
        self._now_ms = now_ms
        self._sql = database.sql
        self._frames = FrameWriter(self._sql)
        self._unpacker = FrameUnpacker()
        self._references = ReferenceWriter(self._sql, keys, limits)
        self._chain = ArrivalChain(keys.secret)
        self._channel_numbers: dict[str, int] = {}
        # The place in the arrival chains up to which the memory is valid.
        self._remembered_at = NOTHING_ARRIVED

    def write(
        self,
        entries: Sequence[NewEntry],
        met: Sequence[MetId] = (),
    ) -> list[WriteResult]:
        """Write entries and IDs of sync messages.

        One transaction; nothing is written if it raises. Returns one result for each entry, in order. Raises
        `Problem` DISK_FULL or STORE_UNAVAILABLE, and the database's own error where the data are at fault.
        """
        try:
            with self._database.transaction() as transaction:
                group = self._begin(transaction)
                digests = {entry.digest for entry in entries}
                self._find_known(transaction, group, digests)
                self._number_channels(transaction, group, entries, met)
                self._find_retired(transaction, group, group.known.keys() | digests)
                results = self._decide_all(group, entries)
                mended = self._mend(transaction, group, entries)
                self._insert(transaction, group, mended)
                wanted = _wanted_claims(_claims(entries))
                of_peers = {entry.digest for entry in entries if entry.is_from_peer}
                claims = self._write_claims(transaction, group, wanted, of_peers)
                settled = self._references.write(transaction, group, met)
                self._move_watermark(transaction, group)
        except BaseException:
            self._frames.forget()
            raise
        self._remember(group)
        self._references.remember(settled)
        self._remembered_at = group.watermark
        for position, result in enumerate(results) if group.mended else ():
            # As of a new entry, the first copy of a group is stored and the others are duplicates.
            if result.seq in group.mended:
                group.mended.discard(result.seq)
                results[position] = result._replace(is_mended=True)
        results = _with_claims(entries, results, claims)
        for position, entry in enumerate(entries) if group.dropped else ():
            gone = group.dropped.get(entry.digest, set())
            count = sum(claim.hint in gone for claim in entry.claims)
            results[position] = results[position]._replace(hints_dropped=count)
        return results

    def recheck(self, seqs: Sequence[int]) -> Rechecked:
        """Read again the frames that a reader could not read; mark the lost ones, unmark the others.

        A frame of which only the filter cannot be read is stored without it. A retired entry whose tombstone is
        gone gets another one: nobody is asked for its content.

        One transaction, in which nobody else writes: a fault of the database marks nothing. Raises as
        `write`.
        """
        with self._database.transaction() as transaction:
            unreadable, rests = self._unreadable(transaction, seqs)
            if rests:
                self._frames.leave_filters_out(transaction, unreadable, rests)
            elif unreadable:
                self._frames.forget()
            lost = unreadable.keys() - rests.keys()
            lost -= self._restore_tombstones(
                transaction, {seq: unreadable[seq].digest for seq in lost}
            )
            marked = {seq for (seq,) in transaction.among(_lost_among(self._sql), seqs)}
            found_at_ms = self._now_ms()
            new = [(seq, found_at_ms) for seq in sorted(lost - marked)]
            transaction.many(self._sql.insert(lost_content, or_ignore=True), new)
            self._unmark(transaction, marked - lost)
        return Rechecked(frozenset(lost), frozenset(seqs) - lost)

    def retire(self, found: Retiring) -> Retired:
        """Drop the content of entries. One transaction; entries that are retired already are skipped.

        Their frames, lost marks and the hints of their claims go; rows, claim elements and, unless
        `with_history`, the IDs of their causes stay. Raises as `write`.
        """
        with self._database.transaction() as transaction:
            group = self._begin(transaction)
            self._find_known(transaction, group, {*found.digests})
            self._find_retired(transaction, group, {*found.digests})
            new = [each for each in dict.fromkeys(found.digests) if each not in group.retired]
            seqs = {each: group.known[each].seq for each in new if each in group.known}
            if len(new) > len(seqs):
                self._require_room(transaction, len(new) - len(seqs))
            now_ms = self._now_ms()
            transaction.many(
                self._sql.insert(retired_content),
                [(each, seqs.get(each), now_ms, found.reason) for each in new],
            )
            for part in chunks(list(seqs.values()), FRAMES_PER_READ):
                self._drop_content(transaction, part, with_history=found.with_history)
        return Retired(len(seqs), len(new) - len(seqs), len(found.digests) - len(new))

    def _require_room(self, transaction: Transaction, new_count: int) -> None:
        [(count,)] = transaction.rows(_ahead_count(self._sql))
        most = self._limits.retired_ahead_max
        if count + new_count > most:
            raise Problem(
                Code.TOO_MANY_ITEMS,
                f"{count:,} entries are retired that have not arrived, and {new_count:,} more are too many: "
                f"at most {most:,}",
            )

    def _drop_content(
        self, transaction: Transaction, seqs: Sequence[int], *, with_history: bool
    ) -> None:
        self._unpacker.forget_references()
        found, _ = read_frames(transaction, self._sql, self._unpacker, seqs)
        here = found.without_filter | found.whole
        rows = [(seq,) for seq in seqs]
        self._unmark(transaction, seqs)
        transaction.many(self._sql.delete_each(frames, "seq"), rows)
        tombstones = [
            (
                seq,
                Tombstone.of(
                    decode(here[seq])[0] if seq in here else None, with_history=with_history
                ),
            )
            for seq in seqs
        ]
        self._write_tombstones(transaction, tombstones)
        transaction.many(
            self._sql.update_each(messages, "seq", "frame_bytes"), [(0, seq) for seq in seqs]
        )
        claims = transaction.among(claims_by_seq(self._sql), seqs)
        gone = [(self._keys.of_bytes(RETIRED_HINT), RETIRED_HINT, each[3]) for each in claims]
        transaction.many(
            self._sql.update_each(published_claims, "claim_no", "hint_key", "hint"), gone
        )

    def write_claims(self, claims: Sequence[tuple[bytes, Claim]]) -> int:
        """Write hint claims on known entries, each with its entry's digest; returns the number of new ones.

        One transaction. Claims on unknown entries are ignored.
        """
        with self._database.transaction() as transaction:
            group = self._begin(transaction)
            self._find_known(transaction, group, {digest for digest, _ in claims})
            self._find_retired(transaction, group, group.known.keys())
            wanted = _wanted_claims(each for each in claims if each[0] in group.known)
            written = self._write_claims(transaction, group, wanted, wanted.keys())
            self._move_watermark(transaction, group)
            return sum(map(len, written.values()))

    def settle(self, references: Sequence[Reference], channel_numbers: dict[str, int]) -> None:
        """Write the references of entries that are stored already."""
        with self._database.transaction() as transaction:
            group = self._begin(transaction)
            group.channel_numbers.update(channel_numbers)
            self._references.settle(transaction, group, dict.fromkeys(references))

    def _begin(self, transaction: Transaction) -> Group:
        [row] = transaction.rows(_numbers(self._sql))
        numbers = _Numbers(*row)
        watermark = watermark_of(numbers[:4])
        if watermark != self._remembered_at:
            self._forget_another_history(transaction)
        return Group(
            watermark,
            numbers.last_history_no,
            numbers.last_channel_no,
            bool(numbers.has_missing),
            bool(numbers.has_lost),
            bool(numbers.has_retired),
            self._now_ms(),
        )

    def _forget_another_history(self, transaction: Transaction) -> None:
        """Forget everything, unless another process went on from the place of this writer's memory.

        A server that fails over, or that is restored under a running node, may lose commits; then the
        numbers of entries and channels in memory are those of others, or soon will be.
        """
        entries, claims = self._remembered_at
        [row] = transaction.rows(
            places_at(self._sql), seq_at=entries.number, claim_no_at=claims.number
        )
        if not goes_on_from(self._remembered_at, watermark_of(row)):
            _log.warning(
                "the database was rolled back to an older copy: the writer clears its caches"
            )
            self._channel_numbers.clear()
            self._frames.forget()
            self._references.forget()
            self._remembered_at = NOTHING_ARRIVED

    def _find_known(self, transaction: Transaction, group: Group, wanted: set[bytes]) -> None:
        rows = transaction.among(_known(self._sql), prefixes(wanted))
        for digest, seq, channel_no, at_ms in rows:
            if digest in wanted:
                group.known[digest] = WriteResult(seq, channel_no, at_ms, is_new=False)

    def _find_retired(
        self, transaction: Transaction, group: Group, digests: AbstractSet[bytes]
    ) -> None:
        """Mark the retired ones among the known entries and those that arrive now."""
        if group.has_retired:
            found = transaction.among(retired_among(self._sql), sorted(digests))
            group.retired = {digest for (digest,) in found}
            for digest in group.retired & group.known.keys():
                group.known[digest] = group.known[digest]._replace(is_retired=True)

    def _number_channels(
        self,
        transaction: Transaction,
        group: Group,
        entries: Sequence[NewEntry],
        met: Sequence[MetId],
    ) -> None:
        numbers = group.channel_numbers
        new = {e.message.channel_id for e in entries if e.digest not in group.known}
        wanted = new | {each.channel_id for each in met}
        numbers.update((c, self._channel_numbers[c]) for c in wanted if c in self._channel_numbers)
        unknown = [channel_id for channel_id in wanted if channel_id not in numbers]
        numbers.update(transaction.among(_channel_numbers(self._sql), unknown))
        for channel_id in sorted(new - numbers.keys()):
            group.last_channel_no += 1
            numbers[channel_id] = group.last_channel_no

    @staticmethod
    def _decide_all(group: Group, entries: Sequence[NewEntry]) -> list[WriteResult]:
        results: list[WriteResult] = []
        last_seq = group.watermark.entries.number
        for entry in entries:
            known = group.known.get(entry.digest)
            if known is not None:
                # Of two copies in one group the second is a duplicate.
                results.append(known._replace(is_new=False) if known.is_new else known)
                continue
            last_seq += 1
            channel_no = group.channel_numbers[entry.message.channel_id]
            result = WriteResult(last_seq, channel_no, group.received_at_ms, is_new=True)
            if entry.digest in group.retired:
                result = result._replace(is_retired=True)
                tombstone = Tombstone.of(entry.message)
                group.tombstones.append((last_seq, tombstone))
                entry = entry._replace(message=_without_content(entry.message))
            results.append(result)
            group.written.append((entry, result))
            group.known[entry.digest] = result
        return results

    # ---- frames that cannot be read

    def _unreadable(
        self,
        transaction: Transaction,
        seqs: Sequence[int],
        known: Mapping[bytes, bytes] | None = None,
    ) -> tuple[dict[int, PackedFrame], dict[int, bytes]]:
        """The rows of entries whose frames were read twice and were wrong each time, and those of their
        frames that can be read without their filters.

        `known` are frames by hash, as in `FrameUnpacker.unpack`.
        """
        unreadable: dict[int, PackedFrame] = {}
        rests: dict[int, bytes] = {}
        for part in chunks(seqs, FRAMES_PER_READ):
            self._unpacker.forget_references()
            _, doubted = read_frames(transaction, self._sql, self._unpacker, part, known)
            if doubted:
                again = FrameUnpacker()
                found, wrong = read_frames(transaction, self._sql, again, list(doubted))
                unreadable |= wrong
                rests |= found.without_filter
        return unreadable, rests

    def _mend(
        self, transaction: Transaction, group: Group, entries: Sequence[NewEntry]
    ) -> list[Written]:
        """Make room for frames of known entries that cannot be read; returns the frames to write."""
        held: dict[int, tuple[NewEntry, WriteResult]] = {}
        for entry in entries:
            known = group.known[entry.digest]
            if not (known.is_new or known.is_retired):
                held.setdefault(known.seq, (entry, known))
        if not held:
            return []
        frames_here = {entry.frame_hash: entry.frame for entry, _ in held.values()}
        unreadable, _ = self._unreadable(transaction, list(held), frames_here)
        if group.has_lost:
            # A frame that can be read is not lost; `_unreadable` decides, not the mark.
            self._unmark(transaction, held.keys())
        if not unreadable:
            return []
        group.mended.update(unreadable)
        self._frames.forget()
        changed = [
            (len(entry.frame), int(entry.dialect), entry.frame_hash, seq)
            for seq, (entry, _) in sorted(held.items())
            if seq in unreadable
        ]
        transaction.many(
            self._sql.update_each(messages, "seq", "frame_bytes", "dialect", "frame_hash"), changed
        )
        gone = [(seq,) for seq in sorted(unreadable)]
        transaction.many(self._sql.delete_each(frames, "seq"), gone)
        return [held[seq] for seq in sorted(unreadable)]

    def _unmark(self, transaction: Transaction, seqs: Iterable[int]) -> None:
        transaction.many(self._sql.delete_each(lost_content, "seq"), [(seq,) for seq in seqs])

    def _insert(self, transaction: Transaction, group: Group, mended: Sequence[Written]) -> None:
        seqs = [result.seq for _, result in group.written]
        digests = [entry.digest for entry, _ in group.written]
        before = group.watermark.entries
        sums = self._chain.sums(before.sum, seqs, digests)
        group.watermark = group.watermark._replace(entries=last_of(before, seqs, sums))
        rows = [self._message_row(*each, at) for each, at in zip(group.written, sums, strict=True)]
        transaction.many(self._sql.insert(messages), rows)
        with_content = [each for each in group.written if not each[1].is_retired]
        self._frames.write(transaction, [*with_content, *mended])
        self._write_tombstones(transaction, group.tombstones)
        arrived = [
            (result.seq, entry.digest) for entry, result in group.written if result.is_retired
        ]
        transaction.many(self._sql.update_each(retired_content, "digest", "seq"), arrived)
        transaction.many(
            self._sql.upsert(channels, "channel_no", _merged_channel), _channel_rows(group)
        )

    def _restore_tombstones(
        self, transaction: Transaction, digests: Mapping[int, bytes]
    ) -> set[int]:
        """Write new tombstones, without history, for the retired ones of these entries; returns their numbers."""
        if not digests:
            return set()
        found = transaction.among(retired_among(self._sql), list(digests.values()))
        retired = {digest for (digest,) in found}
        seqs = {seq for seq, digest in digests.items() if digest in retired}
        transaction.many(self._sql.delete_each(frames, "seq"), [(seq,) for seq in seqs])
        self._write_tombstones(transaction, [(seq, Tombstone.of(None)) for seq in sorted(seqs)])
        return seqs

    def _write_tombstones(
        self, transaction: Transaction, tombstones: Iterable[tuple[int, Tombstone]]
    ) -> None:
        rows: list[Row] = [
            (seq, int(Codec.RETIRED), None, each.packed()) for seq, each in tombstones
        ]
        transaction.many(self._sql.insert(frames), rows)

    def _message_row(self, entry: NewEntry, result: WriteResult, arrival_sum: int) -> Row:
        message = entry.message
        return (
            result.seq,
            self._keys.of_text(message.message_id),
            message.lamport_timestamp,
            result.received_at_ms,
            result.channel_no,
            0 if result.is_retired else len(entry.frame),
            int(entry.dialect),
            0 if entry.id_verifies else 1,
            message.message_id,
            entry.digest[:PREFIX_BYTES],
            entry.digest,
            entry.frame_hash,
            arrival_sum,
        )

    def _write_claims(
        self,
        transaction: Transaction,
        group: Group,
        wanted: dict[bytes, dict[bytes, int]],
        of_peers: AbstractSet[bytes],
    ) -> dict[bytes, list[NewClaim]]:
        """New claims by digest, up to the most that an entry has: more for those that come `of_peers`.

        A better source of a known claim replaces the old one.
        """
        if not wanted:
            return {}
        here = {group.known[digest].seq: digest for digest in wanted}
        made_now = {result.seq for _, result in group.written}
        held: dict[bytes, dict[bytes, int]] = {digest: {} for digest in wanted}
        raised: list[Row] = []
        for seq, source, hint, claim_no, element_id in transaction.among(
            claims_by_seq(self._sql), [seq for seq in here if seq not in made_now]
        ):
            held[here[seq]][element_id] = claim_no
            if wanted[here[seq]].get(hint, source) < source:
                raised.append((wanted[here[seq]][hint], claim_no))
        claims: dict[bytes, list[NewClaim]] = {}
        rows: list[Row] = []
        channel_numbers: list[int] = []
        before = group.watermark.claims
        limits = self._limits
        for digest, hints in wanted.items():
            most = (
                limits.hint_claims_with_peers_max
                if digest in of_peers
                else limits.hint_claims_per_entry_max
            )
            room = max(most - len(held[digest]), 0)
            new = [hint for hint in hints if claim_id(digest, hint) not in held[digest]]
            if len(new) > room:
                group.dropped[digest] = set(new[room:])
                del new[room:]
            for hint in new:
                number = before.number + len(rows) + 1
                claim = NewClaim(number, hint, claim_id(digest, hint))
                if digest in group.retired:
                    claim = claim._replace(hint=RETIRED_HINT)
                else:
                    claims.setdefault(digest, []).append(claim)
                rows.append(self._claim_row(claim, group.known[digest].seq, hints[hint]))
                channel_numbers.append(group.known[digest].channel_no)
        numbers, elements = [row[0] for row in rows], [row[-1] for row in rows]
        sums = self._chain.sums(before.sum, numbers, elements)
        group.watermark = group.watermark._replace(claims=last_of(before, numbers, sums))
        rows = [(*row, *rest) for row, *rest in zip(rows, sums, channel_numbers, strict=True)]
        transaction.many(self._sql.insert(published_claims), rows)
        transaction.many(self._sql.update_each(published_claims, "claim_no", "source"), raised)
        return claims

    def _claim_row(self, claim: NewClaim, seq: int, source: int) -> Row:
        key = self._keys.of_bytes(claim.hint)
        prefix = claim.element_id[:PREFIX_BYTES]
        return claim.claim_no, key, seq, source, claim.hint, prefix, claim.element_id

    def _move_watermark(self, transaction: Transaction, group: Group) -> None:
        if group.watermark != group.began_at:
            entries, claims = group.watermark
            transaction.execute(
                _move_watermark(self._sql),
                new_seq=entries.number,
                new_claim_no=claims.number,
            )

    def _remember(self, group: Group) -> None:
        if len(self._channel_numbers) > CHANNEL_NUMBERS_MAX:
            self._channel_numbers.clear()
        self._channel_numbers.update(group.channel_numbers)


def _without_content(message: Message) -> Message:
    """A message that arrives retired: what its row and the references of its history need."""
    named = tuple([HistoryEntry(each.message_id) for each in message.causal_history])
    return replace(message, content=b"", causal_history=named)


def _channel_rows(group: Group) -> list[Row]:
    lamports: dict[str, list[int]] = {}
    for entry, _ in group.written:
        lamport = entry.message.lamport_timestamp or 0
        lamports.setdefault(entry.message.channel_id, []).append(lamport)
    return [
        (group.channel_numbers[channel_id], channel_id, len(its), min(its), max(its))
        for channel_id, its in lamports.items()
    ]


def _claims(entries: Sequence[NewEntry]) -> Iterator[tuple[bytes, Claim]]:
    return ((entry.digest, claim) for entry in entries for claim in entry.claims)


def _wanted_claims(claims: Iterable[tuple[bytes, Claim]]) -> dict[bytes, dict[bytes, int]]:
    """digest -> hint -> best source, in the order they came."""
    wanted: dict[bytes, dict[bytes, int]] = {}
    for digest, claim in claims:
        hints = wanted.setdefault(digest, {})
        hints[claim.hint] = min(int(claim.source), hints.get(claim.hint, claim.source))
    return wanted


def _with_claims(
    entries: Sequence[NewEntry], results: list[WriteResult], claims: dict[bytes, list[NewClaim]]
) -> list[WriteResult]:
    """Adds the claims of each digest to the result of its first copy in the group."""
    if not claims:
        return results
    return [
        r._replace(new_claims=tuple(new)) if (new := claims.pop(entry.digest, None)) else r
        for entry, r in zip(entries, results, strict=True)
    ]


# ---- statements


@cache
def _numbers(sql: SqlDialect) -> Query:
    """The row of `_Numbers`."""
    return sql.query(
        select(
            watermark.c.seq,
            _last_sum(messages.c.seq, messages.c.arrival_sum),
            watermark.c.claim_no,
            _last_sum(published_claims.c.claim_no, published_claims.c.arrival_sum),
            highest(history_claims.c.claim_no),
            highest(channels.c.channel_no),
            exists(select(missing_references.c.channel_no)),
            exists(select(lost_content.c.seq)),
            exists(select(retired_content.c.digest)),
        )
    )


def _last_sum(number: Column[int], arrival_sum: Column[int]) -> ColumnElement[int]:
    last = select(arrival_sum).order_by(number.desc()).limit(constant(1)).scalar_subquery()
    return func.coalesce(last, literal_column("0"))


@cache
def _ahead_count(sql: SqlDialect) -> Query:
    """The number of retired entries that have not arrived."""
    is_ahead = retired_content.c.seq.is_(None)
    return sql.query(select(func.count()).select_from(retired_content).where(is_ahead))


@cache
def _move_watermark(sql: SqlDialect) -> Query:
    moved: dict[str, Any] = {column: bindparam(f"new_{column}") for column in ("seq", "claim_no")}
    return sql.query(update(watermark).values(moved))


@cache
def _known(sql: SqlDialect) -> ManyQuery:
    """(digest, seq, channel number, time) of entries, by digest prefix."""
    known = select(
        messages.c.digest, messages.c.seq, messages.c.channel_no, messages.c.received_at_ms
    )
    return sql.among(messages.c.digest_prefix, known.where)


@cache
def _channel_numbers(sql: SqlDialect) -> ManyQuery:
    """(name, number) of channels."""
    return sql.among(
        channels.c.channel_id,
        lambda among: select(channels.c.channel_id, channels.c.channel_no).where(among),
    )


def _merged_channel(new: Any) -> dict[str, Any]:
    first, last = channels.c.lamport_first, channels.c.lamport_last
    return {
        "count": channels.c.count + new.count,
        "lamport_first": case((first > new.lamport_first, new["lamport_first"]), else_=first),
        "lamport_last": case((last < new.lamport_last, new["lamport_last"]), else_=last),
    }


@cache
def _lost_among(sql: SqlDialect) -> ManyQuery:
    return sql.among(lost_content.c.seq, select(lost_content.c.seq).where)
