"""What a request passes before its handler: the route on its raw path, its caller, its body, its turn.

**Routes.** Message IDs and channels are arbitrary strings, so a path is split before it is decoded: "a%2Fb" is
one segment. `app.http.front` gives Starlette the path as it was sent, and `{message_id:segment}` in a template
decodes one segment of it. Clients and proxies rewrite some strings in a path ("", ".", ".."), so a route with
an ID has a query form without that segment, which takes any string (`/v1/messages?message_id=…`): `get_by_id`.

**Bodies** are bounded as they arrive and as they are decompressed, under one deadline. The bytes of all bodies
in flight take units of one share. A body takes its units before it is read; a client without units waits with
its bytes in the network. The first bytes of each request are free, so that a single message never waits for
large bodies.

**Admission**: who calls and may they, at what rate; the body; the turn. `admitted` is the dependency of every route:

    @router.get("/v1/channels")
    async def list_channels(call: Annotated[Call, admitted(Scope.READ, turns=Turns.READS)]) -> Reply:

What a request holds is released when its reply has been sent. The fast lane (`app.http.front`) begins the same
`Admission` without FastAPI.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from io import BytesIO
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

import zstandard
from fastapi import APIRouter, Depends, Request
from fastapi._compat import ModelField
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import BaseRoute, Match

from app.access.callers import (
    AnonymousCallers,
    Authorizer,
    Caller,
    Rate,
    Scope,
    anonymous,
    confined,
)
from app.access.proxies import address_key
from app.access.tokens import Tokens
from app.errors import Code, Problem
from app.http.call import (
    ANSWER_KEY,
    Answer,
    AsgiScope,
    Call,
    Form,
    Headers,
    Receive,
    Reply,
    StreamedReply,
    body_form,
    client_of,
    raw_path,
    read_json,
)
from app.server.limits import Limits
from app.server.node import Node
from app.server.sharing import Holding, Share, Turns

# ---- routes

QUERY_FIELDS_MAX = 1_000
"""Fields in one query string; no route needs more."""

ID_PARAMETERS = ("message_id", "channel_id")
"""Path parameters that a caller may pass in the query instead."""

QUERY_KEY = "sdstore.query"
"""Where the parsed `Query` of a request is in the ASGI scope."""

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Reply | StreamedReply]])


class Query(NamedTuple):
    """The fields of a query string, percent-decoded as UTF-8, and the names that are given twice."""

    fields: Mapping[str, str]
    repeated: frozenset[str]


def parse_query(query_string: bytes) -> Query:
    """Parse a query string; `invalid_parameter`. The last value of a repeated name counts here."""
    if not query_string:
        return _NO_QUERY
    if b"%00" in query_string:
        raise Problem(Code.INVALID_PARAMETER, "no parameter holds U+0000")
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=QUERY_FIELDS_MAX,
        )
    except ValueError:
        raise Problem(Code.INVALID_PARAMETER, "the query string is not UTF-8") from None
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return Query(fields, _NO_NAMES)
    counts = Counter(name for name, _ in pairs)
    return Query(fields, frozenset(name for name, count in counts.items() if count > 1))


_NO_NAMES: frozenset[str] = frozenset()
_NO_QUERY = Query({}, _NO_NAMES)


def routable_path(scope: AsgiScope) -> str:
    """The path as it was sent, for Starlette to match; `invalid_parameter`.

    A mount prefix (`root_path`) stays decoded, because Starlette cuts it off by its length.
    """
    raw = raw_path(scope)
    if b"%00" in raw:
        raise Problem(Code.INVALID_PARAMETER, "no parameter holds U+0000")
    path = raw.decode("latin-1")
    root = scope.get("root_path", "")
    if not root:
        return path
    starts = (at for at, character in enumerate(f"{path}/") if character == "/")
    start = next((at for at in starts if unquote(path[:at]) == root), None)
    return path if start is None else f"{root}{path[start:]}"


def segment_text(segment: str) -> str:
    """A decoded path segment; `invalid_parameter`."""
    if "%" not in segment and segment.isascii():
        return segment
    try:
        return unquote_to_bytes(segment.encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise Problem(Code.INVALID_PARAMETER, "a path segment is not UTF-8") from None


class _Segment(Convertor[str]):
    """One percent-encoded path segment, possibly empty."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        """See `Convertor`."""
        return segment_text(value)

    def to_string(self, value: str) -> str:
        """See `Convertor`."""
        raise NotImplementedError("no URL is made from a template")


register_url_convertor("segment", _Segment())


class NodeRoute(APIRoute):
    """A route of one method that knows its query parameters: an unknown or repeated one is an error."""

    @property
    def method(self) -> str:
        """Its method."""
        return next(iter(self.methods or ()))

    @cached_property
    def query_names(self) -> frozenset[str]:
        """The parameters that a query can have."""
        return frozenset(each.alias for each in self._queried)

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """Those of them that can be given more than once."""
        lists = (each for each in self._queried if each.field_info.annotation == list[str])
        return frozenset(each.alias for each in lists)

    @property
    def _queried(self) -> Iterable[ModelField]:
        direct = self.dependant
        return [each for part in (direct, *direct.dependencies) for each in part.query_params]

    def check_query(self, query: Query) -> None:
        """Raise `invalid_parameter` for a parameter that is unknown or given twice.

        A proxy and this node might pick different values of a repeated parameter.
        """
        if twice := query.repeated - self.repeatable:
            raise Problem(Code.INVALID_PARAMETER, f"{min(twice)[:100]} is given twice")
        if query.fields and not self.query_names.issuperset(query.fields):
            unknown = next(name for name in query.fields if name not in self.query_names)
            known = ", ".join(sorted(self.query_names)) or "none"
            why = f"unknown query parameter {unknown[:100]!r}; this route has: {known}"
            raise Problem(Code.INVALID_PARAMETER, why)


class QueryForm(NodeRoute):
    """The query form of a route with an ID. It matches only if the query has the ID."""

    @cached_property
    def id_parameter(self) -> str:
        """The parameter that the other form has in its path."""
        required = (each for each in self._queried if each.field_info.is_required())
        return next(each.alias for each in required if each.alias in ID_PARAMETERS)

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        """See `starlette.routing.Route`."""
        found = super().matches(scope)
        if found[0] is Match.NONE or self.id_parameter in scope[QUERY_KEY].fields:
            return found
        return Match.NONE, {}

    def lacks_only_its_id(self, scope: AsgiScope) -> bool:
        """Whether a request would be this route's with the ID in its query."""
        return super().matches(scope)[0] is Match.FULL


