"""What this process keeps of peers and sessions in the database, and which peers are its own.

**Fair shares** say which process of one database syncs with which peer. Each process announces itself over the
bus once a second (`app.live.relay.Presence`). The rows of the peers say who holds which. From both, every
process computes the same assignment, without a word between them:

- A free peer goes to the process with the fewest peers among those that can hold it. The others leave it
  alone for a moment (`app.store.peerrows.GRACE_S`), in case that process has ended.
- A process that holds more than its share, the number of peers divided by that of processes and rounded up,
  hands on what another process can hold that has at least two peers fewer.

What is heard late or never only makes shares unfair for a while: the leases alone decide who holds a peer.
Times are seconds of any clock that never goes back.

**Records.** Sessions of milliseconds must not cost a durable write each. So this process remembers what it wrote last,
and one transaction a second at most carries what has changed: a peer's row at once when its state changes
and every `PEER_WRITE_S` otherwise, and only the sessions that say something (`Syncs.unwritten`). A process
that is killed loses at most that much: the marks of an earlier session are as good as those of the last
one, and only leave more news to compare.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.federation.peer import Peer
from app.ingest.door import GroupCommitter
from app.live.relay import Presence
from app.store.peerrows import LEASE_S, Lease, PeerRow, SyncRow, encode_memory
from app.store.store import Store
from sdstore.sync.memory import PeerMemory

# ---- fair shares

SILENT_S_MAX = 4.0
"""A process that was silent for this long counts no more: less than a lease, so that nobody waits for a
dead process when its peers become free."""

PROCESSES_MAX = 1_000
"""Announced at the same time; more than a database has connections for."""


class Processes:
    """The other live processes of the database, as they announce themselves."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Presence, float]] = {}

    def heard(self, presence: Presence, now_s: float) -> bool:
        """A process announces itself. Returns whether it reads other streams of stores than before."""
        before, _ = self._heard.pop(presence.process, (None, 0.0))
        if not presence.is_leaving and len(self._heard) < PROCESSES_MAX:
            self._heard[presence.process] = presence, now_s
        reads = () if presence.is_leaving else presence.reads
        return set(reads) != set(before.reads if before else ())

    def live(self, now_s: float) -> list[Presence]:
        """Those that were heard of late; forgets the others."""
        self._heard = {
            name: (presence, at_s)
            for name, (presence, at_s) in self._heard.items()
            if now_s - at_s <= SILENT_S_MAX
        }
        return [presence for presence, _ in self._heard.values()]

    def reads(self, instance_id: str, now_s: float) -> bool:
        """Whether one of them reads the stream of the store with this instance ID."""
        return any(instance_id in each.reads for each in self.live(now_s))


class Share(NamedTuple):
    """Peers to leave to other processes for a moment, and those of them to hand on first."""

    left: frozenset[str]
    surplus: tuple[str, ...]


NO_SHARE = Share(frozenset(), ())


