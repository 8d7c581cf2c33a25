"""Relayed messages and nudges between stores (`app.live.relay`, `app.federation.links`)."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated

import zstandard
from fastapi import APIRouter

from app.access.callers import Scope
from app.errors import Code, Problem
from app.federation.links import Links
from app.http.admission import admitted
from app.http.call import Call, Reply, StreamedReply
from app.http.forms import Form, body_form, read_protobuf
from app.http.models import PublishOutcomes
from app.http.openapi import EVENTS, body, content, documented, reply
from app.http.publish import outcomes_reply
from app.http.replies import event, event_stream
from app.http.routing import NodeRoute
from app.live.hub import Place
from app.live.relay import Passing, Relay, RelayReader
from app.server.limits import Limits
from app.server.sharing import Turns
from sdstore.client.transport import INSTANCE_HEADER
from sdstore.wire import store_pb2 as wire

router = APIRouter(tags=["federation"], route_class=NodeRoute)

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
    if node.relay.is_closed:
        raise Problem(Code.NOT_READY, "the node is about to stop")
    place = node.live.take_place()
    instance_id = call.instance_id
    reader = node.relay.reader(caller.covers, instance_id)
    parts = _parts(reader, node.relay, node.links, instance_id, node.limits, place)
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
    ways = [item.via for item in batch.items]
    outcomes = await call.node.relay.take(frames, call.instance_id, call.caller, ways)
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