def get_by_id(router: APIRouter, path: str, **options: Any) -> Callable[[_Handler], _Handler]:
    """Declare a GET route with an ID in its path, and its query form, as `router.get` does.

    The query form comes first: its paths look like IDs of shorter routes.
    """
    name = next(each for each in ID_PARAMETERS if f"{{{each}:segment}}" in path)

    def declare(handler: _Handler) -> _Handler:
        router.add_api_route(
            path.replace(f"/{{{name}:segment}}", ""),
            handler,
            methods=["GET"],
            include_in_schema=False,
            route_class_override=QueryForm,
            **options,
        )
        router.add_api_route(path, handler, methods=["GET"], **options)
        return handler

    return declare


def no_route(routes: Iterable[BaseRoute], scope: AsgiScope) -> Problem:
    """The refusal of a request that no route takes."""
    methods = set(_allowed(routes, scope))
    for route in routes:
        if isinstance(route, QueryForm) and route.lacks_only_its_id(scope):
            return Problem(Code.INVALID_PARAMETER, f"?{route.id_parameter}= is missing")
    if not methods:
        return Problem(
            Code.NO_SUCH_ROUTE,
            "see /docs for the routes of this node; names and IDs in a path are percent-encoded (a/b: a%2Fb)",
        )
    return Problem(
        Code.METHOD_NOT_ALLOWED,
        f"{scope['method']} is not among the methods of this path",
        headers={"Allow": ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))},
    )


