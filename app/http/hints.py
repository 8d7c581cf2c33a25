"""What a retrieval hint may mean."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.hexadecimal import hint_bytes
from app.http.auth import Scope
from app.http.cursors import CursorKind, Cursors
from app.http.framework import After, CurrentCall, PageLimit, demands, respond
from app.http.pages import page_reply, read_described
from app.limits import DEFAULT_LIMITS

router = APIRouter(prefix="/v1", tags=["messages"])


@router.get("/hints/{hint:segment}", openapi_extra=demands(Scope.READ, takes_turns=True))
async def get_hint(
    call: CurrentCall,
    request: Request,
    hint: str,
    after: After = None,
    limit: PageLimit = DEFAULT_LIMITS.page_items_default,
    channel_id: str | None = None,
) -> Response:
    """The entries that the hint, in hexadecimal, may mean: computed claims first, then publishers',
    then histories'. (Inside a message in JSON hints are base64.)"""
    store = call.node.store
    cursors = Cursors(store.database_id)
    position = await cursors.read_walk(CursorKind.HINT, store, after)
    wanted = hint_bytes(hint, "the hint")
    page, described = await read_described(
        call, limit, lambda limit: store.hint(wanted, channel_id, limit, position)
    )
    token = None
    if page.next is not None:
        token = await cursors.write_walk(CursorKind.HINT, store, page.next)
    return respond(page_reply(call, request, page, described, token))
