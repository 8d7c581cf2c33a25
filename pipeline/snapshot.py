"""Read the tables of a snapshot into Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StructField, StructType

from pipeline.columns import CHANNELS, CLAIMS, ENTRIES
from pipeline.layout import CHANNELS_FILE, CLAIMS_FOLDER, ENTRIES_FOLDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_entries(
    spark: SparkSession,
    snapshot: Path,
    files: Sequence[str] | None = None,
    *,
    lenient: bool = False,
) -> DataFrame:
    """The columns of `ENTRIES`, and `day`, the UTC day of arrival, which prunes folders.

    `files` are paths as in the manifest, by default all. `lenient` skips damaged files.
    """
    day = StructField("day", DateType(), nullable=False)
    columns = StructType([*_columns(ENTRIES).fields, day])
    folder = snapshot.absolute() / ENTRIES_FOLDER
    if files is None:
        paths = [folder] if folder.exists() else []
    else:
        paths = [snapshot.absolute() / each for each in files]
    return _read(spark, paths, columns, folder, lenient=lenient)


def read_claims(spark: SparkSession, snapshot: Path, *, lenient: bool = False) -> DataFrame:
    """The columns of `CLAIMS`; `lenient` skips damaged files."""
    folder = snapshot.absolute() / CLAIMS_FOLDER
    paths = [folder] if folder.exists() else []
    return _read(spark, paths, _columns(CLAIMS), folder, lenient=lenient)


def read_channels(spark: SparkSession, snapshot: Path) -> DataFrame:
    """The columns of `CHANNELS`, sorted by channel ID."""
    path = snapshot.absolute() / CHANNELS_FILE
    return _read(spark, [path], _columns(CHANNELS), path.parent)


def _columns(schema: pa.Schema) -> StructType:
    columns: StructType = from_arrow_schema(schema)
    return columns


def _read(
    spark: SparkSession,
    paths: Sequence[Path],
    columns: StructType,
    base: Path,
    *,
    lenient: bool = False,
) -> DataFrame:
    if not paths:  # a table without rows has no files
        return spark.createDataFrame([], columns)
    reader = spark.read.schema(columns).option("basePath", str(base))
    reader = reader.option("ignoreCorruptFiles", lenient).option("ignoreMissingFiles", lenient)
    return reader.parquet(*map(str, paths))
