"""Peers and sessions, for operators. The work is done in `app.federation`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from app.federation.divergence import divergence_of
from app.federation.syncs import Sync, SyncEvent
from app.http.admission import Operator, json_body
from app.http.call import Call, Reply, StreamedReply
from app.http.models import PeerJson, PeerList, PeerStatus, SyncJson, SyncList
from app.http.openapi import EVENTS, body, content, documented, reply
from app.http.replies import event, event_stream, json_only
from app.http.routing import NodeRoute
from app.server.logs import shown_url

router = APIRouter(tags=["federation"], route_class=NodeRoute)


def utf8_text(value: str) -> str:
    """Text that UTF-8 can encode; JSON can contain half a surrogate pair, which it cannot."""
    value.encode()
    return value


_Text = Annotated[str, AfterValidator(utf8_text)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PeerBody(_Body):
    """A peer to add, with an access token of it if it demands one."""

    url: str = Field(max_length=2_048)
    token: str | None = Field(None, pattern=r"^[!-~]{1,1024}$")


class SyncBody(_Body):
    """Which channels to sync (none: all), and whether only to compare."""

    channels: Annotated[list[_Text], FailFast()] = Field(default_factory=list, max_length=1_000)
    dry_run: bool = False


class SyncUrlBody(SyncBody):
    """A sync with a store that is not a configured peer."""

    peer_url: str = Field(max_length=2_048)


@router.get("/v1/peers", **documented({200: reply("The peers", PeerList)}))
async def list_peers(call: Operator) -> Reply:
    """All peers."""
    await call.node.peers.refresh()
    return json_only({"peers": [peer.document() for peer in call.node.peers.all()]})


@router.post(
    "/v1/peers",
    **documented(
        {201: reply("Added", PeerJson), 200: reply("A peer already", PeerJson)},
        body(content(PeerBody)),
    ),
)
async def add_peer(call: Operator, body: Annotated[PeerBody, json_body(PeerBody)]) -> Reply:
    """Add a peer; 200 if it is one already."""
    call.target = shown_url(body.url)
    await call.node.peers.refresh()
    known = {peer.peer_id for peer in call.node.peers.all()}
    peer = await call.node.peers.add(body.url, body.token)
    call.target = f"{peer.peer_id} {call.target}"
    status = 200 if peer.peer_id in known else 201
    return json_only(peer.document(), status, [call.location(f"/v1/peers/{peer.peer_id}")])


@router.get("/v1/peers/{peer_id:segment}", **documented({200: reply("The peer", PeerJson)}))
async def get_peer(call: Operator, peer_id: str) -> Reply:
    """One peer."""
    await call.node.peers.refresh()
    return json_only(call.node.peers.get(peer_id).document())


@router.delete("/v1/peers/{peer_id:segment}", **documented({204: reply("Removed")}))
async def remove_peer(call: Operator, peer_id: str) -> Reply:
    """Forget a peer; messages that it sent stay."""
    await call.node.peers.refresh()
    await call.node.peers.remove(peer_id)
    return Reply(204, [])


@router.get(
    "/v1/peers/{peer_id:segment}/status", **documented({200: reply("The peer", PeerStatus)})
)
async def peer_status(call: Operator, peer_id: str) -> Reply:
    """Health of a peer and the record of divergence from it."""
    node = call.node
    await node.peers.refresh()
    peer = node.peers.get(peer_id)
    memory = await node.peers.memory_of(peer)
    now_ms = time.time_ns() // 1_000_000
    divergence = await divergence_of(peer, memory, node.store, node.index, now_ms)
    return json_only(peer.status() | {"divergence": divergence})


@router.post(
    "/v1/peers/{peer_id:segment}/sync",
    **documented({202: reply("Started", SyncJson)}, body(content(SyncBody), is_required=False)),
)
async def sync_peer(
    call: Operator, peer_id: str, body: Annotated[SyncBody, json_body(SyncBody, is_optional=True)]
) -> Reply:
    """Start a session with a peer now."""
    await call.node.peers.refresh()
    sync = await call.node.peers.sync_peer(
        peer_id, channels=tuple(body.channels), dry_run=body.dry_run
    )
    return _started(call, sync)


@router.get("/v1/syncs", **documented({200: reply("The sessions", SyncList)}))
async def list_syncs(call: Operator) -> Reply:
    """Sessions, newest first."""
    return json_only({"syncs": await call.node.syncs.documents()})


@router.post(
    "/v1/syncs", **documented({202: reply("Started", SyncJson)}, body(content(SyncUrlBody)))
)
async def sync_url(call: Operator, body: Annotated[SyncUrlBody, json_body(SyncUrlBody)]) -> Reply:
    """Start a session with a store that is not a configured peer."""
    call.target = shown_url(body.peer_url)
    await call.node.peers.refresh()
    sync = await call.node.peers.sync_url(
        body.peer_url, channels=tuple(body.channels), dry_run=body.dry_run
    )
    return _started(call, sync)


@router.get("/v1/syncs/{sync_id:segment}", **documented({200: reply("The session", SyncJson)}))
async def get_sync(call: Operator, sync_id: str) -> Reply:
    """One session: percent in sync, segments of the range bar, report."""
    return json_only(await call.node.syncs.find(sync_id))


@router.get("/v1/syncs/{sync_id:segment}/events", **documented(EVENTS))
async def sync_events(call: Operator, sync_id: str) -> StreamedReply:
    """The session's state, now and after every change, as server-sent events."""
    await call.node.syncs.find(sync_id)
    return event_stream(_sync_events(call.node.syncs.watch(sync_id)))


async def _sync_events(events: AsyncIterator[SyncEvent]) -> AsyncGenerator[Sequence[bytes], None]:
    async for each in events:
        yield [event(each.name, each.document, str(each.number))]


def _started(call: Call, sync: Sync) -> Reply:
    return json_only(sync.document(), 202, [call.location(f"/v1/syncs/{sync.sync_id}")])
