"""The FastAPI application of a node: a router for each subject, in front of them one layer (`app.http.front`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from app.access.callers import Authorizer, Scope, authorizer_without_tokens
from app.access.tokens import TokenAuthorizer
from app.errors import Problem
from app.http import about, channels, federation, live, messages, operators, orders, publish, recon
from app.http.admission import Bodies, NodeRoute, QueryForm, Served, admission_of
from app.http.call import EXCHANGE_KEY, Receive, Send
from app.http.front import Front, HttpMetrics, Lane, RouteStats, refused
from app.http.openapi import Document, describe
from app.page import views
from app.page.session import PageRoute
from app.server.node import Node
from app.server.settings import Settings

ROUTERS = (
    messages.router,
    publish.router,
    channels.router,
    orders.router,
    live.router,
    recon.router,
    recon.mvds_router,
    federation.router,
    operators.tokens_router,
    operators.settings_router,
    operators.quarantine_router,
    operators.retirements_router,
    about.router,
    views.router,
)
SDS_HEADERS = ("sds-digest", "sds-dialect", "sds-variants", "sds-filter")
PAGE_HEADERS = (
    "authorization",
    "content-encoding",
    "content-type",
    "if-none-match",
    "last-event-id",
    "retrieval-hint",
)
"""Headers that a page of another origin may send."""

# By default FastAPI records spans, metrics and logs of its own; ours are in `app.http.front`.
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, operation_spans=False)


FEWER_BOUNDS = (
    "this node runs in another server than that of `sdstore serve`; bounds on connections, headers, slow clients "
    "and TLS handshakes are those of that server"
)

_log = logging.getLogger(__name__)


class Application(FastAPI):
    """See the module."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        super().__init__(
            title="sdstore",
            version=version("sdstore"),
            openapi_url=None,
            redirect_slashes=False,
            default_response_class=Response,
            telemetry=NO_TELEMETRY,
            exception_handlers={
                Problem: refused,
                RequestValidationError: refused,
                HTTPException: refused,
            },
            **options,
        )
        # One flat list, in which `Allow` and the documents find all routes: `include_router` nests them. Query
        # forms first: their paths look like IDs of other routes.
        routes = [route for router in ROUTERS for route in router.routes]
        self.router.routes.extend(sorted(routes, key=lambda each: not isinstance(each, QueryForm)))
        self.metrics = HttpMetrics()
        lane = Lane(self.node_routes) if settings.fast_lane else None
        unmatched = self.metrics.route("*", "unmatched")
        self.add_middleware(Front, stats=self._stats(), unmatched=unmatched, lane=lane)
        if settings.cors_origins:
            self.add_middleware(_Cors, origins=settings.cors_origins)

    @property
    def node_routes(self) -> Sequence[NodeRoute]:
        """The routes of the interface, without the query forms and the page."""
        return [each for each in self._counted_routes if not isinstance(each, PageRoute)]

    @property
    def _counted_routes(self) -> Sequence[NodeRoute]:
        nodes = (route for route in self.routes if isinstance(route, NodeRoute))
        return [route for route in nodes if not isinstance(route, QueryForm)]

    def _stats(self) -> dict[Any, RouteStats]:
        """Counters by handler, which both forms of a route share."""
        stats = {}
        for route in self._counted_routes:
            is_operators = admission_of(route).scope is Scope.ADMIN
            stats[route.endpoint] = self.metrics.route(
                route.method,
                route.path_format,
                is_audited=is_operators and route.method != "GET",
            )
        return stats

    def serve(self, node: Node, authorizer: Authorizer | None = None) -> None:
        """Answer for an open node."""
        if authorizer is None:
            authorizer = with_tokens = TokenAuthorizer(
                node.access.tokens, _without_token(node.settings)
            )

            def take_over(settings: Settings) -> None:
                with_tokens.without_token = _without_token(settings)

            node.reload_listeners.append(take_over)
        node.metrics.register(self.metrics)
        self.state.served = Served(node, authorizer, Bodies(node.sharing.bodies, node.limits))

    def openapi(self) -> Document:
        """See `FastAPI`."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(self, self.node_routes)
        return self.openapi_schema


def application_of(node: Node, authorizer: Authorizer | None = None) -> Application:
    """The application of a node that is open."""
    app = Application(node.settings)
    app.serve(node, authorizer)
    return app


def application(settings: Settings) -> Application:
    """An application that opens its node in its lifespan."""

    @asynccontextmanager
    async def lifespan(app: Application) -> AsyncIterator[None]:
        _log.warning(FEWER_BOUNDS)
        async with Node.open(settings) as node:
            app.serve(node)
            try:
                yield
            finally:
                del app.state.served

    return Application(settings, lifespan=lifespan)


def opened(app: FastAPI) -> AbstractAsyncContextManager[Any]:
    """Opens the node of an application that another one mounts, in the lifespan of that one.

    Starlette runs the lifespan of the outermost application only.
    """
    return app.router.lifespan_context(app)


def openapi_document() -> Document:
    """The OpenAPI document of every route, without a running node."""
    return Application(Settings()).openapi()


def _without_token(settings: Settings) -> Authorizer:
    return authorizer_without_tokens(
        trust_loopback=settings.trusts_loopback,
        insecure=settings.insecure,
        public_host=settings.public_host,
        anonymous_read=settings.anonymous_read,
        anonymous_publish=settings.anonymous_publish,
    )


class _Cors:
    """Lets pages of these origins call; credentials go in headers, never in cookies."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._cors = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=PAGE_HEADERS,
            expose_headers=("etag", "link", "location", "retry-after", *SDS_HEADERS),
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        # The middleware adds its headers in `send`, so no reply may bypass it.
        scope.pop(EXCHANGE_KEY, None)
        await self._cors(scope, receive, send)
