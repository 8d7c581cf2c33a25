"""The outermost layer of the application, and the fast lane beside FastAPI.

`Front` does what no route does: paths as they were sent, HEAD, faults, counters, the audit log. It passes a
request to the fast lane or to FastAPI. FastAPI answers with problem documents by its exception handlers
(`refused`); whatever else a request raises is this node's fault and is answered here.

The fast lane serves the three hottest calls without FastAPI, which would take two thirds of their time.
`GET /v1/messages/{message_id}`, `POST /v1/messages` and `POST /v1/recon` are called directly in their plain
case: no query, no page's origin, no compressed body, no header twice. Everything else goes to FastAPI, before
anything of its body is read. Admission, handler and reply are those of the route, so both ways give the same
bytes (`tests/app/http/test_lane.py`). The setting `fast_lane = false` turns it off.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from time import perf_counter

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from app.errors import Code, Problem, fault_text
from app.http import messages, publish, recon
from app.http.admission import (
    QUERY_KEY,
    Admission,
    ClientGoneError,
    admission_of,
    no_route,
    parse_query,
    routable_path,
    segment_text,
)
from app.http.call import (
    ANSWER_KEY,
    EXCHANGE_KEY,
    Answer,
    AsgiScope,
    Call,
    Receive,
    Reply,
    Send,
    ServerExchange,
    client_of,
    internal_error,
    length_of,
    problem_reply,
    raw_path,
)
from app.server.logs import audit, current_request, request_numbers

# ---- counters

SECONDS_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)


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


# ---- the fast lane

_MESSAGE = "/v1/messages/"
_Handler = Callable[[Call], Awaitable[Reply]]
Taken = Callable[[AsgiScope, Receive], Awaitable[None]]


class Lane:
    """The hot routes of an application, and their admissions."""

    def __init__(self, routes: Iterable[APIRoute]) -> None:
        hot = (messages.get_message, publish.publish_one, recon.reconcile)
        self._admissions = {
            each.endpoint: admission_of(each) for each in routes if each.endpoint in hot
        }

    def plain(self, scope: AsgiScope) -> Taken | None:
        """How to answer a request of the plain case; None: FastAPI answers it."""
        if scope["query_string"] or scope.get("root_path"):
            return None
        headers = dict(scope["headers"])
        is_plain = len(headers) == len(scope["headers"])
        if not is_plain or b"origin" in headers or b"content-encoding" in headers:
            return None
        method, path = scope["method"], scope["path"]
        handler: _Handler
        if method == "GET" and path.startswith(_MESSAGE):
            segment = path[len(_MESSAGE) :]
            if not segment or "/" in segment:
                return None
            scope["endpoint"] = messages.get_message
            handler = partial(messages.get_message, message_id=segment_text(segment))
        elif method == "POST" and path == "/v1/messages":
            scope["endpoint"] = publish.publish_one
            hints = headers.get(b"retrieval-hint")
            handler = partial(
                publish.publish_one,
                retrieval_hint=None if hints is None else [hints.decode("latin-1")],
            )
        elif method == "POST" and path == "/v1/recon":
            scope["endpoint"] = handler = recon.reconcile
        else:
            return None
        return partial(_answered, self._admissions[scope["endpoint"]], handler, headers)


async def _answered(
    admission: Admission,
    handler: _Handler,
    headers: Mapping[bytes, bytes],
    scope: AsgiScope,
    receive: Receive,
) -> None:
    call = await admission.begin(scope, receive, headers)
    try:
        reply = await handler(call)
        await reply(scope, receive, _never)
    finally:
        call.end()


async def _never(_message: object) -> None:
    raise RuntimeError("a reply of ours is sent by its answer")


# ---- the layer

NOT_OPEN = (
    "the node is not open: the lifespan of the application that mounts it must enter "
    "`sdstore.server.opened(node_application)`"
)

_log = logging.getLogger(__name__)


class Front:
    """See the module. `stats`: the counters of each handler; `unmatched`: those of requests without one."""

    def __init__(
        self,
        app: ASGIApp,
        stats: Mapping[Callable[..., object], RouteStats],
        unmatched: RouteStats,
        lane: Lane | None,
    ) -> None:
        self._app = app
        self._stats = stats
        self._unmatched = unmatched
        self._lane = lane

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served = getattr(scope["app"].state, "served", None)
        if served is None:
            await _give(send, problem_reply(Problem(Code.STORE_UNAVAILABLE, NOT_OPEN)))
            return
        started = perf_counter()
        current_request.set(next(request_numbers))
        # Removed from the scope: inside, it would make a cycle for the garbage collector.
        exchange: ServerExchange | None = scope.pop(EXCHANGE_KEY, None)
        is_head = scope["method"] == "HEAD"
        answer = Answer(send, exchange, served.node, is_head=is_head)
        inner = {**scope, ANSWER_KEY: answer, "path_params": {}}
        try:
            if is_head:
                inner["method"] = "GET"
            inner["path"] = routable_path(scope)
            inner[QUERY_KEY] = parse_query(scope["query_string"])
            taken = None if is_head or self._lane is None else self._lane.plain(inner)
            if taken is not None:
                await taken(inner, receive)
            else:
                await self._app(inner, receive, answer)
        except Problem as problem:
            await answer.refuse(problem.detached())
        except ClientGoneError:
            pass
        except Exception:  # noqa: BLE001 - the caller gets a problem document for any fault
            _log.exception("%s failed", self._of(inner).template)
            await answer.give(problem_reply(internal_error()))
        finally:
            stats = self._of(inner)
            if stats.is_audited:
                _audit(stats, scope, answer)
            stats.observe(answer.status, perf_counter() - started)
            # The call names its scope, and that the answer: a cycle, which would keep bodies for the collector.
            answer.call = None

    def _of(self, inner: AsgiScope) -> RouteStats:
        return self._stats.get(inner.get("endpoint"), self._unmatched)  # type: ignore[arg-type]


async def refused(request: Request, error: Exception) -> Reply:
    """FastAPI's exception handler of refusals: the problem document, and its code for the audit log.

    The caller's frame must not keep the problem: with its traceback it would be a cycle that keeps the
    request's body until the next collection.
    """
    scope = request.scope
    if isinstance(error, HTTPException):
        # Only Starlette's router raises these: bodies are read by `app.http.call`.
        scope.pop("endpoint", None)
        problem = no_route(scope["app"].routes, scope)
    else:
        problem = as_problem(error)
    scope[ANSWER_KEY].code = problem.code
    return problem_reply(problem)


def as_problem(error: Exception) -> Problem:
    """The problem that a refusal is."""
    if isinstance(error, RequestValidationError):
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"][1:]))
        return Problem(Code.INVALID_PARAMETER, f"{name}: {fault_text(fault)}")
    if isinstance(error, Problem):
        return error
    raise error


def _audit(stats: RouteStats, scope: AsgiScope, answer: Answer) -> None:
    target = raw_path(scope).decode("latin-1")
    if answer.call is not None and answer.call.target:
        target = f"{target} {answer.call.target}"
    audit(
        who=answer.who,
        address=client_of(scope),
        action=f"{stats.method} {stats.template}",
        target=target,
        status=answer.status,
        code=answer.code,
    )


async def _give(send: Send, reply: Reply) -> None:
    headers = [*reply.raw_headers, *length_of(reply)]
    start = {"type": "http.response.start", "status": reply.status_code, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": reply.body})
