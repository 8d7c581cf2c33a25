"""Reconciliation over HTTP: bytes in, bytes out, compressed where the caller can read it."""

from __future__ import annotations

import re

import zstandard
from fastapi import APIRouter, Response

from app.errors import Code, Problem
from app.federation.transport import INSTANCE_HEADER
from app.http.auth import Scope
from app.http.call import Call, Headers, Reply
from app.http.cursors import INT64_MAX, INT64_MIN
from app.http.forms import Form, answer_form, body_form
from app.http.framework import CurrentCall, demands, respond
from app.http.parsing import check_fields
from app.http.render import json_reply, protobuf_reply
from app.recon.budget import Allowance
from app.recon.endpoint import readable_part
from sdstore.wire import recon_pb2 as recon_wire

router = APIRouter(prefix="/v1", tags=["reconciliation"])

COMPRESS_BYTES_MIN = 1_024
"""Below it a header costs what is saved."""

INTEGER = re.compile("-?[0-9]{1,19}")

# RFC 7694: a server says so which encodings it reads.
_READS_ZSTD = (b"accept-encoding", b"zstd, gzip")


async def reconcile(call: Call) -> Reply:
    """`POST /v1/recon`: one `ReconRequest` in, one `ReconResponse` out."""
    body_form(call.headers.get(b"content-type"), Form.PROTOBUF)
    if not call.body:
        raise Problem(Code.EMPTY_BODY, "the body is a ReconRequest")
    # Before anything in it is looked at, its nonce included: parsing is what could be dear.
    await check_fields(recon_wire.ReconRequest, call.body, call.node.limits.recon_fields_max)
    response = await call.node.recon.answer(call.body, call.caller, _allowance(call))
    return _packed(call, response.SerializeToString())


@router.get("/recon/interests", openapi_extra=demands(Scope.SYNC))
async def interests(call: CurrentCall) -> Response:
    """What this node wants and the caller may read: the canonical `Interest`, or it as JSON."""
    interest = readable_part(call.node.interest, call.caller.channels)
    headers = [_READS_ZSTD, (INSTANCE_HEADER.encode(), call.node.instance_id.encode())]
    if answer_form(call.headers.get(b"accept")) is Form.PROTOBUF:
        return respond(protobuf_reply(interest.encode(), 200, headers))
    document = {
        "all": interest.everything,
        "channels": interest.channels,
        "prefixes": interest.prefixes,
        "lamport_from": _text(interest.lamport_from),
        "lamport_to": _text(interest.lamport_to),
    }
    return respond(json_reply(document, 200, headers))


async def negentropy(call: Call) -> Reply:
    """`POST /v1/negentropy`: one message about a channel's entries in, one out."""
    body_form(call.headers.get(b"content-type"), Form.OCTETS)
    if not call.body:
        raise Problem(Code.EMPTY_BODY, "the body is a negentropy message")
    channel_id = call.channel_id
    if channel_id is None:
        raise Problem(Code.INVALID_PARAMETER, "?channel_id= is missing")
    answer = await call.node.negentropy.answer(
        call.body,
        channel_id,
        _from_lamport(call),
        call.caller.name,
        _allowance(call).reply_bytes_max,
    )
    return Reply(200, [(b"content-type", Form.OCTETS.value)], answer)


def _from_lamport(call: Call) -> int | None:
    text = call.text("from_lamport")
    if text is None:
        return None
    if not INTEGER.fullmatch(text) or not INT64_MIN <= int(text) <= INT64_MAX:
        raise Problem(Code.INVALID_PARAMETER, "from_lamport is an integer of 64 bits")
    return int(text)


def _allowance(call: Call) -> Allowance:
    if call.caller.is_trusted:
        return Allowance(call.node.limits)
    # As sent: padding that compresses to nothing buys nothing.
    return Allowance(call.node.limits, call.sent_bytes)


def _packed(call: Call, body: bytes) -> Reply:
    headers: Headers = [_READS_ZSTD]
    if len(body) >= COMPRESS_BYTES_MIN and b"zstd" in call.headers.get(b"accept-encoding", b""):
        return protobuf_reply(
            zstandard.compress(body), 200, [*headers, (b"content-encoding", b"zstd")]
        )
    return protobuf_reply(body, 200, headers)


def _text(lamport: int | None) -> str | None:
    return None if lamport is None else str(lamport)
