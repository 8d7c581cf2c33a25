"""The SQLite store: loading, ingest, reads and size at 10^4, 10^5 and 10^6 messages.

`python -m bench.store [--quick]`. Two workloads: frames of 300 bytes, and frames of 19 kB with a bloom
filter. Ingest is compared with its limit in the same run: the fastest insertion of ready rows into the
same tables and indexes, by the bare driver in transactions as large as a group. CPU time, unlike
wall-clock time, does not depend on the machine's other load.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import uvloop

from app.cli.server import GC_THRESHOLDS, SWITCH_INTERVAL_S
from app.entries import NewEntry
from app.ingest.door import Door, GroupCommitter
from app.ingest.prepare import Publication, prepare
from app.server.limits import DEFAULT_LIMITS as LIMITS
from app.store.entryrows import FramePacker
from app.store.schema import frames, messages
from app.store.sqlite import SQLITE, WAL_PAGES, WRITER_CACHE_KIB
from app.store.store import Store
from bench.frame_workloads import filter_frames, small_frames
from bench.loading import load_file
from bench.scratch import in_scratch
from bench.table import publish

BATCH = 1_000
PUBLISHERS = 8
MORE = 40_000
READS = 2_000
Result = dict[str, Any]


def main() -> None:
    """Measure and show."""
    quick = "--quick" in sys.argv
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    more = 8_000 if quick else MORE
    results: list[Result] = []
    for size in (10_000, 30_000) if quick else (10_000, 100_000, 1_000_000):
        results += measured("300 B", size, small_frames(size + more, history=2), more)
    large = 500 if quick else 5_000
    results += measured("19 kB", large, filter_frames(2 * large, known=1_000), large)
    publish("store", "SQLite store", results)


def measured(workload: str, size: int, made: Iterator[bytes], more: int) -> list[Result]:
    """Every figure at one size."""
    rows: list[Result] = []

    def note(what: str, value: float, unit: str, cpu_us: float | str = "") -> None:
        figure = {"value": value, "unit": unit, "CPU µs each": cpu_us}
        rows.append({"frames": workload, "messages": size, "what": what, **figure})

    with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
        path = Path(folder) / "store.db"
        kept = list(islice(made, size))
        cost = Cost.of(lambda: load(path, kept))
        note("load an empty store", size / cost.wall_s, "messages/s", cost.cpu_s / size * 1e6)
        frame_bytes = sum(map(len, kept)) / size
        note("file / frames", path.stat().st_size / size / frame_bytes, "bytes/byte")
        note("frame data", frame_data_bytes(path) / size, "bytes/message")
        extra = list(islice(made, more))
        bare = bare_cost(path, [entry_of(frame) for frame in extra])
        cost = Cost.of(lambda: uvloop.run(ingest(path, extra)))
        note("ingest", more / cost.wall_s, "messages/s", cost.cpu_s / more * 1e6)
        note("  bare insertion", more / bare.wall_s, "messages/s", bare.cpu_s / more * 1e6)
        note("  share of it", bare.wall_s / cost.wall_s, "", bare.cpu_s / cost.cpu_s)
        uvloop.run(measure_reads(path, note))
    return rows


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a piece of work; CPU seconds include all threads and ended child processes."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, work: Callable[[], object]) -> Cost:
        """The cost of `work`."""
        wall, cpu = time.perf_counter(), _cpu_s()
        work()
        return cls(time.perf_counter() - wall, _cpu_s() - cpu)


def _cpu_s() -> float:
    return sum(os.times()[:4])


def load(path: Path, kept: Iterable[bytes]) -> None:
    """A store with these frames."""
    load_file(path, ((frame, ()) for frame in kept))


def frame_data_bytes(path: Path) -> int:
    """Bytes of all frames and references."""
    query = "SELECT (SELECT sum(length(data)) FROM frames), (SELECT sum(length(data)) FROM filter_references)"
    with sqlite3.connect(path) as connection:
        first, second = connection.execute(query).fetchone()
    connection.close()
    return int(first) + int(second or 0)


def entry_of(frame: bytes) -> NewEntry:
    """The entry of a frame."""
    entry = prepare(Publication(frame), LIMITS)
    assert isinstance(entry, NewEntry)
    return entry


def bare_cost(path: Path, entries: Sequence[NewEntry]) -> Cost:
    """The cost of inserting into a copy, without look-ups."""
    copy = path.with_name("bare.db")
    shutil.copyfile(path, copy)
    connection = sqlite3.connect(copy, isolation_level=None)
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        f"cache_size = -{WRITER_CACHE_KIB}",
        f"wal_autocheckpoint = {WAL_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    last = connection.execute("SELECT max(seq) FROM messages").fetchone()[0]
    packer = FramePacker()
    ready = [
        (message_row(seq, entry), (seq, *packer.pack_whole([entry.frame])[0]))
        for seq, entry in enumerate(entries, last + 1)
    ]
    groups = [
        ready[n : n + LIMITS.group_items_max] for n in range(0, len(ready), LIMITS.group_items_max)
    ]

    def insert() -> None:
        for group in groups:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(SQLITE.insert(messages).text, [row for row, _ in group])
            connection.executemany(SQLITE.insert(frames).text, [row for _, row in group])
            connection.execute("COMMIT")

    cost = Cost.of(insert)
    connection.close()
    copy.unlink()
    return cost


def message_row(seq: int, entry: NewEntry) -> tuple[object, ...]:
    """A row of `messages`."""
    message = entry.message
    key = int.from_bytes(entry.digest[8:16], "big", signed=True)  # as random as the real one
    numbers = (seq, key, message.lamport_timestamp, time.time_ns() // 10**6, seq % 20 + 1)
    sizes = (len(entry.frame), int(entry.dialect), 1)
    texts = (message.message_id, entry.digest[:8], entry.digest, entry.frame_hash)
    arrival_sum = key  # any number of 64 bits
    return (*numbers, *sizes, *texts, arrival_sum)


async def ingest(path: Path, extra: Sequence[bytes]) -> None:
    """Through the door, published by several clients in batches."""
    store = await Store.open(f"sqlite:///{path}", LIMITS)
    committer = GroupCommitter(store, LIMITS)
    await committer.start()
    door = Door(store, committer, LIMITS)
    batches = iter([extra[n : n + BATCH] for n in range(0, len(extra), BATCH)])

    async def publish_batches() -> None:
        for batch in batches:
            await door.publish_many([Publication(frame) for frame in batch])

    await asyncio.gather(*(publish_batches() for _ in range(PUBLISHERS)))
    await committer.close()
    await store.close()


async def measure_reads(path: Path, note: Callable[[str, float, str], None]) -> None:
    """Start-up, and what readers ask for."""
    started = time.perf_counter()
    store = await Store.open(f"sqlite:///{path}", LIMITS)
    position = (0, 0)
    while len((columns := await store.arrivals.elements_after(*position, 8_192)).orders):
        position = columns.next
    note("open, read all elements", time.perf_counter() - started, "s")
    sample = await store.channels.feed(position[0] // 2, 1_000, 10**9)
    ids = [entry.message_id for entry in sample.entries]
    digests = [entry.digest for entry in sample.entries]
    channel = sample.entries[0].channel_id
    lamport = sample.entries[0].lamport_timestamp
    numbers = count()
    reads: dict[str, Callable[[], Awaitable[object]]] = {
        "get by ID": lambda: store.entries.find(ids[next(numbers) % len(ids)], None),
        "get by digest": lambda: store.entries.by_digest([digests[next(numbers) % len(ids)]]),
        "look up a hint": lambda: store.claims.page(b"no such hint", None, 100),
        "page of 100": lambda: store.channels.page(
            channel, lamport_from=lamport + next(numbers), limit=100, bytes_max=10**9
        ),
        "look-up of 100 IDs": lambda: store.entries.lookup(
            ids[:100], [], None, presence_only=False, bytes_max=10**9
        ),
    }
    for what, read in reads.items():
        times = [await timed_read(read) for _ in range(READS if what.startswith("get") else 200)]
        note(f"{what}, median", statistics.median(times) * 1e3, "ms")
        note(f"{what}, p99", statistics.quantiles(times, n=100)[-1] * 1e3, "ms")
    await store.close()


async def timed_read(read: Callable[[], Awaitable[object]]) -> float:
    """Seconds of one read, in a turn of the event loop of its own."""
    await asyncio.sleep(0)
    started = time.perf_counter()
    await read()
    return time.perf_counter() - started


if __name__ == "__main__":
    in_scratch(main)
