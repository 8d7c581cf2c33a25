"""Pages of messages: rendered in both forms, with the way to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from fastapi import Request

from app.entries import Entry
from app.http.call import Call, Headers, Reply
from app.http.forms import Form, answer_form
from app.http.render import json_reply, message_json, message_protobuf, protobuf_reply
from sdstore.wire import store_pb2 as wire


async def page_reply(
    call: Call, request: Request, entries: Sequence[Entry], next_token: str | None
) -> Reply:
    """A page of entries; `next_token` None where nothing follows."""
    form = answer_form(call.headers.get(b"accept"))
    metas = await call.node.store.meta_of(entries)
    described = zip(entries, metas, strict=True)
    headers = next_link(request, next_token)
    if form is Form.PROTOBUF:
        page = wire.MessagePage(
            messages=[message_protobuf(e, meta.variants, meta.hints) for e, meta in described],
            next=next_token or "",
        )
        return protobuf_reply(page.SerializeToString(), 200, headers)
    messages = [message_json(e, meta.variants, meta.hints) for e, meta in described]
    return json_reply({"messages": messages, "next": next_token}, 200, headers)


def next_link(request: Request, next_token: str | None) -> Headers:
    """`Link: rel="next"`: this request again, behind its last item."""
    if next_token is None:
        return []
    query = [(name, value) for name, value in request.query_params.multi_items() if name != "after"]
    pairs = "&".join(
        f"{quote(name, safe='')}={quote(value, safe='')}"
        for name, value in [*query, ("after", next_token)]
    )
    return [(b"link", f'<{request.url.path}?{pairs}>; rel="next"'.encode())]
