"""Requests that one worker hands on to another, and the notices of the worker that writes.

A worker that cannot answer a route (`app.http.routing.AnsweredBy`) has admitted the caller and read the
body as always; then it sends both to the first worker and passes the reply on. The first worker trusts its
private socket, which only this service's user can reach: headers there say who the caller is and from
which address, so that grants, budgets, turns and the audit log are those of the real caller. No header of a
client gets into their place.

A body is in the memory of both workers for as long as it is on its way between them, and counts in the
share of each.
"""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial

import orjson

from app.bus import Notices, SiblingBus, hand_over
from app.callers import Caller, Rate, Scope
from app.errors import Code, Problem
from app.http.call import Call, Headers, Reply, StreamedReply, client_of, raw_path
from app.http.replies import json_only
from app.http.routing import AnsweredBy, CurrentCall, Route, Routes
from app.http.upstream import SiblingGoneError, Upstreams
from app.limits import Limits
from app.node import Node
from app.siblings import Siblings
from app.store.entryrows import Rechecked
from recon.session import Interest, decode_interest

RETRY_AFTER_S = 1
HEAR_AGAIN_S = 0.1
"""From one attempt to hear the writer to the next; it starts within a second or two."""

CALLER_HEADER = b"sdstore-caller"
ADDRESS_HEADER = b"sdstore-address"
CLIENT_HEADER = b"sdstore-client"
SENT_HEADER = b"sdstore-sent-bytes"
_PRIVATE = b"sdstore-"
PRIVATE_HEADER_BYTES_MAX = 128 * 1024
"""Of a request between workers: the grants of a token with 100 channels take 40 KiB more."""

_NOT_HANDED_ON = frozenset(
    {
        # Of one connection (RFC 9110, 7.6.1), or of a body as it was sent.
        b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
        b"upgrade", b"expect", b"content-length", b"content-encoding",
        # Already applied: credentials, and what a page of another origin may do.
        b"authorization", b"proxy-authorization", b"cookie", b"origin",
    }
)  # fmt: skip
_NOT_PASSED_BACK = frozenset({b"connection", b"content-length", b"transfer-encoding"})

_log = logging.getLogger(__name__)

SIBLING = Caller("sibling")


# --- the worker that hands on ----------------------------------------------------------------------


