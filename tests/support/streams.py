"""A stream of a store into Parquet; `python -m tests.support.streams URL FOLDER` for one to kill."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA = "seq bigint, digest binary"
_SECONDS_MAX = 240


def stream_available(spark: SparkSession, url: str, folder: Path, **options: Any) -> None:
    """Write what is in the store by now to `folder`/out, with a checkpoint, then stop."""
    stream = spark.readStream.format("sdstore").options(url=url, **options).load()
    query = (
        stream.select("seq", "digest")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "out"))
    )
    assert query.awaitTermination(_SECONDS_MAX)


def streamed(spark: SparkSession, folder: Path) -> DataFrame:
    """The rows written by the finished batches."""
    return spark.read.schema(_SCHEMA).parquet(str(folder / "out"))


if __name__ == "__main__":
    with spark_session("local[2,4]") as session:
        # Twenty tasks of one batch: there is a middle to be killed in.
        stream_available(
            session, sys.argv[1], Path(sys.argv[2]), maxEntriesPerBatch=2_000, partitionEntries=100
        )
