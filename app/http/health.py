"""Whether the node lives, whether it is ready, and its metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from app.errors import Code, Problem
from app.http.auth import Scope
from app.http.framework import CurrentCall, demands
from app.http.relay import SIBLING, all_metrics

router = APIRouter(tags=["health"])


@router.get("/livez", openapi_extra=demands(Scope.OPEN))
async def livez() -> dict[str, str]:
    """The process answers."""
    return {"status": "alive"}


@router.get("/readyz", openapi_extra=demands(Scope.OPEN))
async def readyz(call: CurrentCall) -> dict[str, Any]:
    """The node takes and serves messages; `not_ready` with the reason otherwise."""
    reason = await call.node.readiness.check()
    if reason is not None:
        raise Problem(Code.NOT_READY, reason)
    if call.node.siblings is None:
        return {"status": "ready"}
    states = enumerate(call.node.siblings.board.states())
    return {"status": "ready", "workers": {str(n): state.name.lower() for n, state in states}}


@router.get("/metrics", openapi_extra=demands(Scope.OPEN), response_class=Response)
async def metrics(call: CurrentCall) -> Response:
    """Prometheus metrics, prefix `sdstore_`, of all workers."""
    if call.node.readiness.reason is None:  # a database that is away would hold up the scrape
        await call.node.verification.count_lost()
    siblings = call.node.siblings
    if siblings is None or call.caller is SIBLING:
        text = generate_latest(call.node.metrics)
    else:
        text = await all_metrics(call.node, siblings)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
