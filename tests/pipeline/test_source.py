"""The Spark data source: filters, partitions, the watermark, exactly-once streams."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from pipeline.database import Interval, Scan, open_database
from tests.support.snapshots import CHANNELS, FIRST_DAY_MS, conversation, fill_store
from tests.support.streams import stream_available, streamed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    return spark.read.format("sdstore").options(url=url, **options).load()


def test_partitions_are_about_equal_and_share_nothing(store_url: str) -> None:
    with open_database(store_url) as database:
        scan = Scan(seq=Interval(0, database.watermark().seq))
        parts = database.entry_partitions(scan, 500)
        counts = [sum(batch.num_rows for batch in database.keys(part)) for part, _ in parts]
    assert counts == [count for _, count in parts]
    assert sum(counts) == 3_000
    assert max(counts) <= 500
    assert all(a[0].seq.last < b[0].seq.first for a, b in pairwise(parts))


def rows_read(collected: DataFrame) -> int:
    """How many rows the source gave to Spark for what was collected."""
    scan = collected._jdf.queryExecution().executedPlan().collectLeaves().head()
    return int(scan.metrics().apply("numOutputRows").value())


def test_filters_that_sql_answers_change_no_result_and_read_no_other_row(
    spark: SparkSession, store_url: str
) -> None:
    rows = read(spark, store_url, partitionEntries=1_000)
    everything = rows.select("seq", "channel_id", "lamport_timestamp", "received_at").collect()
    day = datetime.fromtimestamp(FIRST_DAY_MS / 1000 + 86_400, UTC)
    found = rows.where(
        f.col("channel_id").isin(CHANNELS[0], CHANNELS[2])
        & (f.col("lamport_timestamp") > 50)
        & (f.col("lamport_timestamp") <= 4_000)
        & (f.col("received_at") < f.lit(day))
    )
    expected = {
        row["seq"]
        for row in everything
        if row["channel_id"] in (CHANNELS[0], CHANNELS[2])
        and 50 < row["lamport_timestamp"] <= 4_000
        and row["received_at"].replace(tzinfo=UTC) < day
    }
    seqs = found.select("seq")
    assert {row["seq"] for row in seqs.collect()} == expected != set()
    assert rows_read(seqs) == len(expected)


def test_a_read_does_not_see_what_arrives_after_it_was_planned(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, messages = f"sqlite:///{tmp_path / 'sdstore.db'}", conversation(seed=2)
    fill_store(url, messages, 300)
    planned = read(spark, url, partitionEntries=100)
    planned.rdd.getNumPartitions()  # plans the scan: the watermark is read here
    fill_store(url, messages, 200)
    assert planned.count() == 300
    assert read(spark, url).count() == 500


def test_a_stream_that_is_restarted_writes_every_entry_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, messages = f"sqlite:///{tmp_path / 'sdstore.db'}", conversation(seed=3)
    for count in (250, 0, 130):
        fill_store(url, messages, count) if count else None
        stream_available(spark, url, tmp_path, maxEntriesPerBatch=100)
    rows = streamed(spark, tmp_path).collect()
    with open_database(url) as database:
        [batch] = database.keys(Scan())
    assert sorted(row["seq"] for row in rows) == batch.column("seq").to_pylist()
    assert {bytes(row["digest"]) for row in rows} == set(batch.column("digest").to_pylist())
