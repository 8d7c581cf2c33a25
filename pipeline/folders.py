"""The folders of snapshots: published at once, listed, pruned.

A folder is built beside its target and renamed once. Every snapshot is complete, because files that it
shares with its parent are hard links. So any snapshot of a chain can be restored, and removing one does
not affect the others.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from secrets import token_hex

from blake3 import blake3

from app.server.disk import sync_path
from pipeline import manifest as manifests
from pipeline.manifest import FileRecord, Manifest, ManifestError, PipelineError

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
    candidates = [each.parent for each in folder.glob(f"*/{manifests.FILE_NAME}")]
    visible = [each for each in candidates if not each.name.startswith(".")]
    left_over = [Listed(each, None, _LEFT_OVER) for each in (*abandoned(folder), *_pruned(folder))]
    return sorted([*left_over, *map(_listed, visible)], key=_age)


def _listed(folder: Path) -> Listed:
    try:
        return Listed(folder, manifests.load(folder))
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
