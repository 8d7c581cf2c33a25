"""The node as an MVDS peer: one payload in, one payload out (docs/mvds.md).

An exchange reads the peer's records, runs a `sdstore.mvds.Node` over them in memory, and writes what
changed. Frames go through the door first, so their ACKs follow their commit. Records and positions are
written in one transaction, and the reply follows it. A crash in between loses nothing: the peer repeats
its payload, and the door answers with duplicates, which are acknowledged.

A frame is the body of a message, its channel the group, its Lamport timestamp the timestamp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from app.access.callers import Caller
from app.cache import Recent
from app.entries import Entry, NewEntry, Outcome
from app.errors import Code, Problem
from app.ingest.door import Door, GroupCommitter, Prepared
from app.ingest.policy import Way
from app.ingest.prepare import Publication
from app.server.limits import Limits
from app.store.peerrows import PeerState, Source
from app.store.store import Store
from sdstore.mvds import (
    Deliver,
    MemoryState,
    Message,
    MvdsOptions,
    Node,
    Record,
    RecordType,
    RemoteProtocolError,
    Send,
    decode,
)

PEER = "peer"
"""The one peer of the `Node` of an exchange."""

REFUSED = "refused"

FAULT_OF_NODE_MIN = 500
"""HTTP statuses from here on are this node's fault: such a message is sent again, not acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MvdsCall:
    """A request of a peer. The name of `caller` and `peer_id` name it together; `channel_ids` are all its channels."""

    caller: Caller
    peer_id: str
    channel_ids: Sequence[str]
    payload: bytes
    interactive: bool


class MvdsEndpoint(Collector):
    """The MVDS side of one node, and its counters for Prometheus."""

    def __init__(self, store: Store, door: Door, committer: GroupCommitter, limits: Limits) -> None:
        self.outcomes: Counter[str] = Counter()
        self._store = store
        self._door = door
        self._committer = committer
        self._limits = limits
        # Digests by message ID, of messages that passed through this process.
        self._known: Recent[bytes, bytes] = Recent(limits.mvds_known_ids_max)
        self._options = MvdsOptions(
            payload_bytes_max=limits.mvds_payload_bytes_max,
            records_per_peer_max=limits.mvds_records_per_peer_max,
            acks_per_peer_max=limits.mvds_fields_max,
            in_process_max=limits.mvds_fields_max,
        )

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        messages = CounterMetricFamily(
            "sdstore_mvds_messages", "Messages received from MVDS peers", labels=("outcome",)
        )
        for outcome, count in sorted(self.outcomes.items()):
            messages.add_metric([outcome], count)
        yield messages

    async def exchange(self, asked: MvdsCall) -> bytes:
        """The payload for a peer that sent one.

        Raises `Problem`: `invalid_body`, `sync_busy`, and those of the door that are not about a
        message (`overloaded`, `disk_full` …). Then the peer sends the payload again.
        """
        before = await self._store.mvds.read(asked.caller.name, asked.peer_id)
        records = _Records(before.records)
        messages = _Messages()
        node = Node(records, messages, self._options)
        for channel_id in asked.channel_ids:
            node.join(channel_id.encode(), [PEER])
        try:
            messages.held |= await self._held(decode(asked.payload).offers, asked.channel_ids)
            effects = node.receive(PEER, asked.payload)
        except RemoteProtocolError as error:
            raise Problem(
                Code.INVALID_BODY, f"not an MVDS payload: {error}", extra={"fault": error.code}
            ) from None
        received = [each.message for each in effects if isinstance(each, Deliver)]
        digests = await self._take(received, node, asked.caller)
        positions = await self._queue_new(asked, before, node, records, messages, but=digests)
        await self._load_due(records, messages, before.epoch + 1)
        effects = node.tick_peer(PEER, before.epoch + 1)
        await self._committer.call(
            lambda: self._store.mvds.write(before, positions, records.changed())
        )
        return next((each.payload for each in effects if isinstance(each, Send)), b"")

    async def _held(self, ids: Iterable[bytes], channel_ids: Collection[str]) -> set[bytes]:
        """Those of some offered messages of these channels whose content this store can serve."""
        digests = {each: digest for each in ids if (digest := self._known.get(each))}
        if not digests:
            return set()
        asked = list(digests.values())
        # The database decides: it may have lost a commit or the content since.
        found = await self._store.entries.outlines(asked)
        held = {digest for digest, each in found.items() if each.channel_id in channel_ids}
        lost = {each.digest for each in await self._store.frames.left_out(asked)}
        return {each for each, digest in digests.items() if digest in held and digest not in lost}

    async def _take(self, messages: Sequence[Message], node: Node, caller: Caller) -> set[bytes]:
        """Publish received messages, then acknowledge them; returns the digests of stored entries.

        A refused frame is acknowledged too, or its sender would repeat it for ever.
        """
        if not messages:
            return set()
        prepared = await self._door.prepare_many([Publication(each.body) for each in messages])
        prepared = [_in_group(*each) for each in zip(messages, prepared, strict=True)]
        outcomes = await self._door.publish_prepared(prepared, way=Way.MVDS, caller=caller)
        for outcome in outcomes:
            if isinstance(outcome, Problem) and outcome.status >= FAULT_OF_NODE_MIN:
                raise outcome.detached()
        digests: set[bytes] = set()
        for message, entry, outcome in zip(messages, prepared, outcomes, strict=True):
            self.outcomes[outcome.kind if isinstance(outcome, Outcome) else REFUSED] += 1
            if isinstance(entry, NewEntry) and isinstance(outcome, Outcome):
                digests.add(entry.digest)
                self._known.put(message.message_id, entry.digest)
            node.processed(message.message_id)
        return digests

    async def _queue_new(
        self,
        asked: MvdsCall,
        before: PeerState,
        node: Node,
        records: _Records,
        messages: _Messages,
        but: Collection[bytes],
    ) -> dict[int, int]:
        """Queue what arrived after the peer's places; returns the new places.

        A peer that is further behind than the window loses the older entries: they are for
        reconciliation. Records of channels that the peer no longer names go.
        """
        positions: dict[int, int] = {}
        bytes_left = self._limits.mvds_payload_bytes_max
        channels = [await self._store.channels.named(each) for each in asked.channel_ids]
        records.keep_channels({each.channel_no for each in channels if each is not None})
        for channel in channels:
            if channel is None:
                continue
            after = max(
                before.positions.get(channel.channel_no, 0),
                await self._store.mvds.window_start(channel.channel_no),
            )
            positions[channel.channel_no] = after
            room = self._limits.mvds_records_per_peer_max - records.count(PEER)
            if room <= 0 or bytes_left <= 0:
                continue
            page = await self._store.channels.page(
                channel.channel_id,
                order="arrival",
                after=(after,),
                limit=room,
                bytes_max=bytes_left,
            )
            for entry in page.entries:
                bytes_left -= len(entry.frame)
                message = message_of(entry)
                if entry.digest in but or message.field_bytes > node.message_bytes_max:
                    continue
                self._known.put(message.message_id, entry.digest)
                records.sources[message.message_id] = Source(channel.channel_no, entry.seq)
                node.send(message, interactive=asked.interactive)
                messages.read[message.message_id] = message
            if page.last_seq is not None:
                positions[channel.channel_no] = page.last_seq
        return positions

    async def _load_due(self, records: _Records, messages: _Messages, epoch: int) -> None:
        """Read the frames of the messages that the next payload may hold; the others are not due yet."""
        records.is_limited = False
        due = [
            each.message_id
            for each in records.due(PEER, epoch, self._limits.mvds_records_per_peer_max)
            if each.type is RecordType.MESSAGE
        ]
        absent = {records.sources[each].seq: each for each in due if each not in messages.read}
        records.ready.update(messages.read)
        if absent:
            examined, entries = await self._store.mvds.entries(
                list(absent), self._limits.mvds_payload_bytes_max
            )
            for entry in entries:
                message = message_of(entry)
                # Another ID: a repaired entry with another frame, or another history of the database.
                if message.message_id == absent[entry.seq]:
                    messages.read[message.message_id] = message
            records.ready.update(absent[seq] for seq in examined)
        records.is_limited = True


