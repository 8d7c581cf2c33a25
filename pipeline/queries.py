"""The tables of a report, each one query over a snapshot's entries.

Days and lags use arrival times: Lamport timestamps are not wall-clock time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray
from pyspark.sql import Window
from pyspark.sql import functions as f

from sdstore.sds.codec import decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

GRAPH_EDGES_MAX = 2_000_000  # of a channel, whose graph one task walks: about 300 MB
_NEIGHBOURS = 10  # messages before and after, in arrival order, that a clock is compared with
_FAR = 10  # times the spread of the neighbours' middle half
_REFERENCE = ("channel_id", "message_id")


def activity(entries: DataFrame) -> DataFrame:
    """Per channel and day: messages, bytes, senders, and messages so far."""
    so_far = Window.partitionBy("channel_id").orderBy("day")
    return (
        entries.groupBy("channel_id", "day")
        .agg(
            f.count("*").alias("messages"),
            f.sum("frame_bytes").alias("frame_bytes"),
            f.sum("content_bytes").alias("content_bytes"),
            f.countDistinct("sender_id").alias("senders"),
        )
        .withColumn("messages_so_far", f.sum("messages").over(so_far))
        .sort("channel_id", "day")
    )


def gaps(entries: DataFrame) -> DataFrame:
    """Per channel and day: messages that histories name and the snapshot lacks.

    Sync messages have IDs but are not stored, so some of these may never have had content.
    """
    missing = _references(entries).join(
        entries.select(*_REFERENCE).distinct(), [*_REFERENCE], "left_anti"
    )
    return (
        missing.groupBy("channel_id", "day")
        .agg(
            f.countDistinct("message_id").alias("missing_messages"),
            f.count("*").alias("references"),
        )
        .sort("channel_id", "day")
    )


def equivocations(entries: DataFrame) -> DataFrame:
    """Message IDs with several entries; more than one content is an equivocation, not a repeat."""
    several = entries.groupBy(*_REFERENCE).count().where("count > 1").select(*_REFERENCE)
    frames = entries.join(several, [*_REFERENCE]).select(*_REFERENCE, "sender_id", "day", "frame")
    contents = frames.mapInArrow(
        _hash_contents,
        "channel_id string, message_id string, sender_id string, day date, content binary",
    )
    return (
        contents.groupBy(*_REFERENCE)
        .agg(
            f.min("day").alias("first_day"),
            f.count("*").alias("variants"),
            f.countDistinct("content").alias("contents"),
            f.countDistinct("sender_id").alias("senders"),
        )
        .withColumn("is_equivocation", f.col("contents") > 1)
        .sort(*_REFERENCE)
    )


def _hash_contents(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        hashes = [
            None if frame is None else blake3(decode(frame)[0].content).digest()
            for frame in batch.column("frame").to_pylist()
        ]
        kept = batch.drop_columns(["frame"])
        yield kept.append_column("content", pa.array(hashes, pa.binary()))


def graphs(entries: DataFrame) -> DataFrame:
    """Per channel: depth and width of the causal graph of its newest messages."""
    newest = Window.partitionBy("channel_id").orderBy(f.desc("seq"))
    # A message without a history is one row of `edges`, too.
    edges_count = f.greatest(f.size("causal_history"), f.lit(1))
    recent = entries.withColumn("edges", f.sum(edges_count).over(newest)).where(
        f.col("edges") <= GRAPH_EDGES_MAX
    )
    named = _first_seen(recent).select(*_REFERENCE, f.col("seq").alias("parent"))
    edges = (
        recent.select("channel_id", "seq", f.explode_outer("causal_history").alias("reference"))
        .select("channel_id", f.col("seq").alias("child"), f.col("reference.message_id"))
        .join(named, [*_REFERENCE], "left")
        .select("channel_id", "child", f.coalesce("parent", f.lit(-1)).alias("parent"))
    )
    columns = "channel_id string, messages bigint, depth bigint, width bigint, cyclic bigint"
    return edges.groupBy("channel_id").applyInArrow(_graph_row, columns).sort("channel_id")


def _graph_row(edges: pa.Table) -> pa.Table:
    children, parents = (edges[name].to_numpy() for name in ("child", "parent"))
    shape = shape_of(children, parents)
    return pa.table(
        {
            "channel_id": edges["channel_id"][:1],
            "messages": [len(np.unique(children))],
            "depth": [shape.depth],
            "width": [shape.width],
            "cyclic": [shape.cyclic_count],
        }
    )


def clocks(entries: DataFrame) -> DataFrame:
    """Messages whose Lamport timestamp is far from those that arrived just before and after."""
    near = Window.partitionBy("channel_id").orderBy("seq").rowsBetween(-_NEIGHBOURS, _NEIGHBOURS)
    quarters = f.percentile_approx("lamport_timestamp", [0.25, 0.5, 0.75]).over(near)
    # Decimals: the difference of two 64-bit clocks may not fit into 64 bits.
    clock = f.col("lamport_timestamp").cast("decimal(20,0)")
    low, middle, high = (f.col("quarters")[each].cast("decimal(20,0)") for each in range(3))
    return (
        entries.withColumn("quarters", quarters)
        .withColumn("distance", f.abs(clock - middle))
        .where(f.col("distance") > (high - low + 1) * _FAR)
        .select("channel_id", "day", "message_id", "sender_id", "lamport_timestamp", "distance")
        .sort("channel_id", "day", "message_id")
    )


def lags(entries: DataFrame) -> DataFrame:
    """Per channel and day: seconds until a message of another sender names a message.

    By then another participant has delivered it. The lag is negative if the message arrived here after
    the message that names it.
    """
    named = _first_seen(entries).select(
        *_REFERENCE, "day", "received_at", f.col("sender_id").alias("author")
    )
    naming = _references(entries).select(
        *_REFERENCE, "sender_id", f.col("received_at").alias("named_at")
    )
    first_named = (
        named.join(naming, [*_REFERENCE])
        .where("sender_id <> author")
        .groupBy("channel_id", "day", "message_id", "received_at")
        .agg(f.min("named_at").alias("named_at"))
    )
    seconds = f.col("named_at").cast("double") - f.col("received_at").cast("double")
    quantiles = f.percentile_approx("lag_s", [0.5, 0.95])
    return (
        first_named.withColumn("lag_s", seconds)
        .groupBy("channel_id", "day")
        .agg(f.count("*").alias("messages"), quantiles.alias("lags"))
        .select(
            "channel_id",
            "day",
            "messages",
            f.col("lags")[0].alias("lag_s_median"),
            f.col("lags")[1].alias("lag_s_p95"),
        )
        .sort("channel_id", "day")
    )


def _references(entries: DataFrame) -> DataFrame:
    """One row per history entry: the sender, the message ID it names, and the arrival time."""
    return entries.select(
        "channel_id",
        "day",
        "sender_id",
        "received_at",
        f.explode("causal_history.message_id").alias("message_id"),
    )


def _first_seen(entries: DataFrame) -> DataFrame:
    """The first-seen variant of each message ID; a history entry is taken to mean this one."""
    first = Window.partitionBy(*_REFERENCE).orderBy("seq")
    return entries.withColumn("_variant", f.row_number().over(first)).where("_variant = 1")


TABLES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "activity": activity,
    "gaps": gaps,
    "equivocations": equivocations,
    "graphs": graphs,
    "clocks": clocks,
    "lags": lags,
}


# ---- depth and width of a causal graph


@dataclass(frozen=True, slots=True)
class Shape:
    """`depth`: messages on the longest causal chain. `width`: the largest number of messages at one
    distance from the roots. `cyclic_count`: messages on or after a cycle, which have no distance."""

    depth: int
    width: int
    cyclic_count: int


def shape_of(children: NDArray[np.int64], parents: NDArray[np.int64]) -> Shape:
    """The shape of the graph with edges children[i] → parents[i]; -1 is "no parent".

    Every message must be a child at least once. Parents that are not children, and references of a
    message to itself, are ignored. Time and memory are linear in the edges (Kahn 1962).
    """
    nodes, child = np.unique(children, return_inverse=True)
    parent = np.searchsorted(nodes, parents).clip(max=len(nodes) - 1)
    is_edge = (nodes[parent] == parents) & (parent != child)
    child, parent = child[is_edge], parent[is_edge]
    order = np.argsort(parent, kind="stable")
    followers = child[order].tolist()
    starts = np.searchsorted(parent[order], np.arange(len(nodes) + 1)).tolist()
    waiting = np.bincount(child, minlength=len(nodes)).tolist()
    return _shape(followers, starts, waiting)


def _shape(followers: list[int], starts: list[int], waiting: list[int]) -> Shape:
    """Kahn's walk: a node gets its level once all its parents have theirs."""
    level = [1] * len(waiting)
    ready = [node for node, count in enumerate(waiting) if not count]
    widths: dict[int, int] = {}
    done_count = 0
    while ready:
        node = ready.pop()
        done_count += 1
        here = level[node]
        widths[here] = widths.get(here, 0) + 1
        for follower in followers[starts[node] : starts[node + 1]]:
            level[follower] = max(level[follower], here + 1)
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return Shape(max(widths, default=0), max(widths.values(), default=0), len(waiting) - done_count)
