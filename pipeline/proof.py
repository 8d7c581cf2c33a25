"""One pass over the files of a snapshot: totals, roots of channels, and claims without an entry.

Tasks cut the digests of the files into pieces. The pieces of one set (all entries, all claims, a
channel) are merged bucket by bucket, and one last task sees the channels in order. The code uses plain
RDDs: for few, large values Spark SQL would take seconds to warm up without a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from app.roots import DIGEST_BYTES, EMPTY_ROOT, in_order
from pipeline.manifest import ClaimRange, EntryRange, Summary
from pipeline.pieces import Piece, Summing, bucket_bits, pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORPHANS_MAX = 1_000
_FILES_PER_TASK = 4  # a quarter of a second of one core: enough to be worth a task
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


_Result = tuple[tuple[_Kind, str, bytes], Any]
"""(kind, channel ID, digest of an orphan), and the `GroupSummary` of a set."""


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
    context = spark.sparkContext
    bits, claim_bits = (
        bucket_bits(sum(each.count for each in ranges)) for ranges in (entry_ranges, claim_ranges)
    )
    work = (
        (entry_ranges, partial(_entry_pieces, bits)),
        (claim_ranges, partial(_claim_pieces, bits, claim_bits)),
    )
    pieces = []
    for ranges, cut in work:
        paths = [folder / each.file.path for each in ranges]
        tasks_count = -(-len(paths) // _FILES_PER_TASK) or 1
        pieces.append(context.parallelize(paths, tasks_count).mapPartitions(cut))
    parts_count = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    together = context.union(pieces).repartitionAndSortWithinPartitions(parts_count, _part_of)
    results = together.mapPartitions(_results).repartitionAndSortWithinPartitions(1)
    proofs: list[Proof[_Made]] = results.mapPartitions(partial(_proof, consume)).collect()
    return proofs[0]


def _part_of(place: _Place) -> int:
    # Not hash(), which differs from one Python process to the next.
    return crc32(place.channel_id.encode(), int(place.kind))


def _entry_pieces(bits: int, paths: Iterable[Path]) -> Iterator[tuple[_Place, Piece]]:
    for rows in _tables(paths, ["channel_id", "lamport_timestamp", "digest"]):
        yield from _total_pieces(_Kind.ENTRIES, rows, bits)
        for channel_id, bucket, *piece in _plain_rows(pack(rows, ["channel_id"], bits)):
            yield _Place(_Kind.CHANNEL, channel_id, bucket), Piece(*piece)


def _claim_pieces(
    bits: int, claim_bits: int, paths: Iterable[Path]
) -> Iterator[tuple[_Place, Piece]]:
    for rows in _tables(paths, ["claim_id", "digest"]):
        yield from _total_pieces(_Kind.CLAIMS, _clockless(rows["claim_id"]), claim_bits)
        targets = _clockless(rows["digest"])
        yield from _total_pieces(_Kind.ENTRIES, targets, bits, is_target=True)


def _total_pieces(
    kind: _Kind, rows: pa.Table, bits: int, *, is_target: bool = False
) -> Iterator[tuple[_Place, Piece]]:
    for bucket, *piece in _plain_rows(pack(rows, [], bits)):
        yield _Place(kind, "", bucket, is_target), Piece(*piece)


def _tables(paths: Iterable[Path], columns: list[str]) -> Iterator[pa.Table]:
    """The columns of each file that exists and has rows."""
    for path in paths:
        if path.exists():
            table = pq.read_table(path, columns=columns, partitioning=None)
            if table.num_rows:
                yield table


def _clockless(digests: pa.ChunkedArray) -> pa.Table:
    """Rows of elements that have no clock."""
    clocks = np.zeros(len(digests), np.int64)
    return pa.table({"digest": digests, "lamport_timestamp": clocks})


def _plain_rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _results(pieces: Iterable[tuple[_Place, Piece]]) -> Iterator[_Result]:
    """One summary per set, and the claims without an entry. The pieces must be in order."""
    for (kind, channel_id), of_set in groupby(pieces, key=lambda each: each[0][:2]):
        summing = Summing()
        orphans_left = ORPHANS_MAX
        for _, of_bucket in groupby(of_set, key=lambda each: each[0].bucket):
            here = b""
            for is_target, same in groupby(of_bucket, key=lambda each: each[0].is_target):
                found = [piece for _, piece in same]
                if is_target:
                    for digest in islice(_missing(found, here), orphans_left):
                        orphans_left -= 1
                        yield (_Kind.ORPHAN, "", digest), None
                else:
                    here = summing.add_bucket(found)
        yield (kind, channel_id, b""), summing.summary()


def _missing(targets: Sequence[Piece], here: bytes) -> Iterator[bytes]:
    """The digests in `targets` that are not among those of `here`, in order."""
    wanted = in_order(b"".join(piece.digests for piece in targets))
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
