"""The records that a node keeps for each peer, behind a small interface.

A peer has at most one record of a message: a REQUEST while we lack it, an OFFER or a MESSAGE while
the peer does. Acks are never kept (2/MVDS, "State").
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class RecordType(IntEnum):
    """The kinds of records. The numbers can be stored; they never change."""

    OFFER = 1
    REQUEST = 2
    MESSAGE = 3


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `send_count`: its transmissions; `send_epoch`: the earliest epoch of the next one."""

    type: RecordType
    message_id: bytes
    send_count: int = 0
    send_epoch: int = 0


class State(Protocol):
    """Storage of records. A node that restarts with the same state continues."""

    def get(self, peer: str, message_id: bytes) -> Record | None:
        """The record of a message."""

    def put(self, peer: str, records: Iterable[Record]) -> None:
        """Write records; each replaces the peer's record of the same message."""

    def remove(self, peer: str, message_ids: Iterable[bytes]) -> None:
        """Forget records; absent ones are ignored."""

    def due(self, peer: str, epoch: int, limit: int) -> list[Record]:
        """At most `limit` records with `send_epoch` ≤ `epoch`.

        The longest waiting records come first: by (send epoch, time of writing).
        """

    def count(self, peer: str) -> int:
        """Records of a peer."""

    def requested_from(self, message_id: bytes) -> list[str]:
        """The peers with a REQUEST for a message."""

    def peers(self) -> list[str]:
        """The peers with any record."""


class MemoryState:
    """`State` in memory."""

    def __init__(self) -> None:
        self._peers: dict[str, _PeerRecords] = {}
        self._requested: dict[bytes, set[str]] = {}
        self._written = 0

    def get(self, peer: str, message_id: bytes) -> Record | None:
        """See `State`."""
        records = self._peers.get(peer)
        return records.by_id[message_id][1] if records and message_id in records.by_id else None

    def put(self, peer: str, records: Iterable[Record]) -> None:
        """See `State`."""
        for record in records:
            kept = self._peers.setdefault(peer, _PeerRecords())
            self._forget(peer, kept, record.message_id)
            self._written += 1
            kept.add(self._written, record)
            if record.type is RecordType.REQUEST:
                self._requested.setdefault(record.message_id, set()).add(peer)

    def remove(self, peer: str, message_ids: Iterable[bytes]) -> None:
        """See `State`."""
        if kept := self._peers.get(peer):
            for message_id in message_ids:
                self._forget(peer, kept, message_id)
            if not kept.by_id:
                del self._peers[peer]

    def due(self, peer: str, epoch: int, limit: int) -> list[Record]:
        """See `State`."""
        kept = self._peers.get(peer)
        return list(kept.due(epoch, limit)) if kept else []

    def count(self, peer: str) -> int:
        """See `State`."""
        return len(self._peers[peer].by_id) if peer in self._peers else 0

    def requested_from(self, message_id: bytes) -> list[str]:
        """See `State`."""
        return sorted(self._requested.get(message_id, ()))

    def peers(self) -> list[str]:
        """See `State`."""
        return list(self._peers)

    def _forget(self, peer: str, kept: _PeerRecords, message_id: bytes) -> None:
        record = kept.pop(message_id)
        if record is not None and record.type is RecordType.REQUEST:
            peers = self._requested[message_id]
            peers.discard(peer)
            if not peers:
                del self._requested[message_id]


class _PeerRecords:
    """Records by message ID, and (send epoch, number of the writing, ID) in order.

    Entries of the order become stale when their record changes; they are dropped once half are stale.
    """

    def __init__(self) -> None:
        self.by_id: dict[bytes, tuple[int, Record]] = {}
        self._order: list[tuple[int, int, bytes]] = []

    def add(self, number: int, record: Record) -> None:
        self.by_id[record.message_id] = (number, record)
        insort(self._order, (record.send_epoch, number, record.message_id))

    def pop(self, message_id: bytes) -> Record | None:
        found = self.by_id.pop(message_id, None)
        if len(self._order) > 2 * len(self.by_id) + 64:
            self._order = [place for place in self._order if self._is_live(place)]
        return found[1] if found else None

    def due(self, epoch: int, limit: int) -> Iterator[Record]:
        for place in self._order:
            if place[0] > epoch or limit <= 0:
                return
            if self._is_live(place):
                limit -= 1
                yield self.by_id[place[2]][1]

    def _is_live(self, place: tuple[int, int, bytes]) -> bool:
        found = self.by_id.get(place[2])
        return found is not None and found[0] == place[1]
