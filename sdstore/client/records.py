"""Arguments and results of calls, and answers of a node read as such.

Hashes and digests are 32 bytes. An invalid answer raises `StoreError`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from sdstore.errors import (
    StoreError,
    error_of_reply,
    is_web_page,
    malformed_reply,
    not_a_store,
)
from sdstore.ordering import RolesChange, WaitsFor
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.model import Message, entry_digest, frame_hash
from sdstore.wire import store_pb2 as wire

Key = str | bytes
"""The key of a look-up: a message ID (text) or a retrieval hint (bytes)."""


@dataclass(frozen=True, slots=True)
class WakuEnvelope:
    """The Waku envelope of a frame; the node computes the Waku hash from it."""

    pubsub_topic: str
    content_topic: str
    timestamp_ns: int
    meta: bytes = b""


@dataclass(frozen=True, slots=True)
class PublishItem:
    """A frame to publish, with its publisher's retrieval hints (raw bytes).

    `without_quarantine`: the node refuses it where its policy would keep it apart for an operator.
    """

    frame: bytes
    retrieval_hints: tuple[bytes, ...] = ()
    waku: WakuEnvelope | None = None
    without_quarantine: bool = False


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """The outcome of a published message: `stored`, `duplicate`, `relayed` or `refused`.

    `digest` is None unless stored or duplicate. `error` is set only if refused; only batches report
    refusals this way. `hints_dropped` is the number of its hints that the node did not keep, because the
    entry has the most.
    """

    outcome: str
    message_id: str
    channel_id: str
    digest: bytes | None = None
    error: StoreError | None = None
    hints_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as the node received it. `dialect` is "v1", "v2", "chat_proto" or "nim".

    `variants_count` is None if the frame was requested by digest.
    """

    frame: bytes
    digest: bytes
    dialect: str
    variants_count: int | None

    @property
    def frame_hash(self) -> bytes:
        """BLAKE3 of the frame."""
        return frame_hash(self.frame)

    @property
    def message(self) -> Message:
        """The message in the frame."""
        return decode(self.frame)[0]


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message with the node's metadata.

    `received_at_ms` is the node's clock since the epoch, `seq` the place in its arrival order,
    `variants` are digests of other messages with the same channel and ID.
    """

    frame: bytes
    digest: bytes
    frame_hash: bytes
    dialect: str
    received_at_ms: int
    seq: int
    variants: tuple[bytes, ...]
    retrieval_hints: tuple[bytes, ...]

    @property
    def message(self) -> Message:
        """The message in the frame."""
        return decode(self.frame)[0]


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A message as it reached the node.

    `digest` is None for a sync or ephemeral message, which the node passes on and does not store.
    `cursor` is the place after this message, `document` the JSON that the node sent.
    """

    message: Message
    digest: bytes | None
    dialect: str
    cursor: str | None
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages and the cursor of the next page; `next` is None after the last one.

    `left_out`: digests of messages of this page whose content the node has lost.
    """

    messages: tuple[StoredMessage, ...]
    next: str | None
    left_out: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """A key that was found; `message` is None if only presence was requested."""

    key: Key
    digest: bytes
    message: StoredMessage | None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`not_examined` are keys for which the reply had no room: request them again.

    `left_out` are matches whose content the node has lost; other nodes may have it. `states` has the missing
    message IDs of which the node knows more: "withheld" (an operator decides), "refused" (by its
    policy), or "met_as_sync" (see `Gap`).
    """

    found: tuple[Match, ...]
    missing: tuple[Key, ...]
    not_examined: tuple[Key, ...]
    left_out: tuple[Match, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel; `root`, BLAKE3 over its sorted digests, is given for a single channel only."""

    channel_id: str
    count: int
    lamport_first: int
    lamport_last: int
    root: bytes | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A message that histories name and the node lacks, with hints that may lead to it.

    `met_as_sync`: the node has seen a sync message with this ID, so the ID may have no content. Anyone
    can send a sync message with any ID, so content is still possible. `state`: "missing", "withheld" (an
    operator of the node decides on it) or "refused" (by the node's policy). `named_by`: "history" of a
    stored message, or "sync" if only sync messages name it.
    """

    message_id: str
    retrieval_hints: tuple[bytes, ...]
    met_as_sync: bool = False
    state: str = "missing"
    named_by: str = "history"


@dataclass(frozen=True, slots=True)
class AncestorsPage:
    """Part of a causal closure, in causal order; `missing` are IDs that the node lacks.

    `left_out`: digests of messages in this part whose content the node has lost.
    `met_as_sync`: the `missing` IDs that the node has seen on sync messages (see `Gap`); `withheld` and
    `refused`: those on which an operator of the node decides, and that its policy refuses.
    """

    messages: tuple[StoredMessage, ...]
    missing: tuple[str, ...]
    next: str | None
    left_out: tuple[bytes, ...] = ()
    met_as_sync: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OrderItem:
    """A place in a channel's order; `sender_id` is "" for a message without a sender.

    `message` is None unless messages were requested and the node has the content.
    """

    message_id: str
    sender_id: str
    digest: bytes
    is_confirmed: bool
    message: StoredMessage | None


@dataclass(frozen=True, slots=True)
class OrderBreach:
    """A precondition that does not hold; `kind` is "no_indexers", "fork" or "variant".

    `message_id` and `other_message_id` are the two messages that show it; equal for a variant.
    """

    kind: str
    sender_id: str
    message_id: str
    other_message_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class OrderIndexer:
    """What the node has of an indexer; `unseen_count` messages of other indexers are not before its last one."""

    sender_id: str
    message_count: int
    last_message_id: str
    unseen_count: int


@dataclass(frozen=True, slots=True)
class OrderPage:
    """A page of a channel's order: first the confirmed prefix, which never changes, then the tail.

    If not `is_complete`, the node has not ordered the whole channel yet: the same call with `next`
    continues, and only confirmed items are shown. `next_confirmed` is the cursor after the last confirmed
    item up to here, and holds for ever. `waiting_count` messages wait for `missing` ones. docs/ordering.md
    describes the rest.
    """

    items: tuple[OrderItem, ...]
    confirmed_count: int
    tail_count: int
    waiting_count: int
    senderless_count: int
    missing: tuple[str, ...]
    breaches: tuple[OrderBreach, ...]
    left_out: tuple[bytes, ...]
    is_complete: bool
    next: str | None
    next_confirmed: str
    indexers: tuple[OrderIndexer, ...] = ()
    waits_for: WaitsFor | None = None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's identity; `document` is the full answer."""

    version: str
    node_id: str
    limits: Mapping[str, int]
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer of a node; `state` is "new", "healthy", "failing", "unreachable" or "refused"."""

    id: str
    url: str
    state: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync session of a node; `state` is "running" or "finished"."""

    id: str
    peer_url: str
    state: str
    document: Mapping[str, Any]


# ---- answers

_DIGEST_BYTES = 32
_Wire = TypeVar("_Wire", bound=ProtobufMessage)
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def checked(reply: Reply) -> Reply:
    """The answer itself if it is a success; else raises its error."""
    if not 200 <= reply.status < 300:
        raise error_of_reply(reply.status, reply.headers, reply.body)
    if is_web_page(reply.headers):
        raise not_a_store(reply.status, reply.headers, reply.body)
    return reply


def nothing(_: Reply) -> None:
    """For answers of which only the status matters."""


def no_content(reply: Reply) -> None:
    """For answers without a body (204). A server that is not a store can answer everything with 200."""
    if reply.status != HTTPStatus.NO_CONTENT:
        raise malformed_reply(f"the answer has the status {reply.status}, not 204", reply.status)


def body_bytes(reply: Reply) -> bytes:
    """For answers that the client does not parse."""
    return reply.body


def frame(reply: Reply) -> Frame:
    """A frame with its `SDS-` headers."""
    headers = reply.headers
    try:
        return Frame(
            reply.body,
            _digest(bytes.fromhex(headers["sds-digest"])),
            headers["sds-dialect"],
            int(headers["sds-variants"]) if "sds-variants" in headers else None,
        )
    except (KeyError, ValueError) as error:
        raise malformed_reply(f"an SDS- header is missing or malformed: {error}") from None


def frame_of_digest(digest: bytes) -> Callable[[Reply], Frame]:
    """A reader that accepts a frame only if it has this `digest`."""

    def read(reply: Reply) -> Frame:
        found = frame(reply)
        try:
            message, _ = decode(found.frame)
        except MessageError as error:
            raise malformed_reply(f"not an SDS frame: {error}") from None
        if entry_digest(message) != digest:
            raise StoreError("digest_mismatch", reply.status, "the frame is another entry's")
        return found

    return read


def publish_outcome(reply: Reply) -> PublishOutcome:
    """The outcome of one publication."""
    return _outcome(_parse(wire.PublishOutcome, reply))


def publish_outcomes(items_count: int) -> Callable[[Reply], Sequence[PublishOutcome]]:
    """A reader of a batch's outcomes, one for each item."""

    def read(reply: Reply) -> Sequence[PublishOutcome]:
        outcomes = _parse(wire.PublishOutcomes, reply).outcomes
        if len(outcomes) != items_count:
            raise malformed_reply(f"{len(outcomes)} outcomes for {items_count} items")
        return [_outcome(outcome) for outcome in outcomes]

    return read


def message_page(reply: Reply) -> MessagePage:
    """A page of messages."""
    page = _parse(wire.MessagePage, reply)
    left_out = tuple(map(_digest, page.left_out))
    return MessagePage(_messages(page.messages), page.next or None, left_out)


def lookup_result(reply: Reply) -> LookupResult:
    """The result of a look-up."""
    result = _parse(wire.LookupReply, reply)
    return LookupResult(
        tuple(_match(match) for match in result.found),
        tuple(_key(key) for key in result.missing),
        tuple(_key(key) for key in result.not_examined),
        tuple(_match(match) for match in result.left_out),
        {key.message_id: key.state for key in result.missing if key.state},
    )


def ancestors_page(reply: Reply) -> AncestorsPage:
    """Part of a causal closure."""
    page = _parse(wire.AncestorsPage, reply)
    return AncestorsPage(
        _messages(page.messages),
        tuple(page.missing),
        page.next or None,
        tuple(map(_digest, page.left_out)),
        tuple(page.met_as_sync),
        tuple(page.withheld),
        tuple(page.refused),
    )


def change_text(change: RolesChange) -> str:
    """A change of roles as a call for an order writes it."""
    roles = change.roles
    document = {"after": change.after, "indexers": [*roles.indexers]}
    return json.dumps(document | ({"relayed": sorted(roles.relayed)} if roles.relayed else {}))


def order_page(reply: Reply) -> OrderPage:
    """A page of a channel's order."""
    page = _parse(wire.OrderPage, reply)
    return OrderPage(
        items=tuple(map(_order_item, page.items)),
        confirmed_count=page.confirmed_count,
        tail_count=page.tail_count,
        waiting_count=page.waiting_count,
        senderless_count=page.senderless_count,
        missing=tuple(page.missing),
        breaches=tuple(
            OrderBreach(
                each.kind, each.sender_id, each.message_id, each.other_message_id, each.detail
            )
            for each in page.breaches
        ),
        left_out=tuple(map(_digest, page.left_out)),
        is_complete=page.complete,
        next=page.next or None,
        next_confirmed=page.next_confirmed,
        indexers=tuple(
            OrderIndexer(
                each.sender_id, each.message_count, each.last_message_id, each.unseen_count
            )
            for each in page.indexers
        ),
        waits_for=WaitsFor(
            page.waits_for.message_id, page.waits_for.count, tuple(page.waits_for.sender_ids)
        )
        if page.HasField("waits_for")
        else None,
    )


def channel(reply: Reply) -> Channel:
    """One channel."""
    return _channel(_parse(wire.Channel, reply))


def channel_page(reply: Reply) -> tuple[tuple[Channel, ...], str | None]:
    """Channels and the cursor of the next page."""
    page = _parse(wire.ChannelPage, reply)
    return tuple(_channel(found) for found in page.channels), page.next or None


def message_items(
    on_left_out: Callable[[tuple[bytes, ...]], None] | None,
) -> Callable[[Reply], tuple[tuple[StoredMessage, ...], str | None]]:
    """A reader of messages and the cursor of the next page; it reports left-out digests."""

    def read(reply: Reply) -> tuple[tuple[StoredMessage, ...], str | None]:
        page = message_page(reply)
        if page.left_out and on_left_out is not None:
            on_left_out(page.left_out)
        return page.messages, page.next

    return read


def gap_page(reply: Reply) -> tuple[tuple[Gap, ...], str | None]:
    """Gaps and the cursor of the next page."""
    page = _parse(wire.GapPage, reply)
    gaps = tuple(
        Gap(
            gap.message_id,
            tuple(gap.retrieval_hints),
            gap.met_as_sync,
            gap.state or "missing",
            gap.named_by or "history",
        )
        for gap in page.gaps
    )
    return gaps, page.next or None


class Document(dict[str, Any]):
    """A JSON object in an answer, at any depth. A missing member is a fault of the node."""

    def __missing__(self, name: str) -> Any:
        raise malformed_reply(f"the answer has no member {name}")


def document(reply: Reply) -> dict[str, Any]:
    """A JSON object."""
    try:
        return _object(json.loads(reply.body, object_pairs_hook=Document))
    except (ValueError, RecursionError):
        raise malformed_reply("the body is not JSON", reply.status) from None


def node_info(reply: Reply) -> NodeInfo:
    """A node's description of itself."""
    about = document(reply)
    limits = _object(about.get("limits"))
    return NodeInfo(_text(about, "version"), _text(about, "node_id"), limits, about)


def peer(reply: Reply) -> Peer:
    """One peer."""
    return _peer(document(reply))


def peers(reply: Reply) -> list[Peer]:
    """All peers of a node."""
    return _listed(document(reply), "peers", _peer)


def quarantine_page(reply: Reply) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
    """Messages in the quarantine and the cursor of the next page."""
    return _numbered_page(reply, "messages")


def retention_page(reply: Reply) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
    """What retention would retire of some channels, and where to go on."""
    return _numbered_page(reply, "channels")


def _numbered_page(reply: Reply, name: str) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
    page = document(reply)
    following = page["next"]
    if following is not None and not isinstance(following, int):
        raise malformed_reply("next is not a number")
    found = tuple(_listed(page, name, lambda each: each))
    return found, None if following is None else str(following)


def sync(reply: Reply) -> Sync:
    """One sync session."""
    return _sync(document(reply))


def syncs(reply: Reply) -> list[Sync]:
    """The sync sessions a node remembers, newest first."""
    return _listed(document(reply), "syncs", _sync)


def _parse(schema: type[_Wire], reply: Reply) -> _Wire:
    try:
        return schema.FromString(reply.body)
    except DecodeError:
        raise malformed_reply(f"the body is not a {schema.DESCRIPTOR.name}", reply.status) from None


def _outcome(outcome: wire.PublishOutcome) -> PublishOutcome:
    return PublishOutcome(
        outcome.outcome,
        outcome.message_id,
        outcome.channel_id,
        _digest(outcome.digest) if outcome.digest else None,
        _refusal(outcome.problem) if outcome.HasField("problem") else None,
        outcome.hints_dropped,
    )


def _refusal(problem: wire.Problem) -> StoreError:
    document = {"code": problem.code, "title": problem.title, "detail": problem.detail}
    return StoreError(problem.code, problem.status, problem.detail or problem.title, document)


def _messages(messages: Sequence[wire.StoredMessage]) -> tuple[StoredMessage, ...]:
    return tuple(map(_message, messages))


def _message(message: wire.StoredMessage) -> StoredMessage:
    return StoredMessage(
        message.frame,
        _digest(message.digest),
        message.frame_hash,
        message.dialect,
        message.received_at_ms,
        message.seq,
        tuple(message.variants),
        tuple(message.retrieval_hints),
    )


def _order_item(item: wire.OrderItem) -> OrderItem:
    message = _message(item.message) if item.HasField("message") else None
    digest = _digest(item.digest)
    return OrderItem(item.message_id, item.sender_id, digest, item.confirmed, message)


def _match(match: wire.LookupMatch) -> Match:
    message = _message(match.message) if match.HasField("message") else None
    return Match(_key(match.key), _digest(match.digest), message)


def _key(key: wire.LookupKey) -> Key:
    return key.retrieval_hint if key.WhichOneof("key") == "retrieval_hint" else key.message_id


def _channel(found: wire.Channel) -> Channel:
    return Channel(
        found.channel_id,
        found.count,
        found.lamport_first,
        found.lamport_last,
        found.root or None,
    )


def _digest(digest: bytes) -> bytes:
    if len(digest) != _DIGEST_BYTES:
        raise malformed_reply(f"a digest has {len(digest)} bytes, not 32")
    return digest


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise malformed_reply("the value is not a JSON object")
    return value


def _text(members: Mapping[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise malformed_reply(f"{name} is missing or not a string")
    return value


def _listed(
    members: Mapping[str, Any], name: str, read: Callable[[dict[str, Any]], _Record]
) -> list[_Record]:
    items = members.get(name)
    if not isinstance(items, list):
        raise malformed_reply(f"{name} is missing or not a list")
    return [read(_object(item)) for item in items]


def _peer(members: dict[str, Any]) -> Peer:
    return Peer(_text(members, "id"), _text(members, "url"), _text(members, "state"), members)


def _sync(members: dict[str, Any]) -> Sync:
    return Sync(_text(members, "id"), _text(members, "peer_url"), _text(members, "state"), members)
