"""The workers of one service, as each of them sees the others.

They share one listening socket, one database and one data directory. The first worker talks to the
peers; calls about peers and syncs that reach another one are handed on to it, and the one that is
asked for metrics asks the others for theirs: each worker also listens on a UNIX socket that only
this service can reach (`app.http.relay`). The supervisor writes the state of every worker into
memory that all of them read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import get_context
from socket import socket

_spawn = get_context("spawn")


class WorkerState(IntEnum):
    """What a worker does now."""

    DOWN = 0
    """It has ended; the supervisor starts another one."""

    STARTING = 1
    """Its process runs; its database is not open yet."""

    SERVING = 2


class Board:
    """The state of each worker and how often it was restarted; written by the supervisor alone.

    It also says whether the workers, once they are told to stop, are to leave out the draining.
    """

    def __init__(self, workers_count: int) -> None:
        self._states = _spawn.RawArray("i", workers_count)
        self._restarts = _spawn.RawArray("q", workers_count)
        self._is_hurried = _spawn.RawValue("b", 0)

    @property
    def is_hurried(self) -> bool:
        """Whether a worker that stops ends as soon as what is in flight is done."""
        return bool(self._is_hurried.value)

    def hurry(self) -> None:
        """Let the workers stop without draining; one that drains ends that."""
        self._is_hurried.value = 1

    def set_state(self, number: int, state: WorkerState) -> None:
        """Note what a worker does."""
        self._states[number] = state

    def count_restart(self, number: int) -> None:
        """Note that a worker is started again."""
        self._restarts[number] += 1

    def states(self) -> list[WorkerState]:
        """Of all workers, by number."""
        return [WorkerState(each) for each in self._states]

    def restarts(self) -> list[int]:
        """Of all workers, by number."""
        return list(self._restarts)


@dataclass(frozen=True, slots=True)
class Siblings:
    """One worker's place among the others: its number, its own UNIX socket, the paths of all."""

    number: int
    listener: socket
    paths: tuple[str, ...]
    board: Board

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that talks to peers and keeps the index file."""
        return self.number == 0

    def serving(self) -> list[int]:
        """The numbers of the other workers that serve now."""
        states = enumerate(self.board.states())
        return [n for n, state in states if n != self.number and state is WorkerState.SERVING]
