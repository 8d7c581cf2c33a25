"""Atomic publication of a folder: it is built beside its target and renamed once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from blake3 import blake3

from app.disk import sync_path
from pipeline.errors import PublishError
from pipeline.manifest import FileRecord

_PARTIAL = ".partial"
LOCK_NAME = ".lock"
"""The empty lock file. A process killed right after the rename leaves it in the published folder."""


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A working folder that becomes `target` when the block ends without an error.

    The folder's name is fixed (".NAME.partial") and its process holds a lock on it. So the next process
    (or `remove_abandoned`) finds and clears the leftovers of a killed one, and two processes never mix.
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
