"""Read the tables of a snapshot into Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StructField, StructType

from pipeline.columns import CHANNELS, CLAIMS, ENTRIES
from pipeline.tables import CHANNELS_FILE, CLAIMS_FOLDER, ENTRIES_FOLDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_entries(
    spark: SparkSession, snapshot: Path, files: Sequence[str] | None = None
) -> DataFrame:
    """The columns of `ENTRIES`, and `day`, the UTC day of arrival, which prunes folders.

    `files` are paths as in the manifest, by default all.
    """
    day = StructField("day", DateType(), nullable=False)
    columns = StructType([*_columns(ENTRIES).fields, day])
    folder = snapshot.absolute() / ENTRIES_FOLDER
    if files is None:
        return _read(spark, [folder] if folder.exists() else [], columns, folder)
    return _read(spark, [snapshot.absolute() / each for each in files], columns, folder)


def read_claims(spark: SparkSession, snapshot: Path) -> DataFrame:
    """The columns of `CLAIMS`."""
    folder = snapshot.absolute() / CLAIMS_FOLDER
    return _read(spark, [folder] if folder.exists() else [], _columns(CLAIMS), folder)


def read_channels(spark: SparkSession, snapshot: Path) -> DataFrame:
    """The columns of `CHANNELS`, sorted by channel ID."""
    path = snapshot.absolute() / CHANNELS_FILE
    return _read(spark, [path], _columns(CHANNELS), path.parent)


def _columns(schema: pa.Schema) -> StructType:
    columns: StructType = from_arrow_schema(schema)
    return columns


def _read(spark: SparkSession, paths: Sequence[Path], columns: StructType, base: Path) -> DataFrame:
    if not paths:  # a table without rows has no files
        return spark.createDataFrame([], columns)
    reader = spark.read.schema(columns).option("basePath", str(base))
    return reader.parquet(*map(str, paths))
