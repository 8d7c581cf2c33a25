"""The data pipeline, measured: `python -m bench.pipeline [--quick] [--rows N]...`.

Rows per second of each verb on this machine alone, beside Spark copying the same rows from Parquet
to Parquet, which proves nothing: the limit in sight. The session is warmed up first. Stores of
rising size show whether time grows with the rows while memory does not. On PostgreSQL the data
source reads beside Spark's JDBC reader, where its driver is at hand (Debian's package
libpostgresql-jdbc-java). Results: bench/results/pipeline.csv, pipeline_postgres.csv and pipeline.png.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from sqlalchemy import make_url

from app.entries import NewEntry
from app.errors import Problem
from app.ingest.bulkload import Item, load_empty_store
from app.ingest.prepare import prepare
from app.ingest.records import Publication
from app.limits import DEFAULT_LIMITS
from app.store.store import Store
from bench.postgres_server import THROW_AWAY, running_postgres
from bench.table import RESULTS, publish
from pipeline.diff import diff
from pipeline.export import export_snapshot
from pipeline.manifest import Manifest
from pipeline.restore import restore_snapshot
from pipeline.session import spark_session
from pipeline.snapshot import read_entries
from pipeline.source import FORMAT
from pipeline.verify import verify_snapshot
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.stores import PostgresStores

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession

QUICK_ROWS = (10_000, 100_000)
ROWS = (100_000, 1_000_000)
CHANNELS = 100
CONTENT_BYTES = 110  # frames of 300 bytes
WRITE_ROWS = 4_096
CHANGE = 0.01
POSTGRES_ROWS, QUICK_POSTGRES_ROWS = 200_000, 20_000
JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")
JDBC_ADDRESS = "127.0.0.2"  # Java knows no Unix sockets; on 127.0.0.1 a server may be running
POSTGRES = (*THROW_AWAY, f"listen_addresses={JDBC_ADDRESS}")
JDBC_ROWS = """(
SELECT m.seq, m.received_at_ms, c.channel_id, m.message_id, m.lamport, m.dialect, m.digest,
m.frame_hash{frames} FROM messages m JOIN channels c ON c.channel_no = m.channel_no{join}) AS entries"""


@dataclass(slots=True)
class Measurement:
    """One store size: what is measured becomes rows of the table."""

    rows_count: int
    table: list[dict[str, Any]] = field(default_factory=list)

    def take(self, what: str, spark: SparkSession, work: Callable[[], object]) -> None:
        """Measure one call; of an export also which share of its bytes was written."""
        start = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - start
        written = made.bytes_written / made.table_bytes if isinstance(made, Manifest) else None
        print(f"{self.rows_count:,} rows, {what}: {seconds:.2f} s", file=sys.stderr, flush=True)
        self.table.append(
            {
                "rows": self.rows_count,
                "what": what,
                "seconds": seconds,
                "rows/s": round(self.rows_count / seconds),
                "of a plain copy": 0.0,
                "written": "" if written is None else f"{written:.1%}",
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
    # Before Spark starts: it takes JARs then or never.
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-class-path {JDBC_DRIVER} pyspark-shell"
    with spark_session() as spark:
        with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
            measure(spark, Path(folder), 2_000)  # the first of everything is slow
        for rows_count in sizes:
            with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
                table += measure(spark, Path(folder), rows_count)
        publish("pipeline", "Snapshots on Spark, this machine alone", table)
        draw(table)
        rows_count = QUICK_POSTGRES_ROWS if arguments.quick else POSTGRES_ROWS
        publish("pipeline_postgres", "Reading PostgreSQL", measure_postgres(spark, rows_count))


def measure(spark: SparkSession, folder: Path, rows_count: int) -> list[dict[str, Any]]:
    """Every verb on a store of `rows_count` entries."""
    url, copy_url = (f"sqlite:///{folder / name}" for name in ("a.db", "b.db"))
    messages = conversation()
    load_empty_store(folder / "a.db", islice(messages, rows_count), DEFAULT_LIMITS, refuse)
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
    restore = partial(restore_snapshot, spark, first, copy_url, is_verified=True)
    found.take("restore", spark, restore)
    found.take("restore again", spark, restore)
    found.take("diff with a store", spark, lambda: diff(spark, first, copy_url))
    asyncio.run(add(url, islice(messages, round(rows_count * CHANGE))))
    found.take(
        "incremental export, 1 % new",
        spark,
        lambda: export_snapshot(spark, url, second, parent=first),
    )
    found.take("diff of two snapshots", spark, lambda: diff(spark, first, second))
    found.compare()
    return found.table


def measure_postgres(spark: SparkSession, rows_count: int) -> list[dict[str, Any]]:
    """The data source and Spark's JDBC reader on the same rows; JDBC decodes no frames."""
    found = Measurement(rows_count)
    with running_postgres(POSTGRES) as server, closing(PostgresStores(server)) as stores:
        url = stores.new_url()
        asyncio.run(add(url, islice(conversation(), rows_count)))

        def read(reader: DataFrameReader) -> None:
            reader.load().write.format("noop").mode("overwrite").save()

        for what, frames, join in (
            ("keys", "", ""),
            (
                "frames",
                ", m.frame_bytes, f.codec, f.reference_no, f.data",
                " JOIN frames f ON f.seq = m.seq",
            ),
        ):
            source = spark.read.format(FORMAT).options(url=url, frames=str(what == "frames"))
            found.take(f"data source, {what}", spark, partial(read, source))
            if not JDBC_DRIVER.exists():
                print(f"no JDBC driver at {JDBC_DRIVER}: nothing to compare with")
                continue
            rows = JDBC_ROWS.format(frames=frames, join=join)
            found.take(f"JDBC, {what}", spark, partial(read, jdbc(spark, url, rows, rows_count)))
    return [
        {each: row[each] for each in ("rows", "what", "seconds", "rows/s")} for row in found.table
    ]


def jdbc(spark: SparkSession, url: str, rows: str, rows_count: int) -> DataFrameReader:
    """Spark's own reader, set up as well as it can be: binary protocol, cursor, a task per core."""
    parts = make_url(url)
    return spark.read.format("jdbc").options(
        url=f"jdbc:postgresql://{parts.host or JDBC_ADDRESS}:{parts.port or 5432}/{parts.database}",
        user=parts.username,
        password=parts.password or "",
        driver="org.postgresql.Driver",
        dbtable=rows,
        fetchsize=10_000,
        partitionColumn="seq",
        lowerBound=1,
        upperBound=rows_count,
        numPartitions=spark.sparkContext.defaultParallelism,
    )


def conversation() -> Iterator[Item]:
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
        yield encode(message), hints


def refuse(_: int, problem: Problem) -> None:
    """No message of a benchmark is refused."""
    raise problem


async def add(url: str, messages: Iterator[Item]) -> None:
    """Write messages into a store that may hold some."""
    prepared = (prepare(Publication(*each), DEFAULT_LIMITS) for each in messages)
    entries = (each for each in prepared if isinstance(each, NewEntry))
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
