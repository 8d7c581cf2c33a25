"""The peers of this node, and one loop for each: sync, wait, sync again.

A loop belongs to one peer alone, so a slow or dead peer delays nobody. Peers are kept in memory:
those of the settings come back with the next start.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from blake3 import blake3

from app.errors import Code, Problem
from app.federation.address import parse_peer_url, resolve, url_text
from app.federation.interests import interest_of
from app.federation.local import LocalSide
from app.federation.memory import PeerMemory
from app.federation.report import Progress, SyncReport
from app.federation.session import sync_with_peer
from app.federation.syncs import RunSync, Sync, Syncs
from app.federation.transport import open_http_transport
from app.limits import Limits
from app.settings import Settings
from recon.interest import Interest

BACKOFF_FACTOR = 2.0
BACKOFF_S_MAX = 600.0  # a peer that comes back is found within ten minutes
JITTER = 0.1  # peers that were started together drift apart


@dataclass(slots=True, eq=False)
class Peer:
    """One peer. `failures` counts the failed syncs since the last good one."""

    peer_id: str
    url: httpx.URL
    memory: PeerMemory = field(default_factory=PeerMemory)
    failures: int = 0
    last_sync: Sync | None = None
    next_sync_at_ms: int | None = None
    loop: asyncio.Task[None] | None = None

    def document(self) -> dict[str, Any]:
        """The peer as JSON."""
        finished = self.last_sync is not None and self.last_sync.is_finished
        state = "failing" if self.failures else "healthy" if finished else "new"
        return {
            "id": self.peer_id,
            "url": url_text(self.url),
            "state": state,
            "failures": self.failures,
            "last_sync_id": self.last_sync.sync_id if self.last_sync else None,
            "next_sync_at_ms": self.next_sync_at_ms,
        }

    def status(self) -> dict[str, Any]:
        """The peer with the report of its last sync."""
        report = self.last_sync.report if self.last_sync else None
        return self.document() | {"last_report": asdict(report) if report else None}


class Peers:
    """Every peer of a node. `start` before, `close` after use."""

    def __init__(self, local: LocalSide, syncs: Syncs, settings: Settings, limits: Limits) -> None:
        self._local = local
        self._syncs = syncs
        self._settings = settings
        self._limits = limits
        self._peers: dict[str, Peer] = {}
        # What was learned of stores that were synced with by URL: as bounded as the sessions are.
        self._memories: dict[str, PeerMemory] = {}

    async def start(self) -> None:
        """Add the peers of the settings. One that is down or not allowed shows it in its reports."""
        for text in self._settings.peers:
            self._add(parse_peer_url(text))

    async def close(self) -> None:
        """End all loops."""
        loops = [peer.loop for peer in self._peers.values() if peer.loop]
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def add(self, url_text: str) -> Peer:
        """Add a peer, or find the one that has this URL already.

        Raises Problem: PEER_URL_REFUSED, PEER_UNREACHABLE where the name does not resolve.
        """
        url = parse_peer_url(url_text)
        await resolve(url, private_allowed=self._settings.allows_private_peers)
        return self._add(url)

    def _add(self, url: httpx.URL) -> Peer:
        peer_id = peer_id_of(url)
        if peer_id not in self._peers:
            if len(self._peers) >= self._limits.peers_max:
                raise Problem(
                    Code.TOO_MANY_ITEMS, f"a node has up to {self._limits.peers_max} peers"
                )
            peer = self._peers[peer_id] = Peer(peer_id, url)
            peer.loop = asyncio.create_task(self._keep_equal(peer), name=f"peer {url_text(url)}")
        return self._peers[peer_id]

    async def remove(self, peer_id: str) -> None:
        """Forget a peer and end its loop; a sync that runs goes on. Raises Problem(NOT_FOUND)."""
        loop = self.get(peer_id).loop
        del self._peers[peer_id]
        if loop:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    def get(self, peer_id: str) -> Peer:
        """The peer of this ID. Raises Problem(NOT_FOUND)."""
        if peer_id not in self._peers:
            raise Problem(Code.NOT_FOUND, f"no peer {peer_id[:64]}")
        return self._peers[peer_id]

    def all(self) -> list[Peer]:
        """Every peer, the oldest first."""
        return list(self._peers.values())

    async def sync_peer(
        self, peer_id: str, channels: tuple[str, ...] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync with a peer now. Raises Problem: NOT_FOUND, SYNC_BUSY, OVERLOADED."""
        return self._start(self.get(peer_id), channels, dry_run)

    async def sync_url(
        self, url_text: str, channels: tuple[str, ...] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start one sync with any store.

        Raises Problem: PEER_URL_REFUSED, PEER_UNREACHABLE, SYNC_BUSY, OVERLOADED.
        """
        url = parse_peer_url(url_text)
        known = self._peers.get(peer_id_of(url))
        if known is None:
            await resolve(url, private_allowed=self._settings.allows_private_peers)
        return self._start(known or self._stranger(url), channels, dry_run)

    def _stranger(self, url: httpx.URL) -> Peer:
        while len(self._memories) >= self._limits.syncs_remembered_max:
            del self._memories[next(iter(self._memories))]
        return Peer("", url, self._memories.setdefault(str(url), PeerMemory()))

    def _start(self, peer: Peer, channels: tuple[str, ...], dry_run: bool) -> Sync:
        interest = interest_of(self._settings)
        if channels:
            interest = interest.intersect(Interest.make(channels=frozenset(channels)))
        sync = self._syncs.start(
            self._run(peer, interest, dry_run),
            peer_url=url_text(peer.url),
            peer_id=peer.peer_id,
            channels=channels,
            dry_run=dry_run,
        )
        peer.last_sync = sync
        return sync

    def _run(self, peer: Peer, interest: Interest, dry_run: bool) -> RunSync:
        async def run(progress: Progress, changed: Any) -> SyncReport:
            async with open_http_transport(
                peer.url, self._limits, private_allowed=self._settings.allows_private_peers
            ) as transport:
                return await sync_with_peer(
                    self._local,
                    transport,
                    interest,
                    memory=peer.memory,
                    dry_run=dry_run,
                    progress=progress,
                    changed=changed,
                )

        return run

    async def _keep_equal(self, peer: Peer) -> None:
        while True:
            peer.failures = 0 if await self._sync_once(peer) else peer.failures + 1
            pause_s = self._pause_s(peer.failures)
            peer.next_sync_at_ms = int((time.time() + pause_s) * 1_000)
            await asyncio.sleep(pause_s)

    async def _sync_once(self, peer: Peer) -> bool:
        try:
            report = await self._start(peer, (), False).finished()
        except Problem:  # another sync with this peer runs, or too many do: the next turn comes
            return True
        return report.in_sync

    def _pause_s(self, failures: int) -> float:
        interval_s = self._settings.sync_interval_s
        slowest_s = max(BACKOFF_S_MAX, interval_s)
        pause_s = min(interval_s * BACKOFF_FACTOR ** min(failures, 32), slowest_s)
        return pause_s * random.uniform(1 - JITTER, 1 + JITTER)


def peer_id_of(url: httpx.URL) -> str:
    """Name of a peer: 8 bytes of BLAKE3 over its URL, in hex."""
    return blake3(url_text(url).encode()).hexdigest(length=8)
