"""Positions in channel logs, where a channel is cut over several partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as f

from pipeline.tables import LOG_ORDER, read_entries
from tests.support.cli import cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture
def many_partitions(spark: SparkSession) -> Iterator[None]:
    """Spark would put partitions as small as a test's together."""
    setting = "spark.sql.adaptive.coalescePartitions.enabled"
    spark.conf.set(setting, "false")
    yield
    spark.conf.unset(setting)


def as_bytes(row: dict[str, Any]) -> list[Any]:
    """The key of log order, in which text is compared by its UTF-8."""
    return [each.encode() if isinstance(each, str) else each for each in map(row.get, LOG_ORDER)]


@pytest.mark.usefixtures("verbs", "many_partitions")
def test_a_channel_in_several_partitions_is_numbered_through(
    spark: SparkSession, snapshot: Path, tmp_path: Path
) -> None:
    entries = read_entries(spark, snapshot).select(*LOG_ORDER, "seq")
    parts = entries.repartitionByRange(*LOG_ORDER).select("channel_id", f.spark_partition_id())
    assert parts.distinct().count() > parts.select("channel_id").distinct().count()

    logs = tmp_path / "logs"
    result = cli("snapshot", "logs", snapshot, "--out", logs, "--json")
    assert result.json == {"folder": str(logs), "rows": 3_000}
    places: defaultdict[str, Iterator[int]] = defaultdict(count)
    expected = [
        {**row, "position": next(places[row["channel_id"]])}
        for row in sorted((row.asDict() for row in entries.collect()), key=as_bytes)
    ]
    files = sorted(logs.glob("*.parquet"))
    assert [row for file in files for row in pq.read_table(file).to_pylist()] == expected
