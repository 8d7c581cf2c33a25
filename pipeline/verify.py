"""`snapshot verify`: hash every row and compute every root again, without trusting the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import node_client
from app.errors import Code
from pipeline import manifest as manifests
from pipeline.check import Fault, FileCheck, Finding, check_file
from pipeline.folders import LOCK_NAME, record_of
from pipeline.manifest import CHANNELS_FILE, ClaimRange, EntryRange, Manifest, Summary
from pipeline.roots import channel_summaries, prove
from pipeline.steps import on_cluster, step
from pipeline.tables import different_channels, stored_channels
from sdstore.client.blocking import StoreClient
from sdstore.client.errors import StoreError

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
            findings += compare_with_node(spark, snapshot, manifest, node_url)
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


# ---- comparison with a live node, by counts and roots of channels, without another export

_ATTEMPTS = 3  # a channel can grow between the requests
# Newer entries of a channel: beyond this, a new snapshot is cheaper than comparing this one. The bound
# also covers all channels that are compared together, whose newer entries are fetched into the driver.
NEWER_MAX = 100_000
_TOGETHER_MAX = 1_000  # channels, whose names become a condition of one read


def compare_with_node(
    spark: SparkSession, snapshot: Path, manifest: Manifest, node_url: str
) -> Iterator[Finding]:
    """The channels in which the node lacks entries of the snapshot.

    A channel of the node may have grown. Then as many of its newest entries are fetched as the node has
    more: together with the snapshot's entries they must have the node's root.
    """
    compare = partial(_compare_grown, spark, snapshot, manifest)
    with node_client(node_url) as client, step(spark, "Compare with the node"):
        grown: dict[str, int] = {}
        newer_count = 0
        for channel_id, count, root, *_ in stored_channels(snapshot):
            kept = Summary.of((count, root))
            live = _live(client, channel_id)
            finding = _fault(channel_id, kept, live)
            if finding is not None:
                yield finding
            elif live != kept:
                grown[channel_id] = kept.count
                newer_count += live.count - kept.count
            if len(grown) >= _TOGETHER_MAX or newer_count >= NEWER_MAX:
                yield from compare(client, grown)
                grown, newer_count = {}, 0
        yield from compare(client, grown)


def _live(client: StoreClient, channel_id: str) -> Summary:
    try:
        channel = client.channel(channel_id)
    except StoreError as error:
        if error.code == Code.NOT_FOUND:
            return Summary.of((0, b""))
        raise
    return Summary.of((channel.count, channel.root or b""))


def _fault(channel_id: str, kept: Summary, live: Summary) -> Finding | None:
    """The fault that counts and roots show; None if they are equal or the node has more entries."""
    where, newer_count = f"channel {channel_id!r}", live.count - kept.count
    if newer_count < 0:
        detail = f"the node has {live.count} entries, the snapshot {kept.count}"
        return Finding(Fault.NODE_LACKS_ENTRIES, where, detail)
    if newer_count > NEWER_MAX:
        detail = f"the node has {newer_count} more entries: export a newer snapshot"
        return Finding(Fault.NODE_DIFFERS, where, detail)
    if newer_count == 0 and live != kept:
        return Finding(Fault.NODE_DIFFERS, where, "equal counts, but different roots")
    return None


def _compare_grown(
    spark: SparkSession,
    snapshot: Path,
    manifest: Manifest,
    client: StoreClient,
    grown: dict[str, int],
) -> Iterator[Finding]:
    """`grown`: the snapshot's count of each channel that is larger on the node."""
    for _ in range(_ATTEMPTS):
        if not grown:
            return
        live = {channel_id: _live(client, channel_id) for channel_id in grown}
        newer = {
            channel_id: list(_newest(client, channel_id, live[channel_id].count - kept_count))
            for channel_id, kept_count in grown.items()
        }
        both = channel_summaries(spark, snapshot, manifest.entry_ranges, newer)
        grown = {each: count for each, count in grown.items() if both.get(each) != live[each]}
    for channel_id in grown:
        detail = "the node's root differs from that of the snapshot's entries and the newer ones"
        yield Finding(Fault.NODE_DIFFERS, f"channel {channel_id!r}", detail)


def _newest(client: StoreClient, channel_id: str, count: int) -> Iterator[bytes]:
    newest = client.messages(channel_id, order="arrival", direction="desc")
    return (message.digest for message in islice(newest, max(count, 0)))
