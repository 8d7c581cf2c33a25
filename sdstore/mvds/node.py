"""An MVDS node: payloads and epochs in, effects out.

Rules (2/MVDS, "Flow"), one per line:

- sending, interactive mode: an OFFER to each member of the group; batch mode: a MESSAGE;
- an OFFER arrives: a REQUEST, or an ACK where we have the message already;
- a REQUEST arrives for what we offer: the OFFER becomes a MESSAGE;
- a MESSAGE arrives: the REQUEST is removed; an ACK follows once the application has processed the
  message;
- an ACK arrives: the record is removed;
- a record is sent when its send epoch is reached, and again after a pause that grows while the peer
  is silent.

The node does no I/O and reads no clock. The caller numbers the epochs: `tick` gives at most one payload
per peer and epoch. Epochs never go back, a restart included.

A crash breaks no promise: records are kept in `State`, and an ACK is queued only when the application
calls `processed`. Queued ACKs are in memory; if one is lost, the peer repeats its MESSAGE. A peer has at
most one record of a message: a REQUEST while we lack it, an OFFER or a MESSAGE while the peer does. Acks are
never kept (2/MVDS, "State").
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

from sdstore.mvds.wire import (
    ID_BYTES,
    ID_FIELD_BYTES,
    LocalProtocolError,
    Message,
    Numbering,
    Payload,
    RemoteProtocolError,
    decode,
    encode,
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MvdsOptions:
    """Behaviour and bounds of a node."""

    interactive: bool = True
    """The default mode of `send`."""
    retry_epochs_first: int = 3
    """Epochs to wait after the first transmission. An answer takes two: the peer's epoch and ours."""
    retry_epochs_max: int = 64
    """While the peer is silent the wait doubles with each transmission, up to this."""
    attempts_max: int = 0
    """Transmissions of an OFFER or a MESSAGE before the node gives up; 0: unlimited."""
    request_attempts_max: int = 8
    """Transmissions of a REQUEST. The peer's next OFFER renews a REQUEST that was given up."""
    payload_bytes_max: int = 256 * 1024
    """Bytes of a payload, sent or received; records that do not fit wait for the next epoch."""
    records_per_peer_max: int = 10_000
    """2 MB of memory a peer. At the limit nothing is queued for the peer, and its offers are ignored."""
    acks_per_peer_max: int = 10_000
    """ACKs that wait for the next epoch. If an ACK is dropped, the peer repeats its MESSAGE."""
    in_process_max: int = 10_000
    """Messages delivered and not yet `processed`. At the limit a MESSAGE is ignored; the peer repeats it."""
    numbering: Numbering = Numbering.SPECIFICATION


