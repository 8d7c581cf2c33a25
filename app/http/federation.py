"""Peers and sessions: what an operator sees and does. Thin: the work is in `app.federation`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from app.federation.syncs import Sync, SyncEvent
from app.http.auth import Scope
from app.http.framework import CurrentCall, demands
from app.http.sse import event, event_stream

router = APIRouter(prefix="/v1", tags=["federation"])


def _text(value: str) -> str:
    """Text that is UTF-8 on the wire; JSON can write half a surrogate pair, which is none."""
    value.encode()
    return value


_Text = Annotated[str, AfterValidator(_text)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PeerBody(_Body):
    """A peer to add."""

    url: str = Field(max_length=2_048)


class SyncBody(_Body):
    """Which channels to sync (none: all), and whether only to compare."""

    channels: Annotated[list[_Text], FailFast()] = Field(default_factory=list, max_length=1_000)
    dry_run: bool = False


class SyncUrlBody(SyncBody):
    """A sync with a store that is not a configured peer."""

    peer_url: str = Field(max_length=2_048)


@router.get("/peers", openapi_extra=demands(Scope.ADMIN))
async def list_peers(call: CurrentCall) -> dict[str, Any]:
    """All peers."""
    return {"peers": [peer.document() for peer in call.node.peers.all()]}


@router.post("/peers", status_code=201, openapi_extra=demands(Scope.ADMIN))
async def add_peer(call: CurrentCall, body: PeerBody) -> JSONResponse:
    """Add a peer; 200 where it is one already."""
    known = {peer.peer_id for peer in call.node.peers.all()}
    peer = await call.node.peers.add(body.url)
    status = 200 if peer.peer_id in known else 201
    return JSONResponse(peer.document(), status, {"location": f"/v1/peers/{peer.peer_id}"})


@router.get("/peers/{peer_id:segment}", openapi_extra=demands(Scope.ADMIN))
async def get_peer(call: CurrentCall, peer_id: str) -> dict[str, Any]:
    """One peer."""
    return call.node.peers.get(peer_id).document()


@router.delete("/peers/{peer_id:segment}", status_code=204, openapi_extra=demands(Scope.ADMIN))
async def remove_peer(call: CurrentCall, peer_id: str) -> None:
    """Forget a peer; what came from it stays."""
    await call.node.peers.remove(peer_id)


@router.get("/peers/{peer_id:segment}/status", openapi_extra=demands(Scope.ADMIN))
async def peer_status(call: CurrentCall, peer_id: str) -> dict[str, Any]:
    """Health of a peer and the record of divergence from it."""
    return call.node.peers.get(peer_id).status()


@router.post("/peers/{peer_id:segment}/sync", status_code=202, openapi_extra=demands(Scope.ADMIN))
async def sync_peer(call: CurrentCall, peer_id: str, body: SyncBody | None = None) -> JSONResponse:
    """Start a session with a peer now."""
    wanted = body or SyncBody()
    sync = await call.node.peers.sync_peer(
        peer_id, channels=tuple(wanted.channels), dry_run=wanted.dry_run
    )
    return _started(sync)


@router.get("/syncs", openapi_extra=demands(Scope.ADMIN))
async def list_syncs(call: CurrentCall) -> dict[str, Any]:
    """Sessions, newest first."""
    return {"syncs": [sync.document() for sync in call.node.syncs.recent()]}


@router.post("/syncs", status_code=202, openapi_extra=demands(Scope.ADMIN))
async def sync_url(call: CurrentCall, body: SyncUrlBody) -> JSONResponse:
    """Start a session with a store that is not a configured peer."""
    sync = await call.node.peers.sync_url(
        body.peer_url, channels=tuple(body.channels), dry_run=body.dry_run
    )
    return _started(sync)


@router.get("/syncs/{sync_id:segment}", openapi_extra=demands(Scope.ADMIN))
async def get_sync(call: CurrentCall, sync_id: str) -> dict[str, Any]:
    """One session: percent in sync, segments of the range bar, report."""
    return call.node.syncs.get(sync_id).document()


@router.get("/syncs/{sync_id:segment}/events", openapi_extra=demands(Scope.ADMIN))
async def sync_events(call: CurrentCall, sync_id: str) -> Response:
    """The session's state, now and after every change, as server-sent events."""
    call.node.syncs.get(sync_id)
    return event_stream(call, _sync_events(call.node.syncs.events(sync_id)))


async def _sync_events(events: AsyncIterator[SyncEvent]) -> AsyncGenerator[Sequence[bytes], None]:
    async for each in events:
        yield [event(each.name, each.document, str(each.number))]


def _started(sync: Sync) -> JSONResponse:
    location = {"location": f"/v1/syncs/{sync.sync_id}"}
    return JSONResponse(sync.document(), 202, location)
