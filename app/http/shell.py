"""The outermost ASGI callable: what holds for every route is done here, once.

Routing on the raw path, authorization, body limits and deadlines, problem documents, metrics. Hot
routes have a handler that is called straight away; the others go on into the FastAPI app, which
sees a bounded body that has already been read and a path whose parameters are one segment each.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from time import perf_counter
from typing import Any
from urllib.parse import quote

from app.errors import Problem
from app.http.auth import Authorizer, confined
from app.http.body import Bodies, ClientGoneError, Receive
from app.http.call import EXCHANGE_KEY, Call, Exchange, Headers, Parts, Reply, length_of
from app.http.problems import internal_error, problem_reply
from app.http.routes import Match, RouteTable
from app.node import Node
from app.sharing import Turns

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CALL_KEY = "sdstore.call"
"""Where FastAPI endpoints find their `Call` in the ASGI scope."""

ANSWER_KEY = "sdstore.answer"
"""Where their responses find the `Answer` of the request, which takes whole replies and parts."""

ASKED_KEY = "sdstore.asked"
"""Where they find the path as it was asked for, in the form and encoding it came in."""

_log = logging.getLogger(__name__)


class Shell:
    """See the module. `framework` is the FastAPI app; it also gets the lifespan events."""

    def __init__(
        self, table: RouteTable, node: Node, authorizer: Authorizer, framework: App
    ) -> None:
        self._table = table
        self._node = node
        self._authorizer = authorizer
        self._framework = framework
        self._sharing = node.sharing
        self._bodies = Bodies(node.sharing.bodies, node.limits)
        self._limits = node.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._framework(scope, receive, send)
            return
        started = perf_counter()
        stats = self._table.unmatched
        # Taken out: left inside, it would make a cycle for the garbage collector.
        answer = Answer(send, scope.pop(EXCHANGE_KEY, None), self._node)
        body_place = None
        try:
            match = self._table.match(scope["method"], _raw_path(scope), scope["query_string"])
            route, stats = match.route, match.stats
            call = self._admit(match, scope)
            call.address = answer.caller or _host(scope)
            if route.body_bytes_max:
                call.body, call.sent_bytes, body_place = await self._bodies.read(
                    receive, call.headers, route.body_bytes_max, call.address
                )
            if route.takes_turns is not None:
                turns = self._sharing.turns[route.takes_turns]
                room_bytes = self._limits.reply_bytes_max
                if route.takes_turns is Turns.BATCHES:
                    # An outcome is about as long as a short message.
                    room_bytes = min(room_bytes, len(call.body))
                with await self._sharing.replies.take(call.address, room_bytes):
                    answer.has_room = True
                    call.turn = await turns.take(call.address, 1)
                    with call.turn:
                        await self._answer(match, call, scope, receive, answer)
            else:
                await self._answer(match, call, scope, receive, answer)
        except Problem as problem:
            await answer.give(problem_reply(problem))
        except ClientGoneError:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets a problem document
            _log.exception("%s failed", stats.template)
            await answer.give(problem_reply(internal_error()))
        finally:
            if body_place is not None:
                body_place.release()
            stats.observe(answer.status, perf_counter() - started)

    async def _answer(
        self, match: Match, call: Call, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        if match.route.handler is not None:
            await answer.give(await match.route.handler(call))
            return
        call.is_head = scope["method"] == "HEAD"
        inner = {**_inner_scope(scope, match, call), ANSWER_KEY: answer}
        await self._framework(inner, _replay(call, receive), answer)

    def _admit(self, match: Match, scope: Scope) -> Call:
        raw_headers = scope["headers"]
        headers = dict(raw_headers)
        if len(headers) != len(raw_headers):
            headers = _joined(raw_headers)
        caller = self._authorizer.identify(_host(scope), headers)
        if b"origin" in headers:
            caller = confined(caller, headers)
        channel_id = match.params.get("channel_id")
        if channel_id is None:
            channel_id = match.query.get("channel_id")
        caller.require(match.route.scope, channel_id)
        return Call(self._node, match.params, match.query, headers, raw_headers, caller)


class Answer:
    """The sending side of one request: knows whether an answer has begun, and its status."""

    __slots__ = ("_exchange", "_free_bytes", "_replies", "_send", "has_room", "status")

    def __init__(self, send: Send, exchange: Exchange | None, node: Node) -> None:
        self._send = send
        self._exchange = exchange
        self._free_bytes = node.limits.reply_free_bytes
        self._replies = node.sharing.replies
        self.has_room = False
        self.status = 0

    @property
    def caller(self) -> str:
        """Whose turn the request takes; empty where another server does not say."""
        return "" if self._exchange is None else self._exchange.caller

    async def give(self, reply: Reply) -> None:
        """Send a whole reply, unless another one has begun (it can only be cut short)."""
        if self.status:
            return
        is_large = len(reply.body) > self._free_bytes
        if is_large and self._replies.free_units <= 0 and not self.has_room:
            # It is made already, but not kept for a client that may not read it.
            reply = problem_reply(self._replies.refuse())
        self.status = reply.status
        if self._exchange is not None:
            await self._exchange.give(reply)
            return
        headers = [*reply.headers, *length_of(reply)]
        await self._send(
            {"type": "http.response.start", "status": reply.status, "headers": headers}
        )
        await self._send({"type": "http.response.body", "body": reply.body})

    async def stream(self, status: int, headers: Headers, parts: Parts, *, is_live: bool) -> None:
        """Send a reply in parts, each made when the one before has been read."""
        self.status = status
        if self._exchange is not None:
            await self._exchange.stream(status, headers, parts, is_live=is_live)
            return
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        async with aclosing(parts):
            async for part in parts:
                message = {"type": "http.response.body", "body": b"".join(part), "more_body": True}
                await self._send(message)
        await self._send({"type": "http.response.body", "body": b""})

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Pass on what the framework sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _joined(raw_headers: Headers) -> dict[bytes, bytes]:
    """RFC 9110 section 5.2: lines of one name are one list."""
    joined: dict[bytes, bytes] = {}
    for name, value in raw_headers:
        joined[name] = b"%s, %s" % (joined[name], value) if name in joined else value
    return joined


def _host(scope: Scope) -> str:
    client = scope["client"]
    return client[0] if client else ""


def _raw_path(scope: Scope) -> bytes:
    raw_path: bytes | None = scope.get("raw_path")
    # Optional in ASGI; without it "%2F" and "/" cannot be told apart any more.
    return quote(scope["path"]).encode() if raw_path is None else raw_path


def _inner_scope(scope: Scope, match: Match, call: Call) -> Scope:
    path = match.route.template
    for name, value in match.params.items():
        path = path.replace(f"{{{name}}}", quote(value, safe=""))
    inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": "", CALL_KEY: call}
    inner[ASKED_KEY] = _raw_path(scope)
    inner["method"] = match.route.method
    return inner


def _replay(call: Call, receive: Receive) -> Receive:
    pending = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def replayed() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return replayed