@dataclass(frozen=True, slots=True)
class Send:
    """Send this payload to this peer, complete or not at all."""

    peer: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """A message for the application. Keep it or refuse it, then call `processed`."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The peer has the message."""

    peer: str
    message_id: bytes


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The peer did not answer within the allowed transmissions; the record is removed."""

    peer: str
    message_id: bytes
    type: RecordType


@dataclass(frozen=True, slots=True)
class StateFull:
    """The peer has the maximum number of records: this message was not queued for it."""

    peer: str
    message_id: bytes


@dataclass(frozen=True, slots=True)
class Ignored:
    """A part of a payload without effect, and why: one word for logs and metrics."""

    peer: str
    reason: str
    count: int


Effect = Send | Deliver | Acknowledged | GaveUp | StateFull | Ignored


class Messages(Protocol):
    """The messages that the application keeps or has processed."""

    def find(self, message_id: bytes) -> Message | None:
        """A message to send; None if it no longer exists, which removes its records."""

    def is_known(self, message_id: bytes) -> bool:
        """Whether a message was processed, kept or not. A forgotten message is delivered again."""


class Node:
    """See the module. Raises `LocalProtocolError` for misuse, `RemoteProtocolError` for invalid bytes."""

    def __init__(
        self, state: State, messages: Messages, options: MvdsOptions | None = None
    ) -> None:
        self._state = state
        self._messages = messages
        self._options = options or MvdsOptions()
        if self._options.payload_bytes_max < 4 * ID_FIELD_BYTES:
            detail = "payload_bytes_max is too small: a payload needs room for four IDs"
            raise LocalProtocolError("bad_option", detail)
        self._groups: dict[bytes, set[str]] = {}
        self._acks: dict[str, OrderedDict[bytes, None]] = {}
        self._in_process: dict[bytes, set[str]] = {}
        self._sent_epoch: dict[str, int] = {}
        self._silent_count: dict[str, int] = {}  # payloads to a peer since it was last heard of

    # ---- groups

    def join(self, group_id: bytes, peers: Iterable[str]) -> None:
        """Add members to a group, and with the first of them the group."""
        self._groups.setdefault(group_id, set()).update(peers)

    def leave(self, group_id: bytes, peers: Iterable[str]) -> None:
        """Remove members from a group. Their records stay until they are acknowledged."""
        members = self._groups.get(group_id, set())
        members.difference_update(peers)
        if not members:
            self._groups.pop(group_id, None)

    def members(self, group_id: bytes) -> frozenset[str]:
        """The peers of a group."""
        return frozenset(self._groups.get(group_id, ()))

    # ---- sending

    def send(
        self, message: Message, *, interactive: bool | None = None, but: Collection[str] = ()
    ) -> list[Effect]:
        """Queue a message for every member of its group, except those of `but`.

        `find` must return the message until every member has acknowledged it.
        """
        if message.field_bytes > self.message_bytes_max:
            raise LocalProtocolError(
                "message_too_large",
                f"the message takes {message.field_bytes} bytes; half a payload has room for "
                f"{self.message_bytes_max}",
            )
        is_interactive = self._options.interactive if interactive is None else interactive
        kind = RecordType.OFFER if is_interactive else RecordType.MESSAGE
        effects: list[Effect] = []
        for peer in sorted(self._groups.get(message.group_id, set()).difference(but)):
            if self._state.get(peer, message.message_id) is not None:
                continue
            if self._state.count(peer) >= self._options.records_per_peer_max:
                effects.append(StateFull(peer, message.message_id))
                continue
            self._state.put(peer, [Record(kind, message.message_id)])
        return effects

    @property
    def message_bytes_max(self) -> int:
        """The largest message: half a payload, so that ACKs never displace it."""
        return self._options.payload_bytes_max // 2

    def tick(self, epoch: int) -> list[Effect]:
        """The payloads of an epoch, for every peer with a due record or ACK."""
        effects: list[Effect] = []
        for peer in sorted({*self._acks, *self._state.peers()}):
            effects += self.tick_peer(peer, epoch)
        return effects

    def tick_peer(self, peer: str, epoch: int) -> list[Effect]:
        """The payload of an epoch for one peer, if anything is due and the epoch has no payload yet."""
        if epoch <= self._sent_epoch.get(peer, -1):
            return []
        payload, effects = self._payload(peer, epoch)
        if not payload.is_empty:
            self._sent_epoch[peer] = epoch
            self._silent_count[peer] = self._silent_count.get(peer, 0) + 1
            effects.append(Send(peer, encode(payload, self._options.numbering)))
        return effects

    def _payload(self, peer: str, epoch: int) -> tuple[Payload, list[Effect]]:
        """ACKs first, up to half of the payload; then records in the order in which they are due."""
        effects: list[Effect] = []
        room = self._options.payload_bytes_max
        acks = self._take_acks(peer, room // 2 // ID_FIELD_BYTES)
        room -= len(acks) * ID_FIELD_BYTES
        ids: dict[RecordType, list[bytes]] = {kind: [] for kind in RecordType}
        messages: list[Message] = []
        sent: list[Record] = []
        gone: list[bytes] = []
        for record in self._state.due(peer, epoch, room // ID_FIELD_BYTES):
            if self._is_spent(record):
                effects.append(GaveUp(peer, record.message_id, record.type))
                gone.append(record.message_id)
                continue
            size = ID_FIELD_BYTES
            if record.type is RecordType.MESSAGE:
                message = self._messages.find(record.message_id)
                if message is None:
                    gone.append(record.message_id)
                    continue
                size = message.field_bytes
                if size > room:
                    break  # it is first in the next epoch
                messages.append(message)
            elif size > room:
                break
            else:
                ids[record.type].append(record.message_id)
            room -= size
            sent.append(self._after_sending(peer, record, epoch))
        self._state.remove(peer, gone)
        self._state.put(peer, sent)
        return (
            Payload(
                acks,
                tuple(ids[RecordType.OFFER]),
                tuple(ids[RecordType.REQUEST]),
                tuple(messages),
            ),
            effects,
        )

    def _take_acks(self, peer: str, count_max: int) -> tuple[bytes, ...]:
        waiting = self._acks.get(peer)
        if waiting is None:
            return ()
        taken = tuple(waiting)[:count_max]
        for message_id in taken:
            del waiting[message_id]
        if not waiting:
            del self._acks[peer]
        return taken

    def _is_spent(self, record: Record) -> bool:
        options = self._options
        is_request = record.type is RecordType.REQUEST
        most = options.request_attempts_max if is_request else options.attempts_max
        return 0 < most <= record.send_count

    def _after_sending(self, peer: str, record: Record, epoch: int) -> Record:
        """The wait grows exponentially while the peer is silent.

        A peer that answers has lost only some payloads, so the wait starts at its first value again.
        """
        options = self._options
        doublings = min(record.send_count, self._silent_count.get(peer, 0), 32)
        doubled = options.retry_epochs_first << doublings
        return replace(
            record,
            send_count=record.send_count + 1,
            send_epoch=epoch + min(doubled, options.retry_epochs_max),
        )

    # ---- receiving

    def receive(self, peer: str, raw: bytes) -> list[Effect]:
        """Process a payload of a peer. If this raises, it has processed none of it."""
        if len(raw) > self._options.payload_bytes_max:
            detail = f"{len(raw)} bytes exceed the maximum of {self._options.payload_bytes_max}"
            raise RemoteProtocolError("payload_too_large", detail)
        payload = decode(raw)
        self._silent_count.pop(peer, None)
        return [
            *self._take_acknowledged(peer, payload.acks),
            *self._take_offers(peer, payload.offers),
            *self._take_requests(peer, payload.requests),
            *self._take_messages(peer, payload.messages),
        ]

    def processed(self, message_id: bytes) -> None:
        """The application has processed a delivered message: it is on disk, or refused for good.

        Its senders, and all peers that offer it, get an ACK with their next payload.
        """
        peers = self._in_process.pop(message_id, set())
        requested = self._state.requested_from(message_id)
        for peer in requested:
            self._state.remove(peer, [message_id])
        for peer in {*peers, *requested}:
            self._acknowledge(peer, message_id)

    def postponed(self, message_id: bytes) -> None:
        """The application could not process a delivered message now: the peer sends it again."""
        self._in_process.pop(message_id, None)

    def _take_acknowledged(self, peer: str, ids: Iterable[bytes]) -> list[Effect]:
        """The peer has these messages: remove the OFFER or MESSAGE records."""
        effects: list[Effect] = []
        for message_id in ids:
            record = self._state.get(peer, message_id)
            if record is not None and record.type is not RecordType.REQUEST:
                self._state.remove(peer, [message_id])
                effects.append(Acknowledged(peer, message_id))
        return effects

    def _take_offers(self, peer: str, ids: Iterable[bytes]) -> list[Effect]:
        effects: list[Effect] = []
        requests: dict[bytes, Record] = {}
        skipped = 0
        room = self._options.records_per_peer_max - self._state.count(peer)
        for message_id in ids:
            if len(message_id) != ID_BYTES or not self._is_member_of_any(peer):
                skipped += 1
            elif self._messages.is_known(message_id):
                effects += self._take_acknowledged(peer, [message_id])
                self._acknowledge(peer, message_id)
            elif self._state.get(peer, message_id) is None and message_id not in requests:
                if len(requests) < room:
                    requests[message_id] = Record(RecordType.REQUEST, message_id)
                else:
                    skipped += 1
        self._state.put(peer, requests.values())
        return effects + ([Ignored(peer, "offers", skipped)] if skipped else [])

    def _take_requests(self, peer: str, ids: Iterable[bytes]) -> list[Effect]:
        """Send only messages that we offer to this peer: any other ID could be a guess."""
        skipped = 0
        for message_id in ids:
            record = self._state.get(peer, message_id)
            if record is not None and record.type is RecordType.OFFER:
                self._state.put(peer, [Record(RecordType.MESSAGE, message_id)])
            elif record is None or record.type is not RecordType.MESSAGE:
                skipped += 1
        return [Ignored(peer, "requests", skipped)] if skipped else []

    def _take_messages(self, peer: str, messages: Iterable[Message]) -> list[Effect]:
        effects: list[Effect] = []
        skipped = 0
        for message in messages:
            message_id = message.message_id
            if peer not in self._groups.get(message.group_id, ()):
                skipped += 1
                continue
            self._state.remove(peer, self._request_for(peer, message_id))
            effects += self._take_acknowledged(peer, [message_id])
            if self._messages.is_known(message_id):
                self._acknowledge(peer, message_id)
            elif message_id in self._in_process:
                self._in_process[message_id].add(peer)
            elif len(self._in_process) >= self._options.in_process_max:
                skipped += 1
            else:
                self._in_process[message_id] = {peer}
                effects.append(Deliver(peer, message))
        return effects + ([Ignored(peer, "messages", skipped)] if skipped else [])

    def _request_for(self, peer: str, message_id: bytes) -> list[bytes]:
        record = self._state.get(peer, message_id)
        is_request = record is not None and record.type is RecordType.REQUEST
        return [message_id] if is_request else []

    def _is_member_of_any(self, peer: str) -> bool:
        return any(peer in members for members in self._groups.values())

    def _acknowledge(self, peer: str, message_id: bytes) -> None:
        acks = self._acks.setdefault(peer, OrderedDict())
        if len(acks) < self._options.acks_per_peer_max:
            acks[message_id] = None
