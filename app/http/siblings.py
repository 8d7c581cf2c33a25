"""Calls between workers, so that any of them can answer for the whole service.

Peers and syncs belong to the first worker: any other one authorizes such a call and forwards it. Each
worker has its own counters: a worker that gets a request for metrics collects those of the others and
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

from app.callers import Caller
from app.errors import Code, Problem
from app.http.call import App, AsgiScope, Receive, Send, raw_path
from app.node import Node
from app.siblings import Siblings, WorkerState

HELD_BY_FIRST = ("/v1/peers", "/v1/syncs")
ANSWER_S_MAX = 30.0  # adding a peer contacts it and waits for the disk
METRICS_S_MAX = 2.0  # a scrape must not wait for a worker that hangs
RETRY_AFTER_S = 1

SIBLING = Caller("sibling")
_PASSED_ON = (b"accept", b"content-type")
_PASSED_BACK = {b"content-type", b"content-length", b"cache-control", b"location", b"retry-after"}


class SiblingAuthorizer:
    """Full rights for callers on a worker's private socket: the other worker has authorized them."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG002
        """See `app.callers.Authorizer`."""
        return SIBLING


def handing_on(siblings: Siblings, framework: App) -> App:
    """The framework of a worker other than the first."""

    async def app(scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(HELD_BY_FIRST):
            await _hand_on(siblings, scope, receive, send)
        else:
            await framework(scope, receive, send)

    return app


async def _hand_on(siblings: Siblings, scope: AsgiScope, receive: Receive, send: Send) -> None:
    if siblings.board.states()[0] is not WorkerState.SERVING:
        raise _first_is_away()
    body = (await receive()).get("body", b"")
    answering = asyncio.create_task(_pass_back(siblings, scope, body, send))
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        # A stream of events lasts until its client disconnects.
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _pass_back(siblings: Siblings, scope: AsgiScope, body: bytes, send: Send) -> None:
    target = raw_path(scope) + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [(name, value) for name, value in scope["headers"] if name in _PASSED_ON]
    has_begun = False
    try:
        async with (
            _client(siblings.paths[0], httpx.Timeout(ANSWER_S_MAX, read=None)) as client,
            client.stream(
                scope["method"],
                client.base_url.copy_with(raw_path=target),
                headers=headers,
                content=body or None,
            ) as response,
        ):
            passed = [(n.lower(), v) for n, v in response.headers.raw if n.lower() in _PASSED_BACK]
            has_begun = True
            start = {"type": "http.response.start", "status": response.status_code}
            await send({**start, "headers": passed})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
    except httpx.TransportError as error:
        if not has_begun:
            raise _first_is_away() from error
        raise


def _first_is_away() -> Problem:
    return Problem(
        Code.NOT_READY,
        "the worker that talks to the peers is starting",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def own_metrics(node: Node) -> bytes:
    """The metrics of this worker."""
    if node.readiness.reason is None:  # an unavailable database would delay the scrape
        await node.sharing.lost_count.get(node.verification.count_lost)
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
