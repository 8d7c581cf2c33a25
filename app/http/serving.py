"""A node as one ASGI application: opened when the server starts, closed when it stops."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from app.http.application import create_app
from app.http.body import Receive
from app.http.shell import App, Scope, Send
from app.limits import DEFAULT_LIMITS, Limits
from app.node import Node
from app.settings import Settings

GC_THRESHOLDS = (50_000, 50, 100)
"""The default (700, 10, 10) walks everything alive every few hundred requests."""

THREAD_SWITCH_S = 0.0005
"""The writer's thread and the event loop share the GIL: a slice of it is a reader's latency."""


def asgi(settings: Settings, limits: Limits = DEFAULT_LIMITS) -> App:
    """The application of a node with these settings; a server's lifespan opens and closes it."""
    return _NodeApp(settings, limits)


class _NodeApp:
    def __init__(self, settings: Settings, limits: Limits) -> None:
        self._settings = settings
        self._limits = limits
        self._lifespan = Starlette(lifespan=self._run)
        self._app: App = self._lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._lifespan if scope["type"] == "lifespan" else self._app
        await app(scope, receive, send)

    @asynccontextmanager
    async def _run(self, _starlette: Starlette) -> AsyncIterator[None]:
        async with Node.open(self._settings, self._limits) as node:
            self._app = create_app(node)
            tune_process()
            yield


def tune_process() -> None:
    """Keep the garbage collector off what lives as long as the process, and threads short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(THREAD_SWITCH_S)
