"""Admission of a request: who calls and may they, at what rate; its body; its turn.

`admitted` is the dependency of every route:

    @router.get("/v1/channels")
    async def list_channels(call: Annotated[Call, admitted(Scope.READ, turns=Turns.READS)]) -> Reply:

What a request holds is released when its reply has been sent. The fast lane (`app.http.lane`) begins the same
`Admission` without FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.access.callers import Authorizer, Caller, Rate, Scope, confined, stranger
from app.access.proxies import address_key
from app.access.strangers import Strangers
from app.access.tokens import Tokens
from app.errors import Code, Problem
from app.http.answer import Answer
from app.http.body import Bodies, ClientGoneError
from app.http.call import ANSWER_KEY, AsgiScope, Call, Headers, Receive, client_of
from app.http.forms import Form, body_form, read_json
from app.http.routing import QUERY_KEY
from app.server.limits import Limits
from app.server.node import Node
from app.server.sharing import Turns


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
                if body.holding is not None:
                    call.held.append(body.holding.release)
            if self.turns is not None:
                await self._take_turn(self.turns, call, asgi[ANSWER_KEY])
            if call.sent_bytes and call.bucket is not None:
                call.bucket.spend(call.sent_bytes)
            if call.caller.token_id is not None:
                _end_with_grants(served.node.tokens, call)
            elif call.caller.rate is Rate.STRANGER:
                _end_with_grants(served.node.strangers, call)
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
        caller = _caller(served, asgi, headers)
        answer.who = caller.name
        # Callers on this machine have no rate limit, and pay nothing for that of others.
        bucket = None if caller.rate is Rate.FREE else node.rates.admit(caller)
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


def _caller(served: Served, asgi: AsgiScope, headers: Mapping[bytes, bytes]) -> Caller:
    client = client_of(asgi)
    try:
        return served.authorizer.identify(client, headers)
    except Problem as problem:
        if problem.code is Code.UNAUTHENTICATED:
            served.node.rates.admit(stranger(client))
            served.node.tokens.note_rejected(headers, client, problem.detail)
        raise


def _end_with_grants(grants: Tokens | Strangers, call: Call) -> None:
    """Have a request ended when its caller's grants are withdrawn.

    The caller was identified before its body came and before it waited for its turn: raises Problem if the
    grants were withdrawn since.
    """
    task = asyncio.current_task() if call.exchange is None else call.exchange.task
    if task is None:
        raise RuntimeError("requests are answered in tasks")
    grants.begin(call.caller, task)
    call.held.append(partial(grants.end, task))
