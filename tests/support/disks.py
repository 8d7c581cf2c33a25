"""File systems that get full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 2 MB in memory until the end of the block; skips without the right to mount."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        # Lazily: after a failure a program may still use it.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def grow(disk: Path, size: str) -> None:
    """Give the file system another size, such as "4m"."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
