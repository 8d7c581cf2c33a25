"""One node behind one socket: uvicorn, started by the program and stopped by a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvloop

from app.cli.exits import CliError, Exit
from app.http.application import create_app
from app.http.server import NodeServer
from app.node import Node
from app.settings import Settings
from app.store.faults import StoreError as DatabaseError

BACKLOG = 2_048
# The writer's thread and the event loop share the interpreter: at the default of 5 ms a reader
# would wait that long behind a commit.
SWITCH_INTERVAL_S = 0.0005
# Libraries that tell each step and each request at the level "info".
TALKATIVE = ("alembic", "httpx", "httpcore")
GC_THRESHOLDS = (50_000, 20, 20)  # requests make few cycles; collecting costs a reader's p99


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
    is_first: bool = True,
) -> list[int]:
    """Serve until a signal; the signals that came. Raises `app.store.faults.StoreError`."""
    start_logging(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener, ready, is_first=is_first))


def start_logging(settings: Settings) -> None:
    """Log to stderr, as talkative as the settings say."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


async def _serve(
    settings: Settings, listener: socket.socket, ready: Callable[[Node], None], *, is_first: bool
) -> list[int]:
    async with Node.open(settings, is_first=is_first) as node:
        server = NodeServer(create_app(node), node)
        signals = _stopping(server)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        # The socket listens already: what connects from now on is answered.
        ready(node)
        await server.serve(sockets=[listener])
        return signals


def _stopping(server: NodeServer) -> list[int]:
    """Let signals stop the server from now on; the list will name those that came.

    uvicorn handles them while it serves, and raises them again when it is done: the node has still
    to be closed then, so they must end nothing more.
    """
    caught: list[int] = []

    def stop(number: int, _frame: object) -> None:
        caught.append(number)
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return caught
