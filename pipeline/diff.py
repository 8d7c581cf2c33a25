"""`snapshot diff`: the entries that only one of two sides has.

Files whose (count, root) both snapshots have are skipped. The other rows go to temporary files, 52 bytes
each, ordered by buckets: ranges of the digest space. Two buckets at a time, one of each side, are
compared in memory. So memory is bounded by a bucket, the channels' names and the ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import manifest as manifests
from pipeline.columns import ENTRY_KEYS, digest_array
from pipeline.database import INT64_MAX, INT64_MIN, Database, Interval, Scan, open_database
from pipeline.manifest import EntryRange, ManifestError, PipelineError
from pipeline.session import items

RANGES_PER_CHANNEL = 64
RANGES_MAX = 10_000  # listed; beyond this the count is enough
_BUCKET_ROWS = 2**18  # of each side: 14 MB, and three times as much to compare them
_BUCKET_BITS_MAX = 16  # the first two bytes of a digest: enough for 1.7 * 10^10 rows
_READ_ROWS = 65_536
_LISTED = ("channel_id", "lamport_timestamp", "message_id", "digest")
_COMPARED = ("seq", "channel_id", "lamport_timestamp", "digest")
_ROW = np.dtype([("digest", "S32"), ("place", "S12"), ("seq", "i8")])
_PLACE = np.dtype([("channel_no", ">u4"), ("clock", ">u8")])  # its bytes sort as its numbers
_SIGN = np.uint64(2**63)
_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RangeDifference:
    """A range of a channel in which the sides differ: its Lamport bounds and each side's count."""

    channel_id: str
    lamport_first: int
    lamport_last: int
    left_count: int
    right_count: int


