"""The data pipeline, measured: `python -m bench.pipeline [--quick] [--rows N]...`.

Rows per second of each verb on this machine alone, beside Spark copying the same rows from Parquet
to Parquet, which proves nothing: the limit in sight. The session is warmed up first. Stores of
rising size show whether time grows with the rows while memory does not. Results:
bench/results/pipeline.csv and .png.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from app.entries import NewEntry
from app.ingest.prepare import prepare
from app.ingest.records import Publication
from app.limits import DEFAULT_LIMITS
from app.store.store import Store
from bench.table import RESULTS, publish
from pipeline.diff import diff
from pipeline.export import export_snapshot
from pipeline.restore import restore_snapshot
from pipeline.session import spark_session
from pipeline.snapshot import read_entries
from pipeline.source import FORMAT
from pipeline.verify import verify_snapshot
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK_ROWS = (10_000, 100_000)
ROWS = (100_000, 1_000_000)
CHANNELS = 100
CONTENT_BYTES = 110  # frames of 300 bytes
WRITE_ROWS = 4_096
CHANGE = 0.01


@dataclass(slots=True)
class Measurement:
    """One store size: what is measured becomes rows of the table."""

    rows_count: int
    table: list[dict[str, Any]] = field(default_factory=list)

    def take(self, what: str, spark: SparkSession, work: Callable[[], object]) -> None:
        """Measure one call."""
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        self.table.append(
            {
                "rows": self.rows_count,
                "what": what,
                "seconds": seconds,
                "rows/s": round(self.rows_count / seconds),
                "of a plain copy": 0.0,
                "driver MB": peak_mb("self"),
                "JVM MB": peak_mb(str(jvm_pid(spark))),
            }
        )

    def compare(self) -> None:
        """Relate every rate to that of the plain copy."""
        [copy] = [row["seconds"] for row in self.table if row["what"] == "plain Parquet copy"]
        for row in self.table:
            row["of a plain copy"] = copy / row["seconds"]


def main() -> None:
    """Measure every size, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, action="append")
    arguments = parser.parse_args()
    sizes = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    table: list[dict[str, Any]] = []
    with spark_session() as spark:
        with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
            measure(spark, Path(folder), 2_000)  # the first of everything is slow
        for rows_count in sizes:
            with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
                table += measure(spark, Path(folder), rows_count)
    publish("pipeline", "Snapshots on Spark, this machine alone", table)
    draw(table)


def measure(spark: SparkSession, folder: Path, rows_count: int) -> list[dict[str, Any]]:
    """Every verb on a store of `rows_count` entries."""
    url, copy_url = (f"sqlite:///{folder / name}" for name in ("a.db", "b.db"))
    messages = conversation()
    fill(url, islice(messages, rows_count))
    first, second = folder / "first", folder / "second"
    found = Measurement(rows_count)

    def copy() -> None:
        entries = read_entries(spark, first)
        entries.write.option("compression", "zstd").parquet(str(folder / "copied"))

    def scan(frames: str) -> None:
        source = spark.read.format(FORMAT).options(url=url, frames=frames).load()
        source.write.format("noop").mode("overwrite").save()

    found.take("data source, keys", spark, lambda: scan("false"))
    found.take("data source, frames", spark, lambda: scan("true"))
    found.take("export", spark, lambda: export_snapshot(spark, url, first))
    found.take("plain Parquet copy", spark, copy)
    found.take("verify", spark, lambda: verify_snapshot(spark, first))
    found.take("restore", spark, lambda: restore_snapshot(spark, first, copy_url))
    found.take("restore again", spark, lambda: restore_snapshot(spark, first, copy_url))
    found.take("diff with a store", spark, lambda: diff(spark, first, copy_url))
    fill(url, islice(messages, round(rows_count * CHANGE)))
    found.take(
        "incremental export, 1 % new",
        spark,
        lambda: export_snapshot(spark, url, second, parent=first),
    )
    found.take("diff of two snapshots", spark, lambda: diff(spark, first, second))
    found.compare()
    return found.table


def conversation() -> Iterator[NewEntry]:
    """Messages of 300 bytes in many channels, each naming the two before it, without end."""
    world = random.Random(1)
    heads: list[list[str]] = [[] for _ in range(CHANNELS)]
    lamport = 0
    while True:
        lamport += 1
        channel = world.randrange(CHANNELS)
        message = Message(
            message_id=world.randbytes(16).hex(),
            channel_id=f"/bench/1/channel-{channel}/proto",
            sender_id=f"sender-{world.randrange(50)}",
            lamport_timestamp=lamport,
            causal_history=tuple(map(HistoryEntry, heads[channel])),
            content=world.randbytes(CONTENT_BYTES),
        )
        heads[channel] = [*heads[channel][-1:], message.message_id]
        hints = (world.randbytes(32),) if lamport % 10 == 0 else ()
        entry = prepare(Publication(encode(message), hints), DEFAULT_LIMITS)
        assert isinstance(entry, NewEntry)
        yield entry


def fill(url: str, entries: Iterator[NewEntry]) -> None:
    """Write the entries into a store."""
    asyncio.run(_fill(url, entries))


async def _fill(url: str, entries: Iterator[NewEntry]) -> None:
    store = await Store.open(url, DEFAULT_LIMITS)
    store.begin_writing()
    try:
        while group := list(islice(entries, WRITE_ROWS)):
            store.write_group(group, ())
    finally:
        await store.close()


def jvm_pid(spark: SparkSession) -> int:
    """The process that runs Spark's driver and, on one machine, its tasks."""
    pid: int = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr] # noqa: SLF001
    return pid


def peak_mb(process: str) -> int:
    """The most memory that a process ever had in RAM, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return round(int(line.split()[1]) / 1024)


def draw(table: list[dict[str, Any]]) -> None:
    """Seconds over rows, both logarithmic: parallel lines of slope one are linear growth."""
    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for what in dict.fromkeys(row["what"] for row in table):
        points = [(row["rows"], row["seconds"]) for row in table if row["what"] == what]
        axes.plot(*zip(*points, strict=True), "o-", label=what)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("entries")
    axes.set_ylabel("seconds")
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(RESULTS / "pipeline.png")


if __name__ == "__main__":
    main()
