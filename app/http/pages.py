"""Pages of messages: rendered in both forms, with the way to the next one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import TypeVar
from urllib.parse import quote

from fastapi import Request

from app.entries import Entry
from app.http.call import Call, Headers, Reply
from app.http.forms import Form, answer_form
from app.http.render import json_reply, message_json, message_protobuf, protobuf_reply
from app.store.metareads import Meta
from app.store.records import HintPage, Page
from sdstore.wire import store_pb2 as wire

_Page = TypeVar("_Page", Page, HintPage)
Described = list[tuple[Entry, Meta]]


async def read_described(
    call: Call, limit: int, read: Callable[[int], Awaitable[_Page]]
) -> tuple[_Page, Described]:
    """A page that `read` gives for a limit, and what the caller may see of it.

    Entries with many hints and variants make the page shorter: a reply is bounded in bytes.
    """
    page = await read(limit)
    entries = [entry for entry in page.entries if call.caller.covers(entry.channel_id)]
    metas = await call.node.store.meta_of(entries)
    sizes = accumulate(meta.shown_bytes for meta in metas)
    fitting = sum(1 for size in sizes if size <= call.node.limits.reply_bytes_max)
    if fitting < len(entries) and limit > 1:
        return await read_described(call, max(1, fitting), read)
    return page, list(zip(entries, metas, strict=True))


def page_reply(
    call: Call,
    request: Request,
    page: Page | HintPage,
    described: Described,
    next_token: str | None,
) -> Reply:
    """The `described` entries of a page; `next_token` None where nothing follows."""
    form = answer_form(call.headers.get(b"accept"))
    headers = next_link(request, next_token)
    left_out = [each.digest for each in page.left_out if call.caller.covers(each.channel_id)]
    if form is Form.PROTOBUF:
        message = wire.MessagePage(
            messages=[message_protobuf(e, meta.variants, meta.hints) for e, meta in described],
            next=next_token or "",
            left_out=left_out,
        )
        return protobuf_reply(message.SerializeToString(), 200, headers)
    document = {
        "messages": [message_json(e, meta.variants, meta.hints) for e, meta in described],
        "next": next_token,
        "left_out": [digest.hex() for digest in left_out],
    }
    return json_reply(document, 200, headers)


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
