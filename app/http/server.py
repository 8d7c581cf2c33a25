"""The HTTP server of a node: uvicorn, told how, and stopped in order.

On SIGTERM the node says at once that it is not ready, and goes on answering for as long as the
settings say, so that a load balancer has time to notice. Live readers are given their cursor and an
end, requests are answered with `Connection: close`. Then the listener closes, and what is still
worked on is finished. Ctrl-C leaves the waiting out.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from app.http.connection import bounded_protocol
from app.http.shell import App
from app.node import Node

SHUTDOWN_TIMEOUT_S = 10
"""Then slow bodies and slow readers are cut."""

_TICK_S = 0.05


class NodeServer(uvicorn.Server):
    """Serves an application of a node."""

    def __init__(self, app: App, node: Node) -> None:
        self._node = node
        self._signals_count = 0
        self._drain_s = 0.0
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(node.limits, node.sharing),
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
        await self._drain()
        await super().shutdown(sockets)

    @property
    def _is_hurried(self) -> bool:
        siblings = self._node.siblings
        return siblings is not None and siblings.board.is_hurried

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
