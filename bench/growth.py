"""Sessions over the news, beside histories of any length: `python -m bench.growth [--quick]`.

Two nodes in one process hold the same messages and were proved equal. Then new messages arrive on each
side, and one session makes the pair equal again; the caches of views are empty each time. Bodies are
counted without the items in them. CPU is that of both sides with everything a session does: finding the
news, comparing, reading frames, checking and storing what came. Results: bench/results/growth.csv.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from app.callers import Caller
from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS
from app.node import Node
from app.recon.budget import Allowance
from app.settings import Settings
from bench.loading import load_file
from bench.scratch import in_scratch
from bench.table import publish
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import SyncReport
from sdstore.sync.session import sync_with_peer
from sdstore.wire.recon_pb2 import ReconRequest

SIZES = (10_000, 100_000, 1_000_000)
QUICK_SIZES = (10_000, 30_000)
CHANNELS = 50
SESSIONS = 9
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

    told_policy: int | None = None

    def __init__(self, node: Node) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.item_bytes = 0
        self._node = node

    async def interest(self) -> bytes:
        """The node's interest."""
        return self._node.interests.current.encode()

    async def recon(self, request: bytes) -> bytes:
        """One call."""
        allowance = Allowance(self._node.limits)
        answer = await self._node.recon.answer(request, _CALLER, allowance)
        raw = answer.SerializeToString()
        self.bytes_up += len(request)
        self.bytes_down += len(raw)
        items = [*ReconRequest.FromString(request).push, *answer.items]
        self.item_bytes += sum(each.ByteSize() + 3 for each in items)  # with tag and length
        return raw


def forget_views(node: Node) -> None:
    """Let no cached view help."""
    node.index._views = node.index._caches()[0]  # noqa: SLF001 - a node never forgets them


async def session(
    ours: Node, theirs: Node, memory: PeerMemory
) -> tuple[SyncReport, PeerMemory, dict[str, Any]]:
    """One session with its cost."""
    for node in (ours, theirs):
        forget_views(node)
    peer = CountingPeer(theirs)
    replica = ours.peers._replica  # noqa: SLF001 - the initiating side, as its scheduler uses it
    started_s = time.process_time()
    report, memory = await sync_with_peer(
        replica, peer, ours.interests.current, memory=memory, arrivals=replica
    )
    cpu_ms = (time.process_time() - started_s) * 1e3
    assert report.in_sync, report
    assert report.proved, report
    bodies = peer.bytes_up + peer.bytes_down - peer.item_bytes
    return report, memory, {"bytes": bodies, "trips": report.requests, "cpu_ms": cpu_ms}


async def measured(folder: Path, size: int, channels: tuple[str, ...], new: int) -> dict[str, Any]:
    """The median cost of sessions with `new` messages on each side, beside `size` others."""
    random = Random(size)
    settings = [
        Settings(data_dir=folder / name, sync_interval_s=3_600, channels=channels)
        for name in ("ours", "theirs")
    ]
    async with (
        Node.open(settings[0], DEFAULT_LIMITS) as ours,
        Node.open(settings[1], DEFAULT_LIMITS) as theirs,
    ):
        _, memory, whole = await session(ours, theirs, PeerMemory())
        costs, peaks = [], []
        for number in range(SESSIONS):
            for node in (ours, theirs):
                channel = channels[0] if channels else f"channel-{random.randrange(CHANNELS)}"
                batch = [
                    Publication(frame(f"new-{node.instance_id}-{number}-{n}", channel, random))
                    for n in range(new)
                ]
                for outcome in await node.door.publish_many(batch):
                    assert not isinstance(outcome, Exception), outcome
                await node.index.catch_up()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            report, memory, cost = await session(ours, theirs, memory)
            assert report.entries_received == report.entries_sent == new, report
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            costs.append(cost)
        _, _, idle = await session(ours, theirs, memory)
    return {
        "others": size,
        "new_each": new,
        "bytes": int(statistics.median(each["bytes"] for each in costs)),
        "trips": int(statistics.median(each["trips"] for each in costs)),
        "cpu_ms": statistics.median(each["cpu_ms"] for each in costs),
        "rss_growth_kib": max(peaks),
        "idle_bytes": idle["bytes"],
        "idle_cpu_ms": idle["cpu_ms"],
        "whole_cpu_ms": whole["cpu_ms"],
    }


def main() -> None:
    """Every size, in the same interest and beside it."""
    sizes = QUICK_SIZES if "--quick" in sys.argv else SIZES
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for each in ("ours", "theirs"):
                (folder / each).mkdir()
            load_file(folder / "ours" / "sdstore.db", ((raw, ()) for raw in frames(size, size)))
            shutil.copyfile(folder / "ours" / "sdstore.db", folder / "theirs" / "sdstore.db")
            for interest, channels, new in (
                ("all", (), NEW_EACH),
                ("one channel", (ONE_CHANNEL,), NEW_IN_ONE_CHANNEL),
            ):
                row = asyncio.run(measured(folder, size, channels, new))
                rows.append({"interest": interest, **row})
                print(rows[-1], flush=True)
    publish("growth", "Sessions over the news, both sides", rows)


if __name__ == "__main__":
    in_scratch(main)
