"""One node behind one socket: uvicorn, started by the program and stopped by a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import uvicorn
import uvloop

from app.cli.exits import CliError, Exit
from app.cli.logs import start_logging
from app.errors import Problem
from app.http.application import create_app, create_sibling_app
from app.http.server import NodeServer, SideServer, serving, waiting_server
from app.limits import DEFAULT_LIMITS, Limits
from app.node import Node
from app.settings import Settings
from app.siblings import Siblings
from app.store.faults import DatabaseUnreachableError
from app.store.faults import StoreError as DatabaseError

BACKLOG = 2_048
DESCRIPTORS_BESIDE = 256
"""Files that are no connections of clients: the database, peers, log."""

# The writer's thread and the event loop share the interpreter: at the default of 5 ms a reader
# would wait that long behind a commit.
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (50_000, 20, 20)  # requests make few cycles; collecting costs a reader's p99
TRY_AGAIN_S = 1.0  # between two attempts to reach a database that is away

_log = logging.getLogger(__name__)


def bind(settings: Settings) -> socket.socket:
    """The listening socket. Raises CliError where the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise CliError(Exit.LOCAL_FAULT, "cannot_listen", f"{where}: {error}") from None


def url_of(listener: socket.socket) -> str:
    """Where the node is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_node(settings: Settings, listener: socket.socket, ready: Callable[[Node], None]) -> Exit:
    """Serve until a signal; `ready` is called when the node answers. INTERRUPTED after Ctrl-C."""
    try:
        stopped_by = serve_node(settings, listener, ready)
    except DatabaseError as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from None
    return Exit.INTERRUPTED if signal.SIGINT in stopped_by else Exit.DONE


def serve_node(
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[Node], None],
    *,
    siblings: Siblings | None = None,
    waits: bool = False,
) -> list[int]:
    """Serve until a signal; the signals that came. Raises `app.store.faults.StoreError`.

    `waits`: while the database is away, answer that it is and try again.
    """
    start_logging(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    limits = raise_descriptor_limit(DEFAULT_LIMITS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, limits, listener, ready, siblings, waits=waits))


def raise_descriptor_limit(limits: Limits) -> Limits:
    """Let this process hold as many connections as `limits` say; fewer where the system forbids."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections_max + DESCRIPTORS_BESIDE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible == wanted:
        return limits
    connections_max = max(1, possible - DESCRIPTORS_BESIDE)
    _log.warning("at most %d connections: the system allows %d files", connections_max, possible)
    share = limits.connections_per_address_max / limits.connections_max
    per_address_max = max(1, int(connections_max * share))
    return replace(
        limits, connections_max=connections_max, connections_per_address_max=per_address_max
    )


async def _serve(
    settings: Settings,
    limits: Limits,
    listener: socket.socket,
    ready: Callable[[Node], None],
    siblings: Siblings | None,
    *,
    waits: bool,
) -> list[int]:
    signals = Signals()
    async with AsyncExitStack() as closing:

        async def opened() -> Node:
            try:
                return await closing.enter_async_context(Node.open(settings, limits, siblings))
            except Problem as problem:  # the database was there, and went away meanwhile
                raise DatabaseUnreachableError(problem.detail) from problem

        node = await (_opened_patiently(opened, listener, signals) if waits else opened())
        if node is None:
            return signals.caught
        server = NodeServer(create_app(node), node)
        signals.let_stop(server)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if siblings is not None:
            beside = SideServer(create_sibling_app(node))
            await closing.enter_async_context(serving(beside, siblings.listener))
        # The socket listens already: what connects from now on is answered.
        ready(node)
        await server.serve(sockets=[listener])
        return signals.caught


async def _opened_patiently(
    opened: Callable[[], Awaitable[Node]], listener: socket.socket, signals: Signals
) -> Node | None:
    """The node, as soon as its database is there; None where a signal comes first."""
    try:
        return await opened()
    except DatabaseUnreachableError as error:
        reason = " ".join(str(error).split())
    since_s = time.monotonic()
    _log.warning("not ready: %s", reason)
    server = waiting_server(reason, DEFAULT_LIMITS)
    signals.let_stop(server)
    async with serving(server, listener):
        while not signals.caught:
            await asyncio.sleep(TRY_AGAIN_S)
            with suppress(DatabaseUnreachableError):
                node = await opened()
                _log.info("ready again after %.1f s", time.monotonic() - since_s)
                return node
    return None


class Signals:
    """The signals that came, and the server that they stop.

    uvicorn handles them while it serves, and raises them again when it is done: the node has still
    to be closed then, so they must end nothing more.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._server: uvicorn.Server | None = None

    def let_stop(self, server: uvicorn.Server) -> None:
        """From now on a signal stops this server; one that came already does."""
        self._server = server
        server.should_exit = bool(self.caught)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, number: int, _frame: object) -> None:
        self.caught.append(number)
        if self._server is not None:
            self._server.should_exit = True
