"""Two real nodes over loopback HTTP: an empty one catches up. `python -m bench.federation [--quick]`.

Each node is a process of its own, and pulls by a session that an operator starts. The rate is compared
with bare insertion in the same run: ready rows into the same tables by the bare driver, in transactions
as large as a group, on an idle machine. Memory is that of the receiver after each quarter. Afterwards the
pair is idle: bytes and CPU of both sides for each session, everything that two nodes do included.
Results: bench/results/federation.csv.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from app.server.limits import DEFAULT_LIMITS as LIMITS
from app.store.entryrows import FramePacker
from app.store.schema import frames, messages
from app.store.sqlite import SQLITE, WAL_PAGES, WRITER_CACHE_KIB, prepare_file
from bench.frame_workloads import filter_frames, small_frames
from bench.http_servers import Served, as_operator, serving
from bench.loading import load_file
from bench.scratch import in_scratch
from bench.store import entry_of, message_row
from bench.table import publish

QUARTERS = 4
POLL_S = 0.2
IDLE_INTERVAL_S = 0.2  # between the sessions of the idle pair
IDLE_S = 10.0


def main() -> None:
    """Measure both workloads."""
    quick = "--quick" in sys.argv
    count = next((int(each) for each in sys.argv[1:] if each.isdigit()), 1_000_000)
    small, large = (20_000, 1_000) if quick else (count, max(count // 50, 1_000))
    made: tuple[tuple[str, int, Callable[[int], Iterator[bytes]]], ...] = (
        ("300 B", small, small_frames),
        ("19 kB", large, lambda n: filter_frames(n, known=1_000)),
    )
    rows = [measured(name, size, make) for name, size, make in made]
    publish("federation", "An empty node catches up with another", rows)


def measured(workload: str, size: int, make: Callable[[int], Iterator[bytes]]) -> dict[str, Any]:
    """The costs of a catch-up and of the idle rounds after it."""
    with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as name, ExitStack() as closing:
        folder = Path(name)
        load_file(folder / "full.db", ((frame, ()) for frame in make(size)))
        bare_s = bare_seconds(folder / "bare.db", make(size))
        (folder / "bare.db").unlink()
        full, empty = (
            closing.enter_context(
                serving("node", f"sqlite:///{folder}/{each}.db", str(folder / each))
            )
            for each in ("full", "empty")
        )
        headers = as_operator(folder / "empty")
        http = closing.enter_context(
            httpx.Client(base_url=empty.url, timeout=60, trust_env=False, headers=headers)
        )
        caught_up = catch_up(http, full, empty, size)
        idle = idle_rounds(folder, full)
    rate, bare_rate = size / caught_up.pop("seconds"), size / bare_s
    row: dict[str, Any] = {"frames": workload, "messages": size}
    row |= {"messages_s": int(rate), "bare_messages_s": int(bare_rate), "share": rate / bare_rate}
    return row | caught_up | idle


def bare_seconds(path: Path, made: Iterator[bytes]) -> float:
    """Seconds to insert the rows of these frames into an empty store."""
    prepare_file(path)
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        f"cache_size = -{WRITER_CACHE_KIB}",
        f"wal_autocheckpoint = {WAL_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    packer, last, seconds = FramePacker(), 0, 0.0
    while group := [entry_of(frame) for frame in islice(made, LIMITS.group_items_max)]:
        of_messages = [message_row(seq, entry) for seq, entry in enumerate(group, last + 1)]
        of_frames = [
            (seq, *packer.pack_whole([entry.frame])[0]) for seq, entry in enumerate(group, last + 1)
        ]
        last += len(group)
        started_s = time.perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(SQLITE.insert(messages).text, of_messages)
        connection.executemany(SQLITE.insert(frames).text, of_frames)
        connection.execute("COMMIT")
        seconds += time.perf_counter() - started_s
    connection.close()
    return seconds


def catch_up(http: httpx.Client, full: Served, empty: Served, size: int) -> dict[str, Any]:
    """One session that brings everything."""
    cpu_s = full.cpu_s(), empty.cpu_s()
    started_s = time.perf_counter()
    sync_id = http.post("/v1/syncs", json={"peer_url": full.url}).raise_for_status().json()["id"]
    memory_mib: list[int] = []
    while True:
        document = http.get(f"/v1/syncs/{sync_id}").raise_for_status().json()
        received = document["progress"]["entries_received"]
        while received >= size * (len(memory_mib) + 1) // QUARTERS and len(memory_mib) < QUARTERS:
            memory_mib.append(empty.memory_bytes() >> 20)
        if (report := document["report"]) is not None:
            break
        time.sleep(POLL_S)
    seconds = time.perf_counter() - started_s
    assert report["outcome"] == "in_sync", report
    assert report["entries_received"] == size, report
    sender, receiver = (
        (each.cpu_s() - before) / size * 1e6
        for each, before in zip((full, empty), cpu_s, strict=True)
    )
    return {
        "seconds": seconds,
        "sender_cpu_us": sender,
        "receiver_cpu_us": receiver,
        "wire_bytes": (report["bytes_up"] + report["bytes_down"]) / size,
        "memory_mib": " ".join(map(str, memory_mib)),
    }


def idle_rounds(folder: Path, full: Served) -> dict[str, Any]:
    """Sessions of another node over the same messages, which has the first one as a peer."""
    other = folder / "other"
    with sqlite3.connect(folder / "full.db") as source, sqlite3.connect(f"{other}.db") as copy:
        source.backup(copy)
    source.close()
    copy.close()
    with (
        serving("node", f"sqlite:///{other}.db", str(other), str(IDLE_INTERVAL_S)) as node,
        httpx.Client(
            base_url=node.url, timeout=60, trust_env=False, headers=as_operator(other)
        ) as http,
    ):
        alone_s = cpu_of_pause(full, node)
        peer_id = http.post("/v1/peers", json={"url": full.url}).raise_for_status().json()["id"]
        while (status := http.get(f"/v1/peers/{peer_id}/status").json())["state"] != "healthy":
            time.sleep(POLL_S)
        before = sessions_begun(http)
        cpu_s = cpu_of_pause(full, node) - alone_s
        sessions = sessions_begun(http) - before
        status = http.get(f"/v1/peers/{peer_id}/status").json()
    report = status["last_report"]
    return {
        "idle_bytes": report["bytes_up"] + report["bytes_down"],
        "idle_cpu_ms": cpu_s / max(sessions, 1) * 1e3,
    }


def cpu_of_pause(*nodes: Served) -> float:
    """Seconds of CPU that the nodes use in `IDLE_S`."""
    before_s = sum(each.cpu_s() for each in nodes)
    time.sleep(IDLE_S)
    return sum(each.cpu_s() for each in nodes) - before_s


def sessions_begun(http: httpx.Client) -> int:
    """Sessions of a node with its one peer so far."""
    name = "sdstore_peer_syncs_total"
    lines = http.get("/metrics").text.splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))


if __name__ == "__main__":
    in_scratch(main)
