"""Writing through to the disk. Apart from its users because the command line must start quickly."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Sync a file to disk, or a folder, and with it the names of the files in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
