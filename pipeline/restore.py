"""`snapshot restore`: load a snapshot's entries and hint claims into a store, under its own rules.

Every frame passes the checks of normal ingest. Rows are written in the arrival order of the exporting
store, so the first-seen variant of an ID stays the first. Entries that the store has are skipped, so
running a killed restore again resumes it. The bulk loader fills an empty SQLite store in a new file,
and resumes too. Hints come last.
"""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from app.entries import Claim, NewEntry, OutcomeKind
from app.errors import Problem
from app.ingest.prepare import Publication, prepare, published_claim
from app.limits import DEFAULT_LIMITS, Limits
from app.store.sqlite import prepare_file, problem_of
from app.store.store import Store
from pipeline import manifest as manifests
from pipeline.bulkdraft import Item
from pipeline.bulkload import forget_load, load_empty_store
from pipeline.database import Database, open_database, sqlite_path
from pipeline.findings import Fault
from pipeline.manifest import ClaimRange, EntryRange, Manifest
from pipeline.progress import items
from pipeline.tables import is_lost
from sdstore.sds.digest import claim_id

_Work = TypeVar("_Work")

_GROUP_ROWS = 4_096
_GROUP_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class Restored:
    """The result of a restore. `refused` counts rows by the code of their refusal.

    `mended_count` counts entries that the store had with lost content. Retired rows have no frame to
    restore, and do not count as refused.
    """

    rows_count: int = 0
    retired_count: int = 0
    written_count: int = 0
    mended_count: int = 0
    claims_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to restore: a frame, and the digest it must have."""

    digest: bytes
    frame: bytes


def restore_snapshot(
    snapshot: Path, url: str, limits: Limits = DEFAULT_LIMITS, *, is_verified: bool = False
) -> Restored:
    """Load the snapshot in folder `snapshot` into the store at `url`, creating it if needed.

    A snapshot that was just verified can fill an empty store in bulk. Any other is restored row by row;
    damaged rows are refused and counted.
    Raises ManifestError, and the `StoreError`s of `app.store.faults` (a running node locks its
    SQLite file).
    """
    snapshot = snapshot.absolute()
    manifest = manifests.load(snapshot)
    restored = Restored()
    empty_file = _empty_file(url, is_verified=is_verified)
    if empty_file is not None:
        _fill(empty_file, snapshot, manifest, limits, restored)
    with asyncio.Runner() as runner, ThreadPoolExecutor(1, "sdstore-writer") as writer:
        store = runner.run(Store.open(url, limits))
        try:
            writer.submit(store.begin_writing).result()
            sink = _Sink(store, writer, limits, restored)
            if empty_file is None:
                in_order = list(stretches(manifest.entry_ranges))
                for stretch in items("Restore", in_order, _rows_of, "rows"):
                    with open_database(url) as database:
                        rows = _rows_to_write(snapshot, stretch, database, sink.recheck, restored)
                        for row in rows:
                            sink.take(row)
            sink.flush()
            # After all entries: a claim needs its entry, and claims have their own order.
            for each in items(
                "Restore the hints", manifest.claim_ranges, attrgetter("count"), "hints"
            ):
                for claims in _claims(snapshot, each, limits, restored):
                    sink.take_claims(claims)
            sink.flush()
        finally:
            runner.run(store.close())
    return restored


def _empty_file(url: str, *, is_verified: bool) -> Path | None:
    """The file of the store if bulk loading applies, created if needed; else None.

    If it does not apply, the files of a stopped load are removed.
    """
    path = sqlite_path(url)
    if path is None:
        return None
    prepare_file(path)
    with open_database(url) as database:
        if is_verified and database.is_empty():
            return path
    forget_load(path)
    return None


def _fill(
    path: Path, snapshot: Path, manifest: Manifest, limits: Limits, restored: Restored
) -> None:
    """Load the frames of the snapshot into an empty store, or resume a stopped load."""
    in_order = list(stretches(manifest.entry_ranges))

    def frames_after(seq: int) -> Iterator[Item]:
        left = [each for each in in_order if max(part.last for part in each) > seq]
        for stretch in items("Fill the store", left, _rows_of, "rows"):
            yield from _frames(snapshot, stretch, seq)

    try:
        loaded = load_empty_store(path, frames_after, limits, name=manifest.snapshot_id)
    except sqlite3.Error as error:  # the disk is full, above all
        raise problem_of(error) or error from error
    frames_count = loaded.counts.total() + loaded.refused.total()
    restored.rows_count = manifest.entries.count
    restored.retired_count = manifest.entries.count - manifest.lost_count - frames_count
    restored.written_count = loaded.counts[OutcomeKind.STORED]
    restored.refused.update(loaded.refused)
    if manifest.lost_count:
        restored.refused[Fault.FRAME_LOST] += manifest.lost_count


def _rows_of(stretch: Sequence[EntryRange]) -> int:
    return sum(each.count for each in stretch)


def stretches(ranges: Sequence[EntryRange]) -> Iterator[list[EntryRange]]:
    """The ranges in arrival order. Ranges overlap, and form one group, if a clock went back past midnight."""
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


def _frames(snapshot: Path, stretch: Sequence[EntryRange], after_seq: int) -> Iterator[Item]:
    """The frames of a stretch that follow `after_seq`, in arrival order."""
    files = [_numbered_frames(snapshot / each.file.path) for each in stretch]
    for seq, frame in heapq.merge(*files, key=itemgetter(0)):
        if frame is not None and seq > after_seq:
            yield seq, frame, ()


def _numbered_frames(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(seq, frame) of the rows of a file in arrival order."""
    table = pq.read_table(path, columns=["seq", "frame"], partitioning=None)
    for batch in table.sort_by("seq").to_batches(_GROUP_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _claims(
    snapshot: Path, each: ClaimRange, limits: Limits, restored: Restored
) -> Iterator[list[tuple[bytes, Claim]]]:
    """The claims of a file, each with the digest of its entry, in groups."""
    try:
        table = pq.read_table(snapshot / each.file.path, partitioning=None).sort_by("claim_no")
    except (pa.ArrowException, OSError):
        restored.refused[Fault.UNREADABLE_ROWS] += each.count
        return
    for batch in table.select(["digest", "hint", "claim_id"]).to_batches(_GROUP_ROWS):
        group: list[tuple[bytes, Claim]] = []
        for digest, hint, element in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            if claim_id(digest, hint) != element:
                restored.refused[Fault.DIGEST_DIFFERS] += 1
                continue
            try:
                group.append((digest, published_claim(hint, limits)))
            except Problem as problem:
                restored.refused[problem.code] += 1
        yield group


def _rows_to_write(
    snapshot: Path,
    stretch: Sequence[EntryRange],
    database: Database,
    recheck: Callable[[Sequence[int]], object],
    restored: Restored,
) -> Iterator[_Row]:
    """The rows of a stretch that the store lacks, in arrival order."""
    files = [_new_rows(snapshot, each, database, recheck, restored) for each in stretch]
    for _, row in heapq.merge(*files, key=itemgetter(0)):
        yield row


def _new_rows(
    snapshot: Path,
    each: EntryRange,
    database: Database,
    recheck: Callable[[Sequence[int]], object],
    restored: Restored,
) -> Iterator[tuple[int, _Row]]:
    """The rows of a file that the store lacks or cannot read, in arrival order with their numbers.

    The store first rechecks frames that cannot be read: it mends only frames that it has recorded as
    lost.
    """
    path, columns = snapshot / each.file.path, ["seq", "digest", "frame", "frame_bytes"]
    try:
        table = pq.read_table(path, columns=columns, partitioning=None)
    except (pa.ArrowException, OSError):
        restored.refused[Fault.UNREADABLE_ROWS] += each.count
        return
    lost = pc.fill_null(is_lost(table), fill_value=False)
    restored.rows_count += table.num_rows
    restored.retired_count += table["frame"].null_count - pc.sum(lost).as_py()
    digests = table["digest"].to_pylist()
    held, doubted = database.held(digests)
    if doubted:
        recheck(doubted)
    is_new = pa.array(digest not in held for digest in digests)
    if lost_count := pc.sum(pc.and_(is_new, lost)).as_py():
        restored.refused[Fault.FRAME_LOST] += lost_count
    wanted = table.filter(pc.and_(is_new, pc.is_valid(table["frame"]))).sort_by("seq")
    for batch in wanted.select(["seq", "digest", "frame"]).to_batches(_GROUP_ROWS):
        for seq, *row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield seq, _Row(*row)


class _Sink:
    """Prepares rows while the writer's thread commits the previous group."""

    def __init__(
        self, store: Store, writer: ThreadPoolExecutor, limits: Limits, restored: Restored
    ) -> None:
        self._store = store
        self._writer = writer
        self._limits = limits
        self._restored = restored
        self._group: list[NewEntry] = []
        self._group_bytes = 0
        self._writing: Future[None] | None = None

    def take(self, row: _Row) -> None:
        """Check a row; write its group once it is full."""
        try:
            entry = prepare(Publication(row.frame), self._limits)
        except Problem as problem:
            self._restored.refused[problem.code] += 1
            return
        if not isinstance(entry, NewEntry) or entry.digest != row.digest:
            self._restored.refused[Fault.DIGEST_DIFFERS] += 1
            return
        self._group.append(entry)
        self._group_bytes += len(row.frame)
        if len(self._group) >= _GROUP_ROWS or self._group_bytes >= _GROUP_BYTES:
            self._submit(self._write, self._group)
            self._group, self._group_bytes = [], 0

    def recheck(self, seqs: Sequence[int]) -> None:
        """Make the store read frames again that could not be read here."""
        self._finish()
        for start in range(0, len(seqs), _GROUP_ROWS):
            self._writer.submit(
                self._store.writer.recheck, seqs[start : start + _GROUP_ROWS]
            ).result()

    def take_claims(self, claims: Sequence[tuple[bytes, Claim]]) -> None:
        """Write claims on entries that the store has."""
        self._submit(self._write_claims, claims)

    def flush(self) -> None:
        """Write the rest, and wait until everything is on disk."""
        self._submit(self._write, self._group)
        self._group, self._group_bytes = [], 0
        self._finish()

    def _submit(self, work: Callable[[_Work], None], what: _Work) -> None:
        self._finish()
        self._writing = self._writer.submit(work, what)

    def _finish(self) -> None:
        if self._writing is not None:
            self._writing.result()
        self._writing = None

    def _write(self, group: Sequence[NewEntry]) -> None:
        results = self._store.writer.write(group)
        self._restored.written_count += sum(result.is_new for result in results)
        self._restored.mended_count += sum(result.is_mended for result in results)

    def _write_claims(self, claims: Sequence[tuple[bytes, Claim]]) -> None:
        self._restored.claims_count += self._store.writer.write_claims(claims)
