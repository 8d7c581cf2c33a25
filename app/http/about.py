"""The node about itself: health, metrics, identity and limits, and this interface as a document.

Each worker of a service has its own counters: a worker that gets a request for metrics collects those of the others and
labels every series with its worker, so that a replaced worker resets only its own series. A worker gives its
metrics to whoever connects to its UNIX socket, in a folder that only the service's user can enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from app.errors import Code, Problem
from app.http.admission import Anybody, NodeRoute, Reader
from app.http.call import Form, Reply, json_only
from app.http.openapi import TEXT, Alive, Info, Ready, documented, reply
from app.server.node import Node
from app.server.workers import WorkerPlace
from recon.limits import PROTOCOL_VERSION, SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from sdstore.sds.codec import DECODER_VERSION
from sdstore.sds.model import ENTRY_CONTEXT

# ---- metrics of all workers

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


# ---- routes

router = APIRouter(tags=["node"], route_class=NodeRoute)


@router.get("/livez", **documented({200: reply("The process answers", Alive)}))
async def livez(call: Anybody) -> Reply:  # noqa: ARG001
    """The process answers."""
    return json_only({"status": "alive"})


@router.get("/readyz", **documented({200: reply("Ready", Ready)}))
async def readyz(call: Anybody) -> Reply:
    """The node serves messages; `not_ready` with the reason otherwise.

    `refuses_messages` is the reason while the disk is nearly full; `failing_tasks` names background tasks
    that fail and are tried again.
    """
    reason = await call.node.readiness.check()
    if reason is not None:
        raise Problem(Code.NOT_READY, reason)
    document: dict[str, Any] = {"status": "ready"}
    if failing := call.node.supervisor.failing:
        document["failing_tasks"] = failing
    if (watermark := call.node.ingest.door.watermark) is not None and watermark.is_low:
        document["refuses_messages"] = watermark.reason
    if call.node.worker is not None:
        states = enumerate(call.node.worker.board.states())
        document["workers"] = {str(number): state.name.lower() for number, state in states}
    return json_only(document)


@router.get(
    "/metrics", **documented({200: reply("Prometheus text format", others={Form.TEXT: TEXT})})
)
async def metrics(call: Reader) -> Reply:
    """Prometheus metrics, prefix `sdstore_`, of all workers. They need grants for every channel."""
    node = call.node
    if not call.caller.sees_all:
        raise Problem(Code.FORBIDDEN, "the metrics are of every channel")
    if node.worker is None:
        text = await own_metrics(node)
    else:
        text = await node.sharing.metrics.get(partial(all_metrics, node, node.worker))
    return Reply(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], text)


@router.get("/v1/info", **documented({200: reply("The node", Info)}))
async def info(call: Reader) -> Reply:
    """Version, node ID, limits, protocols, digest and session parameters."""
    node = call.node
    document = await _document(node)
    # A caller with a part of the channels does not learn how much is in the others.
    if call.caller.channels is None:
        document["content"] = {"lost": await node.lost_content.count()}
    return json_only(document)


async def _document(node: Node) -> dict[str, Any]:
    return {
        "version": version("sdstore"),
        "node_id": node.node_id,
        "protocols": {"recon": [PROTOCOL_VERSION], "negentropy": [1]},
        "digest": {"hash": "blake3", "context": ENTRY_CONTEXT, "decoder_version": DECODER_VERSION},
        "session": {
            "nonce_lifetime_s": node.limits.session_nonce_lifetime_s,
            "short_id_bytes": SHORT_ID_BYTES,
            "summary_hash_bytes": SUMMARY_HASH_BYTES,
        },
        "limits": asdict(node.limits),
    }


@router.get(
    "/openapi.json", **documented({200: reply("JSON", others={Form.JSON: {"type": "object"}})})
)
async def openapi(call: Anybody, request: Request) -> Reply:
    """This interface as an OpenAPI document."""
    document = request.app.openapi()
    if public_url := call.node.settings.public_url:
        document = {**document, "servers": [{"url": public_url}]}
    return json_only(document)


@router.get("/docs", **documented({200: reply("A page", others={Form.HTML: TEXT})}))
async def docs(call: Anybody) -> Reply:  # noqa: ARG001
    """This interface as an interactive page (Swagger UI), with all its files from this node."""
    return Reply(200, [*_DOCS_HEADERS, (b"content-type", b"text/html; charset=utf-8")], _PAGE)


@router.get("/docs/{name:segment}", **documented({200: reply("A file of the page")}))
async def docs_file(call: Anybody, name: str) -> Reply:  # noqa: ARG001
    """A file of the interactive page."""
    if name == _START_NAME:
        content = _START
    elif name in _DOCS_FILES:
        content = await asyncio.to_thread(
            (files("fastapi_swagger") / "resources" / name).read_bytes
        )
    else:
        raise Problem(Code.NOT_FOUND, f"the page has no file {name[:64]!r}")
    kind = _DOCS_FILES.get(name, b"text/javascript")
    headers = [*_DOCS_HEADERS, (b"content-type", kind), (b"cache-control", b"max-age=3600")]
    return Reply(200, headers, content)


_DOCS_FILES = {
    "swagger-ui.css": b"text/css",
    "swagger-ui-bundle.js": b"text/javascript",
    "favicon-32x32.png": b"image/png",
}
_DOCS_HEADERS = [
    # The page's own styles are inline; nothing else is, and nothing comes from elsewhere.
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
            b"img-src 'self' data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
]
_PAGE = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>sdstore: HTTP interface</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="page"><a href="openapi.json">openapi.json</a></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
"""
_START_NAME = "start.js"
_START = b"""SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  displayRequestDuration: true,
  filter: true,
  validatorUrl: null,
});
"""
