"""Peers and sessions, for operators; relayed messages and nudges, for stores.

The work is done in `app.federation` and `app.live.relay`.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated

import zstandard
from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from app.access.callers import Scope
from app.errors import Code, Problem
from app.federation.links import Links
from app.federation.peer import divergence_of
from app.federation.syncs import Sync, SyncEvent
from app.http.admission import NodeRoute, Operator, admitted, json_body
from app.http.call import (
    Call,
    Form,
    Reply,
    StreamedReply,
    body_form,
    event,
    event_stream,
    json_only,
    read_protobuf,
)
from app.http.openapi import (
    EVENTS,
    PeerJson,
    PeerList,
    PeerStatus,
    PublishOutcomes,
    SyncJson,
    SyncList,
    body,
    content,
    documented,
    reply,
)
from app.http.publish import outcomes_reply
from app.live.hub import Place
from app.live.relay import Passing, Relay, RelayReader
from app.server.limits import Limits
from app.server.logs import shown_url
from app.server.sharing import Turns
from sdstore.client.transport import INSTANCE_HEADER
from sdstore.wire import store_pb2 as wire

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
    await call.node.federation.peers.refresh()
    return json_only({"peers": [peer.document() for peer in call.node.federation.peers.all()]})


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
    await call.node.federation.peers.refresh()
    known = {peer.peer_id for peer in call.node.federation.peers.all()}
    peer = await call.node.federation.peers.add(body.url, body.token)
    call.target = f"{peer.peer_id} {call.target}"
    status = 200 if peer.peer_id in known else 201
    return json_only(peer.document(), status, [call.location(f"/v1/peers/{peer.peer_id}")])


@router.get("/v1/peers/{peer_id:segment}", **documented({200: reply("The peer", PeerJson)}))
async def get_peer(call: Operator, peer_id: str) -> Reply:
    """One peer."""
    await call.node.federation.peers.refresh()
    return json_only(call.node.federation.peers.get(peer_id).document())


@router.delete("/v1/peers/{peer_id:segment}", **documented({204: reply("Removed")}))
async def remove_peer(call: Operator, peer_id: str) -> Reply:
    """Forget a peer; messages that it sent stay."""
    await call.node.federation.peers.refresh()
    await call.node.federation.peers.remove(peer_id)
    return Reply(204, [])


@router.get(
    "/v1/peers/{peer_id:segment}/status", **documented({200: reply("The peer", PeerStatus)})
)
async def peer_status(call: Operator, peer_id: str) -> Reply:
    """Health of a peer and the record of divergence from it."""
    node = call.node
    await node.federation.peers.refresh()
    peer = node.federation.peers.get(peer_id)
    memory = await node.federation.peers.memory_of(peer)
    now_ms = time.time_ns() // 1_000_000
    divergence = await divergence_of(peer, memory, node.store, node.recon.index, now_ms)
    return json_only(peer.status() | {"divergence": divergence})


@router.post(
    "/v1/peers/{peer_id:segment}/sync",
    **documented({202: reply("Started", SyncJson)}, body(content(SyncBody), is_required=False)),
)
async def sync_peer(
    call: Operator, peer_id: str, body: Annotated[SyncBody, json_body(SyncBody, is_optional=True)]
) -> Reply:
    """Start a session with a peer now."""
    await call.node.federation.peers.refresh()
    sync = await call.node.federation.peers.sync_peer(
        peer_id, channels=tuple(body.channels), dry_run=body.dry_run
    )
    return _started(call, sync)


@router.get("/v1/syncs", **documented({200: reply("The sessions", SyncList)}))
async def list_syncs(call: Operator) -> Reply:
    """Sessions, newest first."""
    return json_only({"syncs": await call.node.federation.syncs.documents()})


@router.post(
    "/v1/syncs", **documented({202: reply("Started", SyncJson)}, body(content(SyncUrlBody)))
)
async def sync_url(call: Operator, body: Annotated[SyncUrlBody, json_body(SyncUrlBody)]) -> Reply:
    """Start a session with a store that is not a configured peer."""
    call.target = shown_url(body.peer_url)
    await call.node.federation.peers.refresh()
    sync = await call.node.federation.peers.sync_url(
        body.peer_url, channels=tuple(body.channels), dry_run=body.dry_run
    )
    return _started(call, sync)


@router.get("/v1/syncs/{sync_id:segment}", **documented({200: reply("The session", SyncJson)}))
async def get_sync(call: Operator, sync_id: str) -> Reply:
    """One session: percent in sync, segments of the range bar, report."""
    return json_only(await call.node.federation.syncs.find(sync_id))


@router.get("/v1/syncs/{sync_id:segment}/events", **documented(EVENTS))
async def sync_events(call: Operator, sync_id: str) -> StreamedReply:
    """The session's state, now and after every change, as server-sent events."""
    await call.node.federation.syncs.find(sync_id)
    return event_stream(_sync_events(call.node.federation.syncs.watch(sync_id)))


async def _sync_events(events: AsyncIterator[SyncEvent]) -> AsyncGenerator[Sequence[bytes], None]:
    async for each in events:
        yield [event(each.name, each.document, str(each.number))]


def _started(call: Call, sync: Sync) -> Reply:
    return json_only(sync.document(), 202, [call.location(f"/v1/syncs/{sync.sync_id}")])


# ---- relayed messages

