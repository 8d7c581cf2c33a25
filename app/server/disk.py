"""Writing through to the disk. Apart from its users because the command line must start quickly."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_path(path: Path) -> None:
    """Sync a file to disk, or a folder, and with it the names of the files in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file. After a loss of power it is the old one or the new one. Raises OSError.

    A new file is for its user alone. One that is replaced keeps its owner and mode, also if another user
    replaces it, or the file stays and PermissionError is raised.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        _write_new(new, content, like=path)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)  # a part of a file, as on a full disk
        raise
    sync_path(path.parent)


def kept_once(path: Path, content: bytes) -> bytes:
    """The content of a secret file, which is made with `content` if it is not there. Raises OSError."""
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        _write_new(fresh, content)
        # A hard link appears complete, and fails if another worker was first.
        with suppress(FileExistsError):
            path.hardlink_to(fresh)
        fresh.unlink()
    return path.read_bytes()


def _write_new(path: Path, content: bytes, like: Path | None = None) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if like is not None:
            _take_owner(descriptor, like)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _take_owner(descriptor: int, like: Path) -> None:
    """Give a new file the owner and mode of another one, or those of its folder's owner if there is none."""
    try:
        known = like.stat()
    except FileNotFoundError:
        folder = like.parent.stat()
        if os.geteuid() == 0:  # a folder of the node's user: the file is for that user
            os.fchown(descriptor, folder.st_uid, folder.st_gid)
        return
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (known.st_uid, known.st_gid):
        os.fchown(descriptor, known.st_uid, known.st_gid)
    os.fchmod(descriptor, known.st_mode & 0o777)
