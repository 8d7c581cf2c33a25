"""The HTTP server of a node: uvicorn, told how, and stopped in order."""

from __future__ import annotations

import socket

import uvicorn

from app.http.connection import bounded_protocol
from app.http.shell import App
from app.node import Node

KEEP_ALIVE_S = 75
"""Longer than the pauses of clients that poll every minute."""

SHUTDOWN_TIMEOUT_S = 10
"""Then slow bodies and slow readers are cut."""


class NodeServer(uvicorn.Server):
    """Serves an application of a node; ends the live readers before it waits for connections."""

    def __init__(self, app: App, node: Node) -> None:
        self._node = node
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(node.limits),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await self._node.live.close()
        await super().shutdown(sockets)
