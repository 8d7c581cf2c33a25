"""The data pipeline, measured: `python -m bench.pipeline [--quick] [--rows=N]...`.

Rows per second of each verb on this machine alone, beside Spark copying the same rows from Parquet
to Parquet, which proves nothing: the limit in sight. The session is warmed up first. Stores of
rising size show whether time grows with the rows while memory does not; `--rows=4000000` takes a quarter
of an hour and 10 GB of disk. On PostgreSQL the data source reads beside Spark's JDBC reader, where its
driver is at hand (Debian's package libpostgresql-jdbc-java). Results: bench/results/pipeline.csv,
pipeline_postgres.csv and pipeline.png.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from sqlalchemy import make_url

from app.entries import NewEntry
from app.ingest.prepare import Publication, prepare
from app.server.limits import DEFAULT_LIMITS
from app.store.store import Store
from bench.loading import Item, load_file
from bench.postgres_server import THROW_AWAY, running_postgres
from bench.scratch import in_scratch
from bench.spark_steps import Steps
from bench.table import RESULTS, publish
from pipeline.diff import diff
from pipeline.export import export_snapshot
from pipeline.restore import restore_snapshot
from pipeline.session import spark_session
from pipeline.source import FORMAT
from pipeline.tables import read_entries
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
REPEATS = 3
POSTGRES_ROWS_MAX = 1_000_000
JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")
JDBC_ADDRESS = "127.0.0.2"  # Java knows no Unix sockets; on 127.0.0.1 a server may be running
POSTGRES = (*THROW_AWAY, f"listen_addresses={JDBC_ADDRESS}")
JDBC_ROWS = """(
SELECT m.seq, m.received_at_ms, c.channel_id, m.message_id, m.lamport, m.dialect, m.digest,
m.frame_hash{frames} FROM messages m JOIN channels c ON c.channel_no = m.channel_no{join}) AS entries"""


def main() -> None:
    """Measure every size, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, action="append")
    arguments = parser.parse_args()
    sizes: tuple[int, ...] = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
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
        rows_count = min(max(sizes), POSTGRES_ROWS_MAX)
        publish("pipeline_postgres", "Reading PostgreSQL", measure_postgres(spark, rows_count))


def measure(spark: SparkSession, folder: Path, rows_count: int) -> list[dict[str, Any]]:
    """Every verb on a store of `rows_count` entries."""
    url, copy_url = (f"sqlite:///{folder / name}" for name in ("a.db", "b.db"))
    first, second, again, copied = (
        folder / name for name in ("first", "second", "again", "copied")
    )
    in_child(load, folder / "a.db", rows_count)
    steps = Steps(spark, rows_count)

    def scan(frames: str) -> None:
        source = spark.read.format(FORMAT).options(url=url, frames=frames).load()
        source.write.format("noop").mode("overwrite").save()

    def copy() -> None:
        entries = read_entries(spark, first)
        entries.write.option("compression", "zstd").mode("overwrite").parquet(str(copied))

    def restore() -> None:
        """The restore of a user's command line, with its verification."""
        assert not verify_snapshot(spark, first).findings
        restore_snapshot(first, copy_url)

    steps.take("data source, keys", lambda: scan("false"))
    steps.take("data source, frames", lambda: scan("true"))
    export_snapshot(spark, url, first)
    for _ in range(REPEATS):  # in turns, because the machine's speed drifts
        steps.take("export", lambda: export_snapshot(spark, url, again))
        shutil.rmtree(again)
        steps.take("plain Parquet copy", copy)
    steps.take("verify", lambda: verify_snapshot(spark, first))
    steps.take("restore, verified first", restore)
    steps.take("restore again, verified first", restore)
    steps.take("diff with a store", lambda: diff(first, copy_url, 0))
    in_child(add, url, rows_count, round(rows_count * CHANGE))
    grow = partial(export_snapshot, spark, url, second, parent=first)
    steps.take("incremental export, 1 % new", grow, reads_all=False)
    steps.take("diff of two snapshots", lambda: diff(first, second, 0), reads_all=False)
    return steps.table(limit="plain Parquet copy")


def measure_postgres(spark: SparkSession, rows_count: int) -> list[dict[str, Any]]:
    """The data source and Spark's JDBC reader on the same rows; JDBC decodes no frames."""
    steps = Steps(spark, rows_count)
    with running_postgres(POSTGRES) as server, closing(PostgresStores(server)) as stores:
        url = stores.new_url()
        in_child(add, url, 0, rows_count)

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
            steps.take(f"data source, {what}", partial(read, source))
            if not JDBC_DRIVER.exists():
                print(f"no JDBC driver at {JDBC_DRIVER}: nothing to compare with")
                continue
            rows = JDBC_ROWS.format(frames=frames, join=join)
            steps.take(f"JDBC, {what}", partial(read, jdbc(spark, url, rows, rows_count)))
    return steps.table()


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


def conversation(start: int) -> Iterator[Item]:
    """Messages of 300 bytes in many channels, each naming the two before it, without end.

    Clocks begin after `start`, and so do the first references.
    """
    world = random.Random(start)
    heads: list[list[str]] = [[] for _ in range(CHANNELS)]
    lamport = start
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


def in_child(work: Callable[..., None], *arguments: object) -> None:
    """Run `work` in a separate process, so that its memory does not count as the driver's."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(work, *arguments).result()


def load(path: Path, rows_count: int) -> None:
    """A new store of `rows_count` messages."""
    load_file(path, islice(conversation(0), rows_count))


def add(url: str, start: int, rows_count: int) -> None:
    """Write `rows_count` messages with clocks after `start` into a store that may hold some."""
    asyncio.run(_add(url, islice(conversation(start), rows_count)))


async def _add(url: str, messages: Iterator[Item]) -> None:
    prepared = (prepare(Publication(*each), DEFAULT_LIMITS) for each in messages)
    entries = (each for each in prepared if isinstance(each, NewEntry))
    store = await Store.open(url, DEFAULT_LIMITS)
    store.begin_writing()
    try:
        while group := list(islice(entries, WRITE_ROWS)):
            store.writer.write(group, ())
    finally:
        await store.close()


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
    in_scratch(main)
