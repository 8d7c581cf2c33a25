"""A request on its way through the node (`Call`): the forms of bodies and replies, the replies, and their sending.

Two bytes of a body can cost a hundred bytes of memory and a microsecond, so the fields of a body
are counted before it is parsed, and the first fault refuses it.

Replies are responses of Starlette. They are sent by the `Answer` of their request, which bounds what waits for
slow readers and charges their bytes to the caller.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import orjson
from fastapi import Depends, Query
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, ValidationError
from starlette.responses import Response, StreamingResponse

from app.access.callers import Caller, Rate, Readable
from app.access.rates import Bucket
from app.entries import Claim, Entry
from app.errors import Code, Problem, fault_text
from app.ingest.quarantine import Absence
from app.live.hub import Coding
from app.server.limits import Limits
from app.server.node import Node
from app.server.sharing import Holding
from sdstore.client.transport import INSTANCE_HEADER
from sdstore.sds.codec import decode, encode, to_json
from sdstore.sds.model import Message as SdsMessage
from sdstore.wire import store_pb2 as wire

if TYPE_CHECKING:
    from app.server.node import Node


# ---- forms

_Model = TypeVar("_Model", bound=BaseModel)
_Wire = TypeVar("_Wire", bound=Message)

_FIELD_BYTES_MIN = 2
"""A tag, and a length or a value."""

_THREAD_BYTES_MIN = 256 * 1024
"""Counting the fields of so many bytes takes milliseconds: a thread does it."""

_FAULTS_SHOWN_MAX = 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Form(Enum):
    """The two forms of most bodies and replies, and those of some routes."""

    JSON = b"application/json"
    PROTOBUF = b"application/x-protobuf"
    NDJSON = b"application/x-ndjson"
    OCTETS = b"application/octet-stream"
    EVENTS = b"text/event-stream"
    HTML = b"text/html"
    TEXT = b"text/plain"


@lru_cache(maxsize=512)
def answer_form(accept: bytes | None) -> Form:
    """The form that an Accept header prefers; JSON by default.

    RFC 9110 section 12.5.1: the most specific range that matches a type gives its quality.
    Raises `not_acceptable` if both forms have quality 0.
    """
    if not accept:
        return Form.JSON
    ranges = _ranges(accept.decode("latin-1"))
    json, protobuf = (
        _quality(ranges, "application/json"),
        _quality(ranges, "application/x-protobuf"),
    )
    if not json and not protobuf:
        raise Problem(Code.NOT_ACCEPTABLE, "answers are application/json or application/x-protobuf")
    return Form.PROTOBUF if protobuf > json else Form.JSON


@lru_cache(maxsize=512)
def body_form(content_type: bytes | None, *accepted: Form) -> Form:
    """The form of a body by its Content-Type; `unsupported_media_type` if it is not `accepted`."""
    media_type = (content_type or b"").partition(b";")[0].strip().lower()
    for form in accepted:
        if media_type == form.value or (form is Form.NDJSON and media_type == b"application/jsonl"):
            return form
    names = ", ".join(form.value.decode() for form in accepted)
    raise Problem(
        Code.UNSUPPORTED_MEDIA_TYPE,
        f"Content-Type must be one of {names}",
        headers={"Accept": names},
    )


@lru_cache(maxsize=512)
def stream_coding(accept_encoding: bytes | None) -> Coding | None:
    """The coding of a stream that an Accept-Encoding header names (RFC 9110, section 12.5.3): zstd rather than gzip."""
    wanted = _ranges((accept_encoding or b"").decode("latin-1"))
    best = max(Coding, key=lambda coding: wanted.get(coding, 0.0))
    return best if wanted.get(best) else None


def _ranges(accept: str) -> dict[str, float]:
    ranges: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_range, *parameters = (piece.strip() for piece in part.split(";"))
        ranges[media_range] = next(map(_q, filter(_is_quality, parameters)), 1.0)
    return ranges


def _is_quality(parameter: str) -> bool:
    return parameter.startswith("q=")


def _q(parameter: str) -> float:
    try:
        return min(1.0, max(0.0, float(parameter[2:])))
    except ValueError:
        return 0.0


def _quality(ranges: dict[str, float], media_type: str) -> float:
    for media_range in (media_type, "application/*", "*/*"):
        if media_range in ranges:
            return ranges[media_range]
    return 0.0


@dataclass(frozen=True, slots=True)
class TwoFormBody(Generic[_Model, _Wire]):
    """A body in JSON or in protobuf; `fields_max` bounds the fields of the protobuf form."""

    json: type[_Model]
    protobuf: type[_Wire]
    fields_max: Callable[[Limits], int]

    async def read(self, call: Call) -> _Model | _Wire:
        """The body by its Content-Type; `empty_body`, `invalid_body`, `too_many_items`."""
        form = body_form(call.headers.get(b"content-type"), Form.JSON, Form.PROTOBUF)
        if form is Form.JSON:
            return read_json(self.json, call.body)
        return await read_protobuf(self.protobuf, call.body, self.fields_max(call.node.limits))


def read_json(model: type[_Model], body: bytes) -> _Model:
    """A JSON body; `empty_body`, `invalid_body`."""
    _check_not_empty(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if (count := error.error_count()) > _FAULTS_SHOWN_MAX:
            # To describe each of a million faults would take seconds.
            raise Problem(Code.INVALID_BODY, f"the body has {count} faults") from None
        fault = error.errors(include_url=False)[0]
        if fault["type"] == "json_invalid":
            why = f"the body is not JSON: {fault['ctx']['error']}"
            raise Problem(Code.INVALID_BODY, why) from None
        name = ".".join(map(str, fault["loc"])) or "the body"
        raise Problem(Code.INVALID_BODY, f"{name}: {fault_text(fault)}") from None


async def read_protobuf(kind: type[_Wire], body: bytes, fields_max: int) -> _Wire:
    """A protobuf body of up to `fields_max` fields, those of nested messages included.

    `empty_body`, `invalid_body`, `too_many_items`.
    """
    _check_not_empty(body)
    await check_fields(kind, body, fields_max)
    try:
        return kind.FromString(body)
    except DecodeError:
        raise Problem(Code.INVALID_BODY, f"the body is not a {kind.DESCRIPTOR.name}") from None


async def check_fields(kind: type[Message], body: bytes, fields_max: int) -> None:
    """Raise `too_many_items` if a protobuf body holds more than `fields_max` fields."""
    if len(body) <= fields_max * _FIELD_BYTES_MIN:
        return
    if len(body) > _THREAD_BYTES_MIN:
        count = await asyncio.to_thread(count_fields, kind, body, fields_max)
    else:
        count = count_fields(kind, body, fields_max)
    if count > fields_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"the body holds more than {fields_max} fields")


def count_fields(kind: type[Message], body: bytes, most: int) -> int:  # noqa: C901 - one hot loop
    """The number of fields in an encoded message and its nested messages; stops after `most`.

    Walks over tags and lengths, 0.5 us a field. In bytes that are not protobuf it stops at the fault.
    """
    table: Mapping[int, Any] = _nested(kind.DESCRIPTOR)
    at, end, count = 0, len(body), 0
    outer: list[tuple[int, Mapping[int, Any]]] = []
    try:
        while True:
            while at < end and count <= most:
                count += 1
                tag = body[at]
                at += 1
                if tag >= 0x80:
                    tag, at = _varint(body, at - 1)
                wire_type = tag & 7
                if wire_type == _BYTES:
                    size = body[at]
                    at += 1
                    if size >= 0x80:
                        size, at = _varint(body, at - 1)
                    nested = table.get(tag)
                    if nested is None:
                        at += size
                    else:
                        outer.append((end, table))
                        end, table = min(end, at + size), nested
                elif wire_type == _VARINT:
                    while body[at] >= 0x80:
                        at += 1
                    at += 1
                elif wire_type == _FIXED64:
                    at += 8
                elif wire_type == _FIXED32:
                    at += 4
            if not outer or count > most:
                return count
            at = max(at, end)
            end, table = outer.pop()
    except IndexError:
        return count


@cache
def _nested(descriptor: Descriptor) -> Mapping[int, Any]:
    """The tags of the fields that hold messages, each with the same mapping of that message."""
    return {
        field.number << 3 | _BYTES: _nested(field.message_type)
        for field in descriptor.fields
        if field.message_type is not None
    }


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while body[at] >= 0x80 and shift < 64:
        value |= (body[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | body[at] << shift, at + 1


def _check_not_empty(body: bytes) -> None:
    if not body:
        raise Problem(Code.EMPTY_BODY, "this request needs a body")


# ---- calls

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[AsgiScope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
_INSTANCE_ID = re.compile(rb"[0-9a-f]{32}")

EXCHANGE_KEY = "sdstore.exchange"
"""Where our server leaves its `app.server.connection.Exchange` in the ASGI scope. Other servers leave nothing."""

Parts = AsyncGenerator[Sequence[bytes], None]
"""The parts of a reply. The next one is made when the client has read the one before."""


ANSWER_KEY = "sdstore.answer"
"""Where the `Sender` of a request is in the ASGI scope."""


class Sender(Protocol):
    """Sends the reply of a request."""

    async def give(self, reply: Reply) -> None:
        """Send a whole reply."""
        ...

    async def stream(self, reply: StreamedReply, scope: AsgiScope, receive: Receive) -> None:
        """Send a reply in parts."""
        ...


class Reply(Response):
    """A whole reply in memory. Its sender adds the content length."""

    # Starlette's constructor copies and encodes headers, which these are already.
    def __init__(self, status: int, headers: Headers, body: bytes = b"") -> None:
        self.status_code = status
        self.raw_headers = headers
        self.body = body
        self.background = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        await scope[ANSWER_KEY].give(self)


class StreamedReply(Response):
    """A reply in parts; `is_live`: other readers are shown the same bytes."""

    def __init__(self, headers: Headers, parts: Parts, *, is_live: bool = False) -> None:
        self.status_code = 200
        self.raw_headers = headers
        self.parts = parts
        self.is_live = is_live
        self.background = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        await scope[ANSWER_KEY].stream(self, scope, receive)


def length_of(reply: Reply) -> Headers:
    """The Content-Length header of a reply; none for a status without a body (RFC 9110, 8.6)."""
    if reply.status_code in (204, 304):
        return []
    return [(b"content-length", b"%d" % len(reply.body))]


@dataclass(slots=True)
class Call:
    """One request after authorization.

    `query` is the decoded query; `headers` maps names in lower case to values, several lines of one name
    joined. `asgi` is the ASGI scope. `body` is the whole unpacked body (empty if the route reads none),
    `sent_bytes` its length as sent. `address` identifies the client in shares and turns. `turn` is what a
    request of a route with turns holds: a handler that only waits from some point on releases it there.
    `body_room` is the body's share of memory. `exchange` is that of our server; `target` is what an audited action is about, if the path does not say
    it; `bucket` is the rate limit of a caller that has one. `held` releases what the request holds.
    """

    node: Node
    caller: Caller
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    asgi: AsgiScope
    address: str = ""
    exchange: ServerExchange | None = None
    bucket: Bucket | None = None
    body: bytes = b""
    sent_bytes: int = 0
    turn: Holding | None = None
    body_room: Holding | None = None
    target: str = ""
    held: list[Callable[[], None]] = field(default_factory=list)

    def end(self) -> None:
        """Release what the request holds, the last first."""
        while self.held:
            self.held.pop()()

    def free_body(self) -> None:
        """Free the body and its share of memory, for a request that lasts."""
        self.body = b""
        if self.body_room is not None:
            self.body_room.release()

    @property
    def readable(self) -> Readable:
        """The store as the caller may read it."""
        return Readable(self.node.store, self.caller)

    async def channel_nos(self) -> Sequence[int] | None:
        """The numbers of the channels that the caller may read, ascending; None: of every channel."""
        if self.caller.channels is None:
            return None
        await self.node.recon.index.catch_up()
        return self.node.recon.index.channel_numbers(self.caller.channels)

    async def absences(
        self, message_ids: Sequence[str], channel_id: str | None
    ) -> Mapping[str, Absence]:
        """Why these messages are not stored, where that is known and the caller reads their channel.

        Callers check beforehand that the grants cover `channel_id`. Without a policy nothing is known.
        """
        if self.node.ingest.judge is None or not message_ids:
            return {}
        known = await asyncio.to_thread(self.node.ingest.quarantine.absences, message_ids)
        return {
            message_id: why
            for message_id, channel, why in known
            if channel_id in (None, channel) and self.caller.covers(channel)
        }

    @property
    def has_left(self) -> bool:
        """Whether the client hung up before it got a reply."""
        return self.exchange is not None and self.exchange.has_left

    def location(self, path: str) -> tuple[bytes, bytes]:
        """The header `Location` of a path of this node: a URL if the node knows its public one."""
        return b"location", f"{self.node.settings.public_url or ''}{path}".encode()

    @property
    def instance_id(self) -> str:
        """The instance ID that another store gives as its own; empty if the caller gives none."""
        given = self.headers.get(INSTANCE_HEADER.encode(), b"")
        return given.decode() if _INSTANCE_ID.fullmatch(given) else ""

    @property
    def form(self) -> Form:
        """The form of the reply that the caller accepts; raises `not_acceptable`."""
        return answer_form(self.headers.get(b"accept"))


def raw_path(asgi: AsgiScope) -> bytes:
    """The path of a request, still percent-encoded."""
    path: bytes | None = asgi.get("raw_path")
    # ASGI servers can leave it out; then "%2F" and "/" cannot be distinguished.
    return quote(asgi["path"]).encode() if path is None else path


def client_of(asgi: AsgiScope) -> str:
    """The IP address of the client; empty over a UNIX socket."""
    client = asgi["client"]
    return client[0] if client else ""


class ServerExchange(Protocol):
    """Features of our server beyond ASGI: replies in one write, and parts that are not copied."""

    task: asyncio.Task[None]
    """The task that answers the request."""

    @property
    def caller(self) -> str:
        """The client's address, which identifies it in shares and turns."""
        ...

    @property
    def has_left(self) -> bool:
        """Whether the client hung up before it got a reply."""
        ...

    async def give(self, reply: Reply) -> None:
        """Send a whole reply."""
        ...

    async def stream(self, status: int, headers: Headers, parts: Parts, *, is_live: bool) -> None:
        """Send a reply in parts; `is_live`: other readers are shown the same bytes."""
        ...


