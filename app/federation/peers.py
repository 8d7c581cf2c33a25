"""The peers of this node, and one loop for each: sync, wait, sync again.

Each peer has its own loop, so a slow or dead peer delays no other. Peers of the settings are added at
each start; those that an operator added stay in the database until they are removed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import httpx
from blake3 import blake3

from app.errors import Code, Problem
from app.federation.syncs import RunSync, Sync, Syncs
from app.federation.transport import (
    open_http_transport,
    parse_peer_url,
    resolve,
    url_text,
)
from app.recon.replica import NodeReplica
from app.settings import Settings
from recon.session import Interest
from sdstore.client.transport import HttpTransport
from sdstore.sync.limits import SyncLimits
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import Progress, SyncError, SyncOutcome, SyncReport
from sdstore.sync.session import sync_with_peer

BACKOFF_FACTOR = 2.0
BACKOFF_S_MAX = 600.0  # a recovered peer is found within ten minutes
JITTER = 0.1  # spreads the syncs of peers that were started together
WHOLE_JITTER = 0.25  # whole sessions with peers that were added together spread over six hours
CONTACT_S_MAX = 3.0  # for the check that a new peer is not this node; the operator waits

_log = logging.getLogger(__name__)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class PeerBook(Protocol):
    """Keeps the peers that an operator added: URLs, and the access tokens for some of them."""

    async def read(self) -> dict[str, str | None]:
        """The peers that were written last."""

    async def write(self, peers: Mapping[str, str | None]) -> None:
        """Replace the peers. Raises Problem if the database cannot be written."""


class PeerState(StrEnum):
    """How the last sync with a peer ended."""

    NEW = "new"
    HEALTHY = "healthy"
    FAILING = "failing"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"


_LOG_LEVELS = {
    PeerState.HEALTHY: logging.INFO,
    PeerState.FAILING: logging.WARNING,
    PeerState.UNREACHABLE: logging.WARNING,
    PeerState.REFUSED: logging.ERROR,
}


class PeerOrigin(StrEnum):
    """The origin of a peer."""

    SETTINGS = "settings"
    ADDED = "added"


@dataclass(slots=True)
class PeerTotals:
    """Sums over all syncs with a peer since this process started.

    `lost_count` and `set_aside_count` are from the last sync.
    """

    outcomes: Counter[SyncOutcome] = field(default_factory=Counter)
    amounts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    proved_at_s: float | None = None
    lost_count: int = 0
    set_aside_count: int = 0

    def add(self, report: SyncReport) -> None:
        """Count one sync."""
        self.outcomes[report.outcome] += 1
        self.seconds += report.seconds
        for name in COUNTED:
            self.amounts[name] += getattr(report, name)
        self.lost_count, self.set_aside_count = report.lost_here, report.set_aside_count
        if report.proved:
            self.proved_at_s = time.time()


COUNTED = (
    "rounds",
    "bytes_up",
    "bytes_down",
    "entries_received",
    "entries_sent",
    "entries_refused",
    "claims_received",
    "claims_sent",
    "claims_refused",
    "mended",
)
"""Figures of a report that are summed per peer."""


@dataclass(slots=True, eq=False)
class Peer:
    """One peer. `token` is the access token that an operator added. `failures` counts the failed syncs
    since the last good one; `code` and `reason` say why the last one failed."""

    peer_id: str
    url: httpx.URL
    origin: PeerOrigin = PeerOrigin.ADDED
    token: str | None = field(default=None, repr=False)
    memory: PeerMemory = field(default_factory=PeerMemory)
    totals: PeerTotals = field(default_factory=PeerTotals)
    state: PeerState = PeerState.NEW
    since_ms: int = field(default_factory=_now_ms)
    code: str = ""
    reason: str = ""
    failures: int = 0
    last_sync: Sync | None = None
    next_sync_at_ms: int | None = None
    loop: asyncio.Task[None] | None = None

    def document(self) -> dict[str, Any]:
        """The peer as JSON."""
        return {
            "id": self.peer_id,
            "url": url_text(self.url),
            "origin": self.origin,
            "state": self.state,
            "since_ms": self.since_ms,
            "code": self.code,
            "reason": self.reason,
            "failures": self.failures,
            "last_sync_id": self.last_sync.sync_id if self.last_sync else None,
            "next_sync_at_ms": self.next_sync_at_ms,
        }

    def status(self) -> dict[str, Any]:
        """The peer with the report of its last sync."""
        report = self.last_sync.report if self.last_sync else None
        return self.document() | {"last_report": asdict(report) if report else None}

    def learn(self, report: SyncReport) -> None:
        """Record the result of a sync; log a change of the state.

        A fault of this node, such as an outage of its database, does not change the peer's state.
        """
        self.totals.add(report)
        self.code, self.reason = report.code, report.detail
        if report.outcome is SyncOutcome.LOCAL_FAULT:
            self.reason = f"the fault is this node's, not the peer's: {report.detail}"
            return
        state = _state_of(report)
        if state is self.state:
            return
        self.state, self.since_ms = state, _now_ms()
        detail = f": {report.code}: {report.detail}" if report.code else ""
        _log.log(_LOG_LEVELS[state], "peer %s is %s%s", url_text(self.url), state, detail)


def _state_of(report: SyncReport) -> PeerState:
    if report.in_sync:
        return PeerState.HEALTHY
    if report.outcome is SyncOutcome.REFUSED:
        return PeerState.REFUSED
    if report.code == Code.PEER_UNREACHABLE:
        return PeerState.UNREACHABLE
    return PeerState.FAILING


class Peers:
    """All peers of a node. Call `start` before and `close` after use.

    `instance_id` is this node's own ID: a server that answers with it is this node, not a peer.
    `strangers` sums the syncs with stores that are not peers.
    """

    def __init__(
        self,
        replica: NodeReplica,
        syncs: Syncs,
        book: PeerBook,
        interest: Interest,
        settings: Settings,
        instance_id: str,
    ) -> None:
        self.strangers = PeerTotals()
        self._replica = replica
        self._syncs = syncs
        self._book = book
        self._interest = interest
        self._settings = settings
        self._limits = replica.limits
        self._session_limits = replica.limits.sync
        self._instance_id = instance_id
        self._peers: dict[str, Peer] = {}
        # Stores that were synced with by URL, and their results; bounded like the sessions.
        self._strangers: dict[str, Peer] = {}

    async def start(self) -> None:
        """Add the peers of the settings and those of the database.

        The state of a peer shows whether it is down or not allowed.
        """
        for text in self._settings.peers:
            self._add(parse_peer_url(text), PeerOrigin.SETTINGS)
        for text, token in (await self._book.read()).items():
            with suppress(Problem):  # an older version accepted URLs that are refused now
                self._add(parse_peer_url(text), PeerOrigin.ADDED, token)

    async def close(self) -> None:
        """End all loops."""
        loops = [peer.loop for peer in self._peers.values() if peer.loop]
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    async def add(self, url_text: str, token: str | None = None) -> Peer:
        """Add a peer, or return the existing one with this URL; it is kept across restarts.

        A new `token` replaces the one of an existing peer. A peer that is down, or whose name does not
        resolve yet, is added too. Raises Problem: PEER_URL_REFUSED, TOO_MANY_ITEMS, and the errors of a
        write to the database.
        """
        url = parse_peer_url(url_text)
        known = self._peers.get(peer_id_of(url))
        if known is not None:
            await self._replace_token(known, token)
            return known
        await self._contact(url, token)
        peer = self._add(url, PeerOrigin.ADDED, token)
        try:
            await self._keep()
        except Problem:
            await self._forget(peer)
            raise
        return peer

    async def _replace_token(self, peer: Peer, token: str | None) -> None:
        if token is None or token == peer.token:
            return
        before, peer.token = peer.token, token
        try:
            await self._keep()
        except Problem:
            peer.token = before
            raise

    async def _contact(self, url: httpx.URL, token: str | None) -> None:
        """Raise PEER_URL_REFUSED for an address that is not allowed, and for this node itself."""
        try:
            async with asyncio.timeout(CONTACT_S_MAX), self._transport(url, token) as transport:
                await transport.interest()
        except SyncError as error:
            if error.code == Code.PEER_URL_REFUSED:
                raise Problem(Code.PEER_URL_REFUSED, error.detail) from None
        except TimeoutError:
            pass

    async def _keep(self) -> None:
        added = [each for each in self._peers.values() if each.origin is PeerOrigin.ADDED]
        await self._book.write({url_text(each.url): each.token for each in added})

    def _add(self, url: httpx.URL, origin: PeerOrigin, token: str | None = None) -> Peer:
        peer_id = peer_id_of(url)
        if peer_id not in self._peers:
            if len(self._peers) >= self._limits.peers_max:
                raise Problem(
                    Code.TOO_MANY_ITEMS, f"a node has up to {self._limits.peers_max} peers"
                )
            peer = self._peers[peer_id] = Peer(peer_id, url, origin, token)
            peer.loop = asyncio.create_task(self._keep_equal(peer), name=f"peer {url_text(url)}")
        return self._peers[peer_id]

    async def remove(self, peer_id: str) -> None:
        """Remove a peer and end its loop; a running sync continues. A peer of the settings returns at
        the next start. Raises Problem: NOT_FOUND, and the errors of a write to the database."""
        peer = self.get(peer_id)
        del self._peers[peer_id]
        try:
            await self._keep()
        except Problem:
            self._peers[peer_id] = peer
            raise
        await self._forget(peer)

    async def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer.peer_id, None)
        if peer.loop:
            peer.loop.cancel()
            await asyncio.gather(peer.loop, return_exceptions=True)

    def get(self, peer_id: str) -> Peer:
        """The peer with this ID. Raises Problem(NOT_FOUND)."""
        if peer_id not in self._peers:
            raise Problem(Code.NOT_FOUND, f"no peer {peer_id[:64]}")
        return self._peers[peer_id]

    def all(self) -> list[Peer]:
        """All peers, oldest first."""
        return list(self._peers.values())

    async def sync_peer(
        self, peer_id: str, channels: tuple[str, ...] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync with a peer now. Raises Problem: NOT_FOUND, SYNC_BUSY, OVERLOADED."""
        return self._start_asked(self.get(peer_id), channels, dry_run)

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
        return self._start_asked(known or self._stranger(url), channels, dry_run)

    def _stranger(self, url: httpx.URL) -> Peer:
        while len(self._strangers) >= self._limits.syncs_remembered_max:
            del self._strangers[next(iter(self._strangers))]
        return self._strangers.setdefault(str(url), Peer("", url))

    def _start_asked(self, peer: Peer, channels: tuple[str, ...], dry_run: bool) -> Sync:
        """Start a requested sync without waiting for a retry: the peer may work again."""
        sync = self._start(peer, channels, dry_run)
        # The session is a task that has not begun. A sync that is refused changes nothing.
        peer.memory = peer.memory.unserved_due()
        return sync

    def _start(self, peer: Peer, channels: tuple[str, ...], dry_run: bool) -> Sync:
        interest = self._interest
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
        async def run(changed: Callable[[Progress], None]) -> SyncReport:
            try:
                async with self._transport(peer.url, peer.token) as transport:
                    report, peer.memory = await sync_with_peer(
                        self._replica,
                        transport,
                        interest,
                        memory=peer.memory,
                        limits=self._jittered(),
                        nonce_secret=self._replica.nonce_secret,
                        arrivals=self._replica,
                        dry_run=dry_run,
                        changed=changed,
                    )
            except Problem as problem:
                report = SyncReport.of_error(problem)
            if self._peers.get(peer.peer_id) is not peer:
                self.strangers.add(report)
            elif not dry_run:
                peer.learn(report)
            return report

        return run

    def _jittered(self) -> SyncLimits:
        """The limits of one session: whole sessions with many peers do not fall due together."""
        limits = self._session_limits
        return replace(limits, whole_s=limits.whole_s * random.uniform(1 - WHOLE_JITTER, 1))

    def _transport(
        self, url: httpx.URL, token: str | None
    ) -> AbstractAsyncContextManager[HttpTransport]:
        """A transport with the token of the settings' file for this URL, or else with `token`."""
        file = self._settings.peer_token_files.get(url_text(url))
        return open_http_transport(
            url,
            self._limits,
            private_allowed=self._settings.allows_private_peers,
            own_instance=self._instance_id,
            token=token if file is None else _token_in(file),
            ca_file=self._settings.peer_ca,
        )

    async def _keep_equal(self, peer: Peer) -> None:
        while True:
            is_good = await self._sync_once(peer)
            if is_good is not None:
                peer.failures = 0 if is_good else peer.failures + 1
            pause_s = self._pause_s(peer.failures)
            peer.next_sync_at_ms = int((time.time() + pause_s) * 1_000)
            await asyncio.sleep(pause_s)

    async def _sync_once(self, peer: Peer) -> bool | None:
        """Whether the sync succeeded; None if its result does not depend on the peer."""
        try:
            report = await self._start(peer, (), False).finished()
        except Problem:  # a sync with this peer, or too many in all, are running: try next time
            return None
        return None if report.outcome is SyncOutcome.LOCAL_FAULT else report.in_sync

    def _pause_s(self, failures: int) -> float:
        interval_s = self._settings.sync_interval_s
        slowest_s = max(BACKOFF_S_MAX, interval_s)
        pause_s = min(interval_s * BACKOFF_FACTOR ** min(failures, 32), slowest_s)
        return pause_s * random.uniform(1 - JITTER, 1 + JITTER)


def _token_in(file: Path) -> str:
    """The token in a file, which an operator may replace while the node runs."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"the token file {file} of a peer cannot be read: {error}"
        raise Problem(Code.TOKENS_UNAVAILABLE, detail) from None
    if not text or any(each.isspace() for each in text):
        raise Problem(Code.TOKENS_UNAVAILABLE, f"{file} does not contain one token")
    return text


def peer_id_of(url: httpx.URL) -> str:
    """The ID of a peer: 8 bytes of BLAKE3 over its URL, in hex."""
    return blake3(url_text(url).encode()).hexdigest(length=8)
