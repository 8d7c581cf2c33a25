"""Several processes behind one socket: each a whole node, all over one PostgreSQL database.

The first talks to peers and keeps the index file; apart from that they are alike. One that dies is
replaced, at once where it had served for a while and after growing pauses where it had not, for as
long as the service runs. One that is started while the database is away waits for it, and answers
meanwhile that the node is not ready. The service ends when it is told to, when it cannot start, and
when a worker meets what no waiting mends (a schema of a newer version, a database that this version
cannot use). Workers stop with the process that started them, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple

from app.cli.exits import CliError, Exit
from app.cli.logs import start_logging
from app.cli.server import serve_node
from app.node import Node
from app.settings import Settings
from app.siblings import Board, Siblings, WorkerState
from app.store.faults import StoreError as DatabaseError

STOP_SECONDS_MAX = 30
"""Longer than a worker gives its slowest readers; then it is killed."""

STEADY_S = 10.0
"""A worker that served for so long is replaced at once when it dies."""

PAUSE_S_MIN = 0.25
PAUSE_S_MAX = 30.0
"""Pauses before a worker that did not last is started again; each is twice the one before."""

_log = logging.getLogger(__name__)
_spawn = multiprocessing.get_context("spawn")


class Started(NamedTuple):
    """What a worker tells once: the node's ID, or why it could not start."""

    node_id: str | None
    fault: str = ""


class Worker:
    """One place among the workers, and the process that fills it."""

    def __init__(self, settings: Settings, listener: socket.socket, siblings: Siblings) -> None:
        self._settings = settings
        self._listener = listener
        self._siblings = siblings
        self._process: Any = None
        self._line: Connection | None = None
        self._serves_since_s: float | None = None
        self._failures = 0
        self._due_at_s = 0.0

    @property
    def waited_for(self) -> list[Any]:
        """What tells of this worker: its line, and its end."""
        if self._process is None:
            return []
        return [self._process.sentinel, *([self._line] if self._line else [])]

    @property
    def pause_s(self) -> float | None:
        """How long until it has to be started; None while it runs."""
        return None if self._process is not None else max(0, self._due_at_s - time.monotonic())

    def start(self, *, waits: bool) -> None:
        """Start a process; one that `waits` has patience with a database that is away."""
        self._note(WorkerState.STARTING)
        self._line, theirs = _spawn.Pipe()
        process = _spawn.Process(
            target=_work,
            args=(self._settings, self._listener, theirs, self._siblings, waits),
            name=f"worker {self._siblings.number}",
        )
        process.start()
        self._process = process
        theirs.close()

    def restart(self) -> None:
        """Start a process in the place of one that died."""
        self._siblings.board.count_restart(self._siblings.number)
        self.start(waits=True)

    def heard(self) -> str | None:
        """The node's ID, once the worker serves; None where it has ended. Waits for either.

        Raises CliError where it tells why it never will.
        """
        try:
            started: Started | None = self._line.recv() if self._line else None
        except EOFError:
            started = None
        if started is None:
            self._line = None
            return None
        if started.node_id is None:
            raise CliError(Exit.LOCAL_FAULT, "store_unavailable", started.fault)
        self._note(WorkerState.SERVING)
        self._serves_since_s = time.monotonic()
        return started.node_id

    def attend(self, told: Sequence[Any]) -> None:
        """Take note of what it told and of its end. Raises CliError as `heard`."""
        if self._line in told:
            self.heard()
        if self._process is not None and self._process.sentinel in told:
            self._bury()

    def terminate(self) -> None:
        """Tell it to end."""
        if self._process is not None:
            self._send(self._process.terminate)

    def stop(self) -> None:
        """Let it finish what it does, but not for ever."""
        if self._process is not None:
            self.terminate()
            self._process.join(self._settings.drain_s + STOP_SECONDS_MAX)
            self._send(self._process.kill)

    def _send(self, signal_it: Callable[[], None]) -> None:
        # Whatever is wrong with this one, the others are told to end, too.
        try:
            signal_it()
        except OSError:
            _log.exception("worker %d cannot be told to end", self._siblings.number)

    def _bury(self) -> None:
        self._process.join()
        served_s = time.monotonic() - self._serves_since_s if self._serves_since_s else 0.0
        self._failures = 0 if served_s >= STEADY_S else self._failures + 1
        exponent = min(self._failures - 1, 30)
        pause_s = min(PAUSE_S_MIN * 2**exponent, PAUSE_S_MAX) if self._failures else 0.0
        _log.error(
            "worker %d ended with %s; another one starts in %.2f s",
            self._siblings.number,
            self._process.exitcode,
            pause_s,
        )
        self._note(WorkerState.DOWN)
        self._process, self._line, self._serves_since_s = None, None, None
        self._due_at_s = time.monotonic() + pause_s

    def _note(self, state: WorkerState) -> None:
        self._siblings.board.set_state(self._siblings.number, state)


