"""The order of one channel of a snapshot: the node's own code, fed in arrival order.

One process reads the rows of the channel and orders them; Spark finds, sorts and streams them. Memory of the
driver: about 1.3 kB for each message with short names, as in the node, and no frames. A channel must fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import filterfalse, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as f

from app.entries import Entry
from app.orders import NAMED_MAX, Order, Wanted
from app.store.entryrows import LeftOut
from pipeline import manifest as manifests
from pipeline.errors import ChannelError, ManifestError, OrderError
from pipeline.progress import step
from pipeline.snapshot import read_channels, read_entries
from sdstore.client.records import OrderBreach, OrderIndexer, OrderItem, OrderPage, StoredMessage
from sdstore.sds.model import Dialect, MessageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

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
    if read_channels(spark, snapshot).where(f.col("channel_id") == wanted.channel_id).isEmpty():
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
