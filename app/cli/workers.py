"""Several processes behind one socket: each a whole node, all over one PostgreSQL database.

The first talks to peers and keeps the index file; apart from that they are alike. One that dies is
replaced; one that dies before it was ready ends the service, because another would do no better.
Workers stop with the process that started them, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from socket import socket
from types import FrameType
from typing import NamedTuple

from app.cli.exits import CliError, Exit
from app.cli.server import serve_node, start_logging
from app.node import Node
from app.settings import Settings
from app.store.faults import StoreError as DatabaseError

STOP_SECONDS_MAX = 30
"""Longer than a worker gives its slowest readers; then it is killed."""

_log = logging.getLogger(__name__)
_spawn = multiprocessing.get_context("spawn")


class Started(NamedTuple):
    """What a worker tells once: the node's ID, or why it could not start."""

    node_id: str | None
    fault: str = ""


class Worker:
    """One process."""

    def __init__(self, settings: Settings, listener: socket, *, is_first: bool) -> None:
        self.is_first = is_first
        self._line, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_work, args=(settings, listener, theirs, is_first))
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> str:
        """The node's ID. Raises CliError where it ends before."""
        try:
            started: Started = self._line.recv()
        except EOFError:
            started = Started(None, "a worker ended before it was ready")
        if started.node_id is None:
            raise CliError(Exit.LOCAL_FAULT, "store_unavailable", started.fault)
        return started.node_id

    def stop(self) -> None:
        """Let it finish what it does, but not for ever."""
        self.process.terminate()
        self.process.join(STOP_SECONDS_MAX)
        self.process.kill()


class Workers:
    """All of them, from start to end."""

    def __init__(self, settings: Settings, listener: socket) -> None:
        self._settings = settings
        self._listener = listener
        self._running: list[Worker] = []
        self._stopped_by: list[int] = []

    def run(self, ready: Callable[[str], None]) -> Exit:
        """Serve until a signal; `ready` is called with the node's ID when all answer."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._on_signal)
        try:
            for number in range(self._settings.workers):
                self._start(is_first=number == 0)
            names = {worker.wait_until_ready() for worker in self._running}
            ready(names.pop())
            self._replace_those_that_die()
        except CliError:
            if not self._stopped_by:
                raise
        finally:
            for worker in self._running:
                worker.stop()
        return Exit.INTERRUPTED if signal.SIGINT in self._stopped_by else Exit.DONE

    def _start(self, *, is_first: bool) -> Worker:
        worker = Worker(self._settings, self._listener, is_first=is_first)
        self._running.append(worker)
        return worker

    def _replace_those_that_die(self) -> None:
        while not self._stopped_by:
            ended = connection.wait([worker.process.sentinel for worker in self._running])
            for worker in [each for each in self._running if each.process.sentinel in ended]:
                if not self._stopped_by:
                    worker.process.join()
                    _log.error("a worker ended with %s", worker.process.exitcode)
                    self._running.remove(worker)
                    self._start(is_first=worker.is_first).wait_until_ready()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stopped_by.append(number)
        # Whoever waits for them is woken by their end.
        for worker in self._running:
            worker.process.terminate()


def run_workers(settings: Settings, listener: socket, ready: Callable[[str], None]) -> Exit:
    """As `app.cli.server.run_node`, with as many processes as the settings say."""
    start_logging(settings)
    return Workers(settings, listener).run(ready)


def _work(settings: Settings, listener: socket, line: Connection, is_first: bool) -> None:
    def ready(node: Node) -> None:
        line.send(Started(node.node_id))
        # The other end closes with the process that holds it.
        asyncio.get_running_loop().add_reader(line.fileno(), orphaned)

    def orphaned() -> None:
        asyncio.get_running_loop().remove_reader(line.fileno())
        signal.raise_signal(signal.SIGTERM)

    try:
        serve_node(settings, listener, ready, is_first=is_first)
    except DatabaseError as error:
        with suppress(OSError):
            line.send(Started(None, str(error)))
