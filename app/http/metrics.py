"""The metrics of this process, and of all workers of a service.

Each worker has its own counters: a worker that gets a request for metrics collects those of the others and
labels every series with its worker, so that a replaced worker resets only its own series. A worker gives its
metrics to whoever connects to its UNIX socket, in a folder that only the service's user can enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from app.server.node import Node
from app.server.workers import WorkerPlace

METRICS_S_MAX = 2.0  # a scrape must not wait for a worker that hangs
_END = b"# EOF\n"
"""The last line of a worker's metrics: without it the worker has ended meanwhile."""


async def own_metrics(node: Node) -> bytes:
    """The metrics of this worker."""
    if node.readiness.reason is None:  # an unavailable database would delay the scrape
        await node.sharing.lost_count.get(node.lost_content.count)
    return generate_latest(node.metrics)


async def all_metrics(node: Node, place: WorkerPlace) -> bytes:
    """The metrics of all workers that serve, each series with its worker."""
    numbers = place.serving()
    others = await asyncio.gather(*(_metrics_of(place.metrics_socket(n)) for n in numbers))
    own = (await own_metrics(node)).decode()
    texts = {place.number: own} | dict(zip(numbers, others, strict=True))
    answered = {number: text for number, text in sorted(texts.items()) if text is not None}
    return await asyncio.to_thread(_exposed, answered, place)


async def _metrics_of(path: Path) -> str | None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(METRICS_S_MAX):
            reader, writer = await asyncio.open_unix_connection(path)
            with closing(writer):
                text = await reader.read()
                return text.decode() if text.endswith(_END) else None
    return None


@asynccontextmanager
async def giving_metrics(node: Node, place: WorkerPlace) -> AsyncIterator[None]:
    """Give the other workers the metrics of this one while the block runs."""

    async def give(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            writer.write(await own_metrics(node) + _END)
            await writer.drain()

    path = place.metrics_socket(place.number)
    path.unlink(missing_ok=True)  # of the process that had this place before
    async with await asyncio.start_unix_server(give, path):
        yield


def _exposed(texts: Mapping[int, str], place: WorkerPlace) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Joined([*_joined(texts), *_of_workers(texts, place)]))
    return generate_latest(registry)


def _joined(texts: Mapping[int, str]) -> Iterable[Metric]:
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "worker": str(number)}
                joined.samples.append(sample._replace(labels=labels))
    return families.values()


def _of_workers(texts: Mapping[int, str], place: WorkerPlace) -> Iterable[Metric]:
    up = GaugeMetricFamily(
        "sdstore_worker_up", "1 for a worker that reported its metrics, else 0", labels=("worker",)
    )
    restarts = CounterMetricFamily(
        "sdstore_worker_restarts", "Processes that replaced one that died", labels=("worker",)
    )
    for number, count in enumerate(place.board.restarts()):
        up.add_metric([str(number)], number in texts)
        restarts.add_metric([str(number)], count)
    return up, restarts


class _Joined(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
