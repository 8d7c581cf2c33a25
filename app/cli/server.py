"""A node behind a socket: uvicorn in one process, or several workers, and their log.

Workers share one socket and one PostgreSQL database, and each is a whole node. The first one keeps the index
file and reads every frame; each peer is held by one of them.

The supervisor replaces a worker that dies: at once if it had served for a while, otherwise after growing
pauses, for as long as the service runs. A worker that is started while the database is away waits for it,
and meanwhile answers that the node is not ready. The service ends when it is told to, when it cannot start,
and when a worker meets a database that this version cannot use. Workers end with their supervisor, however
that ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
import uvloop

from app.cli.output import CliError, Exit
from app.errors import Problem, SettingsError
from app.http.about import giving_metrics
from app.http.application import application_of
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.logs import set_level, start_logging
from app.server.node import Loaded, Node, checked_certificate, log_reload, merged, reload_settings
from app.server.server import NodeServer, WaitingServer, serving
from app.server.settings import Settings
from app.server.workers import Board, WorkerPlace, WorkerState
from app.store.database import DatabaseUnreachableError
from app.store.database import StoreError as DatabaseError

BACKLOG = 2_048
DESCRIPTORS_BESIDE = 256
"""Open files that are not connections of clients: the database, peers, the log."""

# The writer's thread and the event loop share the interpreter. At the default of 5 ms a reader would
# wait that long behind a commit.
SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (50_000, 20, 20)  # requests make few cycles, and each collection delays readers
TRY_AGAIN_S = 1.0  # from one attempt to reach the database to the next

_log = logging.getLogger(__name__)


# --- one process ---------------------------------------------------------------------------------


def bind(settings: Settings) -> socket.socket:
    """The listening socket. Raises CliError where the system refuses the address."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        # `socket` adds the address, which is named here anyway, to the system's own words.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        detail = f"cannot listen on {settings.host}:{settings.port}: {reason}"
        raise CliError(Exit.LOCAL_FAULT, "cannot_listen", detail) from None


def url_of(listener: socket.socket, settings: Settings) -> str:
    """The URL of the node."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_node(settings: Settings, listener: socket.socket, ready: Callable[[Node], None]) -> Exit:
    """Serve until a signal; `ready` is called when the node answers. Returns INTERRUPTED for Ctrl-C."""
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
    worker: WorkerPlace | None = None,
    waits: bool = False,
) -> list[int]:
    """Serve until a signal; the signals received. Raises `app.store.database.StoreError`.

    `waits`: while the database is away, answer `not_ready` and try again.
    """
    start_logging(settings)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a node to reload
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    limits = raise_descriptor_limit(DEFAULT_LIMITS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, limits, listener, ready, worker, waits=waits))


def raise_descriptor_limit(limits: Limits) -> Limits:
    """Let this process open enough files; the limits, with fewer connections if the system forbids."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections_max + DESCRIPTORS_BESIDE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible == wanted:
        return limits
    connections_max = max(1, possible - DESCRIPTORS_BESIDE)
    _log.warning(
        "the system allows %d open files, so the node takes at most %d connections (not %d); raise it "
        "with `ulimit -n %d`",
        possible,
        connections_max,
        limits.connections_max,
        wanted,
    )
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
    worker: WorkerPlace | None,
    *,
    waits: bool,
) -> list[int]:
    signals = Signals()
    async with AsyncExitStack() as closing:

        async def opened() -> Node:
            try:
                return await closing.enter_async_context(Node.open(settings, limits, worker))
            except Problem as problem:  # the database went away while the node was opening
                raise DatabaseUnreachableError(problem.detail) from problem

        node = await (_opened_patiently(opened, listener, settings, signals) if waits else opened())
        if node is None:
            return signals.caught
        if worker is not None:
            await closing.enter_async_context(giving_metrics(node, worker))
        server = NodeServer(application_of(node), node)
        signals.let_stop(server)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, node)
        # The socket listens already, so whoever connects from now on is answered.
        ready(node)
        await server.serve(sockets=[listener])
        return signals.caught


def _reload(node: Node) -> None:
    board = None if node.worker is None else node.worker.board
    mark = 0 if board is None else board.reloads_asked()  # before the read
    try:
        reload_settings(node)
    except SettingsError as error:
        _log.error("the settings stay as they are: %s", error)
        return
    if node.worker is not None:
        node.worker.board.note_reloaded(node.worker.number, mark)


