"""The clocks of a participant: Lamport's, that of its time-outs, and when to send a sync message.

Sync messages, and the source of all choices that look random:

- The pause before a sync message is drawn from the upper half of a window, first `sync_ms`.
- After a sync message of our own the window doubles, up to `sync_ms_max`.
- A sync message of another participant that names all our heads starts the pause anew: it said what
  ours would say. Others do not, or participants with shorter pauses would keep us from ever naming a message
  that they lack.
- Content shortens the window to half of `sync_ms`. Content of one sender after the other starts the pause
  anew, because their messages acknowledge each other. Content of one sender alone does not put our sync
  message off, because nobody else acknowledges it.
- Content of our own starts the pause anew: it carries our history and filter.

Draws come from a hash of seed, channel, sender and a counter, so equal inputs give equal effects.
"""

from __future__ import annotations

import hashlib
import struct

from sdstore.errors import LocalProtocolError
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


# ---- sync messages


class SyncTimer:
    """See the module. Times are those of the participant's monotonic clock."""

    def __init__(self, options: ParticipantOptions, channel_id: str, sender_id: str) -> None:
        self._options = options
        channel, sender = channel_id.encode(), sender_id.encode()
        lengths = struct.pack(">III", len(options.seed), len(channel), len(sender))
        self._key = hashlib.blake2b(b"".join((lengths, options.seed, channel, sender))).digest()
        self._draws = 0
        self._window_ms = options.sync_ms
        self._last_sender: str | None = None
        self._start_ms = 0
        self._draw = 0  # the draw for this pause; 0: when somebody asks
        self._drawn_window_ms = 0
        self._drawn_ms: int | None = None  # when it is due by that draw

    def is_due(self, elapsed_ms: int) -> bool:
        """Whether to send a sync message now."""
        return self._options.sync_ms > 0 and elapsed_ms >= self._due_ms()

    def sync_sent(self, elapsed_ms: int) -> None:
        """We sent a sync message, because one was due or because of a repair request."""
        if self.is_due(elapsed_ms):
            self._window_ms = min(2 * self._window_ms, self._options.sync_ms_max)
        self._restart(elapsed_ms)

    def sync_arrived(self, elapsed_ms: int) -> None:
        """Another participant sent a sync message that says what ours would say."""
        self._last_sender = None
        self._restart(elapsed_ms)

    def broadcast(self, elapsed_ms: int) -> None:
        """We sent content."""
        self._window_ms = self._options.sync_ms
        self._last_sender = None
        self._restart(elapsed_ms)

    def content_arrived(self, sender_id: str, elapsed_ms: int) -> None:
        """Another participant sent content."""
        self._window_ms = self._options.sync_ms // 2
        is_dialogue = self._last_sender not in {None, sender_id}
        self._last_sender = sender_id
        if is_dialogue:
            self._restart(elapsed_ms)
            return
        # A pause that is drawn now ends in time: it starts earlier, and its window is this one.
        is_drawn = self._take_draw()
        if is_drawn and self._due_ms() > elapsed_ms + self._window_ms:
            self._restart(elapsed_ms)

    def unique_id(self, prefix: str, now_ms: int, content: bytes = b"") -> str:
        """An ID for a message that no log keeps."""
        self._draws += 1
        data = struct.pack(">QQ", self._draws, now_ms % 2**64) + content
        number = hashlib.blake2b(data, key=self._key, digest_size=8).hexdigest()
        return f"{prefix}-{number}{self._mark(number)}"

    def is_ours(self, message_id: str) -> bool:
        """Whether `unique_id` made this ID, perhaps before a restart.

        Versions without senders show in no other way that a message is our own, come back.
        """
        digits = message_id.rpartition("-")[2]
        return len(digits) == 32 and digits[16:] == self._mark(digits[:16])

    def _mark(self, number: str) -> str:
        data = b"ours " + number.encode()
        return hashlib.blake2b(data, key=self._key, digest_size=8).hexdigest()

    def _restart(self, elapsed_ms: int) -> None:
        self._start_ms = elapsed_ms
        self._draw = 0
        self._drawn_ms = None

    def _take_draw(self) -> bool:
        """Take a draw for this pause, unless it has one; whether it had."""
        if self._draw:
            return True
        self._draws += 1
        self._draw, self._drawn_window_ms = self._draws, self._window_ms
        return False

    def _due_ms(self) -> int:
        self._take_draw()
        if self._drawn_ms is None:
            data = struct.pack(">Q", self._draw)
            digest = hashlib.blake2b(data, key=self._key, digest_size=8).digest()
            share = int.from_bytes(digest) / 2**64
            self._drawn_ms = self._start_ms + int(self._drawn_window_ms * (0.5 + share / 2))
        return self._drawn_ms
