"""The tables of an export: compare the parent's ranges with the store, and write what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, islice
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from app.roots import root
from pipeline.cluster import on_cluster
from pipeline.database import Database, open_database
from pipeline.manifest import ClaimRange, EntryRange
from pipeline.plan import merged_tail
from pipeline.publish import record_of, share_file
from pipeline.scan import Scan
from pipeline.tables import is_lost, write_claims, write_entries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_AnyRange = EntryRange | ClaimRange


@dataclass(frozen=True, slots=True)
class Table:
    """How a table is read from the database and written as files.

    `elements` returns the elements of the root and the bytes of their frames; a retired entry stays an
    element, with 0 bytes. Scans bound a claim by its number, an entry by its sequence number.
    """

    name: str
    batches: Callable[[Database, Scan], Iterator[pa.RecordBatch]]
    elements: Callable[[Database, Scan], tuple[NDArray[np.uint8], int]]
    partitions: Callable[[Database, Scan, int], Sequence[tuple[Scan, int]]]
    write: Callable[[Path, Iterable[pa.RecordBatch], int], Iterator[Any]]


ENTRIES_TABLE = Table(
    "entries", Database.entries, Database.entry_digests, Database.entry_partitions, write_entries
)
CLAIMS_TABLE = Table(
    "claims", Database.claims, Database.claim_ids, Database.claim_partitions, write_claims
)


@dataclass(frozen=True, slots=True)
class Route:
    """From the store at `url` into `folder`, in files of about `rows_max` rows.

    Unchanged files come from the snapshot `parent`, by hard links or as copies.
    """

    url: str
    folder: Path
    parent: Path | None
    rows_max: int
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a table to export.

    `parent_ranges` is empty without a parent; rows above its last range are new.
    """

    table: Table
    scan: Scan
    parent_ranges: Sequence[_AnyRange]


@dataclass(frozen=True, slots=True)
class Exported:
    """The ranges of one table, in order, and the bytes written for them."""

    ranges: tuple[Any, ...]
    bytes_written: int

    @property
    def count(self) -> int:
        """Elements in all ranges."""
        return sum(each.count for each in self.ranges)


@dataclass(frozen=True, slots=True)
class _FileTask:
    """The scans whose rows one task writes, and about how many rows they have."""

    scans: Sequence[Scan]
    rows_count: int


def export_tables(spark: SparkSession, route: Route, parts: Sequence[Part]) -> list[Exported]:
    """Write the rows of each part into the folder, or share unchanged files with the parent."""
    ranges = [(part.table, part.scan, each) for part in parts for each in part.parent_ranges]
    states = on_cluster(
        spark,
        "Compare with the parent",
        partial(_is_unchanged, route),
        ranges,
        [each.count for _, _, each in ranges],
    )
    is_unchanged = iter(states)
    plans = [
        _plan(route, part, list(islice(is_unchanged, len(part.parent_ranges)))) for part in parts
    ]
    for kept, _ in plans:
        for each in kept:
            assert route.parent is not None  # noqa: S101 - there are no ranges without one
            share_file(route.parent, route.folder, each.file.path, copies=route.copies)
    tasks = [
        (part.table, task.scans)
        for part, (_, tasks) in zip(parts, plans, strict=True)
        for task in tasks
    ]
    rows = [task.rows_count for _, tasks in plans for task in tasks]
    written = iter(on_cluster(spark, "Export", partial(_write, route), tasks, rows))
    return [_exported(kept, list(chain(*islice(written, len(tasks))))) for kept, tasks in plans]


def _exported(kept: Sequence[_AnyRange], written: Sequence[_AnyRange]) -> Exported:
    return Exported(
        ranges=tuple(sorted([*kept, *written], key=lambda each: (each.first, each.last))),
        bytes_written=sum(each.file.bytes for each in written),
    )


def _plan(
    route: Route, part: Part, is_unchanged: Sequence[bool]
) -> tuple[list[_AnyRange], list[_FileTask]]:
    """The ranges to share with the parent, and the files to write."""
    unchanged = list(compress(part.parent_ranges, is_unchanged))
    changed = list(compress(part.parent_ranges, map(not_, is_unchanged)))
    scan = part.scan
    read_up_to = max((each.last for each in part.parent_ranges), default=-1)
    left = scan.of_seq(read_up_to + 1, scan.seq.last)
    with open_database(route.url) as database:
        new = part.table.partitions(database, left, route.rows_max)
    # Of several new ranges all but the last are full, and nothing is merged with a full range.
    # A range before one that is rewritten is not merged either: the file would span that one.
    last_changed = max((each.last for each in changed), default=-1)
    end = [each for each in unchanged if each.first > last_changed]
    tail = merged_tail(end, new[0][1], route.rows_max) if len(new) == 1 else []
    kept = unchanged[: len(unchanged) - len(tail)]
    tasks = [_FileTask([_scan_of(scan, each)], each.count) for each in changed]
    tasks += [_FileTask([each], count) for each, count in new]
    if tail:
        before = [_scan_of(scan, each) for each in tail]
        rows_count = tasks[-1].rows_count + sum(each.count for each in tail)
        tasks[-1] = _FileTask([*before, *tasks[-1].scans], rows_count)
    return kept, tasks


def _is_unchanged(route: Route, what: tuple[Table, Scan, _AnyRange]) -> bool:
    """Whether the parent's file is intact and the store still holds its rows unchanged."""
    table, scan, each = what
    assert route.parent is not None  # noqa: S101 - there are no ranges without one
    try:
        if record_of(route.parent, each.file.path) != each.file:
            return False
    except OSError:
        return False
    with open_database(route.url) as database:
        elements, frame_bytes = table.elements(database, _scan_of(scan, each))
        state = (len(elements), root(elements).hex(), frame_bytes)
        if state != (each.count, each.root, getattr(each, "frame_bytes", 0)):
            return False
        # A frame that is still lost does not cause a rewrite at every export.
        return not (
            isinstance(each, EntryRange)
            and each.lost_count
            and _is_mended(route.parent / each.file.path, database, _scan_of(scan, each))
        )


def _is_mended(path: Path, database: Database, scan: Scan) -> bool:
    """Whether the store has recovered a frame that the file lacks."""
    columns = ["seq", "frame_bytes", "frame"]
    table = pq.read_table(path, columns=columns, partitioning=None)
    lost = table.filter(is_lost(table))["seq"].combine_chunks()
    bounds = pc.min_max(lost).as_py()
    for batch in database.entries(scan.of_seq(bounds["min"], bounds["max"])):
        whole = batch.filter(pc.is_valid(batch["frame"]))["seq"]
        if pc.any(pc.is_in(whole, lost)).as_py():
            return True
    return False


def _scan_of(scan: Scan, each: _AnyRange) -> Scan:
    part = scan.of_seq(each.first, each.last)
    return part.of_day(each.day) if isinstance(each, EntryRange) else part


def _write(route: Route, what: tuple[Table, Sequence[Scan]]) -> list[_AnyRange]:
    table, scans = what
    with open_database(route.url) as database:
        batches = chain.from_iterable(table.batches(database, scan) for scan in scans)
        return list(table.write(route.folder, batches, route.rows_max))