async def _opened_patiently(
    opened: Callable[[], Awaitable[Node]],
    listener: socket.socket,
    settings: Settings,
    signals: Signals,
) -> Node | None:
    """The node, as soon as the database is there; None if a signal comes first."""
    try:
        return await opened()
    except DatabaseUnreachableError as error:
        reason = " ".join(str(error).split())
    since_s = time.monotonic()
    _log.warning("not ready: %s", reason)
    server = WaitingServer(reason, DEFAULT_LIMITS, settings)
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
    """The signals received, and the server that they stop.

    uvicorn handles signals while it serves, and raises them again when it has stopped. The node is
    still being closed then, so its signals must not end the process.
    """

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._server: uvicorn.Server | None = None

    def let_stop(self, server: uvicorn.Server) -> None:
        """From now on a signal stops this server, and so does one received before."""
        self._server = server
        server.should_exit = bool(self.caught)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, number: int, _frame: object) -> None:
        self.caught.append(number)
        if self._server is not None:
            self._server.should_exit = True


# --- several processes -----------------------------------------------------------------------------

STOP_SECONDS_MAX = 30
"""More than a worker gives its slowest readers. A worker that takes longer is killed."""

STEADY_S = 10.0
"""A worker that served for this long is replaced at once when it dies."""

PAUSE_S_MIN = 0.25
PAUSE_S_MAX = 30.0
"""Pauses before a worker that died sooner is started again; each is twice as long as the last."""

_spawn = multiprocessing.get_context("spawn")


class Started(NamedTuple):
    """What a worker sends once: the node's ID, or why it could not start."""

    node_id: str | None
    fault: str = ""


