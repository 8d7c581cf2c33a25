"""Ancestors: the messages that causally precede some messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, FailFast, Field

from app.errors import Code, Problem
from app.http.admission import ReaderInTurn
from app.http.call import Call, Headers, Reply
from app.http.forms import Form, TwoFormBody
from app.http.models import AncestorsPage
from app.http.openapi import Replies, documented, reply, two_form_body
from app.http.pages import After, CursorKind, Cursors, fitted, next_link
from app.http.replies import json_reply, message_json, message_protobuf, protobuf_reply
from app.http.routing import NodeRoute, get_by_id
from app.ingest.quarantine import Absence
from app.server.limits import DEFAULT_LIMITS
from app.store.ancestry import AncestorPage
from sdstore.wire import store_pb2 as wire

router = APIRouter(tags=["messages"], route_class=NodeRoute)

_LIMIT_DEFAULT = DEFAULT_LIMITS.page_items_default
_URL_TOKEN_CHARACTERS_MAX = 4_000
REQUEST_FIELDS = 3
"""Fields of an `AncestorsRequest` beside heads and known IDs."""

_REPLIES: Replies = {
    200: reply("Part of the closure, in causal order", AncestorsPage, wire.AncestorsPage)
}


class AncestorsBody(BaseModel):
    """The JSON form of a request for ancestors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    channel_id: str
    heads: Annotated[list[str], FailFast()] = Field(
        description="the walk starts here; they are not in the answer"
    )
    known: Annotated[list[str], FailFast()] = Field(
        default_factory=list, description="the walk does not pass these"
    )
    limit: int = Field(default=0, ge=0, le=DEFAULT_LIMITS.ancestors_max, description="0: default")
    after: str = Field(default="", description="the `next` of the page before this one")


class _Wanted(NamedTuple):
    channel_id: str
    heads: Sequence[str]
    known: Sequence[str]
    limit: int
    after: str | None


ANCESTORS_BODY = TwoFormBody(
    AncestorsBody,
    wire.AncestorsRequest,
    lambda limits: limits.ancestors_heads_max + limits.lookup_keys_max + REQUEST_FIELDS,
)


@get_by_id(router, "/v1/messages/{message_id:segment}/ancestors", **documented(_REPLIES))
async def ancestors_of_one(
    call: ReaderInTurn,
    message_id: str,
    channel_id: Annotated[str | None, Query(description="else that of the message served")] = None,
    limit: Annotated[int, Query(ge=1, le=DEFAULT_LIMITS.ancestors_max)] = _LIMIT_DEFAULT,
    after: After = None,
) -> Reply:
    """Everything before one message, the latest first; in each page every message after its causes."""
    found = await call.readable.find(message_id, channel_id)
    wanted = _Wanted(found.entry.channel_id, [message_id], [], limit, after)

    async def read(bytes_max: int) -> Reply:
        page, token = await _page(call, wanted, bytes_max)
        link = next_link(call, token if _fits_url(token) else None)
        return await _reply(call, wanted.channel_id, page, token, link)

    return await fitted(call, read)


@router.post("/v1/messages/ancestors", **documented(_REPLIES, two_form_body(ANCESTORS_BODY)))
async def ancestors(call: ReaderInTurn) -> Reply:
    """Everything before the heads, not passing through `known`, and the IDs that are missing here.

    Pages go back in time; within a page every message comes after its causes. A cycle is entered at its first
    message in log order. All variants under an ID count. `missing` lists IDs that are not stored, cannot be read,
    or did not fit into the cursor: the walk ends there; `met_as_sync`, `withheld` and `refused` list those of them
    for which that is known. Follow `next` until it is null. A message can come twice only where clocks
    contradict causes. A cursor that is too long for a URL has no `Link`: POST it.
    """
    wanted = await _wanted(call)
    call.caller.require_channel_of_body(wanted.channel_id)

    async def read(bytes_max: int) -> Reply:
        page, token = await _page(call, wanted, bytes_max)
        return await _reply(call, wanted.channel_id, page, token, [])

    return await fitted(call, read)


def _fits_url(token: str | None) -> bool:
    # A longer one goes on with POST, which takes it in the body.
    return token is not None and len(token) <= _URL_TOKEN_CHARACTERS_MAX


async def _wanted(call: Call) -> _Wanted:
    limits = call.node.limits
    request = await ANCESTORS_BODY.read(call)
    if len(request.heads) > limits.ancestors_heads_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {limits.ancestors_heads_max} heads")
    if len(request.known) > limits.lookup_keys_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {limits.lookup_keys_max} known IDs")
    if any("\0" in text for text in (*request.heads, *request.known, request.channel_id)):
        raise Problem(Code.NUL_CHARACTER, "an ID contains U+0000")
    if request.limit > limits.ancestors_max:
        raise Problem(Code.INVALID_BODY, f"limit must be at most {limits.ancestors_max}")
    limit = request.limit or _LIMIT_DEFAULT
    return _Wanted(request.channel_id, request.heads, request.known, limit, request.after or None)


async def _page(call: Call, wanted: _Wanted, bytes_max: int) -> tuple[AncestorPage, str | None]:
    store = call.node.store
    cursors = Cursors.of(store)
    page = await store.ancestors.page(
        wanted.channel_id,
        wanted.heads,
        wanted.known,
        limit=wanted.limit,
        bytes_max=bytes_max,
        after=await cursors.read_walk(CursorKind.ANCESTORS, store, wanted.after),
    )
    if page.next is None:
        return page, None
    return page, await cursors.write_walk(CursorKind.ANCESTORS, store, page.next)


async def _reply(
    call: Call, channel_id: str, page: AncestorPage, token: str | None, headers: Headers
) -> Reply:
    absences = await call.absences(page.missing, channel_id)
    withheld, refused = (
        [each for each in page.missing if absences.get(each) is why]
        for why in (Absence.WITHHELD, Absence.REFUSED)
    )
    if call.form is Form.PROTOBUF:
        message = wire.AncestorsPage(
            messages=map(message_protobuf, page.entries),
            missing=page.missing,
            next=token or "",
            left_out=page.left_out,
            met_as_sync=page.met_as_sync,
            withheld=withheld,
            refused=refused,
        )
        return protobuf_reply(message, 200, headers)
    messages = list(map(message_json, page.entries))
    document = {
        "messages": messages,
        "missing": page.missing,
        "next": token,
        "left_out": [digest.hex() for digest in page.left_out],
        "met_as_sync": page.met_as_sync,
        "withheld": withheld,
        "refused": refused,
    }
    return json_reply(document, 200, headers)
