"""Replies: messages in both forms, problem documents, server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson
from google.protobuf.message import Message

from app.entries import Claim, Entry
from app.errors import Code, Problem
from app.http.call import Headers, Parts, Reply, StreamedReply
from app.http.forms import Form
from sdstore.sds.codec import decode
from sdstore.sds.jsonform import to_json
from sdstore.wire import store_pb2 as wire

VARY = (b"vary", b"accept")
NO_CACHE = (b"cache-control", b"no-cache")
PROBLEM_TYPE = b"application/problem+json"
JSON_HEADERS: Headers = [(b"content-type", Form.JSON.value), VARY]
PROTOBUF_HEADERS: Headers = [(b"content-type", Form.PROTOBUF.value), VARY]
_EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # Proxies must neither keep nor collect events.
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def json_only(document: object, status: int = 200, headers: Headers = []) -> Reply:  # noqa: B006
    """A reply of a route that has no form but JSON."""
    return Reply(status, [(b"content-type", Form.JSON.value), *headers], orjson.dumps(document))


def json_reply(document: object, status: int = 200, headers: Headers = []) -> Reply:  # noqa: B006
    """The JSON form of a reply that has two; `headers` are added to the usual ones."""
    return Reply(status, [*JSON_HEADERS, *headers], orjson.dumps(document))


def protobuf_reply(
    body: Message | bytes,
    status: int = 200,
    headers: Headers = [],  # noqa: B006
) -> Reply:
    """The protobuf form of a reply that has two; `headers` are added to the usual ones."""
    encoded = body if isinstance(body, bytes) else body.SerializeToString()
    return Reply(status, [*PROTOBUF_HEADERS, *headers], encoded)


def problem_reply(problem: Problem) -> Reply:
    """The problem document of a refusal (RFC 9457), with its headers."""
    headers = [(b"content-type", PROBLEM_TYPE), (b"cache-control", b"no-store")]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
    return Reply(problem.status, headers, orjson.dumps(problem.document()))


def internal_error() -> Problem:
    """The problem that a caller gets when this node is at fault. The log has the details."""
    return Problem(Code.INTERNAL_ERROR, "the fault is this node's; see its log")


def event_stream(parts: Parts, headers: Headers = []) -> StreamedReply:  # noqa: B006
    """A reply of server-sent events (the WHATWG text format); `headers` are added to the usual ones."""
    return StreamedReply([*_EVENT_HEADERS, *headers], parts, is_live=True)


def event(name: str, document: object, event_id: str | None = None) -> bytes:
    """One event; a reader can resume after one that has an ID."""
    id_line = b"" if event_id is None else b"id: %s\n" % event_id.encode()
    # orjson writes one line, so the data is one line.
    return b"%sevent: %s\ndata: %s\n\n" % (id_line, name.encode(), orjson.dumps(document))


def heartbeat(event_id: str) -> bytes:
    """A comment that keeps proxies and clients from giving up, and an ID that they remember."""
    return b": still here\nid: %s\n\n" % event_id.encode()


def message_json(
    entry: Entry, variants: Sequence[bytes] | None = None, hints: Sequence[bytes] | None = None
) -> dict[str, Any]:
    """A stored message in JSON; members that may still change are left out if they are None."""
    meta: dict[str, Any] = {
        "digest": entry.digest.hex(),
        "frame_hash": entry.frame_hash.hex(),
        "dialect": entry.dialect.label,
        "received_at": rfc3339(entry.received_at_ms),
        "seq": entry.seq,
    }
    if entry.filter_is_lost:
        meta["filter_lost"] = True
    if variants is not None:
        meta["variants"] = [digest.hex() for digest in variants]
    if hints is not None:
        meta["hints"] = [hint.hex() for hint in hints]
    message, _ = decode(entry.frame)
    return {"message": to_json(message), "meta": meta}


def message_protobuf(
    entry: Entry, variants: Sequence[bytes] = (), hints: Sequence[bytes] = ()
) -> wire.StoredMessage:
    """A stored message in protobuf, as an element of a list."""
    return wire.StoredMessage(
        frame=entry.frame,
        digest=entry.digest,
        frame_hash=entry.frame_hash,
        dialect=entry.dialect.label,
        received_at_ms=entry.received_at_ms,
        seq=entry.seq,
        filter_lost=entry.filter_is_lost,
        variants=variants,
        retrieval_hints=hints,
    )


def rfc3339(epoch_ms: int) -> str:
    """A time in UTC with milliseconds, such as 2026-01-31T12:00:00.000Z."""
    seconds, ms = divmod(epoch_ms, 1_000)
    return f"{_to_the_second(seconds)}.{ms:03}Z"


@lru_cache(maxsize=1_024)
def _to_the_second(epoch_s: int) -> str:
    # The messages of one page usually arrived within a few seconds.
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def published_hints(claims: Sequence[Claim]) -> list[bytes]:
    """The hints of an entry's claims."""
    return [claim.hint for claim in claims]
