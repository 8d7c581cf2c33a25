"""A snapshot on disk: its manifest, and its folder, which is published at once, listed, pruned.

The manifest names the files and contents, proved by roots, in one JSON file. It is canonical: it is exactly
what `Manifest.to_bytes` writes, and its last member is the BLAKE3 of everything before it. So any changed
byte is detected.

A folder is built beside its target and renamed once. Every snapshot is complete, because files that it
shares with its parent are hard links. So any snapshot of a chain can be restored, and removing one does
not affect the others."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar, Self, TypeVar

from blake3 import blake3

from app.server.disk import sync_path

FILE_NAME = "manifest.json"
ENTRIES_FOLDER = "entries"
CLAIMS_FOLDER = "claims"
CHANNELS_FILE = "channels.parquet"
LOGS_FILE = "logs.parquet"  # of `snapshot logs`, in a folder of its own
README_FILE = "README.md"
PROTO_FILES = ("proto/sds.proto", "proto/sds_raw.proto")


RANGE_ENTRIES = 65_536
"""Rows: 20 MB of 300-byte frames. 10^10 entries make 153,000 files and a manifest of 95 MB."""

RANGE_BYTES = 96 * 1024 * 1024
"""Bytes of rows in memory in one task; writing them takes about three times as much."""

FORMAT = "sdstore snapshot"
SCHEMA_VERSION = 2
"""Version of the manifest and the tables. Version 1, which can be read but not written, has no column
`content` and no sums in the watermark."""
SCHEMA_VERSIONS_READ = (1, SCHEMA_VERSION)
MANIFEST_BYTES_MAX = 256 * 1024 * 1024  # 400,000 ranges: 2.6 * 10^10 entries
_Range = TypeVar("_Range", "EntryRange", "ClaimRange")
_OTHER_FILES = {CHANNELS_FILE, README_FILE, *PROTO_FILES}
_SEAL = ',\n "manifest_digest": "'


class PipelineError(Exception):
    """Base class of the errors of the snapshot verbs; the text says what happened. `code` is stable."""

    code: ClassVar[str] = "pipeline_failed"


class ManifestError(PipelineError):
    """The folder is not a snapshot, its manifest is damaged or of an unknown version, or a file cannot
    be read."""

    code = "damaged_snapshot"


def entries_path(day: str, first: int, last: int) -> str:
    """The file of the entries from `first` to `last` that arrived on `day`."""
    return f"{ENTRIES_FOLDER}/day={day}/{first:019d}-{last:019d}.parquet"


def claims_path(first: int, last: int) -> str:
    """The file of the claims from `first` to `last`."""
    return f"{CLAIMS_FOLDER}/{first:019d}-{last:019d}.parquet"


@dataclass(frozen=True, slots=True)
class Summary:
    """(count, root) of a set of elements; `root` is BLAKE3 over the sorted elements, in hex."""

    count: int
    root: str

    @classmethod
    def of(cls, count_and_root: tuple[int, bytes]) -> Self:
        """From a count and a root (`app.roots`)."""
        count, root = count_and_root
        return cls(count, root.hex())


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the snapshot; `path` is relative to it, `digest` is BLAKE3 of its bytes, in hex."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class EntryRange:
    """The entries with first ≤ seq ≤ last that arrived on `day` (UTC), and their file.

    `frame_bytes` is the sum over the rows; it falls when content is retired, which changes neither
    count nor root. `lost_count` counts the rows whose frame the store had lost. Readers can skip a file
    by its channel and Lamport bounds.
    """

    day: str
    first: int
    last: int
    count: int
    root: str
    frame_bytes: int
    lost_count: int
    first_channel_id: str
    last_channel_id: str
    lamport_first: int
    lamport_last: int
    file: FileRecord


@dataclass(frozen=True, slots=True)
class ClaimRange:
    """The hint claims with first ≤ claim_no ≤ last, and their file."""

    first: int
    last: int
    count: int
    root: str
    file: FileRecord


@dataclass(frozen=True, slots=True)
class ExportEnd:
    """The end of the export's read: the highest committed sequence and claim numbers.

    The sums of the store's arrival chains there, 64 bits as hex, show whether a store still has the
    history that the snapshot was made from.
    """

    seq: int
    claim_no: int
    entry_sum: str = ""  # empty in version 1
    claim_sum: str = ""


@dataclass(frozen=True, slots=True)
class Parent:
    """The snapshot that this one was made from, and its watermark."""

    snapshot_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to find, check and compare the rows of a snapshot."""

    snapshot_id: str
    created_at: str
    software: str
    decoder_version: int
    database_id: str
    parent: Parent | None
    channel_ids: tuple[str, ...] | None  # the interest; None is every channel
    watermark: ExportEnd
    entries: Summary
    claims: Summary
    entry_ranges: tuple[EntryRange, ...]
    claim_ranges: tuple[ClaimRange, ...]
    channels: FileRecord
    documents: tuple[FileRecord, ...] = ()
    bytes_written: int = 0  # table bytes that this export wrote; the rest is shared with the parent
    format: str = field(default=FORMAT)
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def table_bytes(self) -> int:
        """Bytes of the files that hold entries and claims."""
        entries = sum(each.file.bytes for each in self.entry_ranges)
        return entries + sum(each.file.bytes for each in self.claim_ranges)

    @property
    def lost_count(self) -> int:
        """Entries whose frame the exporting store had lost."""
        return sum(each.lost_count for each in self.entry_ranges)

    def files(self) -> Iterable[FileRecord]:
        """Every file of the snapshot but the manifest itself."""
        yield from (each.file for each in self.entry_ranges)
        yield from (each.file for each in self.claim_ranges)
        yield self.channels
        yield from self.documents

    def paths(self) -> set[str]:
        """The paths of all files, the manifest's too."""
        return {FILE_NAME, *(record.path for record in self.files())}

    def to_bytes(self) -> bytes:
        """The canonical JSON, sealed with its own digest."""
        members = asdict(self)
        if self.schema_version == 1:
            members["watermark"] = {"seq": self.watermark.seq, "claim_no": self.watermark.claim_no}
        ordered = {"format": members.pop("format"), "schema_version": members.pop("schema_version")}
        body = json.dumps(ordered | members, ensure_ascii=False, indent=1)[: -len("\n}")]
        sealed = body.encode()
        return sealed + f'{_SEAL}{blake3(sealed).hexdigest()}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The manifest in `raw`; ManifestError if it is damaged or of an unknown version."""
        try:
            members = json.loads(raw)
            _check_version(members)
            del members["manifest_digest"]
            manifest = cls(**_nested(members))
            if manifest.to_bytes() != raw:
                raise ManifestError("the manifest is damaged: it does not match its own digest")
            manifest.check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(f"the manifest is damaged: {error}") from error
        return manifest

    def check(self) -> None:
        """Raises ManifestError if it contradicts itself, or lists a path that is not of a snapshot."""
        entries = sum(each.count for each in self.entry_ranges)
        claims = sum(each.count for each in self.claim_ranges)
        if (entries, claims) != (self.entries.count, self.claims.count):
            raise ManifestError("the ranges do not add up to the totals")
        read_up_to: dict[str, int] = {}
        ranges: tuple[EntryRange | ClaimRange, ...] = (*self.entry_ranges, *self.claim_ranges)
        for each in ranges:
            _check_range(each)
            day = each.day if isinstance(each, EntryRange) else ""
            if each.first <= read_up_to.get(day, -1):
                raise ManifestError(f"{each.file.path} overlaps the range before it")
            read_up_to[day] = each.last
        for record in (self.channels, *self.documents):
            if record.path not in _OTHER_FILES:
                raise ManifestError(f"{record.path} is not a file of a snapshot")


