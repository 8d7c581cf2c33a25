"""MVDS: speed of a node, and what the two modes cost against loss. `python -m bench.mvds [--quick]`.

Two nodes in one process. Draining: a number of messages of 300 bytes queued at once, both sides'
CPU time. Loss: bytes and epochs until everything is acknowledged, median of several seeds; bytes are
those of payloads over those of the messages. Results: bench/results/mvds*.csv and .png.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from random import Random
from statistics import median

import matplotlib as mpl

from bench.table import RESULTS, publish
from sdstore.mvds import Deliver, MemoryState, Message, MvdsOptions, Node, Send

mpl.use("Agg")

from matplotlib import pyplot as plt

GROUP = b"group"
BODY_BYTES = 300
PAYLOAD_BYTES = 2_000  # so that many payloads are at the mercy of chance
LOSSES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
Row = dict[str, str | int | float]


class Application:
    """Keeps every message in memory."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Message] = {}

    def find(self, message_id: bytes) -> Message | None:
        """See `sdstore.mvds.Messages`."""
        return self.kept.get(message_id)

    def is_known(self, message_id: bytes) -> bool:
        """See `sdstore.mvds.Messages`."""
        return message_id in self.kept


class Pair:
    """Two nodes; `a` sends to `b`. A payload is lost with the odds `loss`."""

    def __init__(
        self, *, interactive: bool, loss: float = 0.0, seed: int = 0, payload: int = 256 * 1024
    ) -> None:
        self.random = Random(seed)
        self.loss = loss
        self.bytes = 0
        self.applications = {name: Application() for name in "ab"}
        self.states = {name: MemoryState() for name in "ab"}
        options = MvdsOptions(
            interactive=interactive, records_per_peer_max=1_000_000, payload_bytes_max=payload
        )
        self.nodes = {
            name: Node(self.states[name], self.applications[name], options) for name in "ab"
        }
        self.nodes["a"].join(GROUP, "b")
        self.nodes["b"].join(GROUP, "a")

    def publish(self, count: int) -> int:
        """Queue messages at `a`; their bytes."""
        size = 0
        for number in range(count):
            made = Message(GROUP, number, self.random.randbytes(BODY_BYTES))
            self.applications["a"].kept[made.message_id] = made
            self.nodes["a"].send(made)
            size += len(made.group_id) + len(made.body)
        return size

    def drain(self) -> int:
        """Epochs until nothing is left to send."""
        epoch = 0
        while self.states["a"].peers() or self.states["b"].peers():
            epoch += 1
            sent = [(name, each) for name in "ab" for each in self.nodes[name].tick(epoch)]
            for name, effect in sent:
                if isinstance(effect, Send):
                    self.bytes += len(effect.payload)
                    if self.random.random() >= self.loss:
                        self._arrive(name, effect)
        return epoch

    def _arrive(self, sender: str, sent: Send) -> None:
        node, application = self.nodes[sent.peer], self.applications[sent.peer]
        for effect in node.receive(sender, sent.payload):
            if isinstance(effect, Deliver):
                application.kept[effect.message.message_id] = effect.message
                node.processed(effect.message.message_id)


def drain_rows(counts: Sequence[int]) -> list[Row]:
    """Messages per second of CPU time, both sides together, and epochs."""
    rows: list[Row] = []
    for count in counts:
        for mode in ("interactive", "batch"):
            pair = Pair(interactive=mode == "interactive")
            pair.publish(count)
            started = time.process_time()
            epochs = pair.drain()
            cpu_s = time.process_time() - started
            row: Row = {"messages": count, "mode": mode, "epochs": epochs}
            rows.append(row | {"messages/s": round(count / cpu_s), "us each": cpu_s / count * 1e6})
    return rows


def loss_rows(count: int, seeds: int) -> list[Row]:
    """Bytes over those of the messages, and epochs, against loss."""
    rows: list[Row] = []
    for mode in ("interactive", "batch"):
        for loss in LOSSES:
            runs = []
            for seed in range(seeds):
                pair = Pair(
                    interactive=mode == "interactive", loss=loss, seed=seed, payload=PAYLOAD_BYTES
                )
                size = pair.publish(count)
                epochs = pair.drain()
                runs.append((pair.bytes / size, epochs))
            row: Row = {"mode": mode, "loss": loss, "bytes x": median(x for x, _ in runs)}
            rows.append(row | {"epochs": median(epochs for _, epochs in runs)})
    return rows


def plot(rows: Sequence[Mapping[str, str | int | float]]) -> None:
    """bench/results/mvds.png: bandwidth and latency of both modes against loss."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    labels = {
        "bytes x": "bytes sent / bytes of the messages",
        "epochs": "epochs until acknowledged",
    }
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for mode, style in (("interactive", "o-"), ("batch", "s--")):
            some = [row for row in rows if row["mode"] == mode]
            axis.plot(
                [100 * float(r["loss"]) for r in some], [r[key] for r in some], style, label=mode
            )
        axis.set_xlabel("payloads lost, %")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.savefig(RESULTS / "mvds.png", dpi=110)
    plt.close(figure)


def main() -> int:
    """Measure, print, write CSV and PNG."""
    quick = "--quick" in sys.argv
    publish("mvds", "MVDS, draining a queue", drain_rows([1_000] if quick else [1_000, 10_000]))
    rows = loss_rows(50, 5 if quick else 25)
    publish("mvds_loss", "MVDS against loss, 50 messages of 300 bytes", rows)
    plot(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
