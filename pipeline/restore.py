"""`snapshot restore`: the entries and hint claims of a snapshot enter a store through its one door.

Every frame passes the checks of a publication, and must have the digest of its row. Rows enter in the
arrival order of the exporting store, so the first-seen variant of an ID stays the first. Entries that the
store has are duplicates, so a restore that was killed is completed by running it again. Hints come last,
because a claim needs its entry.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from app.entries import NewEntry, Outcome, OutcomeKind
from app.errors import Problem
from app.ingest.door import Door, open_door
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS, Limits
from pipeline import manifest as manifests
from pipeline.columns import CLAIMS, ENTRIES
from pipeline.manifest import ClaimRange, EntryRange
from pipeline.session import items
from pipeline.tables import is_lost
from pipeline.verify import Fault
from sdstore.sds.model import claim_id

_COLUMNS = pa.schema([ENTRIES.field(name) for name in ("seq", "digest", "frame_bytes", "frame")])
_READ_ROWS = 1_024  # made Python objects at a time
_LOST_ROWS = 256  # whose frames the store reads at a time
_FAULT_OF_STORE = 500  # an HTTP status: such a problem is not the row's

_Row = tuple[bytes, bytes]
"""A digest, and the frame that must have it."""


@dataclass(slots=True)
class Restored:
    """The result of a restore. `refused` counts rows and hints by the code of their refusal.

    `written_count` counts the entries that are new in the store, and those whose content it had lost.
    `claims_count` counts the hints that it has now. Retired rows have no frame to restore, and do not
    count as refused.
    """

    rows_count: int = 0
    retired_count: int = 0
    written_count: int = 0
    claims_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def restore_snapshot(snapshot: Path, url: str, limits: Limits = DEFAULT_LIMITS) -> Restored:
    """Load the snapshot in folder `snapshot` into the store at `url`, creating it if needed.

    Damaged rows are refused and counted. Raises ManifestError, `Problem` if the store cannot be written,
    and the `StoreError`s of `app.store.database` (a running node locks its SQLite file).
    """
    return asyncio.run(_restore(snapshot.absolute(), url, limits))


async def _restore(snapshot: Path, url: str, limits: Limits) -> Restored:
    manifest = manifests.load(snapshot)
    restored = Restored()
    async with open_door(url, limits) as door:
        publisher = _Publisher(door, restored)
        in_order = list(stretches(manifest.entry_ranges))
        for stretch in items("Restore", in_order, _rows_of, "rows"):
            table = _table(snapshot, stretch, restored)
            for rows in _batches(table, limits):
                await publisher.publish(rows)
            await publisher.finish()
            await _count_lost(door, table, restored)
        for each in items("Restore the hints", manifest.claim_ranges, attrgetter("count"), "hints"):
            for claims in _claims(snapshot, each, limits, restored):
                for problem in await door.publish_claims(claims):
                    if problem is None:
                        restored.claims_count += 1
                    else:
                        _count_refusal(problem, restored)
    return restored


class _Publisher:
    """Prepares a batch while the writer's thread commits the one before."""

    def __init__(self, door: Door, restored: Restored) -> None:
        self._door = door
        self._restored = restored
        self._under_way: asyncio.Task[list[Outcome | Problem]] | None = None

    async def publish(self, rows: Sequence[_Row]) -> None:
        """Check rows, and begin to write them once those before are on disk."""
        sound: list[NewEntry] = []
        prepared = await self._door.prepare_many([Publication(frame) for _, frame in rows])
        for (digest, _), each in zip(rows, prepared, strict=True):
            if isinstance(each, Problem):
                _count_refusal(each, self._restored)
            elif not isinstance(each, NewEntry) or each.digest != digest:
                self._restored.refused[Fault.DIGEST_DIFFERS] += 1
            else:
                sound.append(each)
        await self.finish()
        self._under_way = asyncio.create_task(self._door.publish_prepared(sound))

    async def finish(self) -> None:
        """Return once everything is on disk."""
        if self._under_way is None:
            return
        for outcome in await self._under_way:
            if isinstance(outcome, Problem):
                _count_refusal(outcome, self._restored)
            else:
                self._restored.written_count += outcome.kind is OutcomeKind.STORED
        self._under_way = None


def _count_refusal(problem: Problem, restored: Restored) -> None:
    if problem.status >= _FAULT_OF_STORE:
        raise problem
    restored.refused[problem.code] += 1


def _rows_of(stretch: Sequence[EntryRange]) -> int:
    return sum(each.count for each in stretch)


def stretches(ranges: Iterable[EntryRange]) -> Iterator[list[EntryRange]]:
    """The ranges in arrival order. Those of one portion of rows, written to several days, overlap if a
    clock went back past midnight; they form one group."""
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


def _table(snapshot: Path, stretch: Sequence[EntryRange], restored: Restored) -> pa.Table:
    """The rows of a stretch in arrival order, without the files that cannot be read."""
    tables = [_COLUMNS.empty_table()]
    for each in stretch:
        table = _read(snapshot / each.file.path, _COLUMNS)
        if table is None:
            restored.refused[Fault.UNREADABLE_ROWS] += each.count
        else:
            tables.append(table)
    rows = pa.concat_tables(tables).sort_by("seq")
    restored.rows_count += rows.num_rows
    restored.retired_count += rows["frame"].null_count - (pc.sum(is_lost(rows)).as_py() or 0)
    return rows


def _read(path: Path, columns: pa.Schema) -> pa.Table | None:
    try:
        table = pq.read_table(path, columns=columns.names, partitioning=None)
        return table.select(columns.names).cast(columns)
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None


def _batches(table: pa.Table, limits: Limits) -> Iterator[list[_Row]]:
    """The rows with frames, in batches that fill a group of the writer."""
    whole = table.filter(pc.is_valid(table["frame"])).select(["digest", "frame"])
    batch: list[_Row] = []
    batch_bytes = 0
    for part in whole.to_batches(_READ_ROWS):
        for row in zip(*(column.to_pylist() for column in part.columns), strict=True):
            size = len(row[1])
            if batch and (
                len(batch) == limits.group_items_max or batch_bytes + size > limits.group_bytes_max
            ):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(row)
            batch_bytes += size
    if batch:
        yield batch


async def _count_lost(door: Door, table: pa.Table, restored: Restored) -> None:
    """Count the rows whose content the exporting store had lost and this one lacks, too."""
    lost = table.filter(is_lost(table))["digest"]
    for start in range(0, len(lost), _LOST_ROWS):
        digests = lost[start : start + _LOST_ROWS].to_pylist()
        if missing := len(digests) - len(await door.store.entries.by_digest(digests)):
            restored.refused[Fault.FRAME_LOST] += missing


def _claims(
    snapshot: Path, each: ClaimRange, limits: Limits, restored: Restored
) -> Iterator[list[tuple[bytes, bytes]]]:
    """(digest of the entry, hint) of the claims of a file, in groups."""
    table = _read(snapshot / each.file.path, CLAIMS)
    if table is None:
        restored.refused[Fault.UNREADABLE_ROWS] += each.count
        return
    columns = table.sort_by("claim_no").select(["digest", "hint", "claim_id"])
    for batch in columns.to_batches(limits.group_items_max):
        columns_of = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        rows = [row for row in columns_of if row[1]]  # retired entries have no hints
        sound = [
            (digest, hint) for digest, hint, element in rows if claim_id(digest, hint) == element
        ]
        if len(sound) < len(rows):
            restored.refused[Fault.DIGEST_DIFFERS] += len(rows) - len(sound)
        yield sound
