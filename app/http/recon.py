"""The protocols between stores over HTTP: bytes in, bytes out.

Reconciliation, whose replies are compressed where the caller can read it; negentropy; MVDS; and the interest of
this node, which peers read, operators change and `app.federation.interests` keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import zstandard
from fastapi import APIRouter, Query
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictInt,
    model_validator,
)

from app.access.callers import Scope
from app.errors import Code, Problem
from app.federation.interests import InterestState, described, interest_document, made_interest
from app.http.admission import NodeRoute, Operator, admitted, json_body
from app.http.call import (
    Call,
    Form,
    Headers,
    Reply,
    body_form,
    check_fields,
    json_only,
    json_reply,
    protobuf_reply,
)
from app.http.channels import Lamport
from app.http.federation import utf8_text
from app.http.openapi import BINARY, ChangedInterest, InterestJson, body, content, documented, reply
from app.mvds import MvdsCall
from app.server.sharing import Turns
from recon.limits import INTEREST_NAMES_MAX
from sdstore.client.transport import INSTANCE_HEADER
from sdstore.wire import mvds_pb2 as mvds_wire
from sdstore.wire import recon_pb2 as recon_wire

router = APIRouter(tags=["reconciliation"], route_class=NodeRoute)

COMPRESS_BYTES_MIN = 1_024
"""Below this size the header costs more than compression saves."""

# RFC 7694: how a server names the encodings that it reads.
READS_ZSTD = (b"accept-encoding", b"zstd, gzip")


@router.post(
    "/v1/recon",
    **documented(
        {200: reply("The responder's step", None, recon_wire.ReconResponse)},
        body(content(None, recon_wire.ReconRequest)),
    ),
)
async def reconcile(
    call: Annotated[
        Call,
        admitted(
            Scope.SYNC, turns=Turns.SYNCS, body_bytes_max=lambda limits: limits.recon_body_bytes_max
        ),
    ],
) -> Reply:
    """One step of a reconciliation (docs/recon-protocol.md)."""
    body_form(call.headers.get(b"content-type"), Form.PROTOBUF)
    if not call.body:
        raise Problem(Code.EMPTY_BODY, "the body is a ReconRequest")
    # Before anything else, the nonce included: parsing is the expensive part.
    await check_fields(recon_wire.ReconRequest, call.body, call.node.limits.recon_fields_max)
    caller = call.caller
    if instance_id := call.instance_id:
        caller = replace(caller, instance_id=instance_id)
    response = await call.node.recon.endpoint.answer(call.body, caller)
    packed = _packed(call, response.SerializeToString())
    if response.HasField("interest"):  # a session begins: its initiator can be this node itself
        packed.raw_headers.append((INSTANCE_HEADER.encode(), call.node.instance_id.encode()))
    return packed


@router.post(
    "/v1/negentropy",
    **documented(
        {200: reply("The answer", others={Form.OCTETS: BINARY})},
        body(content(others={Form.OCTETS: BINARY})),
    ),
)
async def negentropy(
    call: Annotated[
        Call,
        admitted(
            Scope.SYNC,
            turns=Turns.SYNCS,
            body_bytes_max=lambda limits: limits.negentropy_body_bytes_max,
        ),
    ],
    channel_id: Annotated[str, Query(description="the channel")],
    from_lamport: Lamport = None,
    divisor: Annotated[int, Query(ge=1, description="of the timestamps of records")] = 1,
) -> Reply:
    """One message of negentropy v1 about a channel (docs/negentropy.md)."""
    body_form(call.headers.get(b"content-type"), Form.OCTETS)
    if not call.body:
        raise Problem(Code.EMPTY_BODY, "the body is a negentropy message")
    answer = await call.node.recon.negentropy.answer(
        call.body,
        channel_id,
        from_lamport,
        divisor,
        call.caller.name,
    )
    return Reply(200, [(b"content-type", Form.OCTETS.value)], answer)


def _packed(call: Call, body: bytes) -> Reply:
    headers: Headers = [(b"content-type", Form.PROTOBUF.value), READS_ZSTD]
    if len(body) >= COMPRESS_BYTES_MIN and b"zstd" in call.headers.get(b"accept-encoding", b""):
        headers.append((b"content-encoding", b"zstd"))
        body = zstandard.compress(body)
    return Reply(200, headers, body)


# ---- the interest

STAYS = "entries outside the interest stay readable here until they are retired; no sync moves them"
"""What happens to the data that a narrower interest no longer covers."""

_Text = Annotated[str, AfterValidator(utf8_text)]
_Names = Annotated[list[_Text], FailFast()]
_Lamport = StrictInt | Annotated[str, Field(pattern=r"^-?[0-9]{1,19}$")]


class InterestBody(BaseModel):
    """All channels, or some by name and by prefix; of these the Lamport timestamps in a window.

    The window contains `lamport_from` and not `lamport_to`.
    """

    model_config = ConfigDict(extra="forbid")

    all: bool = False
    channels: _Names = Field(default_factory=list, max_length=INTEREST_NAMES_MAX)
    prefixes: _Names = Field(default_factory=list, max_length=INTEREST_NAMES_MAX)
    lamport_from: _Lamport | None = None
    lamport_to: _Lamport | None = None

    @model_validator(mode="after")
    def _says_what(self) -> InterestBody:
        # An empty body must not end all syncs.
        if not self.model_fields_set & {"all", "channels", "prefixes"}:
            raise ValueError("name all, channels or prefixes")
        if self.all and (self.channels or self.prefixes):
            raise ValueError("all: true cannot be combined with channels or prefixes")
        return self


@router.get(
    "/v1/recon/interests",
    **documented({200: reply("The interest", InterestJson, "Interest, canonical")}),
)
async def get_interests(call: Annotated[Call, admitted(Scope.SYNC)]) -> Reply:
    """The part of this node's interest that the caller may read: the canonical `Interest`, or JSON.

    JSON also says where the interest comes from: the settings, or an operator.
    """
    state = call.node.federation.interests.state
    interest = call.caller.readable_part(state.interest)
    headers = [READS_ZSTD, (INSTANCE_HEADER.encode(), call.node.instance_id.encode())]
    if call.form is Form.PROTOBUF:
        return protobuf_reply(interest.encode(), 200, headers)
    return json_reply({**state.document(), **interest_document(interest)}, 200, headers)


@router.put(
    "/v1/recon/interests",
    **documented({200: reply("The interest", ChangedInterest)}, body(content(InterestBody))),
)
async def set_interests(
    call: Annotated[
        Call, admitted(Scope.ADMIN, body_bytes_max=lambda limits: limits.small_body_bytes_max)
    ],
    body: Annotated[InterestBody, json_body(InterestBody)],
) -> Reply:
    """Change what this node syncs with its peers; it is kept, and wins over the settings until a DELETE.

    More is fetched at once. What is not wanted any more stays readable and is not synced; the reply
    counts it.
    """
    low, high = (
        None if each is None else int(each) for each in (body.lamport_from, body.lamport_to)
    )
    interest = made_interest(
        everything=body.all,
        channels=frozenset(body.channels),
        prefixes=frozenset(body.prefixes),
        lamport_from=low,
        lamport_to=high,
    )
    return await _changed(call, await call.node.federation.interests.set(interest))


@router.delete("/v1/recon/interests", **documented({200: reply("The interest", ChangedInterest)}))
async def reset_interests(call: Operator) -> Reply:
    """Return to the interest of the settings."""
    return await _changed(call, await call.node.federation.interests.reset())


async def _changed(call: Call, state: InterestState) -> Reply:
    call.target = described(state.interest)
    channels_count, entries_count = await call.node.recon.index.outside(state.interest)
    outside: dict[str, Any] = {"channels": channels_count, "entries": entries_count}
    if entries_count:
        outside["detail"] = STAYS
    return json_only({**state.document(), "outside": outside})


# ---- MVDS

mvds_router = APIRouter(tags=["mvds"], route_class=NodeRoute)


@mvds_router.post(
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
    asked = MvdsCall(
        caller=call.caller,
        peer_id=peer_id,
        channel_ids=channel_ids,
        payload=call.body,
        interactive=mode == "interactive",
    )
    return protobuf_reply(await call.node.mvds.exchange(asked))
