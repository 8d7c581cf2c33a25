"""Compare a snapshot with a live node by its channels' counts and roots, without exporting again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as f

from app.cli.options import node_client
from app.errors import Code
from pipeline.findings import Fault, Finding
from pipeline.manifest import Summary
from pipeline.progress import step
from pipeline.snapshot import read_channels, read_entries
from pipeline.summaries import summaries
from sdstore.client.blocking import StoreClient
from sdstore.client.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ATTEMPTS = 3  # a channel can grow between the requests
# Newer entries of a channel: beyond this, a new snapshot is cheaper than comparing this one. The bound
# also covers all channels that are compared together, whose newer entries are fetched into the driver.
NEWER_MAX = 100_000
_TOGETHER_MAX = 1_000  # channels, whose names become a condition of one query
_NEWER = pa.schema([("channel_id", pa.string()), ("digest", pa.binary())])


def compare_with_node(spark: SparkSession, snapshot: Path, node_url: str) -> Iterator[Finding]:
    """The channels in which the node lacks entries of the snapshot.

    A channel of the node may have grown. Then as many of its newest entries are fetched as the node has
    more: together with the snapshot's entries they must have the node's root.
    """
    with node_client(node_url) as client, step(spark, "Compare with the node"):
        grown: dict[str, int] = {}
        newer_count = 0
        for row in read_channels(spark, snapshot).toLocalIterator():
            channel_id, kept = row["channel_id"], Summary.of((row["count"], bytes(row["root"])))
            live = _live(client, channel_id)
            finding = _fault(channel_id, kept, live)
            if finding is not None:
                yield finding
            elif live != kept:
                grown[channel_id] = kept.count
                newer_count += live.count - kept.count
            if len(grown) >= _TOGETHER_MAX or newer_count >= NEWER_MAX:
                yield from _compare_grown(spark, snapshot, client, grown)
                grown, newer_count = {}, 0
        yield from _compare_grown(spark, snapshot, client, grown)


def _live(client: StoreClient, channel_id: str) -> Summary:
    try:
        channel = client.channel(channel_id)
    except StoreError as error:
        if error.code == Code.NOT_FOUND:
            return Summary.of((0, b""))
        raise
    return Summary.of((channel.count, channel.root or b""))


def _fault(channel_id: str, kept: Summary, live: Summary) -> Finding | None:
    """The fault that counts and roots show; None if they are equal or the node has more entries."""
    where, newer_count = f"channel {channel_id!r}", live.count - kept.count
    if newer_count < 0:
        detail = f"the node has {live.count} entries, the snapshot {kept.count}"
        return Finding(Fault.NODE_LACKS_ENTRIES, where, detail)
    if newer_count > NEWER_MAX:
        detail = f"the node has {newer_count} more entries: export a newer snapshot"
        return Finding(Fault.NODE_DIFFERS, where, detail)
    if newer_count == 0 and live != kept:
        return Finding(Fault.NODE_DIFFERS, where, "equal counts, but different roots")
    return None


def _compare_grown(
    spark: SparkSession, snapshot: Path, client: StoreClient, grown: dict[str, int]
) -> Iterator[Finding]:
    """`grown`: the snapshot's summary of each channel that is larger on the node."""
    for _ in range(_ATTEMPTS):
        if not grown:
            return
        live = {channel_id: _live(client, channel_id) for channel_id in grown}
        newer = [
            {"channel_id": channel_id, "digest": digest}
            for channel_id, kept_count in grown.items()
            for digest in _newest(client, channel_id, live[channel_id].count - kept_count)
        ]
        rows_count = sum(each.count for each in live.values())
        both = _together(spark, snapshot, pa.Table.from_pylist(newer, _NEWER), rows_count)
        grown = {each: count for each, count in grown.items() if both.get(each) != live[each]}
    for channel_id in grown:
        detail = "the node's root differs from that of the snapshot's entries and the newer ones"
        yield Finding(Fault.NODE_DIFFERS, f"channel {channel_id!r}", detail)


def _newest(client: StoreClient, channel_id: str, count: int) -> Iterator[bytes]:
    newest = client.messages(channel_id, order="arrival", direction="desc")
    return (message.digest for message in islice(newest, max(count, 0)))


def _together(
    spark: SparkSession, snapshot: Path, newer: pa.Table, rows_count: int
) -> dict[str, Summary]:
    """(count, root) of each channel of `newer`, over its newer entries and the snapshot's."""
    channel_ids = newer["channel_id"].unique().to_pylist()
    kept = read_entries(spark, snapshot).where(f.col("channel_id").isin(channel_ids))
    both = kept.select(*_NEWER.names).union(spark.createDataFrame(newer)).distinct()
    # Only digests matter here, but summaries need clocks as well.
    clockless = both.withColumn("lamport_timestamp", f.lit(0).cast("bigint"))
    rows = summaries(clockless, ["channel_id"], rows_count).collect()
    return {row["channel_id"]: Summary.of((row["count"], bytes(row["root"]))) for row in rows}
