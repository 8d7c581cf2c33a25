"""What the order of a channel costs: `python -m bench.ordering [--quick]`.

A channel is built message by message. Figures are CPU time on one core:
- "built/s": messages per second, from an empty order to this length.
- "added/s": messages per second of the last half, each with its `Change`: what a reader pays who keeps the order.
- "x 10^3": the cost of a message of the last half, over that in a channel of 1,000 messages.
- "bytes": memory of the order per message, IDs included, of a channel with 10,000 messages.

Channels:
- N writers: all are indexers. A writer refers to its own message before and to the newest two that it has seen; two
  writers of five are one to three messages behind.
- "… silent": so many indexers of three or five never write, and 20 clients do. In 5 messages of 100 a
  client knows only one old message. With two silent ones of three, and three of five, nothing is ever confirmed.
- "no indexers": the same with clients only.
- "not referred to": three indexers refer to each other only, and nine clients to them.

It writes bench/results/ordering.csv and ordering.png.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

import matplotlib as mpl

from bench.table import RESULTS, publish
from sdstore.ordering import Ordering, Roles

mpl.use("Agg")

from matplotlib import pyplot as plt

COUNTS = (1_000, 10_000, 100_000)
COUNTS_QUICK = (1_000, 10_000)
MEMORY_COUNT = 10_000
RUNS = 3
SHORT_MAX = 10_000
CLIENTS = 20

Message = tuple[str, str, tuple[str, ...]]


class Channel(NamedTuple):
    """What is measured; see the module."""

    name: str
    indexer_count: int
    active_count: int
    client_count: int = 0
    late_share: float = 0.0

    def roles(self) -> Roles:
        """All indexers, the silent ones too."""
        return Roles(indexers=[f"w{i}" for i in range(self.indexer_count)])

    def messages(self, count: int) -> list[Message]:
        """Causes first."""
        rng = Random(count)
        clients = [f"c{i}" for i in range(self.client_count)]
        writers = [*self.roles().indexers[: self.active_count], *clients]
        sent: list[str] = []
        last: dict[str, str] = {}
        seen_count: dict[str, int] = {}
        messages: list[Message] = []
        for number in range(count):
            sender = rng.choice(writers)
            if sent and sender in clients and rng.random() < self.late_share:
                causes = {rng.choice(sent)}
            else:
                end = len(sent) - rng.choice((0, 0, 0, 1, 3))
                causes = set(sent[max(0, end - 2) : max(0, end)])
            if (
                self.client_count and sender not in clients
            ):  # an indexer names what it has not named
                causes.update(sent[seen_count.get(sender, 0) :])
                seen_count[sender] = len(sent)
            if sender in last:
                causes.add(last[sender])
            message_id = last[sender] = f"message {number}"
            sent.append(message_id)
            messages.append((message_id, sender, tuple(sorted(causes))))
        return messages


class NotReferredTo(Channel):
    """Indexers that do not refer to clients."""

    def messages(self, count: int) -> list[Message]:
        """Causes first; two messages of three are by clients."""
        rng = Random(count)
        last: dict[str, str] = {}
        newest = ""
        messages: list[Message] = []
        for number in range(count):
            is_client = number % 3 > 0
            sender = f"c{rng.randrange(self.client_count)}" if is_client else f"w{number // 3 % 3}"
            causes = tuple(dict.fromkeys(filter(None, (newest, last.get(sender)))))
            message_id = last[sender] = f"message {number}"
            newest = newest if is_client else message_id
            messages.append((message_id, sender, causes))
        return messages


CHANNELS = (
    *(Channel(f"{count} writers", count, count) for count in (3, 9, 17, 33)),
    Channel("one of 3 silent", 3, 2, CLIENTS, 0.05),
    Channel("two of 3 silent", 3, 1, CLIENTS, 0.05),
    Channel("three of 5 silent", 5, 2, CLIENTS, 0.05),
    Channel("no indexers", 0, 0, CLIENTS, 0.05),
    NotReferredTo("not referred to", 3, 3, 9),
)


def measure(channel: Channel, count: int) -> tuple[float, float, int]:
    """Microseconds per message: of all, of the last half; and the length of the confirmed prefix."""
    messages = channel.messages(count)
    ordering = Ordering(channel.roles())
    half = count // 2
    gc.collect()
    started_s = time.process_time()
    for each in messages[:half]:
        ordering.add(*each)
    middle_s = time.process_time()
    for each in messages[half:]:
        ordering.add(*each)
    ended_s = time.process_time()
    all_us = (ended_s - started_s) / count * 1e6
    return all_us, (ended_s - middle_s) / (count - half) * 1e6, ordering.confirmed_count


def memory_bytes(channel: Channel, count: int) -> float:
    """Memory of the order per message, without the lists of causes that are passed in."""
    messages = channel.messages(count)
    gc.collect()
    tracemalloc.start()
    ordering = Ordering(channel.roles())
    for message_id, sender_id, causes in messages:
        # An ID is a string of its own in each message, as it is when messages are decoded.
        ordering.add(message_id[:1] + message_id[1:], sender_id, causes)
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size_bytes / count


def rows(channel: Channel, counts: Sequence[int]) -> list[dict[str, str | int | float]]:
    """A row for each length: the lowest of `RUNS`, of one run if it is long."""
    size_bytes = memory_bytes(channel, min(MEMORY_COUNT, max(counts)))
    found: list[dict[str, str | int | float]] = []
    first_us = 0.0
    for count in counts:
        runs = [measure(channel, count) for _ in range(RUNS if count <= SHORT_MAX else 1)]
        built_us = min(all_us for all_us, _, _ in runs)
        added_us = min(half_us for _, half_us, _ in runs)
        first_us = first_us or added_us
        found.append(
            {
                "channel": channel.name,
                "messages": count,
                "built/s": round(1e6 / built_us),
                "added/s": round(1e6 / added_us),
                "x 10^3": added_us / first_us,
                "confirmed": runs[0][2],
                "bytes": round(size_bytes),
            }
        )
    return found


def plot(measured: Sequence[Mapping[str, str | int | float]]) -> None:
    """bench/results/ordering.png: messages per second over the length, for each channel."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for channel in CHANNELS:
        some = [row for row in measured if row["channel"] == channel.name]
        axis.semilogx(
            [float(row["messages"]) for row in some],
            [float(row["added/s"]) for row in some],
            "o-",
            label=channel.name,
        )
    axis.set_xlabel("messages in the channel")
    axis.set_ylabel("messages added per second")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(RESULTS / "ordering.png", dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, print, write."""
    counts = COUNTS_QUICK if "--quick" in sys.argv else COUNTS
    measured = [row for channel in CHANNELS for row in rows(channel, counts)]
    publish("ordering", "The order of a channel, CPU time on one core", measured)
    plot(measured)


if __name__ == "__main__":
    main()
