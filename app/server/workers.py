"""The worker processes of one service over PostgreSQL.

Workers share one listening socket, one database and one data directory, and are equal: each answers every
request. The supervisor (`app.cli.server`) writes the state of every worker into shared memory. A worker that
gets a request for metrics asks the others for theirs (`app.http.about`).
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import get_context
from pathlib import Path

_spawn = get_context("spawn")


class WorkerState(IntEnum):
    """The current state of a worker."""

    DOWN = 0
    """It has ended; the supervisor starts another one."""

    STARTING = 1
    """Its process runs; its database is not open yet."""

    SERVING = 2


class Board:
    """The state and the number of restarts of each worker; only the supervisor writes them.

    It also contains the flag that makes stopping workers skip draining, and how far reloads have come.
    """

    def __init__(self, workers_count: int) -> None:
        self._supervisor_pid = os.getpid()  # it makes the board
        self._states = _spawn.RawArray("i", workers_count)
        self._restarts = _spawn.RawArray("q", workers_count)
        self._is_hurried = _spawn.RawValue("b", 0)
        # Each worker writes its own numbers, and the supervisor those of a worker that it starts.
        self._reloads_asked = _spawn.RawArray("q", workers_count)
        self._reloads_done = _spawn.RawArray("q", workers_count)

    @property
    def is_hurried(self) -> bool:
        """Whether a stopping worker skips draining and only finishes the requests in flight."""
        return bool(self._is_hurried.value)

    def hurry(self) -> None:
        """Make the workers stop without draining; a draining worker stops draining."""
        self._is_hurried.value = 1

    def reload(self, number: int) -> int:
        """Have the supervisor make all workers read their settings again, for the worker of this number.

        Returns the mark of this reload for `behind`, or 0, behind which nobody is, if the supervisor is gone.
        """
        if os.getppid() != self._supervisor_pid:
            return 0  # it has ended, and so will this worker
        self._reloads_asked[number] += 1
        mark = self.reloads_asked()
        os.kill(self._supervisor_pid, signal.SIGHUP)
        return mark

    def reloads_asked(self) -> int:
        """How many reloads were asked for: the mark of one that begins now."""
        return sum(self._reloads_asked)

    def note_reloaded(self, number: int, mark: int) -> None:
        """A worker has taken over the settings that it began to read at this mark."""
        self._reloads_done[number] = mark

    def behind(self, mark: int) -> list[int]:
        """The numbers of the serving workers that have not reloaded since this mark."""
        states = enumerate(self.states())
        return [
            n
            for n, state in states
            if state is WorkerState.SERVING and self._reloads_done[n] < mark
        ]

    def set_state(self, number: int, state: WorkerState) -> None:
        """Set the state of a worker."""
        self._states[number] = state

    def count_restart(self, number: int) -> None:
        """Count a restart of a worker."""
        self._restarts[number] += 1

    def states(self) -> list[WorkerState]:
        """The states of all workers, by number."""
        return [WorkerState(each) for each in self._states]

    def restarts(self) -> list[int]:
        """The restarts of all workers, by number."""
        return list(self._restarts)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of one worker among those of its service.

    `folder`: of the UNIX sockets over which workers give each other their metrics; only this user can enter it.
    """

    number: int
    board: Board
    folder: Path

    @property
    def is_first(self) -> bool:
        """Whether this worker writes the index file and reads every frame."""
        return self.number == 0

    def metrics_socket(self, number: int) -> Path:
        """The UNIX socket of a worker."""
        return self.folder / str(number)

    def serving(self) -> list[int]:
        """The numbers of the other workers that are serving."""
        states = enumerate(self.board.states())
        return [n for n, state in states if n != self.number and state is WorkerState.SERVING]
