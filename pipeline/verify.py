"""`snapshot verify`: hash every row and compute every root again, without trusting the manifest.

Rows are hashed even if the bytes of a file match the manifest: a manifest can be forged, but a row cannot be
made to hash to another digest. Spark tasks check one table file each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from app.errors import Code
from pipeline import manifest as manifests
from pipeline.columns import CLAIMS, ENTRIES, ENTRIES_1, history_array
from pipeline.manifest import (
    CHANNELS_FILE,
    LOCK_NAME,
    ClaimRange,
    EntryRange,
    Manifest,
    Summary,
    record_of,
)
from pipeline.session import on_cluster, step
from pipeline.tables import (
    channel_summaries,
    claim_facts,
    different_channels,
    entry_facts,
    is_lost,
    prove,
    stored_channels,
)
from sdstore.client.clients import StoreClient
from sdstore.errors import StoreError
from sdstore.sds.codec import decode
from sdstore.sds.model import Message, MessageError, claim_id, entry_digest, frame_hash

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Fault(StrEnum):
    """Stable names of the faults (docs/pipeline.md explains each)."""

    MISSING_FILE = "missing_file"
    UNLISTED_FILE = "unlisted_file"
    DAMAGED_FILE = "damaged_file"
    UNREADABLE_ROWS = "unreadable_rows"
    FRAME_REFUSED = "frame_refused"
    FRAME_HASH_DIFFERS = "frame_hash_differs"
    DIGEST_DIFFERS = "digest_differs"
    COLUMN_DIFFERS = "column_differs"
    FRAME_LOST = "frame_lost"
    OUTSIDE_OF_RANGE = "outside_of_range"
    SUMMARY_DIFFERS = "summary_differs"
    ROOT_DIFFERS = "root_differs"
    CLAIM_WITHOUT_ENTRY = "claim_without_entry"
    NODE_LACKS_ENTRIES = "node_lacks_entries"
    NODE_DIFFERS = "node_differs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault and its place: a file of the snapshot, or a channel of the node.

    `row` counts from 0 within the file.
    """

    fault: Fault
    where: str
    detail: str
    row: int | None = None
    message_id: str | None = None

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        message = "" if self.message_id is None else f", message {self.message_id!r}"
        return f"{self.where}{row}{message}: {self.fault}: {self.detail}"


FINDINGS_PER_FILE_MAX = 1_000  # a file with more findings is lost anyway


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The findings of one file, at most `FINDINGS_PER_FILE_MAX`, and the number of rows read.

    Rows without a frame were retired, or lost before the export.
    """

    findings: tuple[Finding, ...]
    rows_count: int = 0
    retired_count: int = 0
    lost_count: int = 0


def check_file(snapshot: Path, schema_version: int, expected: EntryRange | ClaimRange) -> FileCheck:
    """Compare the file of `expected` with the manifest (of `schema_version`) and with itself."""
    path = expected.file.path
    try:
        content = (snapshot / path).read_bytes()
    except OSError as error:
        return FileCheck((Finding(Fault.MISSING_FILE, path, str(error)),))
    tables: list[tuple[int, pa.Table]] = []
    schema = CLAIMS
    if isinstance(expected, EntryRange):
        schema = ENTRIES_1 if schema_version == 1 else ENTRIES
    findings = tuple(islice(_findings(content, expected, schema, tables), FINDINGS_PER_FILE_MAX))
    rows_count = sum(table.num_rows for _, table in tables)
    if isinstance(expected, ClaimRange):
        return FileCheck(findings, rows_count)
    without = sum(table["frame"].null_count for _, table in tables)
    lost = sum(pc.sum(is_lost(table)).as_py() or 0 for _, table in tables)
    return FileCheck(findings, rows_count, without - lost, lost)


def _findings(
    content: bytes,
    expected: EntryRange | ClaimRange,
    schema: pa.Schema,
    tables: list[tuple[int, pa.Table]],
) -> Iterator[Finding]:
    """The faults of a file; `tables` receives (first row, rows) of each part that can be read."""
    path = expected.file.path
    if (len(content), blake3(content).hexdigest()) != (expected.file.bytes, expected.file.digest):
        yield Finding(Fault.DAMAGED_FILE, path, "the bytes differ from those exported")
    is_entries = isinstance(expected, EntryRange)
    yield from _read(content, path, schema, tables)
    for first_row, table in tables:
        faults = _entry_faults(table) if is_entries else _claim_faults(table)
        for row, fault, detail in faults:
            message_id = table["message_id"][row].as_py() if is_entries else None
            yield Finding(fault, path, detail, first_row + row, message_id)
    if tables:
        whole = pa.concat_tables([table for _, table in tables])
        yield from _summary_faults(whole, expected)


def _read(
    content: bytes, path: str, schema: pa.Schema, tables: list[tuple[int, pa.Table]]
) -> Iterator[Finding]:
    """Read row group by row group, so that damage in one does not hide the others.

    Page checksums are not checked: where a page can be read, hashing finds the exact row.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        yield Finding(Fault.UNREADABLE_ROWS, path, f"not a Parquet file: {error}")
        return
    first_row = 0
    for number in range(file.num_row_groups):
        rows_count = file.metadata.row_group(number).num_rows
        try:
            table = file.read_row_group(number)
            table.validate(full=True)
            tables.append((first_row, table.select(schema.names).cast(schema)))
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            rows = f"rows {first_row} to {first_row + rows_count - 1} cannot be read"
            yield Finding(Fault.UNREADABLE_ROWS, path, f"{rows}: {error}", first_row)
        first_row += rows_count


