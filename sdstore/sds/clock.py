"""The Lamport clock of a participant, and the time that its time-outs count."""

from __future__ import annotations

from sdstore.sds.errors import LocalProtocolError
from sdstore.sds.model import LAMPORT_MAX
from sdstore.sds.options import ParticipantOptions


class Clock:
    """The caller's `now_ms` may jump; `elapsed_ms` does not.

    `elapsed_ms` counts the time between calls, from 0: never less than nothing, and at most
    `clock_step_max_ms`. The Lamport clock `lamport` follows `now_ms` upwards only.
    """

    def __init__(self, options: ParticipantOptions) -> None:
        self._lamport_at = options.lamport_at
        self._ahead_ms = options.clock_ahead_ms
        self._step_max_ms = options.clock_step_max_ms
        self._lamport_max = options.lamport_max
        self._dialect = options.dialect
        self.is_started = False
        self.now_ms = 0
        self.elapsed_ms = 0
        self.lamport = 0

    def start(self, now_ms: int, lamport: int) -> None:
        """The first call. The Lamport clock begins at the time, or at `lamport` if it is later."""
        self.is_started = True
        self.now_ms = now_ms
        now = min(self._lamport_at(now_ms), self._lamport_max)
        self.lamport = max(self.lamport, lamport, now)

    def advance(self, now_ms: int) -> None:
        """A later call."""
        self.elapsed_ms += min(max(now_ms - self.now_ms, 0), self._step_max_ms)
        self.now_ms = now_ms

    @property
    def is_exhausted(self) -> bool:
        """Whether the dialect has no timestamp for another message."""
        return self._next() > self._lamport_max

    def next_lamport(self) -> int:
        """The timestamp of the next message; it becomes `lamport` once the message is sent."""
        if self.is_exhausted:
            raise LocalProtocolError(
                "lamport_exhausted",
                f"the next Lamport timestamp is {self._next()}; dialect {self._dialect.label} "
                f"ends at {self._lamport_max}",
            )
        return self._next()

    def _next(self) -> int:
        return max(self._lamport_at(self.now_ms), self.lamport + 1)

    def received(self, lamport: int) -> bool:
        """Follow the timestamp of a delivered message; False if it is too far ahead to follow."""
        if lamport > self.lamport:
            if lamport > self.bound(self.now_ms):
                return False
            self.lamport = lamport
        return True

    def bound(self, now_ms: int) -> int:
        """The highest received timestamp that moves the Lamport clock at this time.

        It leaves room for our next message.
        """
        bound = self._lamport_at(now_ms + self._ahead_ms)
        return min(bound, self._lamport_max - 1, LAMPORT_MAX - 1)
