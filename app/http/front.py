"""The outermost layer of the application: paths as they were sent, HEAD, faults, counters, the audit log.

It passes a request to the fast lane or to FastAPI. FastAPI answers with problem documents by its exception
handlers (`refused`); whatever else a request raises is this node's fault and is answered here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import perf_counter

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from app.errors import Code, Problem, fault_text
from app.http.answer import Answer
from app.http.body import ClientGoneError
from app.http.call import (
    ANSWER_KEY,
    EXCHANGE_KEY,
    AsgiScope,
    Exchange,
    Receive,
    Reply,
    Send,
    client_of,
    length_of,
    raw_path,
)
from app.http.counters import RouteStats
from app.http.lane import Lane
from app.http.replies import internal_error, problem_reply
from app.http.routing import QUERY_KEY, no_route, parse_query, routable_path
from app.server.logs import audit, begin_request

NOT_OPEN = (
    "the node is not open: the lifespan of the application that mounts it must enter "
    "`app.main.opened(node_application)`"
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
        begin_request()
        # Removed from the scope: inside, it would make a cycle for the garbage collector.
        exchange: Exchange | None = scope.pop(EXCHANGE_KEY, None)
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

    def _of(self, inner: AsgiScope) -> RouteStats:
        return self._stats.get(inner.get("endpoint"), self._unmatched)  # type: ignore[arg-type]


async def refused(request: Request, error: Exception) -> Reply:
    """FastAPI's exception handler of refusals: the problem document, and its code for the audit log.

    The caller's frame must not keep the problem: with its traceback it would be a cycle that keeps the
    request's body until the next collection.
    """
    scope = request.scope
    if isinstance(error, HTTPException):
        # Only Starlette's router raises these: bodies are read by `app.http.forms`.
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
