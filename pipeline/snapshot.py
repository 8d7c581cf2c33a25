"""Read the tables of a snapshot into Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StructField, StructType

from pipeline.columns import CHANNELS, CLAIMS, ENTRIES
from pipeline.tables import CHANNELS_FILE, CLAIMS_FOLDER, ENTRIES_FOLDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_entries(spark: SparkSession, snapshot: Path) -> DataFrame:
    """The columns of `ENTRIES`, and `day`, the UTC day of arrival, which prunes folders."""
    day = StructField("day", DateType(), nullable=False)
    columns = StructType([*from_arrow_schema(ENTRIES).fields, day])
    return _read(spark, snapshot / ENTRIES_FOLDER, columns)


def read_claims(spark: SparkSession, snapshot: Path) -> DataFrame:
    """The columns of `CLAIMS`."""
    return _read(spark, snapshot / CLAIMS_FOLDER, _columns(CLAIMS))


def read_channels(spark: SparkSession, snapshot: Path) -> DataFrame:
    """The columns of `CHANNELS`, sorted by channel ID."""
    return _read(spark, snapshot / CHANNELS_FILE, _columns(CHANNELS))


def _columns(schema: pa.Schema) -> StructType:
    columns: StructType = from_arrow_schema(schema)
    return columns


def _read(spark: SparkSession, path: Path, columns: StructType) -> DataFrame:
    if not path.exists():  # a table without rows has no files
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).parquet(str(path.absolute()))