def _allowed(routes: Iterable[BaseRoute], scope: AsgiScope) -> Iterator[str]:
    for route in routes:
        if isinstance(route, NodeRoute) and route.matches(scope)[0] is not Match.NONE:
            yield route.method


# ---- bodies

# The rest of a refused body is not read; the connection cannot be used again.
_CLOSE = {"Connection": "close"}
_ZSTD_EMPTY_BYTES_MAX = 7
"""An empty block and a checksum, behind the header of a zstd frame without content."""

_DEFLATE_FACTOR_MAX = 1_032
"""The maximum ratio of a deflate stream."""

_GROWTH = 1 << 20
"""The minimum increment of units for a body without a declared length."""

_THREAD_BYTES_MIN = 256 * 1024
"""Decompressing this much takes a millisecond, so a thread does it."""


class ClientGoneError(Exception):
    """The client hung up before its body was complete; there is no one left to answer."""


class Body(NamedTuple):
    """A complete body, decompressed; the bytes sent; its units of memory."""

    content: bytes
    sent_bytes: int
    holding: Holding | None = None


class Bodies:
    """Reads the bodies of all requests of a process."""

    def __init__(self, share: Share, limits: Limits) -> None:
        self._share = share
        self._limits = limits

    async def read(
        self, receive: Receive, headers: Mapping[bytes, bytes], bytes_max: int, caller: str
    ) -> Body:
        """A complete body. Release its `holding` when the request is over.

        Raises `body_too_large` as soon as it exceeds `bytes_max` (compressed or decompressed),
        `request_timeout` if it is late, `overloaded` if no memory becomes free in time,
        `unsupported_media_type` for an unknown Content-Encoding.
        """
        declared = headers.get(b"content-length")
        # The server has checked that the header contains digits.
        declared_bytes = 0 if declared is None else int(declared)
        if declared_bytes > bytes_max:
            raise _too_large(bytes_max)
        arriving = _Arriving(self._share, caller, self._limits)
        try:
            content = await arriving.read(receive, declared_bytes, bytes_max)
            sent_bytes = len(content)
            encoding = headers.get(b"content-encoding")
            if encoding is not None:
                content = await self._unpack(arriving, content, encoding.lower(), bytes_max)
        except BaseException:
            arriving.release()
            raise
        return Body(content, sent_bytes, arriving.holding)

    async def _unpack(
        self, arriving: _Arriving, body: bytes, encoding: bytes, bytes_max: int
    ) -> bytes:
        if encoding == b"identity":
            return body
        packing = _PACKINGS.get(encoding)
        if packing is None:
            raise Problem(
                Code.UNSUPPORTED_MEDIA_TYPE,
                "Content-Encoding must be gzip, zstd or identity",
                headers={"Accept-Encoding": "gzip, zstd"},
            )
        try:
            size = packing.size(body)
            if size > bytes_max:
                raise _too_large(bytes_max)
            factor = self._limits.unpack_factor_max
            if size > max(self._limits.unpacked_free_bytes, factor * len(body)):
                raise Problem(
                    Code.BODY_TOO_LARGE,
                    f"the body is {size} bytes compressed to {len(body)}; the maximum ratio is "
                    f"{factor}: send it uncompressed",
                )
            await arriving.make_room(len(body) + size)
            if size < _THREAD_BYTES_MIN:
                content = packing.unpack(body, size)
            else:
                content = await asyncio.to_thread(packing.unpack, body, size)
        except (zlib.error, zstandard.ZstdError) as error:
            raise Problem(
                Code.INVALID_BODY, f"the body is not {encoding.decode()}: {error}"
            ) from None
        arriving.shrink(len(content))
        return content


