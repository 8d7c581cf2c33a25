"""Frames on disk, measured: `python -m bench.frames [--quick]`.

Bytes are of the data of frames and references, divided by the frames; µs are of the writer's and the reader's
own work on one core without the database, references included; GET is a look-up by ID through the
store, compared with the same store holding every frame as it is. Results: bench/results/frames.csv
and frames_on_disk.csv.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from app.entries import NewEntry, WriteResult
from app.ingest.prepare import Publication, prepare
from app.server.limits import DEFAULT_LIMITS
from app.store.database import ManyQuery, Row
from app.store.entryrows import Codec, FrameUnpacker, PackedFrame, Unpacked
from app.store.groupwriter import FrameWriter
from app.store.schema import filter_references, frames
from app.store.sqlite import SQLITE
from app.store.store import Store
from bench.frame_workloads import LONG_HISTORY, filter_frames, small_frames
from bench.scratch import in_scratch
from bench.table import publish
from tests.support.filters import staggered_frames

GROUP_ITEMS = 200
GETS = 2_000

Workload = tuple[str, Callable[[int], Iterable[bytes]]]
WORKLOADS: tuple[Workload, ...] = (
    ("300 bytes", small_frames),
    ("19 kB, new filter", filter_frames),
    ("19 kB, 2,000 IDs in the filter", partial(filter_frames, known=2_000)),
    ("19 kB, 6,000 IDs in the filter", partial(filter_frames, known=6_000)),
    ("19 kB, full filter", partial(filter_frames, known=10_000)),
    ("19 kB, 5 senders, staggered filters", partial(staggered_frames, senders=5)),
    ("19 kB, 20 senders, staggered filters", partial(staggered_frames, senders=20)),
    (
        "45 kB, history of 200 with hints",
        partial(filter_frames, known=2_000, history=LONG_HISTORY, hints=True),
    ),
)


class Rows:
    """The writer's transaction as two dictionaries."""

    def __init__(self) -> None:
        self.frames: dict[int, Row] = {}
        self.references: dict[int, Row] = {}

    def among(self, _query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        """The last uses of references: all exist."""
        return [(key, key) for key in keys]

    def each(self, _query: ManyQuery, _arguments: Sequence[Row]) -> list[Row]:
        """The store has no earlier channels."""
        return []

    def many(self, query: ManyQuery, rows: Sequence[Row]) -> None:
        """Keep the written rows."""
        if query is SQLITE.insert(frames):
            self.frames.update((row[0], row) for row in rows)
        elif query is SQLITE.insert(filter_references):
            self.references.update((row[0], row) for row in rows)

    @property
    def bytes(self) -> int:
        """Data of both tables."""
        return sum(len(row[-1]) for t in (self.frames, self.references) for row in t.values())


def main() -> None:
    """Measure and publish."""
    is_quick = "--quick" in sys.argv
    count = 400 if is_quick else 2_000
    rows = [measured(name, entries_of(make(count))) for name, make in WORKLOADS]
    shuffled = entries_of(filter_frames(count, known=2_000))
    Random(1).shuffle(shuffled)
    rows.append(measured("19 kB, arriving shuffled", shuffled))
    publish("frames", "Frames, packed and unpacked", rows)
    disk = [
        asyncio.run(on_disk("300 bytes", small_frames(10_000 if is_quick else 100_000))),
        asyncio.run(on_disk("19 kB", filter_frames(count, known=2_000))),
    ]
    publish("frames_on_disk", "Frames in an SQLite store", disk)


def entries_of(frames: Iterable[bytes]) -> list[NewEntry]:
    """The entries that the door makes of frames."""
    prepared = [prepare(Publication(frame), DEFAULT_LIMITS) for frame in frames]
    return [entry for entry in prepared if isinstance(entry, NewEntry)]


def measured(name: str, entries: Sequence[NewEntry]) -> dict[str, str | int | float]:
    """One workload, without a database."""
    rows = Rows()
    writer = FrameWriter(SQLITE)
    written = [(entry, WriteResult(seq, 1, 0, is_new=True)) for seq, entry in enumerate(entries, 1)]
    start = time.thread_time()
    for at in range(0, len(written), GROUP_ITEMS):
        writer.write(rows, written[at : at + GROUP_ITEMS])  # type: ignore[arg-type]
    packed_s = time.thread_time() - start
    size = sum(len(entry.frame) for entry in entries)
    return {
        "workload": name,
        "frame bytes": size / len(entries),
        "stored bytes": rows.bytes / len(entries),
        "ratio": size / rows.bytes,
        "references": len(rows.references),
        "pack us": 1e6 * packed_s / len(entries),
        "unpack us": 1e6 * unpacked_s(rows, entries) / len(entries),
    }


def unpacked_s(rows: Rows, entries: Sequence[NewEntry]) -> float:
    """Seconds for all frames one by one, each compared with the original."""
    unpacker = FrameUnpacker()
    spent = 0.0
    for seq, entry in enumerate(entries, 1):
        columns = rows.frames[seq][1:]
        packed = PackedFrame(seq, len(entry.frame), entry.frame_hash, entry.digest, *columns)
        start = time.thread_time()
        frame = unpacker.unpack_at_hand(packed) or _asking(unpacker, rows, packed)
        spent += time.thread_time() - start
        if frame != entry.frame:
            raise AssertionError(f"frame {seq} came back changed")
    return spent


def _asking(unpacker: FrameUnpacker, rows: Rows, packed: PackedFrame) -> bytes | None:
    unpacking = unpacker.unpack([packed])
    try:
        numbers = next(unpacking)
        while True:
            numbers = unpacking.send([(each, rows.references[each][-1]) for each in numbers])
    except StopIteration as end:
        found: Unpacked = end.value
        return found.whole.get(packed.seq)


async def on_disk(name: str, frames: Iterable[bytes]) -> dict[str, str | int | float]:
    """One workload in a file: its size, and the cost of reading by ID."""
    entries = entries_of(frames)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "frames.db"
        url = f"sqlite:///{path}"
        store = await Store.open(url, DEFAULT_LIMITS)
        store.begin_writing()
        start = time.perf_counter()
        for at in range(0, len(entries), 20 * GROUP_ITEMS):
            store.writer.write(entries[at : at + 20 * GROUP_ITEMS])
        written_s = time.perf_counter() - start
        packed_us = await get_us(store, entries)
        await store.close()
        file_bytes = path.stat().st_size
        leave_unpacked(path, entries)
        store = await Store.open(url, DEFAULT_LIMITS)
        plain_us = await get_us(store, entries)
        await store.close()
    return {
        "workload": name,
        "messages": len(entries),
        "frame bytes": sum(len(entry.frame) for entry in entries) / len(entries),
        "file bytes per message": file_bytes / len(entries),
        "written per s": len(entries) / written_s,
        "GET us": packed_us,
        "GET us, unpacked frames": plain_us,
        "speed kept": plain_us / packed_us,
    }


async def get_us(store: Store, entries: Sequence[NewEntry]) -> float:
    """Microseconds of a look-up by ID, best of three rounds."""
    chosen = Random(1).choices(entries, k=GETS)
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        for entry in chosen:
            await store.entries.find(entry.message.message_id, None)
        best = min(best, time.thread_time() - start)
    return 1e6 * best / GETS


def leave_unpacked(path: Path, entries: Sequence[NewEntry]) -> None:
    """Store every frame as it is."""
    connection = sqlite3.connect(path)
    with connection:
        connection.executemany(
            f"UPDATE frames SET codec = {int(Codec.RAW)}, reference_no = NULL, data = ? WHERE seq = ?",
            [(entry.frame, seq) for seq, entry in enumerate(entries, 1)],
        )
    connection.close()


if __name__ == "__main__":
    in_scratch(main)
