"""Sessions over the news, beside histories of any length: `python -m bench.growth [SIZE ... | --quick]`.

Two nodes in one process hold the same messages and were proved equal. Then new messages arrive on each
side, and one session makes the pair equal again; the caches of views are empty each time. Bodies are
counted without the items in them. CPU is that of both sides with everything a session does: finding the
news, comparing, reading frames, checking and storing what came. `publish_cpu_ms` is what the same number
of messages costs both nodes when clients publish them: the cost of storing grows with the database.
`beyond_ms` is the rest of a session, round by round. The sizes take turns. The event loop and the
collection of garbage are those of a serving node. Results: bench/results/growth.csv.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from app.access.callers import Caller
from app.cli.server import GC_THRESHOLDS
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from app.server.settings import Settings
from bench.loading import load_file
from bench.scratch import in_scratch
from bench.table import publish
from recon.view import ViewCache
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.sync.driver import sync_with_peer
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import SyncReport
from sdstore.wire.recon_pb2 import ReconRequest

SIZES = (10_000, 100_000, 1_000_000)
QUICK_SIZES = (10_000, 30_000)
CHANNELS = 50
SESSIONS = 15
NEW_EACH = 10
NEW_IN_ONE_CHANNEL = 1_000
ONE_CHANNEL = "the channel of the interest"
_CALLER = Caller("bench")


def frames(count: int, seed: int) -> Iterator[bytes]:
    """Frames of about 300 bytes at random places of 50 channels."""
    random = Random(seed)
    for number in range(count):
        yield frame(f"{seed}-{number}", f"channel-{random.randrange(CHANNELS)}", random)


def frame(message_id: str, channel_id: str, random: Random) -> bytes:
    """One frame at a random Lamport timestamp."""
    lamport, content = random.randrange(1 << 40), random.randbytes(200)
    return encode(
        Message(message_id, channel_id, "sender", lamport_timestamp=lamport, content=content)
    )


class CountingPeer:
    """A transport into a node of this process."""

    def __init__(self, node: Node) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.item_bytes = 0
        self._node = node

    async def recon(self, request: bytes) -> bytes:
        """One call."""
        answer = await self._node.recon.endpoint.answer(request, _CALLER)
        raw = answer.SerializeToString()
        self.bytes_up += len(request)
        self.bytes_down += len(raw)
        items = [*ReconRequest.FromString(request).push, *answer.items]
        self.item_bytes += sum(each.ByteSize() + 3 for each in items)  # with tag and length
        return raw


def forget_views(node: Node) -> None:
    """Let no cached view help."""
    node.recon.index.views = ViewCache(DEFAULT_LIMITS.recon_views_bytes_max)


async def session(
    ours: Node, theirs: Node, memory: PeerMemory
) -> tuple[SyncReport, PeerMemory, dict[str, Any]]:
    """One session with its cost."""
    for node in (ours, theirs):
        forget_views(node)
    peer = CountingPeer(theirs)
    replica = ours.federation.peers._replica  # noqa: SLF001 - the initiating side, as its scheduler uses it
    started_s = time.process_time()
    report, memory = await sync_with_peer(
        replica, peer, ours.federation.interests.current, memory=memory, arrivals=replica
    )
    cpu_ms = (time.process_time() - started_s) * 1e3
    assert report.in_sync, report
    assert report.proved, report
    bodies = peer.bytes_up + peer.bytes_down - peer.item_bytes
    return report, memory, {"bytes": bodies, "trips": report.requests, "cpu_ms": cpu_ms}


class Pair:
    """Two nodes that hold the same messages, and what their sessions cost.

    `interest`: the name of the mutual interest; `new`: the messages that arrive on each side.
    """

    def __init__(self, interest: str, channels: tuple[str, ...], new: int, size: int) -> None:
        self._row: dict[str, Any] = {"interest": interest, "others": size, "new_each": new}
        self._channels = channels
        self._new = new
        self._random = Random(size)
        self._memory = PeerMemory()
        self._costs: list[dict[str, Any]] = []

    async def open(self, folder: Path, closing: AsyncExitStack) -> None:
        """Open both nodes, and prove them equal."""
        self._nodes = [
            await closing.enter_async_context(
                Node.open(
                    Settings(
                        data_dir=folder / name, sync_interval_s=3_600, channels=self._channels
                    ),
                    DEFAULT_LIMITS,
                )
            )
            for name in ("ours", "theirs")
        ]
        _, self._memory, whole = await session(*self._nodes, self._memory)
        self._row["whole_cpu_ms"] = whole["cpu_ms"]

    async def round(self, number: int) -> None:
        """New messages on each side, and a session."""
        publish_cpu_ms = 0.0
        for node in self._nodes:
            channel = (*self._channels, f"channel-{self._random.randrange(CHANNELS)}")[0]
            batch = [
                Publication(frame(f"new-{node.instance_id}-{number}-{n}", channel, self._random))
                for n in range(self._new)
            ]
            started_s = time.process_time()
            outcomes = await node.ingest.door.publish_many(batch)
            publish_cpu_ms += (time.process_time() - started_s) * 1e3
            for outcome in outcomes:
                assert not isinstance(outcome, Exception), outcome
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report, self._memory, cost = await session(*self._nodes, self._memory)
        assert report.entries_received == report.entries_sent == self._new, report
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        cost |= {"publish_cpu_ms": publish_cpu_ms, "beyond_ms": cost["cpu_ms"] - publish_cpu_ms}
        self._costs.append(cost | {"rss_growth_kib": growth})

    async def row(self) -> dict[str, Any]:
        """The medians, the largest growth of memory, and the cost of an idle session."""
        idles = []
        for _ in range(
            1 + SESSIONS
        ):  # the first one still compares what the last one before it moved
            _, self._memory, idle = await session(*self._nodes, self._memory)
            idles.append(idle)
        row = self._row | {
            name: statistics.median(each[name] for each in self._costs) for name in self._costs[0]
        }
        row |= {name: int(row[name]) for name in ("bytes", "trips")}
        row["rss_growth_kib"] = max(each["rss_growth_kib"] for each in self._costs)
        idle_cpu_ms = statistics.median(each["cpu_ms"] for each in idles[1:])
        return row | {"idle_bytes": idles[-1]["bytes"], "idle_cpu_ms": idle_cpu_ms}


async def measured(
    folders: dict[int, Path], interest: str, channels: tuple[str, ...], new: int
) -> list[dict[str, Any]]:
    """A row for each size; the sizes take turns, so that all see the machine in the same state."""
    async with AsyncExitStack() as closing:
        pairs = [Pair(interest, channels, new, size) for size in folders]
        for pair, folder in zip(pairs, folders.values(), strict=True):
            await pair.open(folder, closing)
        gc.collect()
        gc.freeze()
        for number in range(SESSIONS):
            for pair in pairs:
                await pair.round(number)
        return [await pair.row() for pair in pairs]


def main() -> None:
    """Every size, in the same interest and beside it."""
    gc.set_threshold(*GC_THRESHOLDS)
    rows = []
    sizes = tuple(int(each) for each in sys.argv[1:] if each.isdigit())
    with tempfile.TemporaryDirectory() as name:
        folders = {}
        for size in sizes or (QUICK_SIZES if "--quick" in sys.argv else SIZES):
            folder = folders[size] = Path(name) / str(size)
            for each in ("ours", "theirs"):
                (folder / each).mkdir(parents=True)
            load_file(folder / "ours" / "sdstore.db", ((raw, ()) for raw in frames(size, size)))
            shutil.copyfile(folder / "ours" / "sdstore.db", folder / "theirs" / "sdstore.db")
        for interest, channels, new in (
            ("all", (), NEW_EACH),
            ("one channel", (ONE_CHANNEL,), NEW_IN_ONE_CHANNEL),
        ):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rows += runner.run(measured(folders, interest, channels, new))
    publish("growth", "Sessions over the news, both sides", rows)


if __name__ == "__main__":
    in_scratch(main)
