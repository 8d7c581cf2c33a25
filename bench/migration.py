"""The migration that encodes frames again, measured: `python -m bench.migration [--quick]`.

Two stores of the former schema: 10^6 messages of 300 bytes, and 10^5 of 19 kB from five senders whose
filters roll over at different times. They are copies of fewer messages under other numbers. "steps" is the time until the frames are encoded and moved, "vacuum"
the time in which SQLite builds the file anew. Results: bench/results/migration.csv.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from app.entries import NewEntry
from app.ingest.prepare import Publication, prepare
from app.server.limits import DEFAULT_LIMITS
from app.store.schema import migrate
from app.store.store import Store
from bench.frame_workloads import small_frames
from bench.scratch import in_scratch
from bench.table import publish
from tests.support.filters import staggered_frames
from tests.support.former_store import make_former

GROUP_ITEMS = 2_000


def main() -> None:
    """Measure and publish."""
    copies = 1 if "--quick" in sys.argv else 50
    rows = [
        measured("300 bytes", small_frames(20_000), copies),
        measured("19 kB, 5 senders", staggered_frames(2_000, 5), copies),
    ]
    publish("migration", "Encoding frames again", rows)


def measured(name: str, frames: Iterator[bytes], copies: int) -> dict[str, Any]:
    """One store."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        count = asyncio.run(filled(path, frames))
        make_former(path)
        multiply(path, count, copies)
        count *= copies
        before = path.stat().st_size
        began: list[float] = []
        note = partial(_note_vacuum, began)
        event.listen(Engine, "before_cursor_execute", note)
        start = time.perf_counter()
        migrate(f"sqlite:///{path}")
        end = time.perf_counter()
        event.remove(Engine, "before_cursor_execute", note)
        return {
            "frames": name,
            "messages": count,
            "steps s": began[0] - start,
            "vacuum s": end - began[0],
            "messages per s": count / (end - start),
            "file MB before": before / 1e6,
            "file MB after": path.stat().st_size / 1e6,
        }


def _note_vacuum(began: list[float], *call: Any) -> None:
    if call[2] == "VACUUM":
        began.append(time.perf_counter())


def multiply(path: Path, count: int, copies: int) -> None:
    """Copy the rows of all messages under higher numbers."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in ("messages", "frames", "frame_references"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            shifted = [f"{n} + :by" if n in ("seq", "reference_no") else n for n in names]
            for copy in range(1, copies):
                connection.execute(
                    f"INSERT INTO {table} SELECT {', '.join(shifted)} FROM {table} WHERE seq <= :count",
                    {"by": copy * count, "count": count},
                )


async def filled(path: Path, frames: Iterable[bytes]) -> int:
    """Write a store; returns the number of messages."""
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    store.begin_writing()
    count, made = 0, iter(frames)
    while group := [
        prepare(Publication(each), DEFAULT_LIMITS) for each in islice(made, GROUP_ITEMS)
    ]:
        store.writer.write([each for each in group if isinstance(each, NewEntry)])
        count += len(group)
        await asyncio.sleep(0)  # ends SQLite's read transaction
    await store.close()
    return count


if __name__ == "__main__":
    in_scratch(main)
