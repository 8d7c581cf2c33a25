"""Many entries by digest, as a stream: as much as the caller reads, never all of it in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from io import BytesIO

import orjson
from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from google.protobuf.proto import serialize_length_prefixed
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from app.entries import Entry
from app.errors import Code, Problem
from app.hexadecimal import hex_bytes
from app.http.auth import Scope
from app.http.call import Call
from app.http.forms import NDJSON_TYPE, PROTOBUF_TYPE, Form, answer_form, body_form
from app.http.framework import CurrentCall, demands
from app.http.parsing import read_json, read_protobuf
from app.http.render import message_json, message_protobuf
from app.limits import DEFAULT_LIMITS
from app.store.records import ContentState
from sdstore.wire import store_pb2 as wire

router = APIRouter(prefix="/v1", tags=["messages"])

ENTRIES_PER_READ = 64
"""Of the largest frames 64 MiB, of real ones 1 MiB."""

Render = Callable[[bytes, Entry | ContentState | None], bytes]


class EntriesBody(BaseModel):
    """The JSON form of a request for entries."""

    model_config = ConfigDict(extra="forbid", strict=True)

    digests: list[str] = Field(max_length=DEFAULT_LIMITS.entries_max, description="in hexadecimal")


_ENTRIES_BODY = TypeAdapter(EntriesBody)
_REQUEST_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": EntriesBody.model_json_schema()},
        "application/x-protobuf": {"schema": {"type": "string", "description": "EntriesRequest"}},
    },
}


@router.post(
    "/entries",
    openapi_extra={**demands(Scope.READ), "requestBody": _REQUEST_BODY},
    response_class=StreamingResponse,
)
async def stream_entries(call: CurrentCall) -> StreamingResponse:
    """One line, or length-delimited `EntryItem`, per digest and in order: the entry, `missing` or `lost`."""
    render, media_type = _json_line, NDJSON_TYPE
    if answer_form(call.headers.get(b"accept")) is Form.PROTOBUF:
        render, media_type = _delimited, PROTOBUF_TYPE
    digests = _wanted(call)
    if len(digests) > call.node.limits.entries_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {call.node.limits.entries_max} digests")
    headers = {"content-type": media_type.decode(), "vary": "accept"}
    return StreamingResponse(_chunks(call, digests, render), headers=headers)


async def _chunks(call: Call, digests: Sequence[bytes], render: Render) -> AsyncIterator[bytes]:
    for start in range(0, len(digests), ENTRIES_PER_READ):
        part = digests[start : start + ENTRIES_PER_READ]
        entries = await call.node.store.by_digest(part)
        found: dict[bytes, Entry | ContentState] = {
            e.digest: e for e in entries if call.caller.covers(e.channel_id)
        }
        if len(entries) < len(part):
            for left_out in await call.node.store.left_out(part):
                if call.caller.covers(left_out.channel_id):
                    found.setdefault(left_out.digest, ContentState.LOST)
        yield b"".join(render(digest, found.get(digest)) for digest in part)


def _wanted(call: Call) -> list[bytes]:
    if body_form(call.headers.get(b"content-type"), Form.JSON, Form.PROTOBUF) is Form.PROTOBUF:
        return list(read_protobuf(wire.EntriesRequest, call.body).digests)
    return [hex_bytes(digest, "a digest") for digest in read_json(_ENTRIES_BODY, call.body).digests]


def _json_line(digest: bytes, found: Entry | ContentState | None) -> bytes:
    if isinstance(found, Entry):
        document = message_json(found)
    else:
        document = {"missing" if found is None else found.value: digest.hex()}
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _delimited(digest: bytes, found: Entry | ContentState | None) -> bytes:
    item = wire.EntryItem(missing=digest)
    if isinstance(found, Entry):
        item = wire.EntryItem(entry=message_protobuf(found))
    elif found is ContentState.LOST:
        item = wire.EntryItem(lost=digest)
    output = BytesIO()
    serialize_length_prefixed(item, output)
    return output.getvalue()
