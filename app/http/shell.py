"""The outermost ASGI callable: what holds for every route is done here, once.

Routing on the raw path, authorization, body limits and deadlines, problem documents, metrics. Hot
routes have a handler that is called straight away; the others go on into the FastAPI app, which
sees a bounded body that has already been read and a path whose parameters are one segment each.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any
from urllib.parse import quote

from app.errors import Problem
from app.http.auth import Authorizer, confined
from app.http.body import ClientGoneError, Receive, read_body
from app.http.call import REPLY_KEY, Call, Headers, Reply, length_of
from app.http.problems import internal_error, problem_reply
from app.http.routes import Match, RouteTable
from app.node import Node

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
GiveWhole = Callable[[Reply], Awaitable[None]]

CALL_KEY = "sdstore.call"
"""Where FastAPI endpoints find their `Call` in the ASGI scope."""

GIVE_KEY = "sdstore.give"
"""Where their responses find the way to answer with a whole `Reply`."""

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
        self._body_timeout_s = node.limits.body_read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._framework(scope, receive, send)
            return
        started = perf_counter()
        stats = self._table.unmatched
        # Taken out: left inside, it would make a cycle for the garbage collector.
        answer = _Answer(send, scope.pop(REPLY_KEY, None))
        try:
            match = self._table.match(scope["method"], _raw_path(scope), scope["query_string"])
            stats = match.stats
            call = self._admit(match, scope)
            if match.route.body_bytes_max:
                call.body, call.sent_bytes = await read_body(
                    receive, call.headers, match.route.body_bytes_max, self._body_timeout_s
                )
            if match.route.handler is not None:
                await answer.give(await match.route.handler(call))
            else:
                call.is_head = scope["method"] == "HEAD"
                inner = {**_inner_scope(scope, match, call), GIVE_KEY: answer.give}
                await self._framework(inner, _replay(call, receive), answer)
        except Problem as problem:
            await answer.give(problem_reply(problem))
        except ClientGoneError:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets a problem document
            _log.exception("%s failed", stats.template)
            await answer.give(problem_reply(internal_error()))
        finally:
            stats.observe(answer.status, perf_counter() - started)

    def _admit(self, match: Match, scope: Scope) -> Call:
        raw_headers = scope["headers"]
        headers = dict(raw_headers)
        if len(headers) != len(raw_headers):
            headers = _joined(raw_headers)
        client = scope["client"]
        caller = self._authorizer.identify(client[0] if client else "", headers)
        if b"origin" in headers:
            caller = confined(caller, headers)
        channel_id = match.params.get("channel_id")
        if channel_id is None:
            channel_id = match.query.get("channel_id")
        caller.require(match.route.scope, channel_id)
        return Call(self._node, match.params, match.query, headers, raw_headers, caller)


class _Answer:
    """The sending side of one request: knows whether an answer has begun, and its status."""

    __slots__ = ("_give_whole", "_send", "status")

    def __init__(self, send: Send, give_whole: GiveWhole | None) -> None:
        self._send = send
        self._give_whole = give_whole
        self.status = 0

    async def give(self, reply: Reply) -> None:
        """Send a whole reply, unless another one has begun (it can only be cut short)."""
        if self.status:
            return
        self.status = reply.status
        if self._give_whole is not None:
            await self._give_whole(reply)
            return
        headers = [*reply.headers, *length_of(reply)]
        await self._send(
            {"type": "http.response.start", "status": reply.status, "headers": headers}
        )
        await self._send({"type": "http.response.body", "body": reply.body})

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


def _raw_path(scope: Scope) -> bytes:
    raw_path: bytes | None = scope.get("raw_path")
    # Optional in ASGI; without it "%2F" and "/" cannot be told apart any more.
    return quote(scope["path"]).encode() if raw_path is None else raw_path


def _inner_scope(scope: Scope, match: Match, call: Call) -> Scope:
    path = match.route.template
    for name, value in match.params.items():
        path = path.replace(f"{{{name}}}", quote(value, safe=""))
    inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": "", CALL_KEY: call}
    inner["method"] = match.route.method
    return inner


def _replay(call: Call, receive: Receive) -> Receive:
    pending = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def replayed() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return replayed
