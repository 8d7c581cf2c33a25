"""What an SDS participant costs, beside js-waku: `python -m bench.participant [--quick]`.

Two participants share a channel; messages have 100 bytes of content and a causal history of two. In a
lecture one of them sends everything and nothing is acknowledged; in a dialogue both send in turn, and
each message acknowledges the one before. Every frame goes from `send` of one side straight to `receive`
of the other, so no more than one frame exists at a time. Figures are CPU time per message of the last
half of a channel with so many messages: of `send`; and of `receive` with `confirm`, from the frame to
the delivery. Up to 10,000 messages it is the lowest of three runs.

Logs:
- memory: `MemoryLog`, without the frames of all but the newest 10 messages. With them, 100,000 messages
  with filters are 1.9 GB; the participant does not read them here.
- SQLite: `ParticipantFile`, one file for each side. Every 100 messages a transaction saves the effects,
  the syncs to the disk included; its CPU time counts too.
- js-waku: `@waku/sds` with its log in memory, up to 4,000 messages. It cannot send without a filter.

"x js" is js-waku's cost over ours, and "x 10^3" the cost over that with 1,000 messages.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

from bench.scratch import in_scratch
from bench.table import publish
from sdstore.participant.file import ParticipantFile
from sdstore.sds.bloom import Form
from sdstore.sds.effects import Broadcast, Deliver, Effect
from sdstore.sds.log import LogEntry, MemoryLog
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.participant import Participant
from tests.support.js_waku import PROJECT
from tests.support.node import node_process, node_project

CHANNEL = "channel"
START_MS = 1_763_000_000_000
CONTENT_BYTES = 100
COUNTS = (1_000, 4_000, 10_000, 100_000)
COUNTS_QUICK = (1_000, 2_000)
JS_COUNT_MAX = 4_000
FRAMES_KEPT = 10
RUNS = 3
SHORT_MAX = 10_000
SAVE_EVERY = 100
HINT = bytes([7]) * 32


@dataclass
class Cost:
    """CPU time since the last `restart`."""

    send_s: float = 0.0
    receive_s: float = 0.0

    def restart(self) -> None:
        """Start a measurement."""
        self.send_s = self.receive_s = 0.0


class RecentFramesLog(MemoryLog):
    """A log in memory that can forget the frames and filters of old messages."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[str] = deque()

    def append(self, entry: LogEntry) -> None:
        """See `ParticipantLog`."""
        super().append(entry)
        self._kept.append(entry.message.message_id)

    def forget_old(self) -> None:
        """Called while no time is taken."""
        while len(self._kept) > FRAMES_KEPT:
            message_id = self._kept.popleft()
            self._logged[message_id] = (b"", *self._logged[message_id][1:])


class Side:
    """A participant and what carries out its effects: nothing, or a file."""

    def __init__(
        self, name: str, options: ParticipantOptions, file: ParticipantFile | None
    ) -> None:
        self._file = file
        self._unsaved: list[Effect] = []
        self._memory = RecentFramesLog()
        log = self._memory if file is None else file.log(CHANNEL)
        self._participant = Participant(CHANNEL, name, options=options, log=log)

    def send(self, content: bytes, now_ms: int) -> bytes:
        """The frame."""
        effects = self._participant.send(content, now_ms, HINT)
        self._keep(effects)
        (frame,) = [each.frame for each in effects if isinstance(each, Broadcast)]
        return frame

    def receive(self, frame: bytes, now_ms: int) -> None:
        """Receive, deliver, confirm."""
        effects = self._participant.receive(frame, now_ms, HINT)
        self._keep(effects)
        (number,) = [each.number for each in effects if isinstance(each, Deliver)]
        self._keep(self._participant.confirm(number))

    def save(self) -> None:
        """What came since the last save, in one transaction."""
        if self._file is not None:
            self._file.save(CHANNEL, self._unsaved)
        self._unsaved = []

    def forget_old(self) -> None:
        """Keep the memory of the process bounded."""
        self._memory.forget_old()

    def _keep(self, effects: Sequence[Effect]) -> None:
        if self._file is not None:
            self._unsaved += effects