def load(snapshot: Path) -> Manifest:
    """The manifest of the snapshot in folder `snapshot`; ManifestError if it has no valid one."""
    path = snapshot / FILE_NAME
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            raise ManifestError(f"{path} is larger than any manifest")
        return Manifest.from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{snapshot} is not a snapshot: it has no {FILE_NAME}") from None
    except OSError as error:
        raise ManifestError(f"{snapshot} is not a snapshot: {error}") from error


def _check_version(members: dict[str, Any]) -> None:
    if members["format"] != FORMAT:
        raise ManifestError(f"not a snapshot but {members['format']!r}")
    if members["schema_version"] not in SCHEMA_VERSIONS_READ:
        raise ManifestError(
            f"unknown schema version {members['schema_version']}: use a newer sdstore"
        )


def _check_range(each: EntryRange | ClaimRange) -> None:
    if isinstance(each, EntryRange):
        path = entries_path(date.fromisoformat(each.day).isoformat(), each.first, each.last)
    else:
        path = claims_path(each.first, each.last)
    if each.file.path != path:
        raise ManifestError(f"{each.file.path} is not the file of its range")
    if not (each.first <= each.last and each.count > 0):
        raise ManifestError(f"{path} has no rows")


def _nested(members: dict[str, Any]) -> dict[str, Any]:
    """The members of the JSON, with records instead of objects."""
    parent, channel_ids = members["parent"], members["channel_ids"]
    return members | {
        "parent": None if parent is None else Parent(**parent),
        "channel_ids": None if channel_ids is None else tuple(channel_ids),
        "watermark": ExportEnd(**members["watermark"]),
        "entries": Summary(**members["entries"]),
        "claims": Summary(**members["claims"]),
        "entry_ranges": tuple(_with_file(EntryRange, each) for each in members["entry_ranges"]),
        "claim_ranges": tuple(_with_file(ClaimRange, each) for each in members["claim_ranges"]),
        "channels": FileRecord(**members["channels"]),
        "documents": tuple(FileRecord(**each) for each in members["documents"]),
    }


def _with_file(cls: type[_Range], members: dict[str, Any]) -> _Range:
    return cls(**members | {"file": FileRecord(**members["file"])})


_PARTIAL = ".partial"
LOCK_NAME = ".lock"
"""The empty lock file. A process killed right after the rename leaves it in the published folder."""

_PRUNED = ".pruned"
_LEFT_OVER = "left by an export or a prune that was killed: `prune` removes it"


