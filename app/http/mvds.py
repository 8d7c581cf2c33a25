"""MVDS over HTTP: one payload in, one payload out."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from app.access.callers import Scope
from app.errors import Code, Problem
from app.http.admission import admitted
from app.http.call import Call, Reply
from app.http.forms import Form, body_form, check_fields
from app.http.openapi import body, content, documented, reply
from app.http.replies import protobuf_reply
from app.http.routing import NodeRoute
from app.mvds import Exchange
from app.server.sharing import Turns
from sdstore.wire import mvds_pb2 as mvds_wire

router = APIRouter(tags=["mvds"], route_class=NodeRoute)


@router.post(
    "/v1/mvds/{peer_id:segment}",
    **documented(
        {200: reply("The payload for the peer", None, mvds_wire.Payload)},
        body(content(None, mvds_wire.Payload)),
    ),
)
async def mvds_exchange(
    call: Annotated[
        Call,
        admitted(
            Scope.SYNC,
            turns=Turns.SYNCS,
            body_bytes_max=lambda limits: limits.mvds_payload_bytes_max,
        ),
    ],
    peer_id: str,
    channel_id: Annotated[list[str], Query(description="a channel of the peer; repeatable")],
    mode: Annotated[
        Literal["interactive", "batch"], Query(description="offer new messages, or send them")
    ] = "interactive",
) -> Reply:
    """One epoch with an MVDS peer (docs/mvds.md). The channels are all those of the peer."""
    limits = call.node.limits
    if not 0 < len(peer_id.encode()) <= limits.mvds_peer_id_bytes_max:
        why = f"peer_id has 1 to {limits.mvds_peer_id_bytes_max} bytes"
        raise Problem(Code.INVALID_PARAMETER, why)
    channel_ids = list(dict.fromkeys(channel_id))
    if len(channel_ids) > limits.mvds_channels_max:
        why = f"{len(channel_ids)} channels, at most {limits.mvds_channels_max}"
        raise Problem(Code.TOO_MANY_ITEMS, why)
    for each in channel_ids:
        call.caller.require(Scope.READ, each)
        call.caller.require(Scope.PUBLISH, each)
    if call.body:  # a peer with nothing to say sends an empty payload, which has no bytes
        body_form(call.headers.get(b"content-type"), Form.PROTOBUF)
        await check_fields(mvds_wire.Payload, call.body, limits.mvds_fields_max)
    asked = Exchange(
        caller=call.caller.name,
        peer_id=peer_id,
        channel_ids=channel_ids,
        payload=call.body,
        interactive=mode == "interactive",
    )
    return protobuf_reply(await call.node.mvds.exchange(asked))
