"""A folder that appears whole or not at all: built beside its place, published by one rename."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from pipeline.errors import PublishError
from pipeline.manifest import FileRecord

_LOCK_NAME = ".lock"


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A working folder that becomes `target` when the block ends without an error.

    The folder's name is fixed (".NAME.partial") and locked while its maker lives, so what a killed
    process left is found and cleared by the next one, and two makers never mix.
    """
    require_free(target)
    partial = target.parent / f".{target.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / _LOCK_NAME).open("w") as lock:
        _take(lock.fileno(), partial)
        try:
            _clear(partial)
            yield partial
            _sync_folders(partial)
            partial.rename(target)
            # Not before: without the lock another maker could clear the folder under our hands.
            (target / _LOCK_NAME).unlink()
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def require_free(target: Path) -> None:
    """Raises PublishError where `target` exists."""
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
        elif child.name != _LOCK_NAME:
            child.unlink()


def write_file(root: Path, path: str, content: bytes | memoryview) -> FileRecord:
    """Write `content` to `root`/`path` durably; a half-written file never has that name."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    # The name holds the process: a task that Spark runs twice at once writes two files, not one.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    return FileRecord(path, len(content), blake3(content).hexdigest())


def record_of(root: Path, path: str) -> FileRecord:
    """What the record of the file `root`/`path` would be, as it lies there."""
    file = root / path
    return FileRecord(path, file.stat().st_size, blake3().update_mmap(file).hexdigest())


def share_file(source: Path, target: Path, path: str) -> bool:
    """Give snapshot `target` the file `path` of snapshot `source`; False if it had to be copied."""
    destination = target / path
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source / path, destination)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source / path, destination)
        return False
    return True


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync(Path(folder))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