class PublishError(PipelineError):
    """The folder exists already, or another process is making it."""

    code = "target_not_free"


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A working folder that becomes `target` when the block ends without an error.

    The folder's name is fixed (".NAME.partial") and its process holds a lock on it. So the next process
    (or `abandoned`) finds and clears the leftovers of a killed one, and two processes never mix.
    """
    require_free(target)
    partial = target.parent / f".{target.name}{_PARTIAL}"
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / LOCK_NAME).open("w") as lock:
        _take(lock.fileno(), partial)
        try:
            _clear(partial)
            yield partial
            _sync_all(partial)
            partial.rename(target)
            # Only with the lock held: without it another process could clear the folder meanwhile.
            (target / LOCK_NAME).unlink()
            sync_path(target)
            sync_path(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def abandoned(parent: Path) -> Iterator[Path]:
    """The working folders in `parent` whose processes were killed, each locked while the caller has it."""
    for lock_path in sorted(parent.glob(f".*{_PARTIAL}/{LOCK_NAME}")):
        # Locked or published meanwhile: its process is alive.
        with suppress(PublishError, FileNotFoundError), lock_path.open("r+") as lock:
            _take(lock.fileno(), lock_path.parent)
            yield lock_path.parent


def require_free(target: Path) -> None:
    """Raises PublishError if `target` exists."""
    if target.exists():
        raise PublishError(f"{target} exists already")


def _take(lock: int, partial: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PublishError(f"another process is writing {partial}") from None


def _clear(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        elif child.name != LOCK_NAME:
            child.unlink()


def keep_only(folder: Path, paths: Collection[str]) -> None:
    """Remove all other files in `folder`: drafts of killed tasks."""
    kept = {*paths, LOCK_NAME}
    for file in list(folder.rglob("*")):
        if file.is_file() and file.relative_to(folder).as_posix() not in kept:
            file.unlink()


def draft_of(target: Path) -> Path:
    """A random path to write to before a rename to `target`.

    Spark may run a task twice at once, on one machine or two; the random names keep the files apart.
    """
    return target.with_name(f".{target.name}.{token_hex(8)}")


def write_file(root: Path, path: str, content: bytes | memoryview) -> FileRecord:
    """Write `content` to `root`/`path` durably; a half-written file never has that name."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(target)
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(target)
    return FileRecord(path, len(content), blake3(content).hexdigest())


def record_of(root: Path, path: str) -> FileRecord:
    """The record of the existing file `root`/`path`."""
    file = root / path
    return FileRecord(path, file.stat().st_size, blake3().update_mmap(file).hexdigest())


def share_file(source: Path, target: Path, path: str, *, copies: bool = False) -> bool:
    """Link the file `path` of snapshot `source` into `target`; False if it was copied."""
    destination = target / path
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not copies:
        # Fails on another file system, or one without links.
        with suppress(OSError):
            os.link(source / path, destination)
            return True
    shutil.copyfile(source / path, destination)
    return False


def _sync_all(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_path(Path(folder))


# ---- list and prune


@dataclass(frozen=True, slots=True)
class Listed:
    """A folder with a manifest, or what a killed export left. If it is damaged or unfinished, `manifest`
    is None and `fault` says why."""

    folder: Path
    manifest: Manifest | None
    fault: str | None = None


def list_snapshots(folder: Path) -> list[Listed]:
    """The snapshots in `folder`, oldest first; damaged and unfinished ones come before all others."""
    candidates = [each.parent for each in folder.glob(f"*/{FILE_NAME}")]
    visible = [each for each in candidates if not each.name.startswith(".")]
    left_over = [Listed(each, None, _LEFT_OVER) for each in (*abandoned(folder), *_pruned(folder))]
    return sorted([*left_over, *map(_listed, visible)], key=_age)


def _listed(folder: Path) -> Listed:
    try:
        return Listed(folder, load(folder))
    except ManifestError as error:
        return Listed(folder, None, str(error))


def _age(listed: Listed) -> tuple[str, str]:
    created_at = "" if listed.manifest is None else listed.manifest.created_at
    return created_at, listed.folder.name


def prune_snapshots(folder: Path, keep_count: int) -> list[Path]:
    """Remove all but the newest `keep_count` snapshots in `folder`; returns the removed ones.

    Damaged ones are neither counted nor removed: the operator must look at them. A snapshot loses its
    name before its files, so a killed prune leaves no partial snapshot. Leftovers of killed prunes and
    exports are removed too, and come first in the result.
    """
    removed = []
    for left_over in chain(abandoned(folder), _pruned(folder)):  # one by one, under its lock
        shutil.rmtree(left_over)
        removed.append(left_over)
    whole = [each.folder for each in list_snapshots(folder) if each.manifest is not None]
    doomed = whole[: max(len(whole) - keep_count, 0)]
    for each in doomed:
        hidden = each.rename(each.with_name(f".{each.name}{_PRUNED}"))
        sync_path(folder)
        shutil.rmtree(hidden)
    return [*removed, *doomed]


def _pruned(folder: Path) -> list[Path]:
    """What killed prunes left."""
    return sorted(folder.glob(f".*{_PRUNED}"))
