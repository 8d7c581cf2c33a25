"""Servers beside the node's own: they end when the block does that needs them, not with a signal.

One answers while a worker waits for its database and has no node yet, so that whoever asks (a load
balancer, an operator, a client with patience) is told what is the matter. Another one answers the
other workers of the service (`app.http.relay`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from socket import socket
from typing import Any

import orjson
import uvicorn

from app.errors import Code, Problem
from app.http.body import Receive
from app.http.call import Reply, length_of
from app.http.connection import bounded_protocol
from app.http.problems import problem_reply
from app.http.shell import App, Scope, Send
from app.limits import Limits

RETRY_AFTER_S = 1
SHUTDOWN_TIMEOUT_S = 2


class SideServer(uvicorn.Server):
    """Serves an application until `should_exit`. Leaves signals to the node's own server."""

    def __init__(self, app: App, http: Any = "httptools") -> None:
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
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


@asynccontextmanager
async def serving(server: SideServer, listener: socket) -> AsyncIterator[None]:
    """Serve while the block runs; the listener stays open for the next one."""
    running = asyncio.create_task(server.serve(sockets=[listener.dup()]))
    try:
        yield
    finally:
        server.should_exit = True
        await running


def waiting_server(reason: str, limits: Limits) -> SideServer:
    """A server for strangers that tells all of them why there is no node behind it."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        reply = _reply(scope["path"], reason)
        # The connection ends with the answer: the next one may find the node open.
        headers = [*reply.headers, *length_of(reply), (b"connection", b"close")]
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": reply.body})

    return SideServer(answer, bounded_protocol(limits))


def _reply(path: str, reason: str) -> Reply:
    if path == "/livez":
        body = orjson.dumps({"status": "alive"})
        return Reply(200, [(b"content-type", b"application/json")], body)
    code = Code.NOT_READY if path == "/readyz" else Code.STORE_UNAVAILABLE
    return problem_reply(Problem(code, reason, headers={"Retry-After": str(RETRY_AFTER_S)}))
