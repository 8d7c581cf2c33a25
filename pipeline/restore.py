"""`snapshot restore`: bring a snapshot's entries and hint claims into a store, under its own rules.

Every frame passes the same checks as at any other door. Rows go in the arrival order of the store
that exported them, so the first-seen variant of an ID stays the first. What the store holds already
is passed over, so a restore that was killed is simply started again.

An empty SQLite store is first filled by the bulk loader, which makes its file anew: all or nothing.
What is then left is what needs a look at the store, as in any store that holds something.
"""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from app.entries import NewEntry, OutcomeKind
from app.errors import Problem
from app.ingest.bulkload import Item, load_empty_store
from app.ingest.prepare import prepare
from app.ingest.records import Publication
from app.limits import DEFAULT_LIMITS, Limits
from app.store.records import WriteResult
from app.store.sqlite import prepare_file, problem_of
from app.store.store import Store
from pipeline import manifest as manifests
from pipeline.database import Database, open_database, sqlite_path
from pipeline.findings import Fault
from pipeline.manifest import EntryRange, Manifest
from pipeline.progress import items
from pipeline.snapshot import read_claims, read_entries
from pipeline.tables import is_lost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_GROUP_ROWS = 4_096
_GROUP_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class Restored:
    """What a restore did. `refused` counts rows by the code of their refusal.

    Retired rows have nothing to bring in, and are not refused.
    """

    rows_count: int = 0
    retired_count: int = 0
    written_count: int = 0
    claims_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to bring in: a frame, the digest it must have, and the hints that lead to it."""

    digest: bytes
    frame: bytes
    hints: tuple[bytes, ...]


def restore_snapshot(
    spark: SparkSession,
    snapshot: Path,
    url: str,
    limits: Limits = DEFAULT_LIMITS,
    *,
    is_verified: bool = False,
) -> Restored:
    """Bring the snapshot in folder `snapshot` into the store at `url`, making it if need be.

    A snapshot that was just verified can fill an empty store in bulk. Of any other, damaged rows are
    refused and counted, and the rest is brought in row by row.
    Raises ManifestError, and the `StoreError`s of `app.store.faults` (a running node holds its
    SQLite file).
    """
    snapshot = snapshot.absolute()
    manifest = manifests.load(snapshot)
    path = sqlite_path(url)
    restored = Restored()
    if is_verified and path is not None:
        restored.written_count = _fill_if_empty(path, snapshot, manifest, limits)
    hints = _Hints(_hints_by_seq(spark, snapshot))
    with asyncio.Runner() as runner, ThreadPoolExecutor(1, "sdstore-writer") as writer:
        store = runner.run(Store.open(url, limits))
        try:
            writer.submit(store.begin_writing).result()
            sink = _Sink(store, writer, limits, restored)
            for stretch in items("Restore", list(stretches(manifest.entry_ranges))):
                with open_database(url) as database:
                    for row in _rows_to_write(snapshot, stretch, database, hints, restored):
                        sink.take(row)
            sink.flush()
        finally:
            runner.run(store.close())
    return restored


def _fill_if_empty(path: Path, snapshot: Path, manifest: Manifest, limits: Limits) -> int:
    """Load the frames of the snapshot into a store that holds nothing; how many are new there.

    Their hints are left for later, because messages with hints are not written in bulk. So is telling
    what was refused.
    """
    prepare_file(path)
    with open_database(f"sqlite:///{path}") as database:
        if not database.is_empty():
            return 0
    steps = items("Fill the store", list(stretches(manifest.entry_ranges)))
    frames = (item for stretch in steps for item in _frames(snapshot, stretch))
    try:
        loaded = load_empty_store(path, frames, limits, lambda *_: None)
    except sqlite3.Error as error:  # the disk is full, above all
        raise problem_of(error) or error from error
    return loaded.counts[OutcomeKind.STORED]


def stretches(ranges: Sequence[EntryRange]) -> Iterator[list[EntryRange]]:
    """The ranges in arrival order, those together that overlap: a clock went back across midnight."""
    stretch: list[EntryRange] = []
    last = -1
    for each in sorted(ranges, key=attrgetter("first")):
        if stretch and each.first > last:
            yield stretch
            stretch = []
        stretch.append(each)
        last = max(last, each.last)
    if stretch:
        yield stretch


def _frames(snapshot: Path, stretch: Sequence[EntryRange]) -> Iterator[Item]:
    """The frames of a stretch in arrival order."""
    files = [_numbered_frames(snapshot / each.file.path) for each in stretch]
    for _, frame in heapq.merge(*files, key=itemgetter(0)):
        if frame is not None:
            yield frame, ()


def _numbered_frames(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(seq, frame) of the rows of a file in arrival order."""
    table = pq.read_table(path, columns=["seq", "frame"], partitioning=None)
    for batch in table.sort_by("seq").to_batches(_GROUP_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _hints_by_seq(spark: SparkSession, snapshot: Path) -> Iterator[tuple[int, bytes]]:
    """(seq, hint) of every claim, in the order of the entries they lead to."""
    entries = read_entries(spark, snapshot, lenient=True).select("seq", "digest")
    claims = read_claims(spark, snapshot, lenient=True).select("digest", "claim_no", "hint")
    joined = claims.join(entries, "digest").sort("seq", "claim_no").select("seq", "hint")
    for row in joined.toLocalIterator(prefetchPartitions=True):
        yield row["seq"], bytes(row["hint"])


class _Hints:
    """The hints of entries that are asked for in ascending order; each is read once."""

    def __init__(self, pairs: Iterator[tuple[int, bytes]]) -> None:
        self._pairs = pairs
        self._next = next(pairs, None)

    def of(self, seq: int) -> tuple[bytes, ...]:
        """The hints of entry `seq`."""
        found = []
        while self._next is not None and self._next[0] <= seq:
            if self._next[0] == seq:
                found.append(self._next[1])
            self._next = next(self._pairs, None)
        return tuple(found)


def _rows_to_write(
    snapshot: Path,
    stretch: Sequence[EntryRange],
    database: Database,
    hints: _Hints,
    restored: Restored,
) -> Iterator[_Row]:
    """The rows of a stretch that bring the store something, in arrival order."""
    files = [_compared_rows(snapshot, each, database, restored) for each in stretch]
    for seq, digest, is_known, frame in heapq.merge(*files, key=itemgetter(0)):
        row_hints = hints.of(seq)
        if frame.is_valid and (row_hints or not is_known):
            yield _Row(digest, frame.as_py(), row_hints)


def _compared_rows(
    snapshot: Path, each: EntryRange, database: Database, restored: Restored
) -> Iterator[tuple[int, bytes, bool, pa.Scalar]]:
    """(seq, digest, whether the store knows it, frame) of the rows of a file in arrival order.

    Most frames are passed over in the end: only the others become Python's.
    """
    path, columns = snapshot / each.file.path, ["seq", "digest", "frame", "frame_bytes"]
    try:
        table = pq.read_table(path, columns=columns, partitioning=None)
    except (pa.ArrowException, OSError):
        restored.refused[Fault.UNREADABLE_ROWS] += each.count
        return
    seqs, frames, digests = table["seq"].to_numpy(), table["frame"], table["digest"].to_pylist()
    known = database.known_digests(digests)
    lost = table.filter(is_lost(table))["digest"].to_pylist()
    restored.rows_count += table.num_rows
    restored.retired_count += frames.null_count - len(lost)
    if wanted := sum(digest not in known for digest in lost):
        restored.refused[Fault.FRAME_LOST] += wanted
    for row in np.argsort(seqs).tolist():
        yield int(seqs[row]), digests[row], digests[row] in known, frames[row]


class _Sink:
    """Prepares rows here while the writer's thread commits the group before."""

    def __init__(
        self, store: Store, writer: ThreadPoolExecutor, limits: Limits, restored: Restored
    ) -> None:
        self._store = store
        self._writer = writer
        self._limits = limits
        self._restored = restored
        self._group: list[NewEntry] = []
        self._group_bytes = 0
        self._writing: Future[list[WriteResult]] | None = None

    def take(self, row: _Row) -> None:
        """Check a row; write its group once that is full."""
        try:
            self._group += _prepared(row, self._limits)
        except Problem as problem:
            self._restored.refused[problem.code] += 1
        except _DigestDiffersError:
            self._restored.refused[Fault.DIGEST_DIFFERS] += 1
        self._group_bytes += len(row.frame)
        if len(self._group) >= _GROUP_ROWS or self._group_bytes >= _GROUP_BYTES:
            self._write()

    def flush(self) -> None:
        """Write what is left, and wait until all is on disk."""
        self._write()
        self._finish()

    def _write(self) -> None:
        self._finish()
        if self._group:
            self._writing = self._writer.submit(self._store.write_group, self._group, ())
        self._group, self._group_bytes = [], 0

    def _finish(self) -> None:
        if self._writing is not None:
            results = self._writing.result()
            self._restored.written_count += sum(result.is_new for result in results)
            self._restored.claims_count += sum(len(result.new_claims) for result in results)
        self._writing = None


class _DigestDiffersError(ValueError):
    """A frame that is not the entry its row says."""


def _prepared(row: _Row, limits: Limits) -> Iterator[NewEntry]:
    """The row as one publication, or as several if it has more hints than one may carry."""
    most = limits.hints_per_publish_max
    for start in range(0, max(len(row.hints), 1), most):
        entry = prepare(Publication(row.frame, row.hints[start : start + most]), limits)
        if not isinstance(entry, NewEntry) or entry.digest != row.digest:
            raise _DigestDiffersError
        yield entry
