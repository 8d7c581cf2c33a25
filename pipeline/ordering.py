"""Channel logs at any size: the position of every message in the log of its channel.

Log order is (Lamport timestamp, message ID as UTF-8 bytes, digest), as in the node's pages.
Spark compares strings and binaries as unsigned bytes, which gives the same order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline import manifest as manifests
from pipeline.layout import LOGS_FILE
from pipeline.progress import step
from pipeline.publish import keep_only, published
from pipeline.snapshot import read_entries
from pipeline.tables import LOG_ORDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_PART = "_part"
_ROW_GROUP_ROWS = 65_536


def write_logs(spark: SparkSession, snapshot: Path, out: Path) -> int:
    """Make the folder `out` with a Parquet file of the log order, `position` and `seq` of every entry.

    Rows are sorted by channel and position. Returns their number.
    Raises ManifestError, and PublishError if `out` exists.
    """
    rows_count = manifests.load(snapshot).entries.count
    entries = read_entries(spark, snapshot).select(*LOG_ORDER, "seq")
    with published(out.absolute()) as folder, step(spark, "Order logs"):
        ordered = log_positions(entries).sort("channel_id", "position")
        ordered.write.mode("append").parquet(str(folder))
        _joined(folder, ordered.schema)
    return rows_count


def _joined(folder: Path, schema: StructType) -> None:
    """Spark's files, which are sorted by name as by row, become one; it is written by row groups."""
    with pq.ParquetWriter(folder / LOGS_FILE, to_arrow_schema(schema)) as writer:
        for part in sorted(folder.glob("part-*.parquet")):
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(_ROW_GROUP_ROWS):
                    writer.write_batch(batch.cast(writer.schema))
    keep_only(folder, {LOGS_FILE})


def log_positions(entries: DataFrame) -> DataFrame:
    """`entries` with the column `position`: 0 for the first message of its channel's log.

    All rows are sorted across the cluster by (channel, log order). A row's position is its place in its
    partition plus the rows of its channel in earlier partitions. So a channel can exceed any machine.
    """
    placed = (
        entries.repartitionByRange(*LOG_ORDER)
        .withColumn(_PART, f.spark_partition_id())
        # Persist: Spark samples the range bounds, and the rows counted must be the rows numbered.
        .localCheckpoint()
    )
    counts = placed.groupBy("channel_id", _PART).agg(f.count("*").alias("_count"))
    before = (
        Window.partitionBy("channel_id").orderBy(_PART).rowsBetween(Window.unboundedPreceding, -1)
    )
    offsets = counts.select(
        "channel_id", _PART, f.coalesce(f.sum("_count").over(before), f.lit(0)).alias("_offset")
    )
    within = Window.partitionBy("channel_id", _PART).orderBy(*LOG_ORDER[1:])
    numbered = placed.withColumn("_place", f.row_number().over(within) - 1)
    return (
        numbered.join(f.broadcast(offsets), ["channel_id", _PART])
        .withColumn("position", f.col("_offset") + f.col("_place"))
        .drop(_PART, "_place", "_offset")
    )