@dataclass(frozen=True, slots=True)
class Only:
    """The entries that only one side has: their number, and the first of them in that side's arrival
    order (channel, Lamport timestamp, message ID, digest)."""

    count: int
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What each side has alone, the number of ranges that differ, and the first `RANGES_MAX` of those by
    channel and Lamport timestamp."""

    ranges_count: int
    ranges: tuple[RangeDifference, ...]
    left_only: Only
    right_only: Only


def diff(left: Path | str, right: Path | str, limit: int) -> Difference:
    """Compare two sides, each a snapshot's folder or a database URL; list `limit` rows of each.

    Raises ManifestError or DatabaseError if a side is neither, or a file of it cannot be read.
    """
    with ExitStack() as stack:
        sides = _sides(left, right, stack)
        rows_count = max(sum(part.count for part in side) for side in sides)
        bits = min((rows_count // _BUCKET_ROWS).bit_length(), _BUCKET_BITS_MAX)
        numbers: dict[str, int] = {}
        spools = [stack.enter_context(_Spool(bits)) for _ in sides]
        for side, spool in zip(sides, spools, strict=True):
            for part in items("Read the digests", side, lambda each: each.count, "rows"):
                for rows in part.read(_COMPARED):
                    spool.add(_records(rows, numbers))
        ranges = _Ranges([spool.bucket(0)["place"] for spool in spools], len(numbers))
        counts, seqs = [0, 0], [np.empty(0, np.int64)] * 2
        for bucket in range(1 << bits):
            records = [spool.bucket(bucket) for spool in spools]
            for number, (mine, theirs) in enumerate((records, records[::-1])):
                only = mine[~_is_in(mine["digest"], theirs["digest"])]
                ranges.add(number, mine["place"], only["place"])
                counts[number] += len(only)
                seqs[number] = np.sort(np.append(seqs[number], only["seq"]))[:limit]
        only_left, only_right = (
            Only(count, tuple(_rows_of(side, listed)))
            for count, side, listed in zip(counts, sides, seqs, strict=True)
        )
    return Difference(ranges.differing_count, ranges.first(list(numbers)), only_left, only_right)


@dataclass(frozen=True, slots=True)
class _Part:
    """The `count` rows of a side with first ≤ seq ≤ last in one file or scan; `read` returns columns."""

    first: int
    last: int
    count: int
    read: Callable[[Sequence[str]], Iterator[pa.Table]]


def _sides(left: Path | str, right: Path | str, stack: ExitStack) -> list[list[_Part]]:
    """Digests are unique within a snapshot, so equal files do not affect the difference."""
    ranges = {
        side: manifests.load(side).entry_ranges for side in (left, right) if isinstance(side, Path)
    }
    known = [{(each.count, each.root) for each in side} for side in ranges.values()]
    common = known[0] & known[1] if len(known) == 2 else set()
    return [
        [_file(side, each) for each in ranges[side] if (each.count, each.root) not in common]
        if isinstance(side, Path)
        else _scans(stack.enter_context(_store(side)))
        for side in (left, right)
    ]


def _file(snapshot: Path, its: EntryRange) -> _Part:
    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        schema = pa.schema([ENTRY_KEYS.field(name) for name in columns])
        try:
            with pq.ParquetFile(snapshot / its.file.path) as file:
                for batch in file.iter_batches(_READ_ROWS, columns=list(columns)):
                    rows = pa.Table.from_batches([batch]).select(list(columns)).cast(schema)
                    rows.validate(full=True)
                    digest_array(rows["digest"])  # of 32 bytes each
                    yield rows
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise ManifestError(f"{snapshot / its.file.path} cannot be read: {error}") from error

    return _Part(its.first, its.last, its.count, read)


@contextmanager
def _store(url: str) -> Iterator[Database]:
    with open_database(url) as database:
        try:
            yield database
        except database.faults as error:
            raise PipelineError(f"the store cannot be read: {error}") from error


def _scans(database: Database) -> list[_Part]:
    """The store up to its watermark, so that both reads see the same rows."""
    whole = Scan(seq=Interval().at_most(database.watermark().seq))

    def part(scan: Scan, count: int) -> _Part:
        def read(columns: Sequence[str]) -> Iterator[pa.Table]:
            yield pa.Table.from_batches(database.keys(scan), ENTRY_KEYS).select(list(columns))

        return _Part(scan.seq.first, scan.seq.last, count, read)

    return [part(*each) for each in database.entry_partitions(whole, _READ_ROWS)]


def _records(rows: pa.Table, numbers: dict[str, int]) -> _Array:
    """`rows` as `_ROW`; new channels get the next of `numbers`."""
    channels = rows["channel_id"].combine_chunks().dictionary_encode()
    known = [numbers.setdefault(each, len(numbers)) for each in channels.dictionary.to_pylist()]
    records = np.empty(rows.num_rows, _ROW)
    records["digest"] = digest_array(rows["digest"]).view("S32").ravel()
    channel_nos = np.array(known, np.uint32)[channels.indices.to_numpy()]
    records["place"] = _places(channel_nos, rows["lamport_timestamp"].to_numpy())
    records["seq"] = rows["seq"].to_numpy()
    return records


def _places(channel_nos: _Array, lamports: _Array) -> _Array:
    places = np.empty(len(lamports), _PLACE)
    places["channel_no"] = channel_nos
    places["clock"] = lamports.view(np.uint64) ^ _SIGN
    return places.view("S12")


def _channels_and_lamports(places: _Array) -> tuple[_Array, _Array]:
    numbers = np.ascontiguousarray(places).view(_PLACE)
    lamports = (numbers["clock"].astype(np.uint64) ^ _SIGN).view(np.int64)
    return numbers["channel_no"].astype(np.int64), lamports


class _Spool:
    """Records in a temporary file without a name, which a killed process does not leave behind.

    Each portion added is in the order of its buckets.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._file = TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._ends: list[_Array] = []  # for each portion: first row, then the end of each bucket
        self._rows_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, records: _Array) -> None:
        digests = np.ascontiguousarray(records["digest"]).view(np.uint8).reshape(-1, 32)
        buckets = (digests[:, 0].astype(np.int64) << 8 | digests[:, 1]) >> (
            _BUCKET_BITS_MAX - self._bits
        )
        self._file.write(records[np.argsort(buckets, kind="stable")].data)
        counts = np.bincount(buckets, minlength=1 << self._bits)
        self._ends.append(self._rows_count + np.append(0, np.cumsum(counts)))
        self._rows_count += len(records)

    def bucket(self, number: int) -> _Array:
        """The records of a bucket, sorted by digest, each digest once."""
        self._file.flush()
        portions = [np.empty(0, _ROW)]
        for ends in self._ends:
            first, end = (int(each) for each in ends[number : number + 2])
            self._file.seek(first * _ROW.itemsize)
            portions.append(np.fromfile(self._file, _ROW, end - first))
        records = np.concatenate(portions)
        _, firsts = np.unique(records["digest"], return_index=True)
        return records[firsts]


