"""A node on a real socket: uvicorn in a thread of the test process, port of its own."""

from __future__ import annotations

import asyncio
import fcntl
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import uvloop

from app.access.callers import Authorizer, Scope
from app.access.operator import LOCK_FILE, announced, token_for
from app.http.application import application_of
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.node import Node
from app.server.server import NodeServer
from app.server.settings import Settings
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, Message
from tests.support.routes import ROUTES

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


class _AsOperator(httpx.Auth):
    """Sends the operator's token of a node with calls of an operator's routes that have no other token.

    It finds the token as the command line does. All other calls are those of a program on this machine, and
    so are calls of a web page.
    """

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # type: ignore[override]
        """See `httpx.Auth`."""
        call = f"{request.method} {request.url.path}"
        if not {"authorization", "origin"} & set(request.headers) and _OPERATORS.match(call):
            token = token_for(str(request.url))
            if token is not None:
                request.headers["authorization"] = f"Bearer {token}"
        yield request


AS_OPERATOR = _AsOperator()

_OPERATORS = re.compile(
    "|".join(
        f"({re.sub('{[^}]*}', '[^/]+', f'{each.method} {each.template}')}$)"
        for each in ROUTES
        if each.scope is Scope.ADMIN
    )
)


@contextmanager
def announced_to_the_command_line(
    data_dir: Path, listener: socket.socket, url: str
) -> Iterator[None]:
    """As `sdstore serve` does for its node: the commands of this user find its operator's token."""
    with (data_dir / LOCK_FILE).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with announced(lock.fileno(), data_dir, listener, url):
            yield


@contextmanager
def running_node(
    data_dir: Path,
    limits: Limits = DEFAULT_LIMITS,
    *,
    authorizer: Authorizer | None = None,
    listener: socket.socket | None = None,
    **settings: Any,
) -> Iterator[RunningNode]:
    """A node over `data_dir` until the block ends; `settings` as in `app.server.settings`.

    It listens on `listener`, or on a free port.
    """
    node_settings = Settings(data_dir=data_dir, **settings)

    server = _Server(node_settings, limits, authorizer)
    with (
        listener or socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as executor,
    ):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = executor.submit(server.run, listener)
        try:
            # The socket listens already: what connects from now on is answered.
            while not server.is_open.wait(timeout=0.01):
                if running.done():
                    running.result()
            with (
                announced_to_the_command_line(data_dir, listener, url),
                httpx.Client(base_url=url, trust_env=False, timeout=30) as http,
            ):
                if node_settings.trusts_loopback and authorizer is None:
                    http.auth = AS_OPERATOR
                yield RunningNode(url, http)
        finally:
            server.stop()
        running.result(timeout=STOP_SECONDS_MAX)


class _Server:
    def __init__(self, settings: Settings, limits: Limits, authorizer: Authorizer | None) -> None:
        self.is_open = Event()
        self._settings = settings
        self._limits = limits
        self._authorizer = authorizer
        self._server: NodeServer | None = None

    def run(self, listener: socket.socket) -> None:
        # The loop that nodes run on. asyncio's own would leave Nagle's algorithm on for a socket
        # that it did not make: 40 ms for every answer.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        async with Node.open(self._settings, self._limits) as node:
            self._server = NodeServer(application_of(node, self._authorizer), node)
            self.is_open.set()
            await self._server.serve(sockets=[listener])

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
