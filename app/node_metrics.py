"""The node's own counters for Prometheus, read when scraped; prefix `sdstore_`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.ingest.committer import GroupCommitter
from app.live import LiveHub
from app.rangeindex import NodeIndex

Family = CounterMetricFamily | GaugeMetricFamily


def register_node_metrics(
    registry: CollectorRegistry, committer: GroupCommitter, index: NodeIndex, live: LiveHub
) -> None:
    """Add ingest, index and process families to a registry."""
    registry.register(_NodeCollector(committer, index, live))
    ProcessCollector(namespace="sdstore", registry=registry)


class _NodeCollector(Collector):
    def __init__(self, committer: GroupCommitter, index: NodeIndex, live: LiveHub) -> None:
        self._committer = committer
        self._index = index
        self._live = live

    def collect(self) -> Iterator[Family]:
        counters = self._committer.counters
        yield _counter("ingest_groups", "Transactions committed", counters.groups)
        yield _counter("ingest_entries", "Messages in committed transactions", counters.entries)
        yield _counter("ingest_bytes", "Bytes of frames committed", counters.bytes)
        yield _counter("ingest_failed_groups", "Transactions undone", counters.failed_groups)
        yield _gauge("ingest_group_largest", "Messages of the largest one", counters.largest_group)
        yield _gauge("ingest_queue_items", "Messages waiting", counters.queue_items)
        yield _gauge("ingest_queue_bytes", "Bytes of frames waiting", counters.queue_bytes)
        yield _gauge("index_elements", "Elements of the range index", len(self._index.elements))
        yield _gauge("live_readers", "Live readers connected", self._live.readers_count)


def _counter(name: str, about: str, value: float) -> Family:
    return CounterMetricFamily(f"sdstore_{name}", about, value=value)


def _gauge(name: str, about: str, value: float) -> Family:
    return GaugeMetricFamily(f"sdstore_{name}", about, value=value)
