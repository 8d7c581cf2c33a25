"""`snapshot logs` and `snapshot order`: the log of every channel, and the causal order of one.

Log order is (Lamport timestamp, message ID as UTF-8 bytes, digest), as in the node's pages. Spark compares
strings and binaries as unsigned bytes, which gives the same order.

The causal order is computed by the node's own code, fed in arrival order. One process reads the rows of the
channel and orders them; Spark finds, sorts and streams them. Memory of the driver: about 1.3 kB for each
message with short names, as in the node, and no frames. A channel must fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import filterfalse, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Window
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from app.entries import Entry
from app.orders import NAMED_MAX, Order, Wanted
from app.store.entryrows import LeftOut
from pipeline import manifest as manifests
from pipeline.manifest import (
    CHANNELS_FILE,
    LOGS_FILE,
    ManifestError,
    PipelineError,
    keep_only,
    published,
)
from pipeline.session import step
from pipeline.tables import LOG_ORDER, read_entries
from sdstore.client.records import OrderBreach, OrderIndexer, OrderItem, OrderPage, StoredMessage
from sdstore.sds.model import Dialect, MessageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import StructType

_PART = "_part"
_ROW_GROUP_ROWS = 65_536


class ChannelError(PipelineError):
    """The snapshot has no such channel."""

    code = "not_found"


class OrderError(PipelineError):
    """The channel cannot be ordered: too many messages wait for missing ones."""

    code = "order_too_large"


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


# ---- the order of one channel

_BATCH_ROWS = 500
_PLACES = pa.schema([("digest", pa.binary()), ("place", pa.int64())])


@dataclass(frozen=True, slots=True)
class ChannelOrder:
    """The order: `summary` is a page without items; `items` reads each with its message, once."""

    summary: OrderPage
    items: Iterator[OrderItem]


def channel_order(spark: SparkSession, snapshot: Path, wanted: Wanted) -> ChannelOrder:
    """Order a channel. Entries without content, lost or retired, are left out, as in the node.

    Raises ManifestError if this is no snapshot or a frame is damaged, ChannelError if it has no such
    channel, and OrderError if 100,000 messages wait for missing ones.
    """
    order = Order(wanted)
    its = [("channel_id", "=", wanted.channel_id)]
    if not pq.read_table(snapshot / CHANNELS_FILE, columns=["channel_id"], filters=its).num_rows:
        raise ChannelError(f"{snapshot} has no channel {wanted.channel_id!r}")
    rows = _rows(spark, snapshot, wanted.channel_id)
    with step(spark, "Read the channel"):
        arrivals = rows.sort("seq").toLocalIterator(prefetchPartitions=True)
        while batch := list(islice(arrivals, _BATCH_ROWS)):
            _take(order, [_item(row) for row in batch])
    return ChannelOrder(_summary(order), _items(spark, rows, order))


def _rows(spark: SparkSession, snapshot: Path, channel_id: str) -> DataFrame:
    files = [
        each.file.path
        for each in manifests.load(snapshot).entry_ranges
        if each.first_channel_id <= channel_id <= each.last_channel_id
    ]
    return read_entries(spark, snapshot, files).where(f.col("channel_id") == channel_id)


def _item(row: Row) -> Entry | LeftOut:
    digest = bytes(row["digest"])
    if row["frame"] is None:
        return LeftOut(row["seq"], 0, row["channel_id"], row["message_id"], digest)
    return Entry(
        seq=row["seq"],
        channel_id=row["channel_id"],
        message_id=row["message_id"],
        lamport_timestamp=row["lamport_timestamp"],
        digest=digest,
        frame_hash=bytes(row["frame_hash"]),
        dialect=Dialect[row["dialect"].upper()],
        received_at_ms=int(row["received_at"].timestamp() * 1_000),
        frame=bytes(row["frame"]),
        arrival_sum=0,
    )


def _take(order: Order, items: list[Entry | LeftOut]) -> None:
    while items or order.ordering.is_behind:
        try:
            taken = order.take(items)
        except MessageError as error:
            detail = f"a frame of the channel is damaged ({error}): run `snapshot verify`"
            raise ManifestError(detail) from error
        if order.is_too_large:
            raise OrderError("100,000 messages wait for missing ones: the channel has no order")
        items = items[taken.messages_count :]


def _summary(order: Order) -> OrderPage:
    ordering = order.ordering
    return OrderPage(
        items=(),
        confirmed_count=ordering.confirmed_count,
        tail_count=len(ordering) - ordering.confirmed_count,
        waiting_count=ordering.waiting_count,
        senderless_count=order.senderless_count,
        missing=tuple(islice(filterfalse(order.has_content, ordering.missing), NAMED_MAX)),
        breaches=tuple(
            OrderBreach(
                each.kind, each.sender_id, each.message_id, each.other_message_id, each.detail
            )
            for each in ordering.breaches[:NAMED_MAX]
        ),
        left_out=tuple(islice(order.lost, NAMED_MAX)),
        is_complete=True,
        next=None,
        next_confirmed="",
        indexers=tuple(OrderIndexer(**asdict(each)) for each in ordering.indexers),
        waits_for=ordering.waits_for,
    )


def _items(spark: SparkSession, rows: DataFrame, order: Order) -> Iterator[OrderItem]:
    """Join the places with the rows again, so that the frames are never all in memory."""
    ordering = order.ordering
    known = [order.known[each] for each in ordering.page(0, len(ordering))]
    digests = pa.array([each.digest for each in known], pa.binary())
    places = pa.table([digests, pa.array(range(len(known)))], schema=_PLACES)
    in_order = rows.join(spark.createDataFrame(places), "digest").sort("place")
    with step(spark, "Read the messages"):
        for row in in_order.toLocalIterator(prefetchPartitions=True):
            each = known[row["place"]]
            message = StoredMessage(
                frame=bytes(row["frame"]),
                digest=each.digest,
                frame_hash=bytes(row["frame_hash"]),
                dialect=row["dialect"],
                received_at_ms=int(row["received_at"].timestamp() * 1_000),
                seq=row["seq"],
                variants=(),
                retrieval_hints=(),
            )
            is_confirmed = row["place"] < ordering.confirmed_count
            yield OrderItem(
                each.message_id, each.sender_id or "", each.digest, is_confirmed, message
            )
