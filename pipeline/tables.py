"""The tables of a snapshot: written as Parquet files in which a reader can skip rows, and read by Spark; their
counts and roots.

A file of entries holds one range of the arrival order within one UTC day, sorted in log order. So a day
is a folder, and a channel is a few row groups, which a reader finds by the footers.

Counts and roots are computed by Spark tasks. They cut the digests of the files into pieces: those of one set
(all entries, all claims, a channel) in one bucket, a range of the digest space. The pieces of a set are merged
bucket by bucket: numpy sorts the digests, which are hashed as a stream. So few, large values move between
tasks, and a bucket bounds the memory, however large a set is. The code uses plain RDDs: for few, large values
Spark SQL would take seconds to warm up without a gain.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StructField, StructType

from app.roots import DIGEST_BYTES, EMPTY_ROOT, in_order, root
from pipeline.columns import CHANNELS, ENTRIES, digest_array
from pipeline.manifest import (
    CHANNELS_FILE,
    ENTRIES_FOLDER,
    RANGE_BYTES,
    ClaimRange,
    EntryRange,
    FileRecord,
    Summary,
    claims_path,
    draft_of,
    entries_path,
    write_file,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession


ORPHANS_MAX = 1_000
_FILES_PER_TASK = 4  # a quarter of a second of one core: enough to be worth a task
_BUCKET_DIGESTS = 2**20  # 32 MB sorted at once; sorting takes about three times as much memory
_BUCKET_BITS_MAX = 16  # enough for 6 * 10^10 digests of one set
_INT64 = np.iinfo(np.int64)
_Made = TypeVar("_Made")


class ChannelRow(NamedTuple):
    """A row of the channels table; `root` has 32 bytes."""

    channel_id: str
    entries_count: int
    root: bytes
    lamport_first: int
    lamport_last: int


@dataclass(frozen=True, slots=True)
class Proof(Generic[_Made]):
    """The contents of the files of a snapshot.

    `made` is the result of `consume`. `orphans` are at most `ORPHANS_MAX` digests that claims refer to
    and no entry has.
    """

    entries: Summary
    claims: Summary
    made: _Made
    orphans: tuple[bytes, ...]


class _Kind(IntEnum):
    """The subject of a piece or result, in the order in which the last task sees them."""

    ENTRIES = 0
    CLAIMS = 1
    CHANNEL = 2
    ORPHAN = 3


class _Place(NamedTuple):
    """Sort key of pieces: by set, then by bucket; targets of claims come after entries."""

    kind: _Kind
    channel_id: str
    bucket: int
    is_target: bool = False


class _Piece(NamedTuple):
    """Digests of a set in a bucket, 32 bytes each, and the bounds of their clocks."""

    digests: bytes
    lamport_first: int
    lamport_last: int


_Placed = tuple[_Place, _Piece]
_Result = tuple[tuple[_Kind, str, bytes], Any]
"""(kind, channel ID, digest of an orphan), and (count, root, Lamport bounds) of a set."""


def prove(
    spark: SparkSession,
    folder: Path,
    entry_ranges: Sequence[EntryRange],
    claim_ranges: Sequence[ClaimRange],
    consume: Callable[[Iterator[ChannelRow]], _Made],
) -> Proof[_Made]:
    """Read all files of the ranges; `consume` gets the channels in order, inside a task.

    A file that is missing on the machine of a task counts as empty.
    """
    bits, claim_bits = _bucket_bits(entry_ranges), _bucket_bits(claim_ranges)
    pieces = [
        _cut(spark, folder, entry_ranges, partial(_entry_pieces, bits)),
        _cut(spark, folder, claim_ranges, partial(_claim_pieces, bits, claim_bits)),
    ]
    results = _merged(spark, pieces).repartitionAndSortWithinPartitions(1)
    proofs: list[Proof[_Made]] = results.mapPartitions(partial(_proof, consume)).collect()
    return proofs[0]


def channel_summaries(
    spark: SparkSession,
    folder: Path,
    entry_ranges: Sequence[EntryRange],
    newer: Mapping[str, Sequence[bytes]],
) -> dict[str, Summary]:
    """(count, root) of each channel of `newer`, over its entries in the files and its newer digests."""
    bits = _bucket_bits(entry_ranges)
    rows = [(channel_id, digest) for channel_id, its in newer.items() for digest in its]
    channel_ids, digests = zip(*rows, strict=True) if rows else ((), ())
    named = pa.chunked_array([channel_ids], pa.string())
    added = list(_pieces(_Kind.CHANNEL, pa.chunked_array([digests], pa.binary()), bits, named))
    pieces = [
        _cut(spark, folder, entry_ranges, partial(_channel_pieces, bits, list(newer))),
        spark.sparkContext.parallelize(added, 1),
    ]
    return {
        channel_id: Summary.of(summary[:2])
        for (_, channel_id, _), summary in _merged(spark, pieces).collect()
    }


def _bucket_bits(ranges: Sequence[EntryRange | ClaimRange]) -> int:
    """The number of leading bits of a digest that select its bucket."""
    rows_count = sum(each.count for each in ranges)
    return min((rows_count // _BUCKET_DIGESTS).bit_length(), _BUCKET_BITS_MAX)


def _cut(
    spark: SparkSession,
    folder: Path,
    ranges: Sequence[EntryRange | ClaimRange],
    cut: Callable[[Iterable[Path]], Iterator[_Placed]],
) -> RDD[_Placed]:
    paths = [folder / each.file.path for each in ranges]
    tasks_count = -(-len(paths) // _FILES_PER_TASK) or 1
    return spark.sparkContext.parallelize(paths, tasks_count).mapPartitions(cut)


def _merged(spark: SparkSession, pieces: list[RDD[_Placed]]) -> RDD[_Result]:
    parts_count = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    together = spark.sparkContext.union(pieces)
    placed = together.repartitionAndSortWithinPartitions(parts_count, _part_of)
    return placed.mapPartitions(_results)


def _part_of(place: _Place) -> int:
    # Not hash(), which differs from one Python process to the next.
    return crc32(place.channel_id.encode(), int(place.kind))


# ---- cutting


def _entry_pieces(bits: int, paths: Iterable[Path]) -> Iterator[_Placed]:
    for rows in _tables(paths, ["channel_id", "lamport_timestamp", "digest"]):
        clocks = rows["lamport_timestamp"]
        yield from _pieces(_Kind.ENTRIES, rows["digest"], bits)
        yield from _pieces(_Kind.CHANNEL, rows["digest"], bits, rows["channel_id"], clocks)


def _channel_pieces(
    bits: int, channel_ids: Sequence[str], paths: Iterable[Path]
) -> Iterator[_Placed]:
    wanted = [("channel_id", "in", channel_ids)]
    for rows in _tables(paths, ["channel_id", "digest"], wanted):
        yield from _pieces(_Kind.CHANNEL, rows["digest"], bits, rows["channel_id"])


def _claim_pieces(bits: int, claim_bits: int, paths: Iterable[Path]) -> Iterator[_Placed]:
    for rows in _tables(paths, ["claim_id", "digest"]):
        yield from _pieces(_Kind.CLAIMS, rows["claim_id"], claim_bits)
        yield from _pieces(_Kind.ENTRIES, rows["digest"], bits, is_target=True)


def _tables(
    paths: Iterable[Path], columns: list[str], wanted: list[Any] | None = None
) -> Iterator[pa.Table]:
    """The columns of each file that exists and has rows."""
    for path in paths:
        if path.exists():
            table = pq.read_table(path, columns=columns, filters=wanted, partitioning=None)
            if table.num_rows:
                yield table


def _pieces(
    kind: _Kind,
    digests: pa.ChunkedArray,
    bits: int,
    channel_ids: pa.ChunkedArray | None = None,
    clocks: pa.ChunkedArray | None = None,
    *,
    is_target: bool = False,
) -> Iterator[_Placed]:
    """The rows as pieces: of one set, or of a set for each channel. Without clocks their bounds are 0."""
    elements = digest_array(digests)
    buckets = elements[:, 0].astype(np.int64) << 8 | elements[:, 1]
    cells = buckets >> (_BUCKET_BITS_MAX - bits)
    names = [""]
    if channel_ids is not None:
        channels = channel_ids.combine_chunks().dictionary_encode()
        names = channels.dictionary.to_pylist()
        cells |= channels.indices.to_numpy().astype(np.int64) << _BUCKET_BITS_MAX
    if not len(cells):
        return
    order = np.argsort(cells, kind="stable")
    cells, elements = cells[order], elements[order]
    lamports = np.zeros(len(cells), np.int64) if clocks is None else clocks.to_numpy()[order]
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    ends = np.append(starts[1:], len(cells))
    columns = (
        cells[starts],
        starts,
        ends,
        np.minimum.reduceat(lamports, starts),
        np.maximum.reduceat(lamports, starts),
    )
    for cell, start, end, first, last in zip(*(each.tolist() for each in columns), strict=True):
        channel_no, bucket = divmod(cell, 1 << _BUCKET_BITS_MAX)
        place = _Place(kind, names[channel_no], bucket, is_target)
        yield place, _Piece(elements[start:end].tobytes(), first, last)


# ---- merging


def _results(pieces: Iterable[_Placed]) -> Iterator[_Result]:
    """One summary per set, and the claims without an entry. The pieces must be in order."""
    for (kind, channel_id), of_set in groupby(pieces, key=lambda each: each[0][:2]):
        hasher, count = blake3(), 0
        lamport_first, lamport_last = _INT64.max, _INT64.min
        orphans_left = ORPHANS_MAX
        for _, of_bucket in groupby(of_set, key=lambda each: each[0].bucket):
            here = b""
            for is_target, same in groupby(of_bucket, key=lambda each: each[0].is_target):
                digests, firsts, lasts = zip(*(piece for _, piece in same), strict=True)
                ordered = in_order(b"".join(digests))
                if is_target:
                    for digest in islice(_missing(ordered, here), orphans_left):
                        orphans_left -= 1
                        yield (_Kind.ORPHAN, "", digest), None
                    continue
                here = ordered
                hasher.update(ordered)
                count += len(ordered) // DIGEST_BYTES
                lamport_first = min(lamport_first, *firsts)
                lamport_last = max(lamport_last, *lasts)
        yield (kind, channel_id, b""), (count, hasher.digest(), lamport_first, lamport_last)


def _missing(wanted: bytes, here: bytes) -> Iterator[bytes]:
    """The digests in `wanted` that are not among those of `here`; both are in order."""
    as_array = partial(np.frombuffer, dtype=f"S{DIGEST_BYTES}")
    missing = np.setdiff1d(as_array(wanted), as_array(here), assume_unique=True).tobytes()
    return (missing[at : at + DIGEST_BYTES] for at in range(0, len(missing), DIGEST_BYTES))


def _proof(
    consume: Callable[[Iterator[ChannelRow]], _Made], results: Iterable[_Result]
) -> Iterator[Proof[_Made]]:
    """The proof made of all results, which must be in order."""
    totals = dict.fromkeys((_Kind.ENTRIES, _Kind.CLAIMS), Summary.of((0, EMPTY_ROOT)))
    made: list[_Made] = []
    orphans: tuple[bytes, ...] = ()
    for kind, its in groupby(results, key=lambda each: each[0][0]):
        if kind is _Kind.CHANNEL:
            made.append(consume(ChannelRow(name, *summary) for (_, name, _), summary in its))
        elif kind is _Kind.ORPHAN:
            orphans = tuple(digest for (_, _, digest), _ in islice(its, ORPHANS_MAX))
        else:
            [(_, summary)] = its
            totals[kind] = Summary.of(summary[:2])
    if not made:
        made.append(consume(iter(())))
    yield Proof(totals[_Kind.ENTRIES], totals[_Kind.CLAIMS], made[0], orphans)


LOG_ORDER = ("channel_id", "lamport_timestamp", "message_id", "digest")

_ROW_GROUP_ROWS = 8_192  # the minimum that a reader of one channel reads from a file
_ROW_GROUP_BYTES = 16 * 1024 * 1024
_FEW_VALUES = ["channel_id", "sender_id", "dialect"]  # columns worth a dictionary


def write_entries(
    root_folder: Path, batches: Iterable[pa.RecordBatch], rows_max: int
) -> Iterator[EntryRange]:
    """Write `batches` (arrival order) as files of at most `rows_max` rows; returns their ranges."""
    for table in _portions(batches, rows_max):
        days = table["received_at"].cast(pa.date32(), safe=False)
        for day in pc.unique(days).to_pylist():
            yield _write_range(root_folder, day.isoformat(), table.filter(pc.equal(days, day)))


def _portions(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[pa.Table]:
    """The batches merged up to the bounds of one file."""
    held: list[pa.RecordBatch] = []
    rows_count = bytes_count = 0
    for batch in batches:
        if held and (
            rows_count + batch.num_rows > rows_max or bytes_count + batch.nbytes > RANGE_BYTES
        ):
            yield pa.Table.from_batches(held)
            held, rows_count, bytes_count = [], 0, 0
        held.append(batch)
        rows_count, bytes_count = rows_count + batch.num_rows, bytes_count + batch.nbytes
    if rows_count:
        yield pa.Table.from_batches(held)


def _write_range(root_folder: Path, day: str, table: pa.Table) -> EntryRange:
    """One file: the rows of `table`, which all arrived on `day`."""
    facts = entry_facts(table)
    # One chunk: gathering rows from many chunks takes three times as long.
    table = table.combine_chunks().sort_by([(name, "ascending") for name in LOG_ORDER])
    path = entries_path(day, facts["first"], facts["last"])
    return EntryRange(day=day, **facts, file=write_file(root_folder, path, parquet_bytes(table)))


def entry_facts(table: pa.Table) -> dict[str, Any]:
    """The manifest's facts about rows of entries: members of `EntryRange`."""
    seqs, channel_ids, lamports = (
        pc.min_max(table[name]).as_py() for name in ("seq", "channel_id", "lamport_timestamp")
    )
    return {
        "first": seqs["min"],
        "last": seqs["max"],
        "count": table.num_rows,
        "root": root(digest_array(table["digest"])).hex(),
        "frame_bytes": pc.sum(table["frame_bytes"]).as_py(),
        "lost_count": pc.sum(is_lost(table)).as_py(),
        "first_channel_id": channel_ids["min"],
        "last_channel_id": channel_ids["max"],
        "lamport_first": lamports["min"],
        "lamport_last": lamports["max"],
    }