_Fault = tuple[int, Fault, str]
_READ_FROM_FRAME = (
    "channel_id",
    "message_id",
    "sender_id",
    "lamport_timestamp",
    "dialect",
    "content_bytes",
    "frame_bytes",
)
_SENDER, _CONTENT_BYTES = 2, 5


def _entry_faults(table: pa.Table) -> Iterator[_Fault]:
    """Hash every frame again, and compare the columns with its fields."""
    frames, digests, hashes = (table[c].to_pylist() for c in ("frame", "digest", "frame_hash"))
    columns = zip(*(table[name].to_pylist() for name in _READ_FROM_FRAME), strict=True)
    messages: list[Message | None] = []
    for row, (frame, columns_here) in enumerate(zip(frames, columns, strict=True)):
        if frame is None:  # nothing to hash: only the root covers this row
            messages.append(None)
            if (columns_here[_SENDER], columns_here[_CONTENT_BYTES]) != ("", 0):
                yield row, Fault.COLUMN_DIFFERS, "a column has a value without a frame"
            continue
        try:
            message, dialect = decode(frame)
        except MessageError as error:
            messages.append(None)
            yield row, Fault.FRAME_REFUSED, str(error)
            continue
        messages.append(message)
        if frame_hash(frame) != hashes[row]:
            yield row, Fault.FRAME_HASH_DIFFERS, f"frame_hash is {hashes[row].hex()}"
        if entry_digest(message) != digests[row]:
            yield row, Fault.DIGEST_DIFFERS, f"digest is {digests[row].hex()}"
        if columns_here != _expected_columns(message, dialect.label, frame):
            yield row, Fault.COLUMN_DIFFERS, "a column differs from the frame"
    yield from _content_faults(table, messages)


def _expected_columns(message: Message, dialect: str, frame: bytes) -> tuple[Any, ...]:
    return (
        message.channel_id,
        message.message_id,
        message.sender_id,
        message.lamport_timestamp,
        dialect,
        len(message.content),
        len(frame),
    )


def _content_faults(table: pa.Table, messages: list[Message | None]) -> Iterator[_Fault]:
    contents = [None if message is None else message.content for message in messages]
    for name, expected in (
        ("causal_history", history_array(messages)),
        ("content", pa.array(contents, pa.binary())),
    ):
        if name not in table.column_names:  # schema version 1
            continue
        stored = table[name].combine_chunks()
        if not stored.equals(expected):
            for row in range(len(messages)):
                if stored[row] != expected[row]:
                    yield row, Fault.COLUMN_DIFFERS, f"{name} differs from the frame"


def _claim_faults(table: pa.Table) -> Iterator[_Fault]:
    columns = (table[name].to_pylist() for name in ("digest", "hint", "claim_id"))
    for row, (digest, hint, element) in enumerate(zip(*columns, strict=True)):
        # The hint of a claim on a retired entry is gone.
        if hint and claim_id(digest, hint) != element:
            yield row, Fault.DIGEST_DIFFERS, f"claim_id is {element.hex()}"


def _summary_faults(table: pa.Table, expected: EntryRange | ClaimRange) -> Iterator[Finding]:
    path = expected.file.path
    try:
        facts = entry_facts(table) if isinstance(expected, EntryRange) else claim_facts(table)
    except ValueError as error:
        yield Finding(Fault.ROOT_DIFFERS, path, str(error))
        return
    found = facts["count"], facts["root"]
    if found != (expected.count, expected.root):
        detail = f"{found[0]} rows with root {found[1]}, not {expected.count} with {expected.root}"
        yield Finding(Fault.ROOT_DIFFERS, path, detail)
        return  # with rows missing, the other facts differ too
    for name, value in facts.items():
        if getattr(expected, name) != value:
            detail = f"{name} is {value!r}, not {getattr(expected, name)!r}"
            yield Finding(Fault.SUMMARY_DIFFERS, path, detail)
    if not _is_inside(table, expected):
        yield Finding(Fault.OUTSIDE_OF_RANGE, path, "the file contains rows of another range")


def _is_inside(table: pa.Table, expected: EntryRange | ClaimRange) -> bool:
    numbers = table["seq" if isinstance(expected, EntryRange) else "claim_no"].to_numpy()
    if numbers.min() < expected.first or numbers.max() > expected.last:
        return False
    if isinstance(expected, ClaimRange):
        return True
    days = pc.unique(table["received_at"].cast(pa.date32(), safe=False)).to_pylist()
    return [day.isoformat() for day in days] == [expected.day]


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
    from app.cli.output import node_client  # noqa: PLC0415 - tasks of Spark have no command line

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
    newest = client.messages(channel_id, order="arrival", direction="desc", bloom_filter=False)
    return (message.digest for message in islice(newest, max(count, 0)))
