"""What calls take and give back. Hashes and digests are 32 bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdstore.client.errors import StoreError
from sdstore.sds.codec import decode
from sdstore.sds.digest import frame_hash
from sdstore.sds.model import Message

Key = str | bytes
"""What a look-up asks for: a message ID (text) or a retrieval hint (bytes)."""


@dataclass(frozen=True, slots=True)
class WakuEnvelope:
    """What a Waku transport wrapped around a frame; the node computes its Waku hash from it."""

    pubsub_topic: str
    content_topic: str
    timestamp_ns: int
    meta: bytes = b""


@dataclass(frozen=True, slots=True)
class PublishItem:
    """A frame to publish, with the hints (raw bytes) that its publisher knows to lead to it."""

    frame: bytes
    retrieval_hints: tuple[bytes, ...] = ()
    waku: WakuEnvelope | None = None


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """What became of a published message: `stored`, `duplicate`, `relayed` or `refused`.

    `digest` is None unless stored or duplicate; `error` is set exactly where refused, which only
    batches report this way.
    """

    outcome: str
    message_id: str
    channel_id: str
    digest: bytes | None = None
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as the node received it. `dialect` is "v1", "v2", "chat_proto" or "nim".

    `variants_count` is None where the frame was asked for by digest.
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
    """A message with what the node knows about it.

    `received_at_ms` is the node's clock since the epoch, `seq` the place in its arrival order,
    `variants` digests of other messages under the same channel and ID.
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
    """A message as it came to the node.

    `digest` is None for a sync or ephemeral message, which the node passes on and does not store.
    `cursor` is where to go on behind this message, `document` what the node sent.
    """

    message: Message
    digest: bytes | None
    dialect: str
    cursor: str | None
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages and the cursor of the next page; `next` is None after the last one.

    `left_out`: digests of messages that belong here and whose content the node has lost.
    """

    messages: tuple[StoredMessage, ...]
    next: str | None
    left_out: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """A key that was found; `message` is None where presence alone was asked for."""

    key: Key
    digest: bytes
    message: StoredMessage | None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`not_examined` are keys the reply had no room for: ask for them again.

    `left_out` are matches whose content the node has lost; other nodes may have it.
    """

    found: tuple[Match, ...]
    missing: tuple[Key, ...]
    not_examined: tuple[Key, ...]
    left_out: tuple[Match, ...] = ()


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

    `met_as_sync`: a sync message with this ID came by, so that there may be no content. Anybody can
    send one, so there may be content all the same.
    """

    message_id: str
    retrieval_hints: tuple[bytes, ...]
    met_as_sync: bool = False


@dataclass(frozen=True, slots=True)
class AncestorsPage:
    """Part of a causal closure, in causal order; `missing` are IDs the node lacks.

    `left_out`: digests of those among them whose content the node has lost.
    `met_as_sync`: those of `missing` that sync messages bore (see `Gap`).
    """

    messages: tuple[StoredMessage, ...]
    missing: tuple[str, ...]
    next: str | None
    left_out: tuple[bytes, ...] = ()
    met_as_sync: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who a node is; `document` is everything it says about itself."""

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