class Workers:
    """All of them, from start to end."""

    def __init__(
        self, settings: Settings, listener: socket.socket, own_listeners: Sequence[socket.socket]
    ) -> None:
        self._board = board = Board(len(own_listeners))
        paths = tuple(each.getsockname() for each in own_listeners)
        self._workers = [
            Worker(settings, listener, Siblings(number, own, paths, board))
            for number, own in enumerate(own_listeners)
        ]
        self._stopped_by: list[int] = []
        # A signal is told here too: nothing else may happen while no worker runs.
        self._woken, self._waking = _spawn.Pipe(duplex=False)

    def run(self, ready: Callable[[str], None]) -> Exit:
        """Serve until a signal; `ready` is called with the node's ID when all answer."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._on_signal)
        try:
            name = self._start_all()
            if name is not None:
                ready(name)
                self._keep_running()
        except CliError:
            if not self._stopped_by:
                raise
        finally:
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                worker.stop()
        return Exit.INTERRUPTED if signal.SIGINT in self._stopped_by else Exit.DONE

    def _start_all(self) -> str | None:
        """The node's ID, once all workers serve; None where a signal comes first."""
        for worker in self._workers:
            worker.start(waits=False)
        names = set()
        for worker in self._workers:
            connection.wait([self._woken, *worker.waited_for])
            if self._stopped_by:
                return None
            names.add(worker.heard())
        if None in names:
            raise CliError(
                Exit.LOCAL_FAULT, "store_unavailable", "a worker ended before it was ready"
            )
        return str(names.pop())

    def _keep_running(self) -> None:
        while not self._stopped_by:
            for worker in self._workers:
                if worker.pause_s == 0:
                    worker.restart()
            pauses_s = [each.pause_s for each in self._workers if each.pause_s is not None]
            waited_for = [self._woken, *(each for w in self._workers for each in w.waited_for)]
            told = connection.wait(waited_for, min(pauses_s, default=None))
            if not self._stopped_by:
                for worker in self._workers:
                    worker.attend(told)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # It may come while a worker is half started: `run` tells the workers.
        self._stopped_by.append(number)
        if number == signal.SIGINT or len(self._stopped_by) > 1:
            self._board.hurry()
        if len(self._stopped_by) == 1:
            self._waking.send_bytes(b"!")


def run_workers(settings: Settings, listener: socket.socket, ready: Callable[[str], None]) -> Exit:
    """As `app.cli.server.run_node`, with as many processes as the settings say."""
    start_logging(settings)
    with _unix_listeners(settings.workers) as own_listeners:
        return Workers(settings, listener, own_listeners).run(ready)


@contextmanager
def _unix_listeners(count: int) -> Iterator[list[socket.socket]]:
    """A UNIX socket for each worker, which nobody but this user can reach.

    They belong to the supervisor, so that they outlive a worker that is replaced.
    """
    # Not below the data directory: a path of such a socket has 108 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="sdstore-"))
    listeners: list[socket.socket] = []
    try:
        for number in range(count):
            listener = socket.socket(socket.AF_UNIX)
            listeners.append(listener)
            listener.bind(str(folder / str(number)))
            listener.listen()
        yield listeners
    finally:
        for listener in listeners:
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def _work(
    settings: Settings, listener: socket.socket, line: Connection, siblings: Siblings, waits: bool
) -> None:
    def ready(node: Node) -> None:
        line.send(Started(node.node_id))

    Thread(target=_end_with_supervisor, args=(line,), daemon=True).start()
    try:
        serve_node(settings, listener, ready, siblings=siblings, waits=waits)
    except DatabaseError as error:
        with suppress(OSError):
            line.send(Started(None, str(error)))


def _end_with_supervisor(line: Connection) -> None:
    # Nothing is ever sent to a worker: its end of the line closes with the process that holds it.
    with suppress(EOFError, OSError):
        line.recv()
    os.kill(os.getpid(), signal.SIGTERM)