PART_ITEMS_MAX = 1_000
"""Events of one part of a stream: less than a share of one second at its reader."""

WINDOW_BITS = 17
"""Of a compressed stream: 128 KiB, which are a few events with bloom filters, and 0.6 MB of memory. Events of
25 kB become some hundred bytes, because the filter of a message differs little from the one before; it
takes 15 us an event."""

_HEARTBEAT = b": still here\n\n"
_NUDGE = b"event: nudge\ndata: {}\n\n"


@router.get("/v1/relay", **documented(EVENTS))
async def stream(call: Annotated[Call, admitted(Scope.SYNC)]) -> StreamedReply:
    """Nudges and relayed messages, for a store that has this one as its peer.

    The store names itself in the header `sds-instance`, and gets nothing back that came from it. If `zstd`
    is the only encoding that it accepts, the stream is one zstd frame with a window of at most 128 KiB, flushed
    after each group of events.

    Events: `nudge` (`{}`: messages were committed that the caller may read; none of what it pushed, and none
    while this node reads its stream, because then this node starts the session); `relayed` (`frame` in base64,
    `via`: of each store that passed it on, 4 bytes of its instance ID in hex); `reading` (`is_read`: whether a
    process over this database reads the caller's own stream).
    """
    node, caller = call.node, call.caller
    if node.live.relay.is_closed:
        raise Problem(Code.NOT_READY, "the node is about to stop")
    place = node.live.hub.take_place()
    instance_id = call.instance_id
    reader = node.live.relay.reader(caller.covers, instance_id)
    parts = _parts(reader, node.live.relay, node.federation.links, instance_id, node.limits, place)
    headers = [(INSTANCE_HEADER.encode(), node.instance_id.encode())]
    # Links of older versions name several encodings, as their HTTP client does, and read none of them.
    if call.headers.get(b"accept-encoding") == b"zstd":
        headers.append((b"content-encoding", b"zstd"))
        parts = _compressed(parts)
    return event_stream(parts, headers)


@router.post(
    "/v1/relay",
    **documented(
        {200: reply("Outcomes", PublishOutcomes, wire.PublishOutcomes)},
        body(content(None, wire.PublishBatch)),
    ),
)
async def relay(call: Annotated[Call, admitted(Scope.PUBLISH, turns=Turns.BATCHES)]) -> Reply:
    """Sync and ephemeral messages from another store, to be passed on and not stored.

    One outcome each, in order: `relayed`; `duplicate` if this store passed it on before or is in its `via`; or
    `refused` with `not_relayed` (a content message, or a channel outside of this store's interest), `forbidden`
    (a channel that the token does not cover), or a code of publishing. Hints and envelopes are ignored.
    """
    form = call.form
    body_form(call.headers.get(b"content-type"), Form.PROTOBUF)
    limits = call.node.limits
    batch = await read_protobuf(wire.PublishBatch, call.body, limits.batch_fields_max)
    call.body = b""
    if not batch.items:
        raise Problem(Code.EMPTY_BODY, "the batch has no items")
    if len(batch.items) > limits.relay_batch_items_max:
        why = f"a batch of relayed messages has at most {limits.relay_batch_items_max} items"
        raise Problem(Code.TOO_MANY_ITEMS, why)
    frames = [item.frame for item in batch.items]
    paths = [item.via for item in batch.items]
    outcomes = await call.node.live.relay.take(frames, call.instance_id, call.caller, paths)
    return await outcomes_reply(form, outcomes)


async def _parts(
    reader: RelayReader,
    relay: Relay,
    links: Links,
    instance_id: str,
    limits: Limits,
    _place: Place,  # held for as long as the stream lasts
) -> AsyncGenerator[Sequence[bytes], None]:
    is_read: bool | None = None
    nudge_due_s = 0.0
    while not relay.is_closed:
        changed = relay.changed
        part: list[bytes] = []
        if (reads := links.reads(instance_id)) is not is_read:
            is_read = reads
            part.append(event("reading", {"is_read": is_read}))
        wait_s: float = limits.live_heartbeat_s
        if is_read:
            reader.is_nudged = False  # this node starts a session with its own peer by itself
        if reader.is_nudged:
            now_s = time.monotonic()
            wait_s = nudge_due_s - now_s
            if wait_s <= 0:
                reader.is_nudged = False
                nudge_due_s = now_s + 1 / limits.relay_nudges_per_s
                relay.counters.nudges_sent += 1
                part.append(_NUDGE)
        part += [_rendered(each) for each in reader.take(limits.relay_age_s, PART_ITEMS_MAX)]
        if part:
            yield part
            continue
        try:
            async with asyncio.timeout(wait_s):
                await changed.wait()
        except TimeoutError:
            if wait_s == limits.live_heartbeat_s:
                yield [_HEARTBEAT]


async def _compressed(
    parts: AsyncGenerator[Sequence[bytes], None],
) -> AsyncGenerator[Sequence[bytes], None]:
    """One zstd frame, in which each part can be read as soon as it arrives."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=WINDOW_BITS)
    packing = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    async with aclosing(parts):
        async for part in parts:
            packed = [packing.compress(each) for each in part]
            yield [*packed, packing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]


def _rendered(passing: Passing) -> bytes:
    if not passing.rendered:
        frame = b64encode(passing.relayed.frame).decode()
        passing.rendered = event("relayed", {"frame": frame, "via": passing.via.hex()})
    return passing.rendered
