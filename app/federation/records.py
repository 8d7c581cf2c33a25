"""What this process keeps of peers and sessions in the database, and the leases that it holds.

Sessions of milliseconds must not cost a durable write each. So this process remembers what it wrote last,
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from app.federation.peer import Peer
from app.ingest.committer import GroupCommitter
from app.store.peerrows import LEASE_S, Lease, PeerRow, encode_memory
from app.store.store import Store
from app.store.syncrows import SyncRow
from sdstore.sync.memory import PeerMemory

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
