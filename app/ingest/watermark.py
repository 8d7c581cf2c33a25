"""The disk watermark: the node stops taking messages before the disk is full, and goes on serving.

A full disk can make more fail than a publication: the write-ahead log of the database cannot be emptied,
and a backup or a repair has no room. Below the watermark every new message is refused as on a full disk,
and the node offers peers no pushes. It recovers by itself.

The node watches the disk of the SQLite database. With PostgreSQL, whose disk may be another machine's, it
watches that of the data directory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.errors import Code, Problem
from app.server.limits import MIB

LOOK_S = 0.2
"""From one look at the disk to the next, at most: a call of `statvfs`, some 2 microseconds."""

GROWTH = 4
"""Bytes on disk for a byte of a frame, at most: the row, its indexes, and both in the write-ahead log."""

MARGIN = 1 / 16
"""Part of the watermark that must be free on top before messages are taken again."""

_log = logging.getLogger(__name__)


class Watermark(Collector):
    """Whether the disk of a folder has `free_bytes_min` bytes left; 0 switches it off."""

    def __init__(self, folder: Path, free_bytes_min: int) -> None:
        self.folder = folder
        self.free_bytes: int | None = None
        self._free_bytes_min = free_bytes_min
        self._is_low = False
        self._looked_s = float("-inf")
        self._taken_bytes = 0

    @property
    def is_low(self) -> bool:
        """Whether messages are refused now."""
        if not self._free_bytes_min:
            return False
        room = (self.free_bytes or 0) - self._free_bytes_min
        if time.monotonic() - self._looked_s > LOOK_S or self._taken_bytes * GROWTH > room:
            self.look()
        return self._is_low

    def look(self) -> None:
        """Look at the disk, and log a change."""
        self._looked_s = time.monotonic()
        self._taken_bytes = 0
        try:
            disk = os.statvfs(self.folder)
        except OSError:
            return  # the write itself reports what is wrong
        free = self.free_bytes = disk.f_bavail * disk.f_frsize
        least = self._free_bytes_min
        if not self._is_low and free < least:
            self._is_low = True
            _log.warning("messages are refused: %s", self.reason)
        elif self._is_low and free >= least + least * MARGIN:
            self._is_low = False
            _log.info("messages are taken again: %d MiB free on %s", free // MIB, self.folder)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        self.look()
        free_bytes = self.free_bytes or 0
        yield GaugeMetricFamily("sdstore_disk_free_bytes", "Bytes free on the disk", free_bytes)
        yield GaugeMetricFamily(
            "sdstore_disk_low",
            "1 while the node takes no messages because the disk is nearly full",
            self.is_low,
        )

    @property
    def reason(self) -> str:
        """Why messages are refused."""
        free, least = (self.free_bytes or 0) / MIB, self._free_bytes_min / MIB
        return (
            f"{self.folder} has {free:.1f} MiB free; messages are refused below {least:.1f} "
            f"(disk_free_min_bytes), and taken again from {least * (1 + MARGIN):.1f}"
        )

    def check(self, frames_bytes: int = 0) -> None:
        """Raise `disk_full` below the watermark; `frames_bytes` are to be written otherwise."""
        self._taken_bytes += frames_bytes
        if self.is_low:
            raise Problem(Code.DISK_FULL, self.reason)