def _is_in(mine: _Array, theirs: _Array) -> _Array:
    """Which of `mine` are in `theirs`; both are sorted."""
    if not len(theirs):
        return np.zeros(len(mine), bool)
    at = np.searchsorted(theirs, mine)
    return cast("_Array", theirs[np.minimum(at, len(theirs) - 1)] == mine)


class _Ranges:
    """Up to 64 Lamport ranges of each channel, of about equal size: counts, bounds, differences.

    The ranges are cut by a sample of both sides' places. It is the rows of one bucket, which are random
    ones because digests are hashes.
    """

    def __init__(self, sample: Sequence[_Array], channels_count: int) -> None:
        places = np.sort(np.concatenate(sample))
        channel_nos, _ = _channels_and_lamports(places)
        _, starts, sizes = np.unique(channel_nos, return_index=True, return_counts=True)
        rank = RANGES_PER_CHANNEL * (np.arange(len(places)) - np.repeat(starts, sizes))
        size = np.repeat(sizes, sizes)
        is_last = (rank + RANGES_PER_CHANNEL) // size > rank // size
        ends = _places(np.arange(channels_count), np.full(channels_count, INT64_MAX))
        self._ends = np.unique(np.append(places[is_last], ends))
        self._counts = np.zeros((2, len(self._ends)), np.int64)
        self._lamport_first = np.full(len(self._ends), INT64_MAX)
        self._lamport_last = np.full(len(self._ends), INT64_MIN)
        self._differs = np.zeros(len(self._ends), bool)

    def add(self, side: int, places: _Array, only: _Array) -> None:
        """Count rows of a side; `only` are the places of those that the other side lacks."""
        at = np.searchsorted(self._ends, places)
        _, lamports = _channels_and_lamports(places)
        self._counts[side] += np.bincount(at, minlength=len(self._ends))
        np.minimum.at(self._lamport_first, at, lamports)
        np.maximum.at(self._lamport_last, at, lamports)
        self._differs[np.searchsorted(self._ends, only)] = True

    @property
    def differing_count(self) -> int:
        return int(np.count_nonzero(self._differs))

    def first(self, names: Sequence[str]) -> tuple[RangeDifference, ...]:
        """The first `RANGES_MAX` ranges that differ; `names` are the channels by number."""
        found = np.flatnonzero(self._differs)
        channel_nos, _ = _channels_and_lamports(self._ends[found])
        rank = np.empty(len(names), np.int64)
        rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        order = np.argsort(rank[channel_nos], kind="stable")[:RANGES_MAX]
        return tuple(
            RangeDifference(
                names[channel_nos[each]],
                int(self._lamport_first[found[each]]),
                int(self._lamport_last[found[each]]),
                *self._counts[:, found[each]].tolist(),
            )
            for each in order
        )


def _rows_of(side: Sequence[_Part], seqs: _Array) -> list[dict[str, Any]]:
    """The rows with these sequence numbers, in their order."""
    found: list[dict[str, Any]] = []
    for part in side:
        wanted = seqs[(seqs >= part.first) & (seqs <= part.last)]
        for rows in part.read(("seq", *_LISTED)) if len(wanted) else ():
            found += rows.filter(pc.is_in(rows["seq"], value_set=pa.array(wanted))).to_pylist()
    found.sort(key=lambda row: cast("int", row["seq"]))
    return [{name: row[name] for name in _LISTED} for row in found]
