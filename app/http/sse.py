"""Server-sent events (the WHATWG text format), as streamed answers."""

from __future__ import annotations

import orjson
from fastapi import Response

from app.http.call import Call, Headers, Parts, Reply
from app.http.framework import PartsResponse, respond


def event(name: str, document: object, event_id: str | None = None) -> bytes:
    """One event; with an ID it is a place to resume from."""
    id_line = b"" if event_id is None else b"id: %s\n" % event_id.encode()
    # orjson writes one line, so the data is one line.
    return b"%sevent: %s\ndata: %s\n\n" % (id_line, name.encode(), orjson.dumps(document))


def heartbeat(event_id: str) -> bytes:
    """A comment that keeps proxies and clients from giving up, and a bare ID, which they remember."""
    return b": still here\nid: %s\n\n" % event_id.encode()


def event_stream(call: Call, parts: Parts) -> Response:
    """An answer of events; nothing on the way may keep or collect them."""
    headers: Headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    if call.is_head:
        return respond(Reply(200, headers))
    return PartsResponse(parts, headers, is_live=True)
