"""Puts the HTTP layer together: every route, FastAPI for those that are not hot, one gateway."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app.callers import Authorizer, authorizer_without_tokens
from app.http import (
    about,
    ancestors,
    channels,
    federation,
    interests,
    live,
    messages,
    mvds,
    orders,
    publish,
    quarantine,
    recon,
    relay,
    reload,
    tokens,
)
from app.http.call import EXCHANGE_KEY, App, Receive, Send
from app.http.gateway import Gateway, HttpMetrics
from app.http.openapi import Document, describe
from app.node import Node
from app.settings import Settings
from app.tokens import TokenAuthorizer

ROUTES = tuple(
    route
    for subject in (
        messages.routes,
        ancestors.routes,
        publish.routes,
        channels.routes,
        orders.routes,
        live.routes,
        recon.routes,
        interests.routes,
        mvds.routes,
        federation.routes,
        relay.routes,
        tokens.routes,
        reload.routes,
        quarantine.routes,
        about.health,
        about.routes,
    )
    for route in subject.declared
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

# By default FastAPI records spans, metrics and logs of its own; ours are in `app.http.gateway`.
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, operation_spans=False)


def create_app(node: Node, authorizer: Authorizer | None = None) -> App:
    """The ASGI application of a node that is open."""
    if authorizer is None:
        authorizer = with_tokens = TokenAuthorizer(node.tokens, _without_token(node.settings))

        def take_over(settings: Settings) -> None:
            with_tokens.without_token = _without_token(settings)

        node.reload_listeners.append(take_over)
    metrics = HttpMetrics()
    node.metrics.register(metrics)
    gateway = Gateway(ROUTES, node, authorizer, Framework(), metrics)
    return (
        _with_cors(gateway, node.settings.cors_origins) if node.settings.cors_origins else gateway
    )


def _without_token(settings: Settings) -> Authorizer:
    return authorizer_without_tokens(
        trust_loopback=settings.trusts_loopback,
        insecure=settings.insecure,
        public_host=settings.public_host,
        anonymous_read=settings.anonymous_read,
        anonymous_publish=settings.anonymous_publish,
    )


class Framework(FastAPI):
    """FastAPI inside the gateway: no matching, no errors, no documents of its own."""

    def __init__(self) -> None:
        super().__init__(
            title="sdstore",
            version=version("sdstore"),
            openapi_url=None,
            telemetry=NO_TELEMETRY,
        )
        self.router.routes.extend(route.in_framework for route in ROUTES if not route.is_hot)

    def build_middleware_stack(self) -> ASGIApp:
        """See `FastAPI`. Errors go on to the gateway, which answers them for all routes alike."""
        return AsyncExitStackMiddleware(self.router)

    def openapi(self) -> Document:
        """See `FastAPI`."""
        if self.openapi_schema is None:
            routes = [route.in_framework for route in ROUTES]
            self.openapi_schema = describe(self, routes)
        return self.openapi_schema


def openapi_document() -> Document:
    """The OpenAPI document of every route, without a running node."""
    return Framework().openapi()


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
        # The middleware adds its headers in `send`, so no reply may bypass it.
        scope.pop(EXCHANGE_KEY, None)
        await cors(scope, receive, send)

    return with_cors
