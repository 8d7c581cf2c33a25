"""The node about itself: health, metrics, identity and limits, and this interface as a document."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from html import escape
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.callers import Rate
from app.errors import Code, Problem
from app.http.admission import Anybody, Reader
from app.http.call import Reply
from app.http.forms import Form
from app.http.metrics import all_metrics, own_metrics
from app.http.models import Alive, Info, Ready
from app.http.openapi import TEXT, Document, documented, reply
from app.http.replies import json_only
from app.http.routing import NodeRoute
from app.node import Node
from recon.limits import PROTOCOL_VERSION, SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from sdstore.sds.codec import DECODER_VERSION
from sdstore.sds.digest import ENTRY_CONTEXT

router = APIRouter(tags=["health"], route_class=NodeRoute)
router = APIRouter(tags=["node"], route_class=NodeRoute)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h3 code { font-size: 1.05rem; } dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; } section { border-top: 1px solid #8886; } :root { color-scheme: light dark; }
"""


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
    if (watermark := call.node.door.watermark) is not None and watermark.is_low:
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
    if call.caller.channels is not None or call.caller.rate is Rate.STRANGER:
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
async def docs(call: Anybody, request: Request) -> Reply:  # noqa: ARG001
    """This interface as a page to read."""
    page = _docs_page(request.app.openapi())
    return Reply(200, [(b"content-type", b"text/html; charset=utf-8")], page.encode())


def _docs_page(document: Document) -> str:
    """Every operation with its parameters, bodies and answers."""
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a>. '
        f"Errors are problem documents (RFC 9457) with a stable <code>code</code>.</p>{operations}"
    )


def _operation(method: str, path: str, operation: Document) -> str:
    about = operation.get("description") or operation.get("summary", "")
    parameters = [
        (f"{p['name']} ({p['in']})", p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    answers = [(status, a.get("description", "")) for status, a in operation["responses"].items()]
    return (
        f"<section><h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(about)}</p>"
        f"{_list('Parameters', parameters)}{_list('Body', [(kind, '') for kind in body])}"
        f"{_list('Answers', answers)}</section>"
    )


def _list(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    items = "".join(f"<dt><code>{escape(a)}</code><dd>{escape(b)}" for a, b in rows)
    return f"<h4>{title}</h4><dl>{items}</dl>"
