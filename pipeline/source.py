"""`spark.read.format("sdstore")` and `spark.readStream.format("sdstore")` on a database URL.

SourceOptions: `url` (sqlite:///PATH or postgresql://…); `frames` ("false" leaves out the frames and the
columns decoded from them, which makes a scan several times faster); `partitionEntries` (approximate
entries of one partition); `maxEntriesPerBatch` (streams: entries of one micro-batch).

Sequence order is commit order in a store, so the entries up to the watermark, which is read first, do
not change: all partitions of one read see the same state, on any number of machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pipeline.columns import ENTRIES, ENTRY_KEYS
from pipeline.database import (
    Database,
    DatabaseError,
    Interval,
    Scan,
    absolute_url,
    ceil_ms,
    floor_ms,
    open_database,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = "sdstore"
PARTITION_ENTRIES = 65_536  # 20 MB of 300-byte frames: a second or two of one core


def register(spark: SparkSession) -> None:
    """Make the format known to a session; once is enough."""
    spark.dataSource.register(StoreSource)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a read, checked."""

    url: str
    has_frames: bool
    partition_entries: int
    batch_entries_max: int | None

    @classmethod
    def of(cls, options: Any) -> SourceOptions:
        """From the caller's options; ValueError for a missing or invalid one."""
        if not options.get("url"):
            raise ValueError("the option url is missing: sqlite:///PATH or postgresql://…")
        batch_max = options.get("maxEntriesPerBatch")
        return cls(
            url=absolute_url(options["url"]),
            has_frames=str(options.get("frames", "true")).lower() == "true",
            partition_entries=_positive(options.get("partitionEntries", PARTITION_ENTRIES)),
            batch_entries_max=None if batch_max is None else _positive(batch_max),
        )

    @property
    def schema(self) -> pa.Schema:
        """The columns of this read."""
        return ENTRIES if self.has_frames else ENTRY_KEYS


def _positive(text: Any) -> int:
    if (number := int(text)) < 1:
        raise ValueError(f"{text} is not a positive number")
    return number


class StoreSource(DataSource):
    """The entries of one store as a table."""

    @classmethod
    def name(cls) -> str:
        """The name in `format(…)`."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns of `pipeline.columns`."""
        return from_arrow_schema(SourceOptions.of(self.options).schema)

    def reader(self, schema: StructType) -> StoreReader:  # noqa: ARG002 - Spark's signature
        """For `spark.read`."""
        return StoreReader(SourceOptions.of(self.options))

    def streamReader(self, schema: StructType) -> StoreStreamReader:  # noqa: ARG002, N802
        """For `spark.readStream`."""
        return StoreStreamReader(SourceOptions.of(self.options))


class ScanPartition(InputPartition):
    """One partition: a scan whose sequence range no other partition shares."""

    def __init__(self, scan: Scan) -> None:
        super().__init__(scan)
        self.scan = scan


class StoreReader(DataSourceReader):
    """One read of the store as it was when the read was planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._scan = Scan()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Accept the filters that SQL answers exactly; return the rest to Spark."""
        for each in filters:
            narrowed = narrow(self._scan, each)
            if narrowed is None:
                yield each
            else:
                self._scan = narrowed

    def partitions(self) -> Sequence[InputPartition]:
        """Sequence ranges of about equal entry counts, all up to one watermark."""
        return _partitions(self._options, self._scan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition."""
        return _read(self._options, partition)


class StoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The store in arrival order. The offset is the last sequence number read and the sum of the arrival
    chain there. A stream stops with an error if the store was rolled back."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._target_seq: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Before the first entry."""
        return {"seq": 0, "sum": "0" * 16}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxEntriesPerBatch`."""
        most = self._options.batch_entries_max
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop at the current watermark, even if more entries arrive while the query runs."""
        with open_database(self._options.url) as database:
            self._target_seq = database.watermark().seq

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The watermark, or the earlier end of a batch of `limit`."""
        with open_database(self._options.url) as database:
            _require_history(database, start)
            target = database.watermark().seq if self._target_seq is None else self._target_seq
            if isinstance(limit, ReadMaxRows):
                target = database.seq_after(start["seq"], target, limit.max_rows)
            return _offset(database, max(start["seq"], target))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The partitions of the entries after `start`, up to `end`."""
        with open_database(self._options.url) as database:
            _require_history(database, end)
        return _partitions(self._options, Scan(seq=Interval(start["seq"] + 1, end["seq"])))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition."""
        return _read(self._options, partition)


def _offset(database: Database, seq: int) -> dict[str, Any]:
    return {"seq": seq, "sum": database.entry_sum_at(seq)}


def _require_history(database: Database, offset: dict[str, Any]) -> None:
    if offset["seq"] > database.watermark().seq or offset != _offset(database, offset["seq"]):
        raise DatabaseError(
            "the store was rolled back after the stream read it (it serves an older copy of its "
            "database), or is another copy: start the query with a new checkpoint"
        )


def _partitions(options: SourceOptions, scan: Scan) -> list[InputPartition]:
    with open_database(options.url) as database:
        scan = replace(scan, seq=scan.seq.at_most(database.watermark().seq))
        parts = database.entry_partitions(scan, options.partition_entries)
    return [ScanPartition(part) for part, _ in parts]


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, ScanPartition)  # noqa: S101 - our own, come back from Spark
    with open_database(options.url) as database:
        batches = database.entries if options.has_frames else database.keys
        yield from batches(partition.scan)


def narrow(scan: Scan, condition: Filter) -> Scan | None:
    """`scan` narrowed by `condition`, or None if SQL cannot answer it exactly."""
    column = getattr(condition, "attribute", (None,))
    match column[0], condition:
        case "channel_id", EqualTo(value=channel_id):
            return scan.of_channels([channel_id])
        case "channel_id", In(value=channel_ids):
            return scan.of_channels([each for each in channel_ids if each is not None])
        case "lamport_timestamp", _:
            lamport = _narrow_integers(scan.lamport, condition)
            return None if lamport is None else replace(scan, lamport=lamport)
        case "seq", _:
            seq = _narrow_integers(scan.seq, condition)
            return None if seq is None else replace(scan, seq=seq)
        case "received_at", _:
            received = _narrow_moments(scan.received_ms, condition)
            return None if received is None else replace(scan, received_ms=received)
    return None


def _narrow_integers(interval: Interval, condition: Filter) -> Interval | None:
    match condition:
        case EqualTo(value=int(value)):
            return interval.at_least(value).at_most(value)
        case GreaterThan(value=int(value)):
            return interval.at_least(value + 1)
        case GreaterThanOrEqual(value=int(value)):
            return interval.at_least(value)
        case LessThan(value=int(value)):
            return interval.at_most(value - 1)
        case LessThanOrEqual(value=int(value)):
            return interval.at_most(value)
    return None


def _narrow_moments(interval: Interval, condition: Filter) -> Interval | None:
    """Spark counts microseconds and the store milliseconds, so bounds are rounded inwards."""
    match condition:
        case EqualTo(value=moment):
            return interval.at_least(ceil_ms(moment)).at_most(floor_ms(moment))
        case GreaterThan(value=moment):
            return interval.at_least(floor_ms(moment) + 1)
        case GreaterThanOrEqual(value=moment):
            return interval.at_least(ceil_ms(moment))
        case LessThan(value=moment):
            return interval.at_most(ceil_ms(moment) - 1)
        case LessThanOrEqual(value=moment):
            return interval.at_most(floor_ms(moment))
    return None
