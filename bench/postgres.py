"""Batch ingest on PostgreSQL: `python -m bench.postgres [--quick]`.

Messages of about 300 bytes go through the door in batches of 1,000, eight callers at a time, into a
server that syncs every commit; the last 10,000 before each size are timed. Beside it, in the same run,
the fastest bare insertion: the very same rows, already made, into the same tables and indexes of
another database, as `INSERT … SELECT unnest` of binary arrays. CPU seconds, unlike the clock, do not
depend on what else the machine does: node is the process that ingests, server its connection's.
Results: bench/results/postgres.csv.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg
import uvloop
from sqlalchemy import Table

from app.cli.server import GC_THRESHOLDS, SWITCH_INTERVAL_S
from app.ingest.door import Door, open_door
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.store.postgres import POSTGRES, adapt, array_of, session_settings
from app.store.schema import frames, messages, migrate
from bench.frame_workloads import small_frames
from bench.loading import new_database
from bench.postgres_server import running_postgres
from bench.scratch import in_scratch
from bench.table import publish

SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (10_000,)
TIMED = 10_000
BATCH = 1_000
CALLERS = 8
BARE_BATCH = 5_000
SERVER = ("shared_buffers=512MB", "max_wal_size=4GB", "checkpoint_timeout=15min")

_SERVER_PROCESSES = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"


@dataclass(slots=True)
class Cost:
    """Of `TIMED` messages."""

    wall_s: float = 0
    node_cpu_s: float = 0
    server_cpu_s: float = 0


@contextmanager
def measured(url: str) -> Iterator[Cost]:
    """The cost of a block that writes to this database."""
    cost = Cost()
    with psycopg.connect(url) as connection:
        before = server_cpu_s(connection)
        clock, cpu = time.perf_counter(), time.process_time()
        yield cost
        cost.wall_s, cost.node_cpu_s = time.perf_counter() - clock, time.process_time() - cpu
        cost.server_cpu_s = server_cpu_s(connection) - before


def server_cpu_s(connection: psycopg.Connection[Any]) -> float:
    """Seconds of CPU that all connections to a database have used."""
    ticks = 0
    for (pid,) in connection.execute(_SERVER_PROCESSES):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def ingest(door: Door, made: Iterator[bytes], count: int) -> None:
    """The next `count` messages, through the door."""
    batches = [[Publication(frame) for frame in islice(made, BATCH)] for _ in range(count // BATCH)]
    waiting = iter(batches)

    async def call() -> None:
        for batch in waiting:
            await door.publish_many(batch)

    await asyncio.gather(*(call() for _ in range(CALLERS)))


class Bare:
    """Inserts rows that another database holds already."""

    def __init__(self, url: str, rows_url: str) -> None:
        self._into = psycopg.connect(url, autocommit=True)
        self._from = psycopg.connect(rows_url, autocommit=True)
        adapt(self._into.adapters)
        self._into.execute(session_settings(DEFAULT_LIMITS.database_statement_s))
        self._inserts = [(table, POSTGRES.insert(table)) for table in (messages, frames)]

    def read(self, first: int, count: int) -> list[list[list[Any]]]:
        """The columns of both tables for the messages from one number on, in batches."""
        return [
            [self._columns(table, number) for table, _ in self._inserts]
            for number in range(first, first + count, BARE_BATCH)
        ]

    def insert(self, batches: list[list[list[Any]]]) -> None:
        """One transaction for each batch."""
        for batch in batches:
            with self._into.transaction():
                for (_, query), columns in zip(self._inserts, batch, strict=True):
                    arrays = [array_of(*each) for each in zip(query.types, columns, strict=True)]
                    self._into.execute(query.text, arrays, prepare=True)

    def _columns(self, table: Table, first: int) -> list[Any]:
        names = ", ".join(table.columns.keys())
        query = f"SELECT {names} FROM {table.name} WHERE seq >= %s AND seq < %s ORDER BY seq"
        with self._from.cursor(binary=True) as cursor:
            cursor.execute(query, (first, first + BARE_BATCH))  # type: ignore[arg-type]
            return [*zip(*cursor.fetchall(), strict=True)]


async def measure(server_url: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each size."""
    url, bare_url = new_database(server_url, "ingest"), new_database(server_url, "bare")
    await asyncio.to_thread(migrate, bare_url)
    bare = Bare(bare_url, url)
    made = small_frames(sizes[-1])
    rows: list[dict[str, Any]] = []
    count = 0
    async with open_door(url, DEFAULT_LIMITS) as door:
        for size in sizes:
            while count < size - TIMED:
                await ingest(door, made, TIMED)
                bare.insert(bare.read(count + 1, TIMED))
                count += TIMED
            timed = [*islice(made, TIMED)]
            with measured(url) as cost:
                await ingest(door, iter(timed), TIMED)
            ready = bare.read(count + 1, TIMED)
            with measured(bare_url) as bare_cost:
                bare.insert(ready)
            count += TIMED
            rows.append(_row(size, cost, bare_cost))
    return rows


def _row(size: int, cost: Cost, bare: Cost) -> dict[str, Any]:
    return {
        "messages": size,
        "ingest/s": round(TIMED / cost.wall_s),
        "bare/s": round(TIMED / bare.wall_s),
        "ratio": bare.wall_s / cost.wall_s,
        "node CPU µs": cost.node_cpu_s / TIMED * 1e6,
        "server CPU µs": cost.server_cpu_s / TIMED * 1e6,
        "bare client CPU µs": bare.node_cpu_s / TIMED * 1e6,
        "bare server CPU µs": bare.server_cpu_s / TIMED * 1e6,
    }


def main() -> None:
    """Measure and print."""
    # As a node runs.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    sizes = QUICK_SIZES if "--quick" in sys.argv else SIZES
    with running_postgres(SERVER) as url:
        rows = uvloop.run(measure(url, sizes))
    publish("postgres", "Batch ingest on PostgreSQL, 300-byte messages", rows)


if __name__ == "__main__":
    in_scratch(main)
