"""What this node is: version, identity, limits, protocols."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from app.http.auth import Scope
from app.http.docs_page import render_docs
from app.http.framework import CurrentCall, demands, respond
from app.http.render import json_reply
from app.node import Node
from recon.limits import PROTOCOL_VERSION, SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from sdstore.sds.codec import DECODER_VERSION
from sdstore.sds.digest import ENTRY_CONTEXT

router = APIRouter(tags=["node"])


@router.get("/v1/info", openapi_extra=demands(Scope.READ))
async def info(call: CurrentCall) -> Response:
    """Version, node ID, limits, protocols, digest and session parameters."""
    return respond(json_reply(await _document(call.node)))


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
        "content": await node.verification.document(),
        "limits": asdict(node.limits),
    }


@router.get("/openapi.json", openapi_extra=demands(Scope.OPEN))
async def openapi(request: Request) -> JSONResponse:
    """This interface as an OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/docs", openapi_extra=demands(Scope.OPEN), response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """This interface as a page to read."""
    return HTMLResponse(render_docs(request.app.openapi()))