class Worker:
    """One place among the workers, and the process that fills it."""

    def __init__(self, settings: Settings, listener: socket.socket, place: WorkerPlace) -> None:
        self._place = place
        self._settings = settings
        self._listener = listener
        self._process: Any = None
        self._line: Connection | None = None
        self._serves_since_s: float | None = None
        self._failures = 0
        self._due_at_s = 0.0
        self._mark = 0
        self._has_old_settings = False

    @property
    def waited_for(self) -> list[Any]:
        """What to wait for: a message of the worker, and its end."""
        if self._process is None:
            return []
        return [self._process.sentinel, *([self._line] if self._line else [])]

    @property
    def pause_s(self) -> float | None:
        """Seconds until it is due to start; None while it runs."""
        return None if self._process is not None else max(0, self._due_at_s - time.monotonic())

    def reload(self, settings: Settings, mark: int) -> None:
        """Have it read its settings again: at once if it serves, else when it does.

        `settings` are those that were read at `mark`, for the next start.
        """
        self._settings, self._mark, self._has_old_settings = settings, mark, True
        if self._serves_since_s is not None:
            self._send_hangup()

    def _send_hangup(self) -> None:
        self._has_old_settings = False
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGHUP)

    def start(self, *, waits: bool) -> None:
        """Start a process; with `waits` it waits for a database that is away."""
        self._has_old_settings = False
        self._note(WorkerState.STARTING)
        self._place.board.note_reloaded(self._place.number, self._mark)
        self._line, theirs = _spawn.Pipe()
        process = _spawn.Process(
            target=_work,
            args=(self._settings, self._listener, theirs, self._place, waits),
            name=f"worker {self._place.number}",
        )
        process.start()
        self._process = process
        theirs.close()

    def restart(self) -> None:
        """Start a process in the place of one that died."""
        self._place.board.count_restart(self._place.number)
        self.start(waits=True)

    def heard(self) -> str | None:
        """Wait until the worker serves or has ended: the node's ID, or None.

        Raises CliError where the worker says why it cannot start.
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
        if self._has_old_settings:
            self._send_hangup()
        return started.node_id

    def attend(self, told: Sequence[Any]) -> None:
        """Handle its message and its end, if `told` names them. Raises CliError as `heard`."""
        if self._line in told:
            self.heard()
        if self._process is not None and self._process.sentinel in told:
            self._bury()

    def terminate(self) -> None:
        """Tell it to end."""
        if self._process is not None:
            self._send(self._process.terminate)

    def stop(self) -> None:
        """Tell it to end, wait until it has finished its work, and kill it if it takes too long."""
        if self._process is not None:
            self.terminate()
            self._process.join(self._settings.drain_s + STOP_SECONDS_MAX)
            self._send(self._process.kill)

    def _send(self, signal_it: Callable[[], None]) -> None:
        # Whatever is wrong with this worker, the others must be told to end, too.
        try:
            signal_it()
        except OSError:
            _log.exception("no signal could be sent to worker %d", self._place.number)

    def _bury(self) -> None:
        self._process.join()
        served_s = time.monotonic() - self._serves_since_s if self._serves_since_s else 0.0
        self._failures = 0 if served_s >= STEADY_S else self._failures + 1
        exponent = min(self._failures - 1, 30)
        pause_s = min(PAUSE_S_MIN * 2**exponent, PAUSE_S_MAX) if self._failures else 0.0
        _log.error(
            "worker %d ended with %s; another one starts in %.2f s",
            self._place.number,
            self._process.exitcode,
            pause_s,
        )
        self._note(WorkerState.DOWN)
        self._process, self._line, self._serves_since_s = None, None, None
        self._due_at_s = time.monotonic() + pause_s

    def _note(self, state: WorkerState) -> None:
        self._place.board.set_state(self._place.number, state)


class Workers:
    """All workers of a service, from start to end."""

    def __init__(self, settings: Settings, listener: socket.socket, folder: Path) -> None:
        self._board = board = Board(settings.workers)
        self._workers = [
            Worker(settings, listener, WorkerPlace(number, board, folder))
            for number in range(settings.workers)
        ]
        # The policy is loaded at the first reload, to refuse a broken one.
        self._loaded = Loaded(settings, None, checked_certificate(settings))
        self._stopped_by: list[int] = []
        self._is_reload_due = False
        # A signal also writes to this pipe: while no worker runs, nothing else would end the wait.
        self._woken, self._waking = _spawn.Pipe(duplex=False)

    def run(self, ready: Callable[[str], None]) -> Exit:
        """Serve until a signal; `ready` is called with the node's ID when all answer."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup)
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
        """The node's ID, once all workers serve; None if a signal comes first."""
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
            if self._is_reload_due:
                self._reload()
            if not self._stopped_by:
                for worker in self._workers:
                    worker.attend(told)

    def _on_hangup(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_reload_due:
            self._is_reload_due = True
            self._waking.send_bytes(b"!")

    def _reload(self) -> None:
        """Have all workers read their settings again; workers that start later get the new ones."""
        self._is_reload_due = False
        self._woken.recv_bytes()
        mark = self._board.reloads_asked()
        try:
            self._loaded, found = merged(self._loaded)
        except SettingsError as error:
            _log.error("the settings stay as they are: %s", error)
            return
        set_level(self._loaded.settings.log_level)
        log_reload(found)
        for worker in self._workers:
            worker.reload(self._loaded.settings, mark)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A worker may be half started at this moment, so `run` tells the workers, not this handler.
        self._stopped_by.append(number)
        if number == signal.SIGINT or len(self._stopped_by) > 1:
            self._board.hurry()
        if len(self._stopped_by) == 1:
            self._waking.send_bytes(b"!")


def run_workers(settings: Settings, listener: socket.socket, ready: Callable[[str], None]) -> Exit:
    """As `run_node`, with as many processes as the settings say."""
    start_logging(settings)
    # Not below the data directory: the path of a UNIX socket has at most 108 bytes.
    with tempfile.TemporaryDirectory(prefix="sdstore-", ignore_cleanup_errors=True) as folder:
        return Workers(settings, listener, Path(folder)).run(ready)


def _work(
    settings: Settings, listener: socket.socket, line: Connection, place: WorkerPlace, waits: bool
) -> None:
    def ready(node: Node) -> None:
        line.send(Started(node.node_id))

    Thread(target=_end_with_supervisor, args=(line,), daemon=True).start()
    try:
        serve_node(settings, listener, ready, worker=place, waits=waits)
    except DatabaseError as error:
        with suppress(OSError):
            line.send(Started(None, str(error)))


def _end_with_supervisor(line: Connection) -> None:
    # Nothing is ever sent to a worker. The other end of the pipe closes when the supervisor ends.
    with suppress(EOFError, OSError):
        line.recv()
    os.kill(os.getpid(), signal.SIGTERM)
