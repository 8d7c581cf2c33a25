"""Graphs for tests: written as lines, or random."""

from __future__ import annotations

import random
from typing import NamedTuple


class Sent(NamedTuple):
    """A message: its sender is the first letter of its ID."""

    message_id: str
    sender_id: str
    causes: tuple[str, ...]


def graph(text: str) -> list[Sent]:
    """Messages from lines such as "c1: b0 c0", causes first; a line can hold several after commas."""
    sent = []
    for part in text.replace("\n", ",").split(","):
        name, _, causes = part.strip().partition(":")
        if name:
            sent.append(Sent(name, name[0], tuple(causes.split())))
    return sent


def random_graph(
    rng: random.Random, writer_count: int, message_count: int, news_share: float
) -> list[Sent]:
    """Writers that hear of each other's messages now and then, and refer to all heads that they know.

    `news_share`: the higher, the more a writer has heard before it writes.
    """
    writers = [chr(ord("a") + i) for i in range(writer_count)]
    known: dict[str, set[str]] = {writer: set() for writer in writers}
    views: dict[str, set[str]] = {}
    last: dict[str, str] = {}
    counts = dict.fromkeys(writers, 0)
    sent = []
    for _ in range(message_count):
        writer = rng.choice(writers)
        while rng.random() < news_share:
            other = rng.choice(writers)
            if rng.random() < 0.5:
                known[writer] |= known[other]
            elif known[other]:
                known[writer] |= views[rng.choice(sorted(known[other]))]
        behind = {cause for each in known[writer] for cause in views[each] if cause != each}
        causes = known[writer] - behind
        if writer in last:
            causes.add(last[writer])
        message_id = f"{writer}{counts[writer]}"
        counts[writer] += 1
        last[writer] = message_id
        views[message_id] = {message_id}.union(*[views[each] for each in causes])
        known[writer].add(message_id)
        sent.append(Sent(message_id, writer, tuple(sorted(causes))))
    return sent
