"""Puts the HTTP layer together: thin routes, FastAPI routes, one shell around both."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from app.errors import Code, Problem
from app.http import (
    ancestors,
    channels,
    entries,
    federation,
    health,
    hints,
    info,
    live,
    messages,
    publish,
    recon,
)
from app.http.auth import Authorizer, LoopbackAuthorizer, OpenAuthorizer, Scope
from app.http.body import Receive
from app.http.call import EXCHANGE_KEY
from app.http.framework import SCOPE_KEY, TURNS_KEY, respond
from app.http.metrics import HttpMetrics
from app.http.openapi import describe
from app.http.problems import internal_error, problem_reply
from app.http.relay import SiblingAuthorizer, handing_on
from app.http.routes import Route, RouteTable
from app.http.shell import App, Send, Shell
from app.limits import DEFAULT_LIMITS, Limits
from app.node import Node
from app.sharing import Turns

SDS_HEADERS = ("sds-digest", "sds-dialect", "sds-variants")
PAGE_HEADERS = (
    "authorization",
    "content-encoding",
    "content-type",
    "if-none-match",
    "last-event-id",
    "retrieval-hint",
)
"""Headers that a page of another origin may send."""

ROUTERS: tuple[APIRouter, ...] = (
    channels.router,
    ancestors.router,
    hints.router,
    entries.router,
    live.router,
    recon.router,
    federation.router,
    info.router,
    health.router,
)
# FastAPI records spans, metrics and logs of its own unless told; ours are in `app.http.metrics`.
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, operation_spans=False)


def create_app(node: Node, authorizer: Authorizer | None = None) -> App:
    """The ASGI application of a node that is open."""
    if authorizer is None:
        authorizer = OpenAuthorizer() if node.settings.insecure else LoopbackAuthorizer()
    metrics = HttpMetrics()
    node.metrics.register(metrics)
    table = RouteTable(routes(node.limits), metrics)
    framework: App = _framework()
    if node.siblings is not None and not node.siblings.is_first:
        framework = handing_on(node.siblings, framework)
    shell = Shell(table, node, authorizer, framework)
    return _with_cors(shell, node.settings.cors_origins) if node.settings.cors_origins else shell


def create_sibling_app(node: Node) -> App:
    """What the other workers call. They have counted their call, so it is not counted again."""
    table = RouteTable(routes(node.limits), HttpMetrics())
    return Shell(table, node, SiblingAuthorizer(), _framework())


def _with_cors(app: App, origins: Sequence[str]) -> App:
    """Let pages of these origins call; credentials go in headers, never in cookies."""
    cors = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=PAGE_HEADERS,
        expose_headers=("etag", "link", "location", "retry-after", *SDS_HEADERS),
    )

    async def with_cors(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        # Its headers are added to what is sent: no reply may go past it.
        scope.pop(EXCHANGE_KEY, None)
        await cors(scope, receive, send)

    return with_cors


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of every route, without a running node."""
    document: dict[str, Any] = _framework().openapi()
    return document


def routes(limits: Limits) -> list[Route]:
    """Every route of the node."""
    framework_routes = [
        _from_framework(route, limits)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
    ]
    return [*thin_routes(limits), *framework_routes]


def thin_routes(limits: Limits) -> Sequence[Route]:
    """The routes that are answered without FastAPI: hot ones, and those with bodies in both forms."""
    return (
        Route(
            method="GET",
            template="/v1/messages/{message_id}",
            scope=Scope.READ,
            handler=messages.get_message,
        ),
        Route(
            method="GET",
            template="/v1/entries/{digest}",
            scope=Scope.READ,
            handler=messages.get_entry,
        ),
        Route(
            method="POST",
            template="/v1/messages",
            scope=Scope.PUBLISH,
            handler=publish.publish_one,
            body_bytes_max=limits.small_body_bytes_max,
        ),
        Route(
            method="POST",
            template="/v1/messages/batch",
            scope=Scope.PUBLISH,
            handler=publish.publish_batch,
            body_bytes_max=limits.body_bytes_max,
            takes_turns=Turns.BATCHES,
        ),
        Route(
            method="POST",
            template="/v1/messages/lookup",
            scope=Scope.READ,
            handler=messages.lookup,
            body_bytes_max=limits.small_body_bytes_max,
            takes_turns=Turns.READS,
        ),
        Route(
            method="POST",
            template="/v1/recon",
            scope=Scope.SYNC,
            handler=recon.reconcile,
            body_bytes_max=limits.recon_body_bytes_max,
            takes_turns=Turns.SYNCS,
        ),
        Route(
            method="POST",
            template="/v1/negentropy",
            scope=Scope.SYNC,
            handler=recon.negentropy,
            body_bytes_max=limits.negentropy_body_bytes_max,
            takes_turns=Turns.SYNCS,
        ),
    )


def _from_framework(route: APIRoute, limits: Limits) -> Route:
    (method,) = route.methods or {"GET"}
    extra = route.openapi_extra or {}
    scope = Scope(extra[SCOPE_KEY])
    return Route(
        method=method,
        template=route.path_format,
        scope=scope,
        body_bytes_max=0 if method != "POST" else _body_bytes_max(scope, limits),
        takes_turns=Turns(extra[TURNS_KEY]) if TURNS_KEY in extra else None,
    )


def _body_bytes_max(scope: Scope, limits: Limits) -> int:
    is_operator = scope is Scope.ADMIN
    return limits.operator_body_bytes_max if is_operator else limits.small_body_bytes_max


def _framework() -> FastAPI:
    app = FastAPI(
        title="sdstore",
        version=version("sdstore"),
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
        exception_handlers=dict.fromkeys(
            (Problem, RequestValidationError, HTTPException, Exception), _on_exception
        ),
    )
    for router in ROUTERS:
        app.include_router(router)
    describe(app, thin_routes(DEFAULT_LIMITS))
    return app


async def _on_exception(_request: Request, error: Exception) -> Response:
    # Of a fault of ours Starlette raises the exception again, and the shell logs it.
    return respond(problem_reply(_as_problem(error)))


def _as_problem(error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case RequestValidationError():
            fault = error.errors()[0]
            where, *path = fault["loc"]
            code = Code.INVALID_BODY if where == "body" else Code.INVALID_PARAMETER
            name = ".".join(map(str, path)) or "the body"
            return Problem(code, f"{name}: {fault['msg']}")
        case HTTPException():
            # The shell has matched the route: what is left is a body that FastAPI cannot read.
            return Problem(Code.INVALID_BODY, str(error.detail))
        case _:
            return internal_error()
