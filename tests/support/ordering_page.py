"""The tables of docs/ordering.md: `python -m tests.support.ordering_page`."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from sdstore.ordering import Ordering, Roles
from tests.ordering.graphs import Sent, graph

PAGE = Path(__file__).parents[2] / "docs" / "ordering.md"


def page(*names: str) -> str:
    """The page with these parts made anew; without names, all of them."""
    text = PAGE.read_text(encoding="utf-8")
    for name in names or PARTS:
        mark = f"<!-- {name} -->\n"
        head, found, rest = text.partition(mark)
        assert found, name
        _, tail = rest.split("\n\n", 1)
        text = head + mark + "\n".join(PARTS[name]()) + "\n\n" + tail
    return text


# --- a chat as it arrives

CHAT = "a0, c0: a0, a1: c0 a0, c1: a1 c0, b0: a0, a2: c1 b0 a1, c2: a2 c1, b1: c2 b0"
CLOCKS = {"a0": 1, "c0": 2, "a1": 3, "c1": 4, "b0": 2, "a2": 5, "c2": 6, "b1": 7}
WORDS = {
    "a0": "lunch at one?", "c0": "yes", "a1": "booked", "c1": "thanks", "b0": "no, at two",
    "a2": "too late", "c2": "next time", "b1": "fine",
}  # fmt: skip


def chat_table() -> list[str]:
    """What ada's phone shows after each arrival, in both orders."""
    ordering = Ordering(Roles(indexers=("a", "b", "c")))
    shown: list[tuple[int, str]] = []
    lines = [
        "| arrives | what it says | by Lamport timestamp | confirmed, then tentative | taken back |",
        "|---|---|---|---|---|",
    ]
    for sent in graph(CHAT):  # it arrives as it is written down
        name = sent.message_id
        insort(shown, (CLOCKS[name], name))
        is_redrawn = shown[-1][1] != name
        change = ordering.add(*sent)
        lamport = " ".join(f"**{each}**" if each == name else each for _, each in shown)
        confirmed = " ".join(ordering.confirmed) or "–"
        lines.append(
            f"| `{name}` | {WORDS[name]} | {lamport}{', redrawn' if is_redrawn else ''} "
            f"| {confirmed} ‖ {' '.join(ordering.tail)} | {change.rewound} |"
        )
    return lines


# --- a simulated chat

MESSAGES = 3_000
SEED = 1
TRANSPORT_S = 0.3  # median; one in twenty takes ten times as long
AWAY_EVERY_S, AWAY_S = 1_800.0, 120.0


@dataclass
class Member:
    """A participant in ordered mode: it refers to its previous message and to all heads that it knows."""

    name: str
    known: dict[str, Sent] = field(default_factory=dict)
    heads: dict[str, None] = field(default_factory=dict)
    waiting: dict[str, tuple[Sent, int]] = field(default_factory=dict)
    clock_ms: int = 0
    count: int = 0
    away_until_s: float = 0.0

    def write(self, now_s: float) -> tuple[Sent, int]:
        last = [f"{self.name}-{self.count - 1}"] if self.count else []
        causes = tuple(dict.fromkeys([*last, *self.heads]))
        sent = Sent(f"{self.name}-{self.count}", self.name, causes)
        self.count += 1
        self.clock_ms = max(int(now_s * 1_000), self.clock_ms + 1)
        self.take(sent, self.clock_ms)
        return sent, self.clock_ms

    def hear(self, sent: Sent, clock_ms: int) -> list[tuple[Sent, int]]:
        """The messages that are delivered now, in causal order."""
        self.waiting[sent.message_id] = (sent, clock_ms)
        delivered = []
        while ready := [frame for frame in self.waiting.values() if self.has_causes(frame[0])]:
            for frame in ready:
                del self.waiting[frame[0].message_id]
                self.take(*frame)
            delivered += ready
        return delivered

    def has_causes(self, sent: Sent) -> bool:
        return all(cause in self.known for cause in sent.causes)

    def take(self, sent: Sent, clock_ms: int) -> None:
        self.known[sent.message_id] = sent
        self.clock_ms = max(self.clock_ms, clock_ms)
        for cause in sent.causes:
            self.heads.pop(cause, None)
        self.heads[sent.message_id] = None


