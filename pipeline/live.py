"""Compare a snapshot with a live node by its channels' counts and roots, without exporting again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from app.errors import Code
from pipeline.findings import Fault, Finding
from pipeline.manifest import Summary
from pipeline.progress import step
from pipeline.snapshot import read_channels, read_entries
from pipeline.summaries import root_of
from sdstore.client.blocking import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.records import Channel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ATTEMPTS = 3  # a channel may grow between the questions
NEWER_MAX = (
    100_000  # entries per channel; beyond, a new snapshot is cheaper than comparing this one
)


def compare_with_node(spark: SparkSession, snapshot: Path, node_url: str) -> Iterator[Finding]:
    """The channels in which the node does not hold what the snapshot holds.

    A node that went on receiving has larger channels. Its newest entries are then fetched, as many
    as it has more: together with the snapshot's they must have the node's root.
    """
    with StoreClient(node_url) as client, step(spark, "Compare with the node"):
        for row in read_channels(spark, snapshot).toLocalIterator():
            channel_id, kept = row["channel_id"], Summary.of((row["count"], bytes(row["root"])))
            finding = None
            for _ in range(_ATTEMPTS):
                finding = _compare_channel(spark, snapshot, client, channel_id, kept)
                if finding is None:
                    break
            if finding is not None:
                yield finding


def _compare_channel(
    spark: SparkSession, snapshot: Path, client: StoreClient, channel_id: str, kept: Summary
) -> Finding | None:
    where = f"channel {channel_id!r}"
    here = _channel(client, channel_id)
    count = 0 if here is None else here.count
    if here is None or count < kept.count:
        detail = f"the node has {count} entries, the snapshot {kept.count}"
        return Finding(Fault.NODE_LACKS_ENTRIES, where, detail)
    live = Summary.of((count, here.root or b""))
    if live == kept:
        return None
    if count - kept.count > NEWER_MAX:
        detail = f"the node has {count - kept.count} more entries: export a newer snapshot"
        return Finding(Fault.NODE_DIFFERS, where, detail)
    if _with_newest(spark, snapshot, client, here, count - kept.count) == live:
        return None
    detail = "the node's root is not that of the snapshot's entries and as many newer ones"
    return Finding(Fault.NODE_DIFFERS, where, detail)


def _channel(client: StoreClient, channel_id: str) -> Channel | None:
    try:
        return client.channel(channel_id)
    except StoreError as error:
        if error.code == Code.NOT_FOUND:
            return None
        raise


def _with_newest(
    spark: SparkSession, snapshot: Path, client: StoreClient, channel: Channel, newer_count: int
) -> Summary:
    """(count, root) of the channel in the snapshot and the node's newest entries together."""
    newest = client.messages(channel.channel_id, order="arrival", direction="desc")
    rows = [(message.digest,) for message in islice(newest, newer_count)]
    kept = read_entries(spark, snapshot).where(f.col("channel_id") == channel.channel_id)
    newer = spark.createDataFrame(rows, "digest binary")
    both = kept.select("digest").union(newer).distinct()
    return Summary.of(root_of(both, "digest", channel.count))
