"""The HTTP servers of a process, on uvicorn: the node's own, and the one of a worker without a node.

On SIGTERM the node reports at once that it is not ready, and goes on answering for `drain_s` seconds,
so that a load balancer has time to notice. Live readers get their cursor and the end of the stream;
replies carry `Connection: close`. Then the listener closes, and requests in flight are finished.
Ctrl-C skips the wait.

While a worker waits for its database it has no node yet: then a `WaitingServer` answers, so that load
balancers, operators and clients learn the reason.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import orjson
import uvicorn

from app.access.proxies import Proxies
from app.errors import Code, Problem
from app.http.call import App, AsgiScope, Receive, Reply, Send, length_of
from app.http.replies import problem_reply
from app.server.connection import bounded_protocol
from app.server.limits import Limits
from app.server.node import Node
from app.server.reload import checked_certificate, warn_of
from app.server.settings import Settings
from app.server.tls import tls_layers

SHUTDOWN_TIMEOUT_S = 10
"""After it slow bodies and slow readers are cut."""

WAITING_SHUTDOWN_TIMEOUT_S = 2
RETRY_AFTER_S = 1

_TICK_S = 0.05


def tls_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's options for TLS; none if the node serves http."""
    if settings.tls_cert is None:
        return {}
    return {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}


def _proxies(settings: Settings) -> Proxies:
    return Proxies(settings.trusted_proxies, settings.proxy_header)


class _Server(uvicorn.Server):
    """Accepts connections with our layer of TLS (`app.server.tls`). `tls`: uvicorn's options for it."""

    def __init__(self, app: App, http: Any, shutdown_timeout_s: int, tls: dict[str, Any]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=shutdown_timeout_s,
                **tls,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        tls = self.config.ssl
        if tls is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        loop = asyncio.get_running_loop()
        protocol_class: Any = self.config.http_protocol_class
        connect = partial(protocol_class, self.config, self.server_state, self.lifespan.state)
        layers = tls_layers(tls, connect)
        for each in sockets:
            server = await loop.create_server(layers, sock=each, backlog=self.config.backlog)
            self.servers.append(server)


class NodeServer(_Server):
    """Serves the application of a node."""

    def __init__(self, app: App, node: Node) -> None:
        self._node = node
        self._signals_count = 0
        self._drain_s = 0.0
        # Before it is loaded: a change meanwhile is found by the next reload.
        node.certificate = checked_certificate(node.settings)
        warn_of(node.certificate)
        super().__init__(
            app,
            bounded_protocol(node.limits, node.sharing, _proxies(node.settings)),
            SHUTDOWN_TIMEOUT_S,
            tls_options(node.settings),
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self._node.tls = self.config.ssl  # a certificate can be replaced in it

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`. Also called for signals that came before it served."""
        self._signals_count += 1
        if self._signals_count == 1 and sig == signal.SIGTERM:
            self._drain_s = self._node.settings.drain_s
        self._node.readiness.is_stopping = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        self._node.readiness.is_stopping = self._node.sharing.is_draining = True
        await self._node.live.close()
        await self._node.relay.close()
        await self._drain()
        await super().shutdown(sockets)

    @property
    def _is_hurried(self) -> bool:
        worker = self._node.worker
        return worker is not None and worker.board.is_hurried

    async def _drain(self) -> None:
        """Go on answering for a while; a second signal ends it."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._drain_s
        signals_count = self._signals_count
        left_s = self._drain_s
        while left_s > 0 and self._signals_count == signals_count and not self._is_hurried:
            # A handler of signals cannot set an event of a loop that sleeps.
            await asyncio.sleep(min(_TICK_S, left_s))
            left_s = ends_s - loop.time()


class WaitingServer(_Server):
    """Answers every request with the reason why there is no node behind it, until `should_exit`.

    It leaves signals alone.
    """

    def __init__(self, reason: str, limits: Limits, settings: Settings) -> None:
        async def answer(scope: AsgiScope, _receive: Receive, send: Send) -> None:
            reply = _waiting_reply(scope["path"], reason)
            # Close the connection, because the client's next one may reach the open node.
            headers = [*reply.raw_headers, *length_of(reply), (b"connection", b"close")]
            start = {"type": "http.response.start", "status": reply.status_code, "headers": headers}
            await send(start)
            await send({"type": "http.response.body", "body": reply.body})

        http = bounded_protocol(limits, proxies=_proxies(settings))
        super().__init__(answer, http, WAITING_SHUTDOWN_TIMEOUT_S, tls_options(settings))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


@asynccontextmanager
async def serving(server: WaitingServer, listener: socket.socket) -> AsyncIterator[None]:
    """Serve while the block runs; the listener stays open for the next server."""
    running = asyncio.create_task(server.serve(sockets=[listener.dup()]))
    try:
        yield
    finally:
        server.should_exit = True
        await running


def _waiting_reply(path: str, reason: str) -> Reply:
    if path == "/livez":
        body = orjson.dumps({"status": "alive"})
        return Reply(200, [(b"content-type", b"application/json")], body)
    code = Code.NOT_READY if path == "/readyz" else Code.STORE_UNAVAILABLE
    return problem_reply(Problem(code, reason, headers={"Retry-After": str(RETRY_AFTER_S)}))