@dataclass
class Reader:
    """What one member's screen shows, in both orders."""

    ordering: Ordering
    lamport: list[tuple[int, str]] = field(default_factory=list)
    arrived: dict[str, tuple[float, int]] = field(default_factory=dict)
    redrawn: int = 0
    rewound: int = 0
    lags_s: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)

    def show(self, sent: Sent, clock_ms: int, now_s: float) -> None:
        self.arrived[sent.message_id] = (now_s, len(self.arrived))
        place = (clock_ms, sent.message_id)
        insort(self.lamport, place)
        self.redrawn += self.lamport[-1] != place
        tail_count = len(self.ordering) - self.ordering.confirmed_count
        change = self.ordering.add(*sent)
        assert change.rewound <= tail_count  # confirmed lines never move
        self.rewound += change.rewound > 0
        for name in change.confirmed:
            then_s, number = self.arrived[name]
            self.lags_s.append(now_s - then_s)
            self.lags.append(len(self.arrived) - 1 - number)


Frame = tuple[Sent, int]  # a message and its Lamport timestamp


class Chat:
    """Members who are all indexers; one message each `pause_s` in all. The first one's screen is read."""

    def __init__(self, member_count: int, pause_s: float) -> None:
        self.rng = random.Random(SEED)
        self.pause_s = pause_s * member_count
        self.members = [Member(f"m{number}") for number in range(member_count)]
        self.reader = Reader(Ordering(Roles(indexers=[each.name for each in self.members])))
        self.next_away_s = [self.rng.expovariate(1 / AWAY_EVERY_S) for _ in self.members]
        self.written = 0
        self.events_count = 0
        # Time, number of the event, member, and what arrives; None: its turn to write.
        self.queue: list[tuple[float, int, int, Frame | None]] = []

    def run(self) -> Reader:
        for at in range(len(self.members)):
            self.plan(self.rng.expovariate(1 / self.pause_s), at, None)
        while self.queue:
            now_s, _, at, frame = heappop(self.queue)
            member = self.members[at]
            if now_s > self.next_away_s[at]:
                member.away_until_s = self.next_away_s[at] + AWAY_S
                pause_s = self.rng.expovariate(1 / AWAY_EVERY_S)
                self.next_away_s[at] = member.away_until_s + pause_s
            if now_s < member.away_until_s:
                self.plan(member.away_until_s, at, frame)  # in the same order
            elif frame is not None:
                self.show(at, member.hear(*frame), now_s)
            elif self.written < MESSAGES:
                self.write(at, now_s)
        assert not self.reader.ordering.breaches
        assert len(self.reader.ordering) == MESSAGES
        return self.reader

    def plan(self, time_s: float, at: int, frame: Frame | None) -> None:
        self.events_count += 1
        heappush(self.queue, (time_s, self.events_count, at, frame))

    def show(self, at: int, frames: list[Frame], now_s: float) -> None:
        for frame in frames:
            if at == 0:
                self.reader.show(*frame, now_s)

    def write(self, at: int, now_s: float) -> None:
        self.written += 1
        frame = self.members[at].write(now_s)
        self.show(at, [frame], now_s)
        for other in range(len(self.members)):
            if other != at:
                delay_s = TRANSPORT_S * self.rng.lognormvariate(0, 0.5)
                delay_s *= 10 if self.rng.random() < 0.05 else 1
                self.plan(now_s + delay_s, other, frame)
        self.plan(now_s + self.rng.expovariate(1 / self.pause_s), at, None)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values is."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measured_table() -> list[str]:
    """Both orders over simulated chats."""
    titles = (
        "| a message every | indexers | log order redrawn "
        "| tail redrawn | lag in messages | lag in seconds |"
    )
    lines = [titles, "|---" * 6 + "|"]
    for pause_s in (30.0, 1.0):
        for count in (3, 9):
            seen = Chat(count, pause_s).run()
            lines.append(
                f"| {pause_s:.0f} s | {count} | {seen.redrawn / MESSAGES:.1%} "
                f"| {seen.rewound / MESSAGES:.1%} "
                f"| {quantile(seen.lags, 0.5)}, {quantile(seen.lags, 0.99)} "
                f"| {quantile(seen.lags_s, 0.5):.0f}, {quantile(seen.lags_s, 0.99):.0f} |"
            )
    return lines


PARTS: dict[str, Callable[[], list[str]]] = {
    "chat": chat_table,
    "measured": measured_table,
}

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
