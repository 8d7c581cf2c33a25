"""The outermost ASGI callable: the one way of a request through the HTTP layer.

`Gateway` matches the route, admits the caller, reads the body, takes turns, has the handler called
(a hot one directly, the others by FastAPI), sends its reply or the problem document, and counts.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from fastapi.exceptions import RequestValidationError
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException

from app.callers import Authorizer, Caller, Rate, confined, stranger
from app.errors import Code, Problem, fault_text
from app.http.body import Bodies, ClientGoneError
from app.http.call import (
    EXCHANGE_KEY,
    App,
    AsgiScope,
    Call,
    Exchange,
    Headers,
    Parts,
    Receive,
    Reply,
    Send,
    StreamedReply,
    client_of,
    length_of,
    raw_path,
)
from app.http.replies import internal_error, problem_reply
from app.http.routing import CALL_KEY, MATCH_KEY, Match, Route, RouteTable
from app.logs import audit, begin_request
from app.node import Node
from app.proxies import address_key
from app.rates import Bucket
from app.sharing import Holding, Turns
from app.strangers import Strangers
from app.tokens import Tokens

SECONDS_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)

_log = logging.getLogger(__name__)


class Gateway:
    """See the module. `framework` is the FastAPI app; it also gets the lifespan events."""

    def __init__(
        self,
        routes: Sequence[Route],
        node: Node,
        authorizer: Authorizer,
        framework: App,
        metrics: HttpMetrics,
    ) -> None:
        self._table = RouteTable(routes)
        self._stats = {
            route: metrics.route(route.method, route.template, is_audited=route.is_audited)
            for route in routes
        }
        self._unmatched = metrics.route("*", "unmatched")
        self._node = node
        self._authorizer = authorizer
        self._framework = framework
        self._sharing = node.sharing
        self._bodies = Bodies(node.sharing.bodies, node.limits)
        self._limits = node.limits
        self._public_host = node.settings.public_host
        self._rates = node.rates
        self._tokens = node.tokens
        self._strangers = node.strangers

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._framework(scope, receive, send)
            return
        started = perf_counter()
        begin_request()
        stats, call, code = self._unmatched, None, ""
        # Removed from the scope: inside, it would make a cycle for the garbage collector.
        exchange: Exchange | None = scope.pop(EXCHANGE_KEY, None)
        answer = Answer(send, exchange, self._node)
        body_place = None
        try:
            match = self._table.match(scope["method"], raw_path(scope), scope["query_string"])
            route = match.route
            stats = self._stats[route]
            call = self._admit(match, scope, answer)
            call.address = answer.caller or address_key(client_of(scope))
            call.exchange = exchange
            answer.bucket = call.bucket
            if bytes_max := route.body_bytes_max(self._limits):
                call.body, call.sent_bytes, body_place = await self._bodies.read(
                    receive, call.headers, bytes_max, call.address
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
                    try:
                        if answer.is_for_nobody and route.takes_turns is not Turns.BATCHES:
                            raise ClientGoneError  # while it waited: a reply costs milliseconds
                        await self._answer(match, call, receive, answer)
                    finally:
                        call.turn.release_after_pass()
            else:
                await self._answer(match, call, receive, answer)
        except (Problem, RequestValidationError, HTTPException) as error:
            code = await _refuse(answer, error)
        except ClientGoneError:
            pass
        except Exception:  # noqa: BLE001 - the caller gets a problem document for any fault
            _log.exception("%s failed", stats.template)
            await answer.give(problem_reply(internal_error()))
        finally:
            _release(body_place)
            if stats.is_audited:
                self._audit(stats, scope, call, answer, code)
            stats.observe(answer.status, perf_counter() - started)

    def _audit(
        self, stats: RouteStats, scope: AsgiScope, call: Call | None, answer: Answer, code: str
    ) -> None:
        who, status = answer.who, answer.status
        target = raw_path(scope).decode("latin-1")
        if call is not None and call.target:
            target = f"{target} {call.target}"
        action = f"{stats.method} {stats.template}"
        address = client_of(scope)
        audit(who=who, address=address, action=action, target=target, status=status, code=code)

    def _admit(self, match: Match, scope: AsgiScope, answer: Answer) -> Call:
        """The call, if its caller has the route's scope and the channel that path or query name.

        `answer` learns who calls, also if that caller is refused.
        """
        raw_headers = scope["headers"]
        headers = dict(raw_headers)
        if len(headers) != len(raw_headers):
            headers = _joined(raw_headers)
        caller = self._identify(scope, headers)
        answer.who = caller.name
        # Callers on this machine have no rate limit, and pay nothing for that of others.
        bucket = None if caller.rate is Rate.FREE else self._rates.admit(caller)
        if b"origin" in headers:
            caller = confined(caller, headers, self._public_host)
        channel_id = match.params.get("channel_id")
        if channel_id is None:
            channel_id = match.query.get("channel_id")
        caller.require(match.route.scope, channel_id)
        match.check_query()
        call = Call(self._node, caller, match.params, match.query, headers, scope)
        call.bucket = bucket
        return call

    def _identify(self, scope: AsgiScope, headers: Mapping[bytes, bytes]) -> Caller:
        try:
            return self._authorizer.identify(client_of(scope), headers)
        except Problem as problem:
            if problem.code is Code.UNAUTHENTICATED:
                self._node.rates.admit(stranger(client_of(scope)))
                self._tokens.note_rejected(headers, client_of(scope), problem.detail)
            raise

    async def _answer(self, match: Match, call: Call, receive: Receive, answer: Answer) -> None:
        caller = call.caller
        if call.sent_bytes and call.bucket is not None:
            call.bucket.spend(call.sent_bytes)
        # What ends the request when its caller's grants are withdrawn.
        running: Tokens | Strangers | None = (
            self._tokens
            if caller.token_id is not None
            else (self._strangers if caller.rate is Rate.STRANGER else None)
        )
        if running is not None:
            task = _current_task() if call.exchange is None else call.exchange.task
            # The caller was identified before its body came and before it waited for its turn.
            running.begin(caller, task)
        try:
            route = match.route
            if route.is_hot:
                call.reply = await route.handler(call, **route.arguments(call))
            else:
                inner = {**call.asgi, "method": route.method, CALL_KEY: call, MATCH_KEY: match}
                await self._framework(inner, _replay(call, receive), answer)
            reply, call.reply = call.reply, None
            if isinstance(reply, StreamedReply):
                if call.asgi["method"] != "HEAD":
                    await self._stream(call, reply, answer)
                    return
                await reply.parts.aclose()
                reply = Reply(reply.status, reply.headers)
            if reply is not None:
                await answer.give(reply)
        finally:
            if running is not None:
                running.end(task)

    async def _stream(self, call: Call, reply: StreamedReply, answer: Answer) -> None:
        bucket = call.bucket
        if bucket is None:
            await answer.stream(reply)
            return
        is_counted = reply.is_live and call.caller.rate is Rate.STRANGER
        if is_counted:
            try:
                self._node.rates.begin_live(bucket)
            except Problem:
                await reply.parts.aclose()
                raise
        try:
            await answer.stream(reply._replace(parts=_paid(reply.parts, bucket)))
        finally:
            if is_counted:
                self._node.rates.end_live(bucket)


class Answer:
    """The sending side of one request. `status` is 0 until a reply has begun; `who` is the caller's name.

    `bucket` pays for a whole reply; parts are paid where they are made.
    """

    __slots__ = (
        "_exchange",
        "_free_bytes",
        "_replies",
        "_send",
        "bucket",
        "has_room",
        "status",
        "who",
    )

    def __init__(self, send: Send, exchange: Exchange | None, node: Node) -> None:
        self._send = send
        self._exchange = exchange
        self._free_bytes = node.limits.reply_free_bytes
        self._replies = node.sharing.replies
        self.has_room = False
        self.status = 0
        self.who = "unknown"
        self.bucket: Bucket | None = None

    @property
    def caller(self) -> str:
        """The client's address in shares and turns; empty if another server does not say."""
        return "" if self._exchange is None else self._exchange.caller

    @property
    def is_for_nobody(self) -> bool:
        """Whether the client hung up before it got a reply."""
        return self._exchange is not None and self._exchange.has_left

    async def give(self, reply: Reply) -> None:
        """Send a whole reply, unless another one has begun (it can only be cut short)."""
        if self.status:
            return
        is_large = len(reply.body) > self._free_bytes
        if is_large and self._replies.free_units <= 0 and not self.has_room:
            # Do not keep the finished reply for a client that might never read it.
            reply = problem_reply(self._replies.refuse())
        self.status = reply.status
        if self.bucket is not None:
            self.bucket.spend(len(reply.body))
        if self._exchange is not None:
            await self._exchange.give(reply)
            return
        headers = [*reply.headers, *length_of(reply)]
        await self._send(
            {"type": "http.response.start", "status": reply.status, "headers": headers}
        )
        await self._send({"type": "http.response.body", "body": reply.body})

    async def stream(self, reply: StreamedReply) -> None:
        """Send a reply in parts; the next one is made when the client has read the one before."""
        headers, parts, is_live, status = reply
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
        """ASGI's `send`, for a framework that answers by itself."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class RouteStats:
    """Counters of one route: plain integers, because prometheus-client locks at each increment."""

    __slots__ = (
        "bucket_counts",
        "is_audited",
        "method",
        "seconds_total",
        "status_counts",
        "template",
    )

    def __init__(self, method: str, template: str, *, is_audited: bool = False) -> None:
        self.is_audited = is_audited
        self.method = method
        self.template = template
        self.status_counts: dict[int, int] = {}
        self.bucket_counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self.seconds_total = 0.0

    def observe(self, status: int, seconds: float) -> None:
        """Count one answer; `status` 0 means that the client hung up first."""
        self.status_counts[status] = self.status_counts.get(status, 0) + 1
        self.bucket_counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.seconds_total += seconds


class HttpMetrics(Collector):
    """The counters of all routes as Prometheus families.

    Labels come from closed sets (route templates, methods, statuses this node returns), so no caller
    can create series.
    """

    def __init__(self) -> None:
        self._routes: list[RouteStats] = []

    def route(self, method: str, template: str, *, is_audited: bool = False) -> RouteStats:
        """The counters of a new route."""
        stats = RouteStats(method, template, is_audited=is_audited)
        self._routes.append(stats)
        return stats

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        requests = CounterMetricFamily(
            "sdstore_http_requests", "Requests answered", labels=("method", "route", "status")
        )
        seconds = HistogramMetricFamily(
            "sdstore_http_request_seconds", "Time to answer", labels=("method", "route")
        )
        for stats in self._routes:
            labels = [stats.method, stats.template]
            for status, count in stats.status_counts.items():
                requests.add_metric([*labels, str(status)], count)
            seconds.add_metric(labels, _cumulative(stats.bucket_counts), stats.seconds_total)
        yield requests
        yield seconds


def _cumulative(bucket_counts: list[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*SECONDS_BOUNDS, "+Inf"), bucket_counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets


async def _paid(parts: Parts, bucket: Bucket) -> AsyncGenerator[Sequence[bytes], None]:
    """Parts of a reply, each taken from the bytes of its caller."""
    async with aclosing(parts):
        async for part in parts:
            bucket.spend(sum(map(len, part)))
            yield part


async def _refuse(answer: Answer, error: Problem | RequestValidationError | HTTPException) -> str:
    """Answer with a problem document; its code.

    The caller's frame must not keep the problem: with its traceback it would be a cycle that keeps the
    request's body until the next collection.
    """
    problem = _as_problem(error)
    await answer.give(problem_reply(problem))
    return problem.code


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("requests are answered in tasks")
    return task


def _release(place: Holding | None) -> None:
    if place is not None:
        place.release()


def _as_problem(error: Problem | RequestValidationError | HTTPException) -> Problem:
    if isinstance(error, RequestValidationError):
        fault = error.errors()[0]
        where, *path = fault["loc"]
        if fault["type"] == "json_invalid":
            detail = f"the body is not JSON: {fault['ctx']['error']}, at character {path[0]}"
            return Problem(Code.INVALID_BODY, detail)
        code = Code.INVALID_BODY if where == "body" else Code.INVALID_PARAMETER
        name = ".".join(map(str, path)) or "the body"
        return Problem(code, f"{name}: {fault_text(fault)}")
    if isinstance(error, HTTPException):
        # The route is matched and its parameters are read: FastAPI could not read the body.
        return Problem(Code.INVALID_BODY, str(error.detail))
    return error


def _joined(raw_headers: Headers) -> dict[bytes, bytes]:
    """RFC 9110 section 5.2: lines of one name are one list."""
    joined: dict[bytes, bytes] = {}
    for name, value in raw_headers:
        joined[name] = b"%s, %s" % (joined[name], value) if name in joined else value
    return joined


def _replay(call: Call, receive: Receive) -> Receive:
    """ASGI's `receive` over a body that is already read."""
    pending = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def replayed() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return replayed
