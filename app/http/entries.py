"""Many entries by digest, as a stream: as much as the caller reads, never all of it in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from io import BytesIO
from itertools import accumulate
from typing import Annotated

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from google.protobuf.proto import serialize_length_prefixed
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from app.entries import Entry
from app.errors import Code, Problem
from app.hexadecimal import hex_bytes
from app.http.auth import Scope
from app.http.call import Call
from app.http.forms import NDJSON_TYPE, PROTOBUF_TYPE, Form, answer_form, body_form
from app.http.framework import CurrentCall, PartsResponse, demands
from app.http.parsing import read_json, read_protobuf
from app.http.render import VARY, message_json, message_protobuf
from app.limits import DEFAULT_LIMITS
from app.sharing import Turns
from app.store.records import ContentState
from sdstore.wire import store_pb2 as wire

router = APIRouter(prefix="/v1", tags=["messages"])

ENTRIES_PER_PART = 64
PART_BYTES = 1 << 20
"""Of frames in one part of the answer, unless one alone has more."""

Render = Callable[[bytes, Entry | ContentState | None], bytes]


class EntriesBody(BaseModel):
    """The JSON form of a request for entries."""

    model_config = ConfigDict(extra="forbid", strict=True)

    digests: Annotated[list[str], FailFast()] = Field(
        max_length=DEFAULT_LIMITS.entries_max, description="in hexadecimal"
    )


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
async def stream_entries(call: CurrentCall) -> Response:
    """One line, or length-delimited `EntryItem`, per digest and in order: the entry, `missing` or `lost`."""
    render, media_type = _json_line, NDJSON_TYPE
    if answer_form(call.headers.get(b"accept")) is Form.PROTOBUF:
        render, media_type = _delimited, PROTOBUF_TYPE
    digests = await _wanted(call)
    if len(digests) > call.node.limits.entries_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {call.node.limits.entries_max} digests")
    return PartsResponse(_parts(call, digests, render), [(b"content-type", media_type), VARY])


async def _parts(
    call: Call, digests: Sequence[bytes], render: Render
) -> AsyncGenerator[Sequence[bytes], None]:
    sharing = call.node.sharing
    done = 0
    while done < len(digests):
        # Asked for again only when the part before has been read: nothing is held meanwhile.
        with (
            await sharing.replies.take(call.address, PART_BYTES),
            await sharing.turns[Turns.READS].take(call.address, 1),
        ):
            part = await _next_part(call, digests[done : done + ENTRIES_PER_PART])
            done += len(part)
            rendered = [render(digest, found) for digest, found in part]
            del part
        yield rendered


async def _next_part(
    call: Call, digests: Sequence[bytes]
) -> list[tuple[bytes, Entry | ContentState | None]]:
    """What is known of the first of these digests, as many as a part can hold."""
    sizes = await call.node.store.frame_sizes(digests)
    sums = accumulate(sizes.get(digest, 0) for digest in digests)
    asked = digests[: max(1, sum(1 for bytes_count in sums if bytes_count <= PART_BYTES))]
    entries = await call.node.store.by_digest(asked)
    found: dict[bytes, Entry | ContentState] = {
        e.digest: e for e in entries if call.caller.covers(e.channel_id)
    }
    if len(entries) < len(asked):
        for left_out in await call.node.store.left_out(asked):
            if call.caller.covers(left_out.channel_id):
                found.setdefault(left_out.digest, ContentState.LOST)
    return [(digest, found.get(digest)) for digest in asked]


async def _wanted(call: Call) -> list[bytes]:
    if body_form(call.headers.get(b"content-type"), Form.JSON, Form.PROTOBUF) is Form.PROTOBUF:
        fields_max = call.node.limits.entries_max
        request = await read_protobuf(wire.EntriesRequest, call.body, fields_max)
        return list(request.digests)
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
