"""Two commits of this project in turns: CPU time per operation of nodes that each of them serves.

`python -m bench.turns [BASE [--alternations N]]`: the working tree against commit BASE (default:
HEAD; BASE against itself shows the noise: `--itself`). Each side serves two SQLite nodes from a
checkout of its own, in the environment of this process. An alternation measures every operation once
on each side; which side is first changes each time. CPU time of the serving processes, all threads, is
read from the kernel in nanoseconds, so other work on the machine matters little.

Sessions are whole syncs between the two nodes of a side over HTTP, content included, both
processes counted.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import httpx

from bench.http_servers import as_operator
from bench.scratch import in_scratch
from bench.table import publish
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from sdstore.wire.store_pb2 import PublishBatch, PublishItem

ROOT = Path(__file__).parents[1]
PROTOBUF = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
MESSAGES = 50_000
BATCH = 1_000
CHANNELS = 20
SYNC_SECONDS_MAX = 60
_START_MS = 1_763_000_000_000


@dataclass
class Node:
    """A serving process, a client of it, and a client with its operator's token."""

    url: str
    process_id: int
    http: httpx.Client
    operator: httpx.Client

    def cpu_ns(self) -> int:
        """Of all threads so far."""
        tasks = Path(f"/proc/{self.process_id}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    def publish(self, frames: list[bytes]) -> None:
        """One batch."""
        batch = PublishBatch(items=[PublishItem(frame=frame) for frame in frames])
        answer = self.http.post(
            "/v1/messages/batch", content=batch.SerializeToString(), headers=PROTOBUF
        )
        answer.raise_for_status()

    def sync_with(self, peer: Node) -> None:
        """Make both equal and wait for it."""
        started = self.operator.post("/v1/syncs", json={"peer_url": peer.url}).raise_for_status()
        target = f"/v1/syncs/{started.json()['id']}"
        deadline = time.monotonic() + SYNC_SECONDS_MAX
        while (document := self.operator.get(target).json())["state"] != "finished":
            if time.monotonic() > deadline:
                raise TimeoutError(f"a sync took more than {SYNC_SECONDS_MAX} s")
            # Polling costs the node CPU time too, so poll rarely and equally often on both sides.
            time.sleep(0.05)
        if document["report"]["outcome"] != "in_sync":
            raise RuntimeError(str(document["report"]))


@dataclass
class Side:
    """One commit: two nodes with equal sets, and the number of messages made for them."""

    first: Node
    second: Node
    made: int = 0
    ids: list[str] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def frames(self, count: int, *, newest: bool = False) -> list[bytes]:
        """New messages of about 300 bytes; their clocks are random, or above all earlier ones."""
        return [self._frame(newest=newest) for _ in range(count)]

    def _frame(self, *, newest: bool) -> bytes:
        self.made += 1
        draw = self.random
        message_id = draw.randbytes(32).hex()
        place = self.made + MESSAGES if newest else draw.randrange(MESSAGES)
        known = tuple(HistoryEntry(each) for each in self.ids[-2:])
        self.ids.append(message_id)
        return encode(
            Message(
                message_id,
                f"/app/1/room-{draw.randrange(CHANNELS)}/proto",
                sender_id=f"0x{draw.randrange(50):040x}",
                lamport_timestamp=_START_MS + 1_000 * place + draw.randrange(1_000),
                causal_history=known,
                content=draw.randbytes(60),
            )
        )

    def cpu_ns(self) -> int:
        """Of both processes."""
        return self.first.cpu_ns() + self.second.cpu_ns()


def _get(side: Side, count: int) -> None:
    for message_id in side.random.choices(side.ids[:MESSAGES], k=count):
        side.first.http.get(
            f"/v1/messages/{message_id}", headers={"accept": PROTOBUF["accept"]}
        ).raise_for_status()


def _ingest(side: Side, count: int) -> None:
    """Batches, and the same to the other node: both stay equal."""
    for _ in range(count // BATCH):
        frames = side.frames(BATCH, newest=True)
        side.first.publish(frames)
        side.second.publish(frames)


def _post(side: Side, count: int) -> None:
    for frame in side.frames(count, newest=True):
        for node in (side.first, side.second):
            node.http.post("/v1/messages", content=frame, headers=PROTOBUF).raise_for_status()


def _page(side: Side, count: int, accept: str) -> None:
    for _ in range(count):
        channel = f"/app/1/room-{side.random.randrange(CHANNELS)}/proto"
        lamport = _START_MS + 1_000 * side.random.randrange(MESSAGES)
        side.first.http.get(
            "/v1/channels/messages",
            params={"channel_id": channel, "from_lamport": lamport, "limit": 100},
            headers={"accept": accept},
        ).raise_for_status()


def _session(side: Side, count: int, differences: int, *, newest: bool) -> None:
    """Syncs, each after so many new messages, half of them on each side."""
    for _ in range(count):
        here = side.frames((differences + 1) // 2, newest=newest)
        there = side.frames(differences // 2, newest=newest)
        if here:
            side.first.publish(here)
        if there:
            side.second.publish(there)
        side.first.sync_with(side.second)


Operation = tuple[str, int, Callable[[Side, int], None]]
"""Name of each operation, its repetitions per measurement, and its function."""

OPERATIONS: tuple[Operation, ...] = (
    ("GET by ID", 1_000, _get),
    ("POST one, two nodes", 200, _post),
    ("batch of 1,000, per message and two nodes", 2_000, _ingest),
    ("page of 100, protobuf", 50, lambda s, n: _page(s, n, PROTOBUF["accept"])),
    ("page of 100, JSON", 50, lambda s, n: _page(s, n, "application/json")),
    ("session, idle", 10, lambda s, n: _session(s, n, 0, newest=False)),
    ("session, 1 anywhere, publishing it", 10, lambda s, n: _session(s, n, 1, newest=False)),
    ("session, 10 newest, publishing them", 10, lambda s, n: _session(s, n, 10, newest=True)),
    ("session, 1,000 anywhere, publishing them", 1, lambda s, n: _session(s, n, 1_000, newest=False)),
)  # fmt: skip


def main() -> int:
    """Measure, print, write CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("base", nargs="?", default="HEAD")
    parser.add_argument("--alternations", type=int, default=20)
    parser.add_argument("--itself", action="store_true", help="BASE against BASE: the noise")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    alternations = 2 if options.quick else options.alternations
    with ExitStack() as stack:
        base = stack.enter_context(_checkout(options.base))
        trees = (base, base if options.itself else ROOT)
        sides = [stack.enter_context(_side(tree)) for tree in trees]
        costs = _alternate(sides, alternations)
    publish("turns", f"CPU time per operation: {options.base} and then", _rows(costs))
    return 0


def _alternate(sides: list[Side], alternations: int) -> dict[str, list[tuple[float, float]]]:
    """Operation -> microseconds of (base, other) of each alternation."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in OPERATIONS}
    for turn in range(-1, alternations):
        for name, count, work in OPERATIONS:
            found = [0.0, 0.0]
            for at in (0, 1) if turn % 2 else (1, 0):
                before_ns = sides[at].cpu_ns()
                work(sides[at], count)
                found[at] = (sides[at].cpu_ns() - before_ns) / count / 1e3
            if turn >= 0:  # the first is the warm-up
                costs[name].append((found[0], found[1]))
    return costs


def _rows(costs: dict[str, list[tuple[float, float]]]) -> list[dict[str, str | float]]:
    rows: list[dict[str, str | float]] = []
    for name, pairs in costs.items():
        ratios = [after / before for before, after in pairs]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        rows.append(
            {
                "operation": name,
                "base us": round(median(before for before, _ in pairs), 1),
                "then us": round(median(after for _, after in pairs), 1),
                "ratio": round(median(ratios), 3),
                "quartiles": f"{low:.3f} … {high:.3f}",
                "alternations": len(pairs),
            }
        )
    return rows


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sdstore-turns-") as folder:
        tree = Path(folder) / "tree"
        add = ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit]
        subprocess.run(add, cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            remove = ["git", "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, cwd=ROOT, check=True)


@contextmanager
def _side(tree: Path) -> Iterator[Side]:
    with ExitStack() as stack:
        side = Side(stack.enter_context(_node(tree)), stack.enter_context(_node(tree)))
        for _ in range(MESSAGES // BATCH):
            frames = side.frames(BATCH)
            side.first.publish(frames)
            side.second.publish(frames)
        side.first.sync_with(side.second)
        yield side


@contextmanager
def _node(tree: Path) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="sdstore-turns-") as folder:
        url = f"sqlite:///{folder}/store.db"
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.http_servers", "node", url, folder],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process, ExitStack() as stack:
            stack.callback(process.terminate)
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            http = stack.enter_context(
                httpx.Client(base_url=address, trust_env=False, timeout=SYNC_SECONDS_MAX)
            )
            operator = stack.enter_context(
                httpx.Client(
                    base_url=address,
                    trust_env=False,
                    timeout=SYNC_SECONDS_MAX,
                    headers=as_operator(Path(folder)),
                )
            )
            yield Node(address, process.pid, http, operator)


if __name__ == "__main__":
    sys.exit(in_scratch(main))
