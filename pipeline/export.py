"""`snapshot export`: a store's entries and hint claims as Parquet, with the roots that prove them.

Spark's tasks read sequence ranges of the database and write the files themselves: rows go from SQL
through Arrow to Parquet without passing through the JVM, and a task never holds more than one file's
rows. With a parent, its ranges are compared with the store. Files that are unchanged are shared by hard
links; what differs is written again.

New entries become new ranges. Short ranges at the end are merged with them, so that many small exports
still make few files: a range is merged if it has at most `_MERGE_FACTOR` times the elements after it.
Sizes then fall geometrically, and an entry is rewritten a logarithmic number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, compress, islice
from operator import not_
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from app.roots import root
from pipeline import manifest as manifests
from pipeline.columns import write_documents
from pipeline.database import Database, Interval, Scan, open_database
from pipeline.manifest import (
    RANGE_ENTRIES,
    ClaimRange,
    EntryRange,
    ExportEnd,
    Manifest,
    Parent,
    PipelineError,
    keep_only,
    published,
    record_of,
    share_file,
    write_file,
)
from pipeline.session import on_cluster, step
from pipeline.tables import prove, write_channels, write_claims, write_entries
from sdstore.sds.codec import DECODER_VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Range = EntryRange | ClaimRange
_MERGE_FACTOR = 2
_FULL_SHARE = 2  # a range more than half full is not merged again
_FULL_BYTES = 16 * 1024 * 1024  # compressed; large frames fill a range by bytes


class ParentMismatchError(PipelineError):
    """The parent is a snapshot of another store, of other channels, or of a lost history."""

    code = "parent_mismatch"


def export_snapshot(
    spark: SparkSession,
    url: str,
    target: Path,
    *,
    parent: Path | None = None,
    channel_ids: Sequence[str] | None = None,
    rows_max: int = RANGE_ENTRIES,
    copies: bool = False,
) -> Manifest:
    """Make the folder `target` from the store at `url` as it is now; returns its manifest.

    Files have about `rows_max` rows at most, and bounded bytes. Files that `parent` has already are hard
    links to it, or with `copies` copies.
    Raises PublishError if `target` exists, ParentMismatchError if `parent` is of another store or the
    store was rolled back since, and ManifestError if `parent` is not a snapshot. A killed export leaves
    no folder `target`.
    """
    store = _Store.look(url, channel_ids)
    base = None if parent is None else _Base(parent.absolute(), manifests.load(parent))
    if base is not None and not base.fits(store):
        raise ParentMismatchError(f"{parent} is a snapshot of another store or of other channels")
    if base is not None:
        base.require_history(url)
    with published(target.absolute()) as folder:
        route = Route(url, folder, None if base is None else base.folder, rows_max, copies)
        manifest = _export(spark, store, base, route)
        manifest.check()
        write_file(folder, manifests.FILE_NAME, manifest.to_bytes())
        keep_only(folder, manifest.paths())
    return manifest


@dataclass(frozen=True, slots=True)
class _Store:
    """The store at the start of the export: nothing later is read."""

    database_id: str
    watermark: ExportEnd
    channel_ids: tuple[str, ...] | None

    @classmethod
    def look(cls, url: str, channel_ids: Sequence[str] | None) -> _Store:
        interest = None if channel_ids is None else tuple(sorted(set(channel_ids)))
        with open_database(url) as database:
            return cls(database.database_id(), database.watermark(), interest)

    def scan(self, last: int) -> Scan:
        everything = Scan(seq=Interval(0, last))
        return everything if self.channel_ids is None else everything.of_channels(self.channel_ids)


@dataclass(frozen=True, slots=True)
class _Base:
    """The parent snapshot."""

    folder: Path
    manifest: Manifest

    def fits(self, store: _Store) -> bool:
        mine = (self.manifest.database_id, self.manifest.channel_ids)
        return mine == (store.database_id, store.channel_ids)

    def require_history(self, url: str) -> None:
        """Raises ParentMismatchError if the store's history is not the one the parent was made from.

        A parent of an older version has no sums to compare; nothing is shared with it.
        """
        if self.manifest.schema_version != manifests.SCHEMA_VERSION:
            return
        with open_database(url) as database:
            if not database.holds(self.manifest.watermark):
                raise ParentMismatchError(
                    f"the store was rolled back after {self.folder} was made (it serves an older "
                    "copy of its database), or is another copy: use a parent from before that copy "
                    "was made, or export without a parent"
                )


def _export(spark: SparkSession, store: _Store, base: _Base | None, route: Route) -> Manifest:
    folder = route.folder
    watermark = store.watermark
    # Files of an older version have other columns, and its manifest has no sums of its history.
    shares = base is not None and base.manifest.schema_version == manifests.SCHEMA_VERSION
    old = base.manifest if base is not None and shares else None
    parts = [
        Part(ENTRIES_TABLE, store.scan(watermark.seq), old.entry_ranges if old else ()),
        Part(CLAIMS_TABLE, store.scan(watermark.claim_no), old.claim_ranges if old else ()),
    ]
    entries, claims = export_tables(spark, route, parts)
    _require_all_there(folder, [*entries.ranges, *claims.ranges])
    with step(spark, "Prove what was written"):
        write = partial(write_channels, folder)
        proof = prove(spark, folder, entries.ranges, claims.ranges, write)
    _require_all_read("entries", entries.count, proof.entries.count)
    _require_all_read("claims", claims.count, proof.claims.count)
    return Manifest(
        snapshot_id=token_hex(16),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        software=f"sdstore {version('sdstore')}",
        decoder_version=DECODER_VERSION,
        database_id=store.database_id,
        parent=None if base is None else Parent(base.manifest.snapshot_id, base.folder.name),
        channel_ids=store.channel_ids,
        watermark=store.watermark,
        entries=proof.entries,
        claims=proof.claims,
        entry_ranges=entries.ranges,
        claim_ranges=claims.ranges,
        channels=proof.made,
        documents=write_documents(folder),
        bytes_written=entries.bytes_written + claims.bytes_written,
    )


def _require_all_there(folder: Path, ranges: Sequence[EntryRange | ClaimRange]) -> None:
    for each in ranges:
        if not (folder / each.file.path).is_file():
            raise PipelineError(f"{each.file.path} is missing: do all workers share the folder?")


def _require_all_read(what: str, written: int, found: int) -> None:
    if found != written:
        raise PipelineError(
            f"{written} {what} were written, but {found} were found: do all workers share the folder?"
        )


# ---- the tables: compare the parent's ranges with the store, and write what differs


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
    parent_ranges: Sequence[_Range]


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


def _exported(kept: Sequence[_Range], written: Sequence[_Range]) -> Exported:
    return Exported(
        ranges=tuple(sorted([*kept, *written], key=lambda each: (each.first, each.last))),
        bytes_written=sum(each.file.bytes for each in written),
    )


def _plan(
    route: Route, part: Part, is_unchanged: Sequence[bool]
) -> tuple[list[_Range], list[_FileTask]]:
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


def _is_unchanged(route: Route, what: tuple[Table, Scan, _Range]) -> bool:
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
    # A file that lacks lost frames is written again: the store may have them by now.
    whole = each.count, each.root, getattr(each, "frame_bytes", 0)
    return state == whole and not getattr(each, "lost_count", 0)


def _scan_of(scan: Scan, each: _Range) -> Scan:
    part = scan.of_seq(each.first, each.last)
    return part.of_day(each.day) if isinstance(each, EntryRange) else part


def _write(route: Route, what: tuple[Table, Sequence[Scan]]) -> list[_Range]:
    table, scans = what
    with open_database(route.url) as database:
        batches = chain.from_iterable(table.batches(database, scan) for scan in scans)
        return list(table.write(route.folder, batches, route.rows_max))


# ---- which ranges at the end are merged


def merged_tail(ranges: Sequence[_Range], new_count: int, rows_max: int) -> list[_Range]:
    """The ranges at the end of `ranges` to rewrite together with `new_count` new elements.

    The resulting files have about `rows_max` rows.
    """
    if not new_count:
        return []
    start = len(ranges)
    while start and _is_worth_merging(ranges[start - 1], new_count, rows_max):
        if getattr(ranges[start - 1], "day", None) != getattr(ranges[-1], "day", None):
            break  # a file holds one day, so merging across days saves no file
        start -= 1
        new_count += ranges[start].count
    return list(ranges[start:])


def _is_worth_merging(last: _Range, after_count: int, rows_max: int) -> bool:
    return (
        last.count <= _MERGE_FACTOR * after_count
        and last.count * _FULL_SHARE <= rows_max
        and last.file.bytes <= _FULL_BYTES
    )
