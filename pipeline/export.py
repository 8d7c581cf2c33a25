"""`snapshot export`: a store's entries and hint claims as Parquet, with the roots that prove them.

Spark's tasks read sequence ranges of the database and write the files themselves: rows go from SQL
through Arrow to Parquet without passing through the JVM, and a task never holds more than one
file's rows. Files that are unchanged since the parent snapshot are shared with it by hard links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from pipeline import manifest as manifests
from pipeline.channels import write_channels
from pipeline.database import open_database
from pipeline.documents import write_documents
from pipeline.errors import ParentMismatchError, PipelineError
from pipeline.increment import CLAIMS_TABLE, ENTRIES_TABLE, Part, Route, export_tables
from pipeline.limits import RANGE_ENTRIES
from pipeline.manifest import ClaimRange, EntryRange, Manifest, Parent, Watermark
from pipeline.progress import step
from pipeline.proof import prove
from pipeline.publish import keep_only, published, write_file
from pipeline.scan import Interval, Scan
from sdstore.sds.codec import DECODER_VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    watermark: Watermark
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
