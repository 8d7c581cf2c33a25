"""Which process of one database syncs with which peer: fair shares of the peers.

Each process announces itself over the bus once a second (`app.live.bus.Presence`). The rows of the peers say
who holds which. From both, every process computes the same assignment, without a word between them:

- A free peer goes to the process with the fewest peers among those that can hold it. The others leave it
  alone for a moment (`app.store.peerrows.GRACE_S`), in case that process has ended.
- A process that holds more than its share, the number of peers divided by that of processes and rounded up,
  hands on what another process can hold that has at least two peers fewer.

What is heard late or never only makes shares unfair for a while: the leases alone decide who holds a peer.
Times are seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from app.live.bus import Presence
from app.store.peerrows import Lease, PeerRow

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
