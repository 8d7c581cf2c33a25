"""Reconciliation over HTTP: bytes in, bytes out, compressed where the caller can read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import zstandard
from fastapi import APIRouter, Query

from app.access.callers import Scope
from app.errors import Code, Problem
from app.http.admission import admitted
from app.http.call import Call, Headers, Reply
from app.http.forms import Form, body_form, check_fields
from app.http.openapi import BINARY, body, content, documented, reply
from app.http.pages import Lamport
from app.http.routing import NodeRoute
from app.server.sharing import Turns
from sdstore.client.transport import INSTANCE_HEADER
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
    response = await call.node.recon.answer(call.body, caller)
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
    answer = await call.node.negentropy.answer(
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
