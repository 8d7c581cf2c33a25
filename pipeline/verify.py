"""`snapshot verify`: hash every row and compute every root again, without trusting the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import manifest as manifests
from pipeline.channels import different_channels
from pipeline.check_file import FileCheck, check_file
from pipeline.cluster import on_cluster
from pipeline.findings import Fault, Finding
from pipeline.layout import CHANNELS_FILE
from pipeline.live import compare_with_node
from pipeline.manifest import ClaimRange, EntryRange, Manifest
from pipeline.progress import step
from pipeline.proof import prove
from pipeline.publish import LOCK_NAME, record_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHANNEL_FINDINGS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a check; a snapshot without findings is as it was exported.

    Rows without a frame were retired, or lost before the export.
    """

    manifest: Manifest
    rows_count: int
    retired_count: int
    lost_count: int
    findings: tuple[Finding, ...]


def verify_snapshot(
    spark: SparkSession, snapshot: Path, node_url: str | None = None
) -> Verification:
    """Check the snapshot in folder `snapshot` and, if given, compare it with a live node.

    Raises ManifestError if the manifest is missing or damaged.
    """
    snapshot = snapshot.absolute()
    manifest = manifests.load(snapshot)
    ranges: list[EntryRange | ClaimRange] = [*manifest.entry_ranges, *manifest.claim_ranges]
    work = partial(check_file, snapshot, manifest.schema_version)
    checks: list[FileCheck] = on_cluster(
        spark, "Hash every row again", work, ranges, [each.count for each in ranges]
    )
    findings = [finding for check in checks for finding in check.findings]
    findings += _other_files(snapshot, manifest)
    if not findings:  # else Spark would fail on the damaged files
        findings += _totals(spark, snapshot, manifest)
        if node_url is not None:
            findings += compare_with_node(spark, snapshot, node_url)
    return Verification(
        manifest,
        sum(check.rows_count for check in checks),
        sum(check.retired_count for check in checks),
        sum(check.lost_count for check in checks),
        tuple(findings),
    )


def _other_files(snapshot: Path, manifest: Manifest) -> Iterator[Finding]:
    """Faults of the files without rows, and of files that the manifest does not list."""
    for record in (manifest.channels, *manifest.documents):
        path = snapshot / record.path
        if not path.is_file():
            yield Finding(Fault.MISSING_FILE, record.path, "the file is missing")
        elif record_of(snapshot, record.path) != record:
            detail = "the bytes differ from those exported"
            yield Finding(Fault.DAMAGED_FILE, record.path, detail)
    listed = manifest.paths() | {LOCK_NAME}
    for path in sorted(snapshot.rglob("*")):
        name = path.relative_to(snapshot).as_posix()
        if path.is_file() and name not in listed:
            yield Finding(Fault.UNLISTED_FILE, name, "the manifest does not list the file")


def _totals(spark: SparkSession, snapshot: Path, manifest: Manifest) -> Iterator[Finding]:
    """Faults across files: totals, channels, claims without an entry."""
    with step(spark, "Compute the roots again"):
        compare = partial(different_channels, snapshot, _CHANNEL_FINDINGS_MAX)
        proof = prove(spark, snapshot, manifest.entry_ranges, manifest.claim_ranges, compare)
    for what, found, expected in (
        ("entries", proof.entries, manifest.entries),
        ("claims", proof.claims, manifest.claims),
    ):
        if found != expected:
            yield Finding(Fault.ROOT_DIFFERS, what, f"{found} is not {expected}")
    for channel_id in proof.made:
        detail = f"the row of channel {channel_id!r} differs from its entries"
        yield Finding(Fault.ROOT_DIFFERS, CHANNELS_FILE, detail)
    for digest in proof.orphans:
        detail = f"a claim on {digest.hex()} leads to no entry of this snapshot"
        yield Finding(Fault.CLAIM_WITHOUT_ENTRY, "claims", detail)