# ---- replies

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


class Shape(NamedTuple):
    """The parts of messages that a caller wants in a list or a stream."""

    has_filter: bool = True
    is_short: bool = False

    def shown(self, message: SdsMessage) -> SdsMessage:
        """The message with the parts that are wanted."""
        return message if self.has_filter else replace(message, bloom_filter=b"")


WHOLE = Shape()


def _shape(
    filter_form: Annotated[
        Literal["full", "none"],
        Query(
            alias="filter", description="`none`: without bloom filters, which is most of a frame"
        ),
    ] = "full",
    meta_form: Annotated[
        Literal["full", "short"],
        Query(alias="meta", description="`short`: digest and sequence number only"),
    ] = "full",
) -> Shape:
    return Shape(filter_form == "full", meta_form == "short")


Shaped = Annotated[Shape, Depends(_shape)]
"""The parameters `filter` and `meta` of a route."""


def message_json(
    entry: Entry,
    variants: Sequence[bytes] | None = None,
    hints: Sequence[bytes] | None = None,
    shape: Shape = WHOLE,
) -> dict[str, Any]:
    """A stored message in JSON; members that may still change are left out if they are None."""
    message, _ = decode(entry.frame)
    shown = shape.shown(message)
    document = {"message": to_json(shown)}
    if shape.is_short:
        return document | {"meta": {"digest": entry.digest.hex(), "seq": entry.seq}}
    meta: dict[str, Any] = {
        "digest": entry.digest.hex(),
        "frame_hash": entry.frame_hash.hex(),
        "dialect": entry.dialect.label,
        "received_at": rfc3339(entry.received_at_ms),
        "seq": entry.seq,
    }
    if entry.filter_is_lost:
        meta["filter_lost"] = True
    if shown != message:
        del meta["frame_hash"]  # of a frame that the caller does not get
        meta["filter_left_out"] = True
    if variants is not None:
        meta["variants"] = [digest.hex() for digest in variants]
    if hints is not None:
        meta["hints"] = [hint.hex() for hint in hints]
    return document | {"meta": meta}