class _Arriving:
    """One arriving body, and the units it holds."""

    def __init__(self, share: Share, caller: str, limits: Limits) -> None:
        self.holding: Holding | None = None
        self._share = share
        self._caller = caller
        self._limits = limits
        self._arrived_bytes = 0
        self._deadline: asyncio.Timeout | None = None
        self._is_cut = False

    async def read(self, receive: Receive, declared_bytes: int, bytes_max: int) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_read_timeout_s) as self._deadline:
                await self.make_room(declared_bytes)
                return await self._collect(receive, bytes_max)
        except TimeoutError:
            why = (
                "the body stalled while others waited for room"
                if self._is_cut
                else f"the body took longer than {self._limits.body_read_timeout_s} s"
            )
            raise Problem(Code.REQUEST_TIMEOUT, why, headers=_CLOSE) from None
        finally:
            self._deadline = None
            if self.holding is not None:
                # From now on the delay is this node's, not the client's.
                self._share.forget(self.holding)

    async def _collect(self, receive: Receive, bytes_max: int) -> bytes:
        message = await receive()
        first: bytes = message.get("body", b"")
        # Grows in place, and its value is not a copy: a body is in memory once.
        body = BytesIO()
        while message["type"] == "http.request":
            chunk = message.get("body", b"")
            self._arrived_bytes += len(chunk)
            if self._arrived_bytes > bytes_max:
                raise _too_large(bytes_max)
            if not message.get("more_body", False):
                if len(first) == self._arrived_bytes:
                    return first
                body.write(chunk)
                return body.getvalue()
            body.write(chunk)
            held_bytes = 0 if self.holding is None else self.holding.units
            if self._arrived_bytes > max(held_bytes, self._limits.body_free_bytes):
                await self.make_room(min(bytes_max, max(_GROWTH, 2 * self._arrived_bytes)))
            message = await receive()
        raise ClientGoneError

    async def make_room(self, wanted_bytes: int) -> None:
        """Hold units for this many bytes, less those that are free for each request."""
        if wanted_bytes <= self._limits.body_free_bytes:
            return
        if self.holding is None:
            holder = None if self._deadline is None else self
            self.holding = await self._share.take(self._caller, wanted_bytes, holder)
        elif wanted_bytes > self.holding.units:
            await self._share.grow(self.holding, wanted_bytes - self.holding.units)

    def shrink(self, bytes_count: int) -> None:
        if self.holding is not None:
            self.holding.resize(min(self.holding.units, bytes_count))

    def release(self) -> None:
        if self.holding is not None:
            self.holding.release()

    def moved_bytes(self) -> int:
        return self._arrived_bytes

    def cut(self) -> None:
        if self._deadline is not None:
            self._is_cut = True
            self._deadline.reschedule(asyncio.get_running_loop().time())


class _Packing(NamedTuple):
    """`size` reads the declared size of a body; `unpack` allocates no more than that."""

    size: Callable[[bytes], int]
    unpack: Callable[[bytes, int], bytes]


def _gzip_size(body: bytes) -> int:
    # RFC 1952: the last four bytes; the check of the stream includes them.
    size = int.from_bytes(body[-4:], "little")
    if size > _DEFLATE_FACTOR_MAX * len(body):
        raise zlib.error("it declares more bytes than its length allows")
    return size


def _gunzip(body: bytes, size: int) -> bytes:
    # 16 + 15: a gzip header and the largest window.
    stream = zlib.decompressobj(31)
    unpacked = stream.decompress(body, size + 1)
    if not stream.eof:
        raise zlib.error("its length differs from the declared one")
    # Only one member: millions of empty ones would waste time.
    if stream.unused_data:
        raise zlib.error("data follows its first member")
    return unpacked


def _zstd_size(body: bytes) -> int:
    size: int = zstandard.frame_content_size(body)
    if size < 0:
        raise zstandard.ZstdError("the frame does not declare its content size")
    # The library ignores data that follows an empty frame.
    behind_bytes = len(body) - zstandard.frame_header_size(body)
    if not size and behind_bytes > _ZSTD_EMPTY_BYTES_MAX:
        raise zstandard.ZstdError("data follows an empty frame")
    return size


