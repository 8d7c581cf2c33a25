"""A node on a real socket: uvicorn in a thread of the test process, port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import uvicorn

from app.http.application import create_app
from app.http.auth import Authorizer
from app.limits import DEFAULT_LIMITS, Limits
from app.node import Node
from app.settings import Settings
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, Message

STOP_SECONDS_MAX = 30
PROTOBUF = {"content-type": "application/x-protobuf"}
WANTS_PROTOBUF = {"accept": "application/x-protobuf"}


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A node that listens at `url`; `http` is a client bound to it."""

    url: str
    http: httpx.Client

    def publish(self, message: Message, dialect: Dialect = Dialect.V2) -> httpx.Response:
        """Publish a message as a frame."""
        return self.http.post("/v1/messages", content=encode(message, dialect), headers=PROTOBUF)


@contextmanager
def running_node(
    data_dir: Path,
    limits: Limits = DEFAULT_LIMITS,
    *,
    authorizer: Authorizer | None = None,
    **settings: Any,
) -> Iterator[RunningNode]:
    """A node over `data_dir` until the block ends; `settings` as in `app.settings`."""
    node_settings = Settings(data_dir=data_dir, **settings)

    @asynccontextmanager
    async def open_app() -> AsyncIterator[Any]:
        async with Node.open(node_settings, limits) as node:
            yield create_app(node, authorizer)

    with serving(open_app) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        yield RunningNode(url, http)


@contextmanager
def serving(open_app: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[str]:
    """The URL of an ASGI application that listens on loopback until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as executor:
        server = _Server(listener)
        running = executor.submit(server.run, open_app)
        try:
            while not server.is_started.wait(timeout=0.01):
                if running.done():
                    running.result()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
        running.result(timeout=STOP_SECONDS_MAX)


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self.is_started = Event()
        self._listener = listener
        self._uvicorn: uvicorn.Server | None = None

    def run(self, open_app: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        asyncio.run(self._serve(open_app))

    async def _serve(self, open_app: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        async with open_app() as app:
            config = uvicorn.Config(
                app,
                http="httptools",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,
            )
            self._uvicorn = uvicorn.Server(config)
            # The socket listens already: what connects from now on is answered.
            self.is_started.set()
            await self._uvicorn.serve(sockets=[self._listener])

    def stop(self) -> None:
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
