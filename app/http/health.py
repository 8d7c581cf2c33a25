"""Whether the node lives, whether it is ready, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from app.errors import Code, Problem
from app.http.auth import Scope
from app.http.framework import CurrentCall, demands

router = APIRouter(tags=["health"])


@router.get("/livez", openapi_extra=demands(Scope.OPEN))
async def livez() -> dict[str, str]:
    """The process answers."""
    return {"status": "alive"}


@router.get("/readyz", openapi_extra=demands(Scope.OPEN))
async def readyz(call: CurrentCall) -> dict[str, str]:
    """The node takes and serves messages; `not_ready` with the reason otherwise."""
    reason = await call.node.readiness.check()
    if reason is not None:
        raise Problem(Code.NOT_READY, reason)
    return {"status": "ready"}


@router.get("/metrics", openapi_extra=demands(Scope.OPEN), response_class=Response)
async def metrics(call: CurrentCall) -> Response:
    """Prometheus metrics, prefix `sdstore_`."""
    await call.node.verification.count_lost()
    return Response(generate_latest(call.node.metrics), media_type=CONTENT_TYPE_LATEST)