def is_lost(table: pa.Table) -> pa.ChunkedArray:
    """A mask of the rows whose frame is lost: no frame, but not retired (0 bytes)."""
    return pc.and_(pc.is_null(table["frame"]), pc.greater(table["frame_bytes"], 0))


def write_claims(
    root_folder: Path, batches: Iterable[pa.RecordBatch], rows_max: int
) -> Iterator[ClaimRange]:
    """Write `batches` of claims (in the order of their numbers) as files; returns their ranges."""
    for table in _portions(batches, rows_max):
        facts = claim_facts(table)
        path = claims_path(facts["first"], facts["last"])
        yield ClaimRange(**facts, file=write_file(root_folder, path, parquet_bytes(table)))


def claim_facts(table: pa.Table) -> dict[str, Any]:
    """The manifest's facts about rows of claims: members of `ClaimRange`."""
    numbers = pc.min_max(table["claim_no"]).as_py()
    return {
        "first": numbers["min"],
        "last": numbers["max"],
        "count": table.num_rows,
        "root": root(digest_array(table["claim_id"])).hex(),
    }


def parquet_bytes(table: pa.Table) -> memoryview:
    """`table` as a Parquet file with page checksums and an index of its pages."""
    sink = pa.BufferOutputStream()
    rows_per_group = _ROW_GROUP_BYTES * max(table.num_rows, 1) // max(table.nbytes, 1)
    pq.write_table(
        table.combine_chunks(),
        sink,
        compression="zstd",
        row_group_size=max(1, min(_ROW_GROUP_ROWS, rows_per_group)),
        use_dictionary=[name for name in _FEW_VALUES if name in table.column_names],
        write_page_index=True,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


# ---- the table of channels, streamed: ten million channels need no more memory than ten

_ROWS_PER_BATCH = 4_096


def write_channels(folder: Path, rows: Iterator[ChannelRow]) -> FileRecord:
    """Write channels, sorted by ID, into the snapshot `folder`."""
    target = folder / CHANNELS_FILE
    draft = draft_of(target)
    with pq.ParquetWriter(draft, CHANNELS, compression="zstd", write_page_checksum=True) as writer:
        while portion := list(islice(rows, _ROWS_PER_BATCH)):
            columns = zip(*portion, strict=True)
            arrays = [pa.array(*each) for each in zip(columns, CHANNELS.types, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=CHANNELS))
    with draft.open("rb") as file:
        digest = blake3().update_mmap(draft).hexdigest()
        os.fsync(file.fileno())
    draft.rename(target)
    return FileRecord(CHANNELS_FILE, target.stat().st_size, digest)


def different_channels(folder: Path, limit: int, rows: Iterator[ChannelRow]) -> list[str]:
    """The first `limit` channels whose row in the snapshot `folder` differs from that in `rows`.

    Both are sorted by ID. Raises pyarrow's errors if the file is not a channels table.
    """
    return list(islice(_different(rows, stored_channels(folder)), limit))


def stored_channels(folder: Path) -> Iterator[ChannelRow]:
    """The rows of the snapshot `folder`, sorted by ID. Raises pyarrow's errors."""
    with pq.ParquetFile(folder / CHANNELS_FILE) as file:
        for batch in file.iter_batches(_ROWS_PER_BATCH):
            columns = (column.to_pylist() for column in batch.cast(CHANNELS).columns)
            yield from map(ChannelRow, *columns)


def _different(computed: Iterator[ChannelRow], stored: Iterator[ChannelRow]) -> Iterator[str]:
    sides = (zip(side, repeat(number)) for number, side in enumerate((computed, stored)))
    both = heapq.merge(*sides, key=lambda each: each[0].channel_id)
    for channel_id, found in groupby(both, key=lambda each: each[0].channel_id):
        rows, numbers = zip(*found, strict=True)
        if numbers != (0, 1) or rows[0] != rows[1]:
            yield channel_id


# ---- reading into Spark


def read_entries(
    spark: SparkSession, snapshot: Path, files: Sequence[str] | None = None
) -> DataFrame:
    """The columns of `ENTRIES`, and `day`, the UTC day of arrival, which prunes folders.

    `files` are paths as in the manifest, by default all.
    """
    folder = snapshot.absolute() / ENTRIES_FOLDER
    if files is None:
        paths = [folder] if folder.exists() else []
    else:
        paths = [snapshot.absolute() / each for each in files]
    day = StructField("day", DateType(), nullable=False)
    columns = StructType([*from_arrow_schema(ENTRIES).fields, day])
    if not paths:  # a table without rows has no files
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).option("basePath", str(folder)).parquet(*map(str, paths))
