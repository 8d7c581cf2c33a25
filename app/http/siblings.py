"""The metrics of all workers of a service.

Each worker has its own counters: a worker that gets a request for metrics collects those of the others and
labels every series with its worker, so that a replaced worker resets only its own series. Workers call
each other over UNIX sockets in a folder that only the service's user can enter (`app.siblings`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import httpx
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from app.node import Node
from app.siblings import Siblings

METRICS_S_MAX = 2.0  # a scrape must not wait for a worker that hangs


async def own_metrics(node: Node) -> bytes:
    """The metrics of this worker."""
    if node.readiness.reason is None:  # an unavailable database would delay the scrape
        await node.sharing.lost_count.get(node.lost_content.count)
    return generate_latest(node.metrics)


async def all_metrics(node: Node, siblings: Siblings) -> bytes:
    """The metrics of all workers that serve, each series with its worker."""
    numbers = siblings.serving()
    others = await asyncio.gather(*(_metrics_of(siblings.paths[n]) for n in numbers))
    own = (await own_metrics(node)).decode()
    texts = {siblings.number: own} | dict(zip(numbers, others, strict=True))
    answered = {number: text for number, text in sorted(texts.items()) if text is not None}
    return await asyncio.to_thread(_exposed, answered, siblings)


async def _metrics_of(path: str) -> str | None:
    try:
        async with asyncio.timeout(METRICS_S_MAX), _client(path, METRICS_S_MAX) as client:
            return (await client.get("/metrics")).raise_for_status().text
    except (httpx.HTTPError, TimeoutError):
        return None


@asynccontextmanager
async def _client(path: str, patience: float | httpx.Timeout) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", timeout=patience, trust_env=False
    ) as client:
        yield client


def _exposed(texts: Mapping[int, str], siblings: Siblings) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Joined([*_joined(texts), *_of_workers(texts, siblings)]))
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


def _of_workers(texts: Mapping[int, str], siblings: Siblings) -> Iterable[Metric]:
    up = GaugeMetricFamily(
        "sdstore_worker_up", "1 for a worker that reported its metrics, else 0", labels=("worker",)
    )
    restarts = CounterMetricFamily(
        "sdstore_worker_restarts", "Processes that replaced one that died", labels=("worker",)
    )
    for number, count in enumerate(siblings.board.restarts()):
        up.add_metric([str(number)], number in texts)
        restarts.add_metric([str(number)], count)
    return up, restarts


class _Joined(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