@dataclass(frozen=True)
class Setting:
    """What is measured; see the module."""

    log: str
    pattern: str
    has_filter: bool

    def measure(self, counts: Sequence[int]) -> list[tuple[float, float]]:
        """Microseconds of (send, receive) at each count: the lowest of `RUNS`, of one if it is long."""
        short = [count for count in counts if count <= SHORT_MAX]
        runs = [self._grow(counts), *(self._grow(short) for _ in range(RUNS - 1))]
        return [
            (min(send for send, _ in each), min(receive for _, receive in each))
            for each in zip_longest(*runs, fillvalue=(inf, inf))
        ]

    def _grow(self, counts: Sequence[int]) -> list[tuple[float, float]]:
        """One channel that grows, measured at each count."""
        options = ParticipantOptions(history_max=2, bloom=Form.JS if self.has_filter else None)
        with ExitStack() as stack:
            sides = [
                Side(name, options, self._open(name, stack) if self.log == "SQLite" else None)
                for name in ("alice", "bob")
            ]
            gc.collect()
            gc.freeze()  # what was imported is not this participant's
            cost = Cost()
            found = []
            number = 0
            for count in counts:
                measured = measured_of(count)
                self._exchange(sides, range(number, count - measured), cost)
                cost.restart()
                self._exchange(sides, range(count - measured, count), cost)
                found.append((cost.send_s / measured * 1e6, cost.receive_s / measured * 1e6))
                number = count
        return found

    def _open(self, name: str, stack: ExitStack) -> ParticipantFile:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sdstore-bench-"))
        return stack.enter_context(ParticipantFile(Path(folder) / f"{name}.db"))

    def _exchange(self, sides: Sequence[Side], numbers: range, cost: Cost) -> None:
        for number in numbers:
            at = number % 2 if self.pattern == "dialogue" else 0
            now_ms = START_MS + 1_000 * number
            content = b"message %d " % number
            content = content.ljust(CONTENT_BYTES, b".")
            is_saved = number % SAVE_EVERY == SAVE_EVERY - 1
            started_s = time.process_time()
            frame = sides[at].send(content, now_ms)
            if is_saved:
                sides[at].save()
            sent_s = time.process_time()
            sides[1 - at].receive(frame, now_ms)
            if is_saved:
                sides[1 - at].save()
            cost.receive_s += time.process_time() - sent_s
            cost.send_s += sent_s - started_s
            for side in sides:
                side.forget_old()


SETTINGS = tuple(
    Setting(log, pattern, has_filter)
    for log, pattern in (("memory", "lecture"), ("memory", "dialogue"), ("SQLite", "lecture"))
    for has_filter in (False, True)
)


def measured_of(count: int) -> int:
    """How many of the last messages are measured."""
    return count // 2


def rows(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Every setting at every count, beside js-waku."""
    found: list[dict[str, Any]] = []
    js: dict[tuple[str, bool, int], dict[str, Any]] = {}
    with node_process(node_project(PROJECT) / "measure.mjs") as node:
        for setting in SETTINGS:
            measured = setting.measure(counts)
            for count, (send_us, receive_us) in zip(counts, measured, strict=True):
                key = (setting.pattern, setting.has_filter, count)
                if key not in js and count <= JS_COUNT_MAX:
                    js[key] = node.call(
                        messages=count,
                        measured=measured_of(count),
                        dialogue=setting.pattern == "dialogue",
                        filter=setting.has_filter,
                    )
                theirs = js.get(key)
                found.append(
                    {
                        "log": setting.log,
                        "pattern": setting.pattern,
                        "filter": "yes" if setting.has_filter else "no",
                        "messages": count,
                        "send us": round(send_us, 1),
                        "receive us": round(receive_us, 1),
                        "js send us": theirs and setting.has_filter and round(theirs["send_us"]),
                        "js receive us": theirs and round(theirs["receive_us"]),
                        "send x js": theirs and setting.has_filter and theirs["send_us"] / send_us,
                        "receive x js": theirs and theirs["receive_us"] / receive_us,
                        "send x 10^3": send_us / measured[0][0],
                        "receive x 10^3": receive_us / measured[0][1],
                    }
                )
    return [{key: value or "" for key, value in row.items()} for row in found]


def main() -> int:
    """Measure, print, write CSV."""
    counts = COUNTS_QUICK if "--quick" in sys.argv else COUNTS
    publish("participant", "An SDS participant: CPU time per message", rows(counts))
    return 0


if __name__ == "__main__":
    sys.exit(in_scratch(main))
