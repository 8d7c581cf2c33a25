"""Pages of messages: rendered in both forms, with the way to the next one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import orjson
from fastapi import Request

from app.entries import Entry
from app.http.call import Call, Headers, Reply
from app.http.forms import Form, answer_form
from app.http.render import JSON_HEADERS, message_json, message_protobuf, protobuf_reply
from app.http.shell import ASKED_KEY
from app.store.metareads import Meta
from app.store.records import HintPage, Page
from sdstore.wire import store_pb2 as wire

RENDERED_PER_TURN = 100
"""Messages written as JSON before other callers of the event loop get their turn: a millisecond."""

# RFC 3986: names, addresses, ports. Nothing else goes into a header of ours.
_AUTHORITY = re.compile(r"[A-Za-z0-9._~%-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_PATH_CHARACTERS = "/%:@!$&'()*+,;="  # and unreserved ones: what stands there already is kept
_Page = TypeVar("_Page", Page, HintPage)


class Shown(NamedTuple):
    """An entry of a page, what goes with it, and its JSON where that is the form of the answer."""

    entry: Entry
    meta: Meta
    document: bytes


def frame_bytes_max(call: Call) -> int:
    """How many bytes of frames a reply can hold in the form it will have."""
    bytes_max = call.node.limits.reply_bytes_max
    # Base64 takes four bytes for three, and what is said beside the frame has to fit as well.
    return (
        bytes_max * 5 // 8 if answer_form(call.headers.get(b"accept")) is Form.JSON else bytes_max
    )


async def read_described(
    call: Call, limit: int, read: Callable[[int], Awaitable[_Page]]
) -> tuple[_Page, list[Shown]]:
    """A page that `read` gives for a limit, and what the caller may see of it.

    A reply is bounded in bytes as it leaves, so entries with many hints and variants, or text that
    is long in JSON, make the page shorter.
    """
    page = await read(limit)
    entries = [entry for entry in page.entries if call.caller.covers(entry.channel_id)]
    metas = await call.node.store.meta_of(entries)
    is_json = answer_form(call.headers.get(b"accept")) is Form.JSON
    room = call.node.limits.reply_bytes_max
    shown: list[Shown] = []
    for entry, meta in zip(entries, metas, strict=True):
        document = b""
        if is_json:
            document = orjson.dumps(message_json(entry, meta.variants, meta.hints))
            room -= len(document) + 1
        else:
            room -= len(entry.frame) + meta.shown_bytes
        if room < 0 and limit > 1:
            return await read_described(call, max(1, len(shown)), read)
        shown.append(Shown(entry, meta, document))
        if len(shown) % RENDERED_PER_TURN == 0:
            await asyncio.sleep(0)
    return page, shown


def page_reply(
    call: Call,
    request: Request,
    page: Page | HintPage,
    shown: Sequence[Shown],
    next_token: str | None,
) -> Reply:
    """The `shown` entries of a page; `next_token` None where nothing follows."""
    headers = next_link(request, next_token)
    left_out = [each.digest for each in page.left_out if call.caller.covers(each.channel_id)]
    if answer_form(call.headers.get(b"accept")) is Form.PROTOBUF:
        message = wire.MessagePage(
            messages=[message_protobuf(e, meta.variants, meta.hints) for e, meta, _ in shown],
            next=next_token or "",
            left_out=left_out,
        )
        return protobuf_reply(message.SerializeToString(), 200, headers)
    messages = b",".join(document for _, _, document in shown)
    rest = orjson.dumps({"next": next_token, "left_out": [digest.hex() for digest in left_out]})
    return Reply(200, [*JSON_HEADERS, *headers], b'{"messages":[%s],%s' % (messages, rest[1:]))


async def fitted(call: Call, read: Callable[[int], Awaitable[Reply]]) -> Reply:
    """The reply that `read` makes of up to so many bytes of frames; of fewer where it is too long."""
    most = call.node.limits.reply_bytes_max
    bytes_max = frame_bytes_max(call)
    reply = await read(bytes_max)
    while len(reply.body) > most and bytes_max > 1:
        # In the worst case text is six times as long in JSON.
        bytes_max = min(bytes_max, len(reply.body)) * most // (2 * len(reply.body))
        await asyncio.sleep(0)
        reply = await read(bytes_max)
    return reply


def next_link(request: Request, next_token: str | None) -> Headers:
    """`Link: rel="next"`: this request again, behind its last item, as an absolute URL.

    It keeps the form that was asked in (a proxy may rewrite IDs in paths, which the query form is for),
    and the authority, by which the caller reaches this node.
    """
    if next_token is None:
        return []
    query = [(name, value) for name, value in request.query_params.multi_items() if name != "after"]
    pairs = "&".join(
        f"{quote(name, safe='')}={quote(value, safe='')}"
        for name, value in [*query, ("after", next_token)]
    )
    path = quote(request.scope[ASKED_KEY], safe=_PATH_CHARACTERS)
    url = f"{request.scope['scheme']}://{_authority(request)}{path}?{pairs}"
    return [(b"link", f'<{url}>; rel="next"'.encode())]


def _authority(request: Request) -> str:
    """Host and port as the caller wrote them; those of the listening socket where it wrote none."""
    host = request.headers.get("host", "")
    if _AUTHORITY.fullmatch(host):
        return host
    name, port = request.scope.get("server") or ("localhost", None)
    name = f"[{name}]" if ":" in name else name
    return name if port is None else f"{name}:{port}"