def _unzstd(body: bytes, _size: int) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)


_PACKINGS: Mapping[bytes, _Packing] = {
    b"gzip": _Packing(_gzip_size, _gunzip),
    b"zstd": _Packing(_zstd_size, _unzstd),
}


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        Code.BODY_TOO_LARGE, f"the body exceeds the maximum of {bytes_max} bytes", headers=_CLOSE
    )


# ---- admission


class Served(NamedTuple):
    """The open node of an application, in `app.state.served` while it is open."""

    node: Node
    authorizer: Authorizer
    bodies: Bodies


class Admission:
    """What a route demands of a request: a scope of its caller, a turn, a bounded body.

    `turns`: a reply costs milliseconds or many bytes, so clients wait for each other. Without
    `body_bytes_max`, the body of a POST or PUT is a small one.
    """

    def __init__(
        self,
        scope: Scope,
        turns: Turns | None = None,
        body_bytes_max: Callable[[Limits], int] | None = None,
    ) -> None:
        self.scope = scope
        self.turns = turns
        self._body_bytes_max = body_bytes_max

    async def admit(self, request: Request) -> AsyncIterator[Call]:
        """The dependency of a route."""
        call = await self.begin(request.scope, request.receive, joined(request.scope["headers"]))
        try:
            yield call
        finally:
            call.end()

    async def begin(
        self, asgi: AsgiScope, receive: Receive, headers: Mapping[bytes, bytes]
    ) -> Call:
        """The call of a request, if it is admitted: end it (`Call.end`) after its reply. Raises Problem."""
        served: Served = asgi["app"].state.served
        call = self._identified(served, asgi, headers)
        try:
            if bytes_max := self._bytes_max(served.node.limits, asgi["method"]):
                body = await served.bodies.read(receive, headers, bytes_max, call.address)
                call.body, call.sent_bytes = body.content, body.sent_bytes
                call.body_room = body.holding
                if body.holding is not None:
                    call.held.append(body.holding.release)
            if self.turns is not None:
                await self._take_turn(self.turns, call, asgi[ANSWER_KEY])
            if call.sent_bytes and call.bucket is not None:
                call.bucket.spend(call.sent_bytes)
            if call.caller.token_id is not None:
                _end_with_grants(served.node.access.tokens, call)
            elif call.caller.rate is Rate.ANONYMOUS:
                _end_with_grants(served.node.access.anonymous, call)
        except BaseException:
            call.end()
            raise
        return call

    async def _take_turn(self, turns: Turns, call: Call, answer: Answer) -> None:
        limits, sharing = call.node.limits, call.node.sharing
        room_bytes = limits.reply_bytes_max
        if turns is Turns.BATCHES:
            # An outcome is about as long as a short message.
            room_bytes = min(room_bytes, len(call.body))
        room = await sharing.replies.take(call.address, room_bytes)
        call.held.append(room.release)
        answer.has_room = True
        call.turn = await sharing.turns[turns].take(call.address, 1)
        call.held.append(call.turn.release_after_pass)
        if call.has_left and turns is not Turns.BATCHES:
            raise ClientGoneError  # while it waited: a reply costs milliseconds

    def _identified(self, served: Served, asgi: AsgiScope, headers: Mapping[bytes, bytes]) -> Call:
        """The call of a caller with the route's scope, and with the channel that path or query name.

        The answer learns who calls, also if that caller is refused.
        """
        node, query, answer = served.node, asgi[QUERY_KEY], asgi[ANSWER_KEY]
        caller = identified(served, asgi, headers)
        answer.who = caller.name
        # Callers on this machine have no rate limit, and pay nothing for that of others.
        bucket = None if caller.rate is Rate.FREE else node.access.rates.admit(caller)
        if b"origin" in headers:
            caller = confined(caller, headers, node.settings.public_host)
        channel_id = asgi["path_params"].get("channel_id")
        if channel_id is None:
            channel_id = query.fields.get("channel_id")
        caller.require(self.scope, channel_id)
        if (route := asgi.get("route")) is not None:
            route.check_query(query)
        exchange = answer.exchange
        address = "" if exchange is None else exchange.caller
        address = address or address_key(client_of(asgi))
        call = Call(node, caller, query.fields, headers, asgi, address, exchange, bucket)
        answer.call = call
        return call

    def _bytes_max(self, limits: Limits, method: str) -> int:
        if self._body_bytes_max is not None:
            return self._body_bytes_max(limits)
        if method not in ("POST", "PUT"):
            return 0
        is_operator = self.scope is Scope.ADMIN
        return limits.operator_body_bytes_max if is_operator else limits.small_body_bytes_max


