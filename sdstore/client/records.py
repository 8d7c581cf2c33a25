"""Arguments and results of calls. Hashes and digests are 32 bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdstore.client.errors import StoreError
from sdstore.sds.codec import decode
from sdstore.sds.digest import frame_hash
from sdstore.sds.model import Message

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
