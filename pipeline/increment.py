"""One table of an export: compare the parent's ranges with the store, write what is not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cluster import on_cluster
from pipeline.database import Database, open_database
from pipeline.manifest import ClaimRange, EntryRange
from pipeline.plan import merged_tail
from pipeline.publish import record_of, share_file
from pipeline.roots import root
from pipeline.scan import Scan
from pipeline.tables import write_claims, write_entries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_AnyRange = EntryRange | ClaimRange


@dataclass(frozen=True, slots=True)
class Table:
    """How a table is read from the database and written as files.

    `elements` are what its roots are over, with the bytes of their frames: a retired entry stays
    an element, but has none. Scans bound a claim by its number, an entry by its sequence number.
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

    Unchanged files come from the snapshot `parent`.
    """

    url: str
    folder: Path
    parent: Path | None
    rows_max: int


@dataclass(frozen=True, slots=True)
class Exported:
    """The ranges of one table, in order, and the bytes of the files that were written for them."""

    ranges: tuple[Any, ...]
    bytes_written: int

    @property
    def count(self) -> int:
        """Elements in all ranges."""
        return sum(each.count for each in self.ranges)


def export_table(
    spark: SparkSession,
    table: Table,
    route: Route,
    scan: Scan,
    parent_ranges: Sequence[_AnyRange],
) -> Exported:
    """Bring the rows of `scan` into the folder, sharing with the parent whatever is the same.

    `parent_ranges` is empty without a parent; rows above the last of them are new.
    """
    unchanged, changed = _compare(spark, table, route, scan, parent_ranges)
    read_up_to = max((each.last for each in parent_ranges), default=-1)
    with open_database(route.url) as database:
        new = table.partitions(database, scan.of_seq(read_up_to + 1, scan.seq.last), route.rows_max)
    # Several new ranges are full ones but the last, and what follows a full range is not merged.
    # Nor is what lies before a range that is written again: the file would span that one.
    last_changed = max((each.last for each in changed), default=-1)
    end = [each for each in unchanged if each.first > last_changed]
    tail = merged_tail(end, new[0][1], route.rows_max) if len(new) == 1 else []
    kept = unchanged[: len(unchanged) - len(tail)]
    tasks = [[_part(scan, each)] for each in changed] + [[part] for part, _ in new]
    if tail:
        tasks[-1][:0] = [_part(scan, each) for each in tail]
    for each in kept:
        assert route.parent is not None  # noqa: S101 - there are no ranges without one
        share_file(route.parent, route.folder, each.file.path)
    work = partial(_write, table, route)
    written = list(chain(*on_cluster(spark, f"Export the {table.name}", work, tasks)))
    return Exported(
        ranges=tuple(sorted([*kept, *written], key=lambda each: (each.first, each.last))),
        bytes_written=sum(each.file.bytes for each in written),
    )


def _compare(
    spark: SparkSession, table: Table, route: Route, scan: Scan, ranges: Sequence[_AnyRange]
) -> tuple[list[_AnyRange], list[_AnyRange]]:
    """(unchanged, changed) of `ranges`."""
    work = partial(_is_unchanged, table, route, scan)
    states = on_cluster(spark, f"Compare the {table.name} with the parent", work, ranges)
    unchanged: list[_AnyRange] = []
    changed: list[_AnyRange] = []
    for each, is_unchanged in zip(ranges, states, strict=True):
        (unchanged if is_unchanged else changed).append(each)
    return unchanged, changed


def _is_unchanged(table: Table, route: Route, scan: Scan, each: _AnyRange) -> bool:
    """Whether the store still holds what the parent's file was made of, and that file is whole."""
    assert route.parent is not None  # noqa: S101 - there are no ranges without one
    with open_database(route.url) as database:
        elements, frame_bytes = table.elements(database, _part(scan, each))
    state = (len(elements), root(elements).hex(), frame_bytes)
    if state != (each.count, each.root, getattr(each, "frame_bytes", 0)):
        return False
    try:
        return record_of(route.parent, each.file.path) == each.file
    except OSError:
        return False


def _part(scan: Scan, each: _AnyRange) -> Scan:
    part = scan.of_seq(each.first, each.last)
    return part.of_day(each.day) if isinstance(each, EntryRange) else part


def _write(table: Table, route: Route, scans: Sequence[Scan]) -> list[_AnyRange]:
    with open_database(route.url) as database:
        batches = chain.from_iterable(table.batches(database, scan) for scan in scans)
        return list(table.write(route.folder, batches, route.rows_max))