def admitted(
    scope: Scope,
    *,
    turns: Turns | None = None,
    body_bytes_max: Callable[[Limits], int] | None = None,
) -> Any:
    """The dependency that admits a caller with a scope, as described in `Admission`."""
    return Depends(Admission(scope, turns, body_bytes_max).admit)


def json_body(model: type[BaseModel], *, is_optional: bool = False) -> Any:
    """The dependency that reads a JSON body, which the admission before it has read, bounded.

    FastAPI would read a body before it admits its sender. `is_optional`: an empty body is an empty object.
    """

    async def read(request: Request) -> BaseModel:
        call: Call = request.scope[ANSWER_KEY].call
        if is_optional and not call.body:
            return model()
        body_form(call.headers.get(b"content-type"), Form.JSON)
        return read_json(model, call.body)

    return Depends(read)


Anybody = Annotated[Call, admitted(Scope.OPEN)]
Reader = Annotated[Call, admitted(Scope.READ)]
ReaderInTurn = Annotated[Call, admitted(Scope.READ, turns=Turns.READS)]
Operator = Annotated[Call, admitted(Scope.ADMIN)]


def admission_of(route: APIRoute) -> Admission:
    """The admission of a route.

    Raises TypeError if it has none, which would let everybody in, and if FastAPI would read its body before.
    """
    if route.body_field is not None:
        raise TypeError(f"{route.path}: the handler needs `json_body` for its body")
    for dependency in route.dependant.dependencies:
        owner = getattr(dependency.call, "__self__", None)
        if isinstance(owner, Admission):
            return owner
    raise TypeError(f"{route.path}: the handler needs a parameter with `admitted`")


def joined(raw_headers: Headers) -> Mapping[bytes, bytes]:
    """Headers by name; lines of one name are one list (RFC 9110 section 5.2)."""
    headers = dict(raw_headers)
    if len(headers) == len(raw_headers):
        return headers
    lists: dict[bytes, bytes] = {}
    for name, value in raw_headers:
        lists[name] = b"%s, %s" % (lists[name], value) if name in lists else value
    return lists


def identified(served: Served, asgi: AsgiScope, headers: Mapping[bytes, bytes]) -> Caller:
    """The caller of a request; one with a wrong token is counted and logged. Raises Problem."""
    client = client_of(asgi)
    try:
        return served.authorizer.identify(client, headers)
    except Problem as problem:
        if problem.code is Code.UNAUTHENTICATED:
            served.node.access.rates.admit(anonymous(client))
            served.node.access.tokens.note_rejected(headers, client, problem.detail)
        raise


def _end_with_grants(grants: Tokens | AnonymousCallers, call: Call) -> None:
    """Have a request ended when its caller's grants are withdrawn.

    The caller was identified before its body came and before it waited for its turn: raises Problem if the
    grants were withdrawn since.
    """
    task = asyncio.current_task() if call.exchange is None else call.exchange.task
    if task is None:
        raise RuntimeError("requests are answered in tasks")
    grants.begin(call.caller, task)
    call.held.append(partial(grants.end, task))