def message_of(entry: Entry) -> Message:
    """The MVDS message of a stored entry."""
    return Message(entry.channel_id.encode(), entry.lamport_timestamp, entry.frame)


def _in_group(message: Message, prepared: Prepared) -> Prepared:
    """Refuse a frame of another channel than its group: the peer is a member of the group only."""
    if isinstance(prepared, Problem) or prepared.message.channel_id.encode() == message.group_id:
        return prepared
    return Problem(Code.FORBIDDEN, "the frame belongs to another channel than its MVDS group")


@dataclass(slots=True)
class _Messages:
    """The messages of one exchange (`sdstore.mvds.Messages`)."""

    read: dict[bytes, Message] = field(default_factory=dict)
    held: set[bytes] = field(default_factory=set)

    def find(self, message_id: bytes) -> Message | None:
        """See `Messages`."""
        return self.read.get(message_id)

    def is_known(self, message_id: bytes) -> bool:
        """See `Messages`."""
        return message_id in self.held


class _Records(MemoryState):
    """The records of one peer, and which of them changed.

    While `is_limited`, a MESSAGE is due only if its frame was looked for (`ready`).
    """

    def __init__(self, stored: Iterable[tuple[Record, Source]]) -> None:
        super().__init__()
        self.sources: dict[bytes, Source] = {}
        self.ready: set[bytes] = set()
        self.is_limited = True
        self._changed: set[bytes] = set()
        for record, source in stored:
            self.sources[record.message_id] = source
            super().put(PEER, [record])

    def put(self, peer: str, records: Iterable[Record]) -> None:
        """See `State`."""
        taken = list(records)
        self._changed.update(each.message_id for each in taken)
        super().put(peer, taken)

    def remove(self, peer: str, message_ids: Iterable[bytes]) -> None:
        """See `State`."""
        taken = [each for each in message_ids if self.get(peer, each) is not None]
        self._changed.update(taken)
        super().remove(peer, taken)

    def due(self, peer: str, epoch: int, limit: int) -> list[Record]:
        """See `State`."""
        found = super().due(peer, epoch, self.count(peer))
        if self.is_limited:
            found = [
                each
                for each in found
                if each.type is not RecordType.MESSAGE or each.message_id in self.ready
            ]
        return found[:limit]

    def keep_channels(self, channel_nos: Collection[int]) -> None:
        """Forget the offers and messages of other channels."""
        gone = [
            message_id
            for message_id, source in self.sources.items()
            if source.channel_no and source.channel_no not in channel_nos
        ]
        self.remove(PEER, gone)

    def changed(self) -> Mapping[bytes, tuple[Record, Source] | None]:
        """Records that were written, and None for those that are gone."""
        changed: dict[bytes, tuple[Record, Source] | None] = {}
        for message_id in self._changed:
            record = self.get(PEER, message_id)
            if record is None:
                changed[message_id] = None
            elif record.type is RecordType.REQUEST:
                changed[message_id] = record, Source()
            else:
                changed[message_id] = record, self.sources[message_id]
        return changed
