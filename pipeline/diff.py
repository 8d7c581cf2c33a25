"""`snapshot diff`: the entries that only one of two sides has.

Files whose (count, root) both snapshots have are skipped. Channels are compared by (count, root).
Channels that differ are cut into Lamport ranges and compared in the same way. Only rows of ranges that
differ are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as f

from pipeline import manifest as manifests
from pipeline.progress import step
from pipeline.snapshot import read_entries
from pipeline.source import FORMAT
from pipeline.summaries import summaries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RANGES_PER_CHANNEL = 64  # the join covers at least 1/64 of a channel that differs
RANGES_MAX = 10_000  # listed; beyond this the count is enough
_KEYS = ("channel_id", "lamport_timestamp", "message_id", "digest")
_CHANNEL = ["channel_id"]
_RANGE = ["channel_id", "range"]


@dataclass(frozen=True, slots=True)
class RangeDifference:
    """A range of a channel in which the sides differ: its Lamport bounds and each side's count."""

    channel_id: str
    lamport_first: int
    lamport_last: int
    left_count: int
    right_count: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The entries (channel, Lamport, ID, digest) that only one side has, the number of ranges that
    differ, and the first `RANGES_MAX` of those by channel and Lamport timestamp."""

    ranges_count: int
    ranges: tuple[RangeDifference, ...]
    left_only: DataFrame
    right_only: DataFrame


def diff(spark: SparkSession, left: Path | str, right: Path | str) -> Difference:
    """Compare two sides, each a snapshot's folder or a database URL.

    Raises ManifestError or DatabaseError if a side is neither.
    """
    with step(spark, "Compare ranges"):
        one, other = _sides(spark, left, right)
        rows_count = max(one.count(), other.count())
        channels = _different(one, other, _CHANNEL, rows_count)
        one, other = _with_ranges(*_only(channels, _CHANNEL, one, other))
        ranges = _different(one, other, _RANGE, rows_count)
        rows = ranges.sort("channel_id", "lamport_first").limit(RANGES_MAX).collect()
        ranges_count = ranges.count()
        one, other = _only(ranges, _RANGE, one, other)
    return Difference(
        ranges_count=ranges_count,
        ranges=tuple(RangeDifference(*(row[name] for name in _REPORTED)) for row in rows),
        left_only=one.join(other, "digest", "left_anti").select(*_KEYS),
        right_only=other.join(one, "digest", "left_anti").select(*_KEYS),
    )


_REPORTED = ("channel_id", "lamport_first", "lamport_last", "left_count", "right_count")


def _sides(spark: SparkSession, left: Path | str, right: Path | str) -> tuple[DataFrame, DataFrame]:
    if isinstance(left, Path) and isinstance(right, Path):
        return _without_common_files(spark, left, right)
    return _side(spark, left), _side(spark, right)


def _side(spark: SparkSession, side: Path | str) -> DataFrame:
    if isinstance(side, Path):
        manifests.load(side)
        return read_entries(spark, side).select(*_KEYS)
    source = spark.read.format(FORMAT).option("url", side).option("frames", "false")
    # Cached: it is read three times, to find the ranges, to hash them and to join their rows.
    return source.load().select(*_KEYS).persist(StorageLevel.DISK_ONLY)


def _without_common_files(
    spark: SparkSession, left: Path, right: Path
) -> tuple[DataFrame, DataFrame]:
    """Digests are unique within a snapshot, so equal files do not affect the difference."""
    ranges = [manifests.load(side).entry_ranges for side in (left, right)]
    known = [{(each.count, each.root) for each in side} for side in ranges]
    common = known[0] & known[1]
    one, other = (
        read_entries(
            spark,
            side,
            [each.file.path for each in of_side if (each.count, each.root) not in common],
        ).select(*_KEYS)
        for side, of_side in zip((left, right), ranges, strict=True)
    )
    return one, other


def _different(one: DataFrame, other: DataFrame, keys: Sequence[str], rows_count: int) -> DataFrame:
    """(keys…, Lamport bounds, counts) of the groups that differ between the sides."""
    left, right = (
        _prefixed(summaries(side, keys, rows_count), keys, name)
        for side, name in ((one, "left"), (other, "right"))
    )
    found = (
        left.join(right, [*keys], "full_outer")
        .where(~f.col("left_root").eqNullSafe(f.col("right_root")))
        .select(
            *keys,
            f.least("left_lamport_first", "right_lamport_first").alias("lamport_first"),
            f.greatest("left_lamport_last", "right_lamport_last").alias("lamport_last"),
            f.coalesce("left_count", f.lit(0)).alias("left_count"),
            f.coalesce("right_count", f.lit(0)).alias("right_count"),
        )
    )
    return found.persist()


def _only(groups: DataFrame, keys: Sequence[str], *sides: DataFrame) -> Iterator[DataFrame]:
    """The rows of each side that are in one of `groups`."""
    return (side.join(groups.select(*keys), [*keys]) for side in sides)


def _prefixed(frame: DataFrame, keys: Sequence[str], prefix: str) -> DataFrame:
    names = [name for name in frame.columns if name not in keys]
    return frame.withColumnsRenamed({name: f"{prefix}_{name}" for name in names})


def _with_ranges(one: DataFrame, other: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Number the rows of each channel by Lamport ranges of about equal size, counting both sides."""
    fractions = [number / RANGES_PER_CHANNEL for number in range(1, RANGES_PER_CHANNEL)]
    cuts = (
        one.union(other)
        .groupBy("channel_id")
        .agg(f.percentile_approx("lamport_timestamp", fractions).alias("cuts"))
    )
    number = f.size(f.filter("cuts", lambda cut: cut < f.col("lamport_timestamp")))
    numbered = [
        side.join(cuts, "channel_id").withColumn("range", number).drop("cuts")
        for side in (one, other)
    ]
    return numbered[0], numbered[1]