class Handing:
    """Hands requests on to the first worker. For all workers but that one."""

    def __init__(self, siblings: Siblings, limits: Limits) -> None:
        self._siblings = siblings
        self._upstreams = Upstreams(siblings.paths[0])
        # All workers together leave the first one room for as many connections as it can have.
        self._running_max = max(1, limits.connections_max // len(siblings.paths))

    def takes(self, route: Route, call: Call) -> bool:
        """Whether a request is one for the first worker."""
        match route.answered_by:
            case AnsweredBy.ANY:
                return False
            case AnsweredBy.FIRST:
                return True
            case AnsweredBy.WRITER:
                return not self._siblings.writes and (route.writes is None or route.writes(call))

    async def pass_on(self, route: Route, call: Call) -> Reply | StreamedReply:
        """The first worker's reply. Raises Problem: `not_ready` while it is away, `overloaded`."""
        if not self._siblings.first_serves:
            raise self._away()
        if self._upstreams.running_count >= self._running_max:
            detail = f"{self._running_max} requests wait for the worker that answers them"
            raise Problem(Code.OVERLOADED, detail, headers={"Retry-After": "2"})
        if call.turn is not None:
            # The work is the other worker's, and so are the turns.
            call.turn.release()
        target = raw_path(call.asgi)
        if query := call.asgi["query_string"]:
            target += b"?" + query
        body, call.body = call.body, b""
        try:
            upstream = await self._upstreams.ask(
                route.method.encode(), target, _headers_of(call), body
            )
        except SiblingGoneError as error:
            raise self._away() from error
        call.is_handed_on = True
        del body
        headers = [each for each in upstream.headers if each[0] not in _NOT_PASSED_BACK]
        if any(name == b"transfer-encoding" for name, _ in upstream.headers):
            parts = upstream.parts(self._upstreams)
            await anext(parts)  # from here on closing it closes the connection
            return StreamedReply(headers, parts, is_live=True, status=upstream.status)
        try:
            return Reply(upstream.status, headers, await upstream.body())
        except SiblingGoneError as error:
            raise self._away() from error
        finally:
            self._upstreams.close(upstream)

    async def recheck(self, seqs: Sequence[int]) -> Rechecked:
        """Have the writer read frames again; see `app.ingest.committer.GroupCommitter.recheck`."""
        if not self._siblings.first_serves:
            raise self._away()
        try:
            upstream = await self._upstreams.ask(
                b"POST", b"/siblings/recheck", (), orjson.dumps(list(seqs))
            )
            try:
                answer = orjson.loads(await upstream.body())
            finally:
                self._upstreams.close(upstream)
        except SiblingGoneError as error:
            raise self._away() from error
        if upstream.status != 200:
            raise Problem(Code(answer["code"]), answer["detail"])
        return Rechecked(frozenset(answer["lost"]), frozenset(answer["whole"]))

    def close(self) -> None:
        """Close the connections that wait for a request."""
        self._upstreams.close_all()

    def _away(self) -> Problem:
        does = "writes" if self._siblings.one_writes else "talks to the peers"
        return Problem(
            Code.NOT_READY,
            f"the worker that {does} is starting",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )


def _headers_of(call: Call) -> Headers:
    headers: Headers = [
        each
        for each in call.asgi["headers"]
        if each[0] not in _NOT_HANDED_ON and not each[0].startswith(_PRIVATE)
    ]
    headers.append((CALLER_HEADER, _encoded(call.caller)))
    headers.append((ADDRESS_HEADER, call.address.encode()))
    headers.append((CLIENT_HEADER, client_of(call.asgi).encode()))
    headers.append((SENT_HEADER, b"%d" % call.sent_bytes))
    return headers


@lru_cache(maxsize=4_096)
def _encoded(caller: Caller) -> bytes:
    interests = [
        None if each is None else b64encode(each.encode()).decode()
        for each in (caller.channels, caller.publishable)
    ]
    fields = [caller.name, sorted(caller.scopes), *interests, caller.is_trusted, caller.rate]
    # JSON escapes line ends, and a header can hold the bytes of UTF-8.
    return orjson.dumps([*fields, caller.instance_id])


@lru_cache(maxsize=4_096)
def _decoded(encoded: bytes) -> Caller:
    name, scopes, channels, publishable, is_trusted, rate, instance_id = orjson.loads(encoded)
    # Without the ID of the token: the worker that admitted the caller ends what a revocation ends.
    return Caller(
        name,
        frozenset(map(Scope, scopes)),
        _interest(channels),
        is_trusted,
        rate=Rate(rate),
        publishable=_interest(publishable),
        instance_id=instance_id,
    )


def _interest(encoded: str | None) -> Interest | None:
    return None if encoded is None else decode_interest(b64decode(encoded))


# --- the worker that answers -----------------------------------------------------------------------


class SiblingAuthorizer:
    """The callers of a worker's private socket: those that a sibling admitted, or the sibling itself."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG002
        """See `app.callers.Authorizer`."""
        encoded = headers.get(CALLER_HEADER)
        return SIBLING if encoded is None else _decoded(encoded)


def private_limits(limits: Limits) -> Limits:
    """The limits of a private socket: all its connections are those of siblings, and they last."""
    return replace(
        limits,
        connections_per_address_max=limits.connections_max,
        header_bytes_max=PRIVATE_HEADER_BYTES_MAX,
        header_lines_max=limits.header_lines_max + 4,
        connection_idle_s=86_400,
    )


private = Routes("siblings", answered_by=AnsweredBy.ANY)
"""The routes that only siblings can call."""


@private.add("GET /siblings/notices", Scope.OPEN, is_hot=True)
async def notices(call: CurrentCall) -> StreamedReply:
    """The notices of the worker that writes (`app.bus.SiblingBus`)."""
    bus = call.node.relay.bus
    if not isinstance(bus, SiblingBus):
        raise Problem(Code.NOT_FOUND, "this worker is not the one that writes")
    return StreamedReply([(b"content-type", b"application/octet-stream")], bus.stream())


@private.add("POST /siblings/recheck", Scope.OPEN, is_hot=True)
async def recheck(call: CurrentCall) -> Reply:
    """Read frames again, by their sequence numbers."""
    found = await call.node.committer.recheck(orjson.loads(call.body))
    return json_only({"lost": sorted(found.lost), "whole": sorted(found.whole)})


# --- notices ---------------------------------------------------------------------------------------


@asynccontextmanager
async def hearing(node: Node, siblings: Siblings) -> AsyncIterator[None]:
    """Hear the notices of the worker that writes, while the block runs."""
    hear = partial(_hear, node, siblings, Upstreams(siblings.paths[0]))
    async with node.supervisor.repeating("notices of the writer", hear, HEAR_AGAIN_S):
        yield


async def _hear(node: Node, siblings: Siblings, upstreams: Upstreams) -> None:
    if not siblings.first_serves:
        return
    with suppress(SiblingGoneError):
        upstream = await upstreams.ask(b"GET", b"/siblings/notices", (), b"")
        try:
            joined = Notices()
            while piece := await upstream.piece():
                for notice in joined.feed(piece):
                    hand_over(notice, node.relay)
        finally:
            upstreams.close(upstream)