def message_protobuf(
    entry: Entry,
    variants: Sequence[bytes] = (),
    hints: Sequence[bytes] = (),
    shape: Shape = WHOLE,
) -> wire.StoredMessage:
    """A stored message in protobuf, as an element of a list."""
    if not shape.has_filter:
        message, dialect = decode(entry.frame)
        if message.bloom_filter:
            entry = entry._replace(frame=encode(shape.shown(message), dialect))
            found = message_protobuf(entry, variants, hints, Shape(is_short=shape.is_short))
            found.frame_hash, found.filter_left_out = b"", True
            return found
    if shape.is_short:
        return wire.StoredMessage(
            frame=entry.frame,
            digest=entry.digest,
            seq=entry.seq,
            filter_lost=entry.filter_is_lost,
        )
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


# ---- sending


class Answer:
    """Sends the reply of one request. `status` is 0 until it has begun.

    `who` is the caller's name and `call` its call, as soon as they are known; `code` is that of the problem
    that was given. `has_room`: the request holds room for a large reply.
    """

    __slots__ = (
        "_exchange",
        "_is_head",
        "_node",
        "_send",
        "call",
        "code",
        "has_room",
        "status",
        "who",
    )

    def __init__(
        self, send: Send, exchange: ServerExchange | None, node: Node, *, is_head: bool
    ) -> None:
        self._send = send
        self._exchange = exchange
        self._node = node
        self._is_head = is_head
        self.status = 0
        self.who = "unknown"
        self.call: Call | None = None
        self.code = ""
        self.has_room = False

    @property
    def exchange(self) -> ServerExchange | None:
        """That of our server; None if another one serves."""
        return self._exchange

    async def refuse(self, problem: Problem) -> None:
        """Send a problem document."""
        self.code = problem.code
        await self.give(problem_reply(problem))

    async def give(self, reply: Reply) -> None:
        """Send a whole reply, unless another one has begun (it can only be cut short)."""
        if self.status:
            return
        node, body = self._node, reply.body
        is_large = len(body) > node.limits.reply_free_bytes
        if is_large and node.sharing.replies.free_units <= 0 and not self.has_room:
            # Do not keep the finished reply for a client that might never read it.
            reply = problem_reply(node.sharing.replies.refuse())
        self.status = reply.status_code
        if self.call is not None and self.call.bucket is not None:
            self.call.bucket.spend(len(reply.body))
        if self._exchange is not None:
            await self._exchange.give(reply)
            return
        headers = [*reply.raw_headers, *length_of(reply)]
        start = {"type": "http.response.start", "status": reply.status_code, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": reply.body})

    async def stream(self, reply: StreamedReply, scope: AsgiScope, receive: Receive) -> None:
        """Send a reply in parts; the next one is made when the client has read the one before."""
        if self._is_head:
            await reply.parts.aclose()
            await self.give(Reply(reply.status_code, reply.raw_headers))
            return
        call = self.call
        bucket = None if call is None else call.bucket
        if call is None or bucket is None:
            await self._stream(reply, reply.parts, scope, receive)
            return
        rates = self._node.access.rates
        is_counted = reply.is_live and call.caller.rate is Rate.ANONYMOUS
        if is_counted:
            try:
                rates.begin_live(bucket)
            except Problem:
                await reply.parts.aclose()
                raise
        try:
            await self._stream(reply, _paid(reply.parts, bucket), scope, receive)
        finally:
            if is_counted:
                rates.end_live(bucket)

    async def _stream(
        self, reply: StreamedReply, parts: Parts, scope: AsgiScope, receive: Receive
    ) -> None:
        self.status, headers = reply.status_code, reply.raw_headers
        if self._exchange is not None:
            await self._exchange.stream(self.status, headers, parts, is_live=reply.is_live)
            return
        # Another server does not cancel this task when the client leaves. Starlette's response asks
        # `receive` for it.
        async with aclosing(parts):
            streaming = StreamingResponse((b"".join(part) async for part in parts), self.status)
            streaming.raw_headers = headers
            await streaming(scope, receive, self._send)

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """ASGI's `send`, for a response that is not one of ours."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


async def _paid(parts: Parts, bucket: Bucket) -> AsyncGenerator[Sequence[bytes], None]:
    """Parts of a reply, each taken from the bytes of its caller."""
    async with aclosing(parts):
        async for part in parts:
            bucket.spend(sum(map(len, part)))
            yield part