def share_of(
    me: str,
    settings_peers: Mapping[str, Collection[str]],
    rows: Sequence[tuple[PeerRow, Lease]],
    idle: Collection[str],
) -> Share:
    """The share of one process.

    `settings_peers`: for each live process, this one included, the peers of its settings. `idle`: the
    peers without a running session that this process holds; only these can be handed on.
    """
    counts = Counter(lease.holder for _, lease in rows if lease.is_live)
    processes = settings_peers.keys() | counts.keys()
    most = -(-len(rows) // max(len(processes), 1))

    def next_holder(row: PeerRow, others: Collection[str]) -> str | None:
        """The process that can hold the peer and has the fewest."""
        able = [
            each
            for each in others
            if row.origin != "settings" or row.peer_id in settings_peers[each]
        ]
        return min(able, key=lambda each: (counts[each], each), default=None)

    left, surplus = set(), []
    for row, lease in rows:
        if lease.is_live:
            continue
        holder = next_holder(row, settings_peers.keys())
        if holder is not None:
            counts[holder] += 1
        if holder not in (me, None):
            left.add(row.peer_id)
    others = settings_peers.keys() - {me}
    for row, lease in rows:
        if not (lease.is_live and lease.holder == me and row.peer_id in idle):
            continue
        holder = next_holder(row, others)
        if holder is not None and counts[me] > max(most, counts[holder] + 1):
            counts[me] -= 1
            counts[holder] += 1
            surplus.append(row.peer_id)
    return Share(frozenset({*left, *surplus}), tuple(surplus))


# ---- records

PEER_WRITE_S = 10.0  # what a kill loses of a quiet peer; a commit costs the disk some milliseconds
MEMORY_BYTES_PER_S = 100_000  # a large memory is written less often: 5 MB once in 50 s


class Records:
    """The peers and sessions of one database, as one process writes them.

    `process` names it. `fences`: of the peers that it holds.
    """

    def __init__(self, store: Store, committer: GroupCommitter) -> None:
        self.process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.is_shared = store.peers.is_shared
        self.fences: dict[str, int] = {}
        self._store = store
        self._committer = committer
        self._held_until_s = 0.0
        self._written: dict[str, _Written] = {}

    async def read(self) -> list[tuple[PeerRow, Lease]]:
        """All peers, oldest first."""
        return await self._store.peers.read()

    async def memory(self, peer_id: str) -> PeerMemory:
        """The memory of a peer as it was written last."""
        return await self._store.peers.memory(peer_id)

    # ---- which peers there are

    async def add(self, *added: PeerRow) -> None:
        """Add peers that are not there yet. Raises `Problem` as `GroupCommitter.call`."""
        await self._committer.call(lambda: self._store.peers.add(added))

    async def set_token(self, peer_id: str, token: str, origin: str) -> None:
        """Replace the access token of a peer. Raises as `add`."""
        await self._committer.call(lambda: self._store.peers.set_token(peer_id, token, origin))

    async def remove(self, peer_id: str) -> None:
        """Remove a peer. Raises as `add`."""
        await self._committer.call(lambda: self._store.peers.remove(peer_id))
        self.let_go(peer_id)

    async def forget_settings(self, kept: Collection[str]) -> None:
        """Remove the peers of former settings, but for those of other hosts. Raises as `add`."""
        await self._committer.call(lambda: self._store.peers.forget_settings(kept))

    # ---- leases

    @property
    def is_in_time(self) -> bool:
        """Whether the leases still hold by this process's own clock: it was not paused for too long."""
        return not self.is_shared or _now_s() < self._held_until_s

    async def hold(self, settings_peers: Collection[str], left: Collection[str]) -> None:
        """Renew the leases and take those that have expired; those in `left` have to be free for a moment."""
        before_s = _now_s()
        self.fences |= await self._store.peers.hold(
            self.process, settings_peers, LEASE_S, left=left
        )
        self._held_until_s = before_s + LEASE_S

    def let_go(self, peer_id: str) -> None:
        """Another process has taken the peer, or it was removed."""
        self.fences.pop(peer_id, None)
        self._written.pop(peer_id, None)

    async def release(self, peer_ids: Collection[str] | None = None) -> None:
        """End the leases of all or some peers, so that other processes take them at once."""
        await self._store.peers.release(self.process, peer_ids)

    # ---- what sessions change

    def has_read(self, peer: Peer) -> None:
        """The peer's row and memory are those of the database."""
        self._written[peer.peer_id] = _Written(peer.row(), peer.memory, 0, _now_s())

    async def write(
        self, held: Sequence[Peer], syncs: Sequence[SyncRow], *, is_end: bool = False
    ) -> None:
        """Write what has changed and is due; at the end of the process all that has changed.

        Peers that another process has taken meanwhile, and sessions with them, are left out. Raises
        `Problem` as `GroupCommitter.call`; then it is due again.
        """
        now_s = _now_s()
        due = [each for each in held if self._is_due(each, now_s, is_end=is_end)]
        if not (due or syncs):
            return
        rows: list[tuple[_Written, bytes | None]] = []
        for each in due:
            row, memory, raw = each.row(), each.memory, None
            before = self._written.get(each.peer_id)
            if before is None or is_end or _lasting(memory) != _lasting(before.memory):
                # A large memory takes a tenth of a second.
                raw = await asyncio.to_thread(encode_memory, memory)
            size = before.memory_bytes if before and raw is None else len(raw or b"")
            rows.append((_Written(row, memory, size, now_s), raw))
        fences = dict(self.fences)

        def write_all() -> set[str]:
            with self._store.transaction() as transaction:
                standing = self._store.peers.standing(transaction, self.process, fences)
                self._store.peers.write(
                    transaction,
                    [(new.row, raw) for new, raw in rows if new.row.peer_id in standing],
                )
                ours = [each for each in syncs if not each.peer_id or each.peer_id in standing]
                self._store.syncs.write(transaction, ours)
            return standing

        standing = await self._committer.call(write_all)
        for new, _ in rows:
            if new.row.peer_id in standing:
                self._written[new.row.peer_id] = new

    def _is_due(self, peer: Peer, now_s: float, *, is_end: bool) -> bool:
        before = self._written.get(peer.peer_id)
        if before is None:
            return True
        row, now = before.row, peer.row()
        if (now.state, now.code) != (row.state, row.code):
            return True
        is_changed = before.memory is not peer.memory or now != replace(
            row, next_sync_at_ms=now.next_sync_at_ms
        )
        pause_s = max(PEER_WRITE_S, before.memory_bytes / MEMORY_BYTES_PER_S)
        return is_changed and (is_end or now_s - before.at_s >= pause_s)

    # ---- sessions

    async def request(self, row: SyncRow) -> None:
        """Ask the process that holds a peer for a session. Raises as `add`."""

        def write_row() -> None:
            with self._store.transaction() as transaction:
                self._store.syncs.write(transaction, [row])

        await self._committer.call(write_row)

    async def under_way(self) -> list[SyncRow]:
        """Running and requested sessions."""
        return await self._store.syncs.under_way()

    async def end_abandoned(self, now_ms: int) -> None:
        """End the records of sessions whose processes have ended. Raises as `add`."""
        await self._committer.call(lambda: self._store.syncs.end_abandoned(now_ms))


@dataclass(frozen=True, slots=True)
class _Written:
    """What was written last of a peer, and when; `memory_bytes` is the size of its encoded memory."""

    row: PeerRow
    memory: PeerMemory
    memory_bytes: int
    at_s: float


def _lasting(memory: PeerMemory) -> PeerMemory:
    """A memory without what each session changes: a session after a restart does as well without it."""
    return replace(
        memory,
        responder_nonce=b"",
        interest=None,
        arrived_count=0,
        lost_after=0,
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
