"""Nodes that start in a quarter of a second: forked from a process that has imported everything."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from app.access.callers import Caller
from app.federation import peers, records
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings
from app.store import peerrows
from tests.support.cli import free_port
from tests.support.server import _Server

LEASE_S = 0.9
"""Leases, and all times beside them, are this much shorter than those of real nodes, which are 6 s."""

STEPS_COUNT = 16
"""Calls of the database for the peers of a node that starts, each counted before and after it."""

_context = get_context("forkserver")
_context.set_forkserver_preload([__name__])


class _Everything:
    """Whoever calls may do everything."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG002
        return Caller("test")


def _serve(data_dir: Path, settings: dict[str, Any], port: int, stop_at: int | None) -> None:
    scale = LEASE_S / peerrows.LEASE_S
    for module, name in (
        (records, "LEASE_S"),
        (peerrows, "GRACE_S"),
        (peers, "LOOK_S"),
        (records, "SILENT_S_MAX"),
    ):
        setattr(module, name, getattr(module, name) * scale)
    peerrows.PeerRows.hold.__defaults__ = (LEASE_S, ())
    if stop_at is not None:
        _stop_at(stop_at)
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = _Server(Settings(data_dir=data_dir, **settings), DEFAULT_LIMITS, _Everything())
        server.run(listener)


def _stop_at(step: int) -> None:
    """Pause this process before or after one of the first calls of the database about peers."""
    steps = count()

    def reach() -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopping(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(call)
        async def stopped(*arguments: Any, **options: Any) -> Any:
            reach()
            result = await call(*arguments, **options)
            reach()
            return result

        return stopped

    for name in ("end_abandoned", "forget_settings", "add", "read", "hold", "memory", "write"):
        setattr(records.Records, name, stopping(getattr(records.Records, name)))


class ForkedNode:
    """A node as a process of its own, over `data_dir`. It pauses itself at a step of its start, if told."""

    def __init__(self, data_dir: Path, stop_at: int | None = None, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = _context.Process(
            target=_serve, args=(data_dir, settings, self.port, stop_at), daemon=True
        )
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self._process.kill()
        self._process.join(30)
