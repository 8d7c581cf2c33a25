"""Every call of the HTTP interface as a value: the request, and how to read its answer.

Message IDs and channel IDs are arbitrary strings. They go into the query: a proxy might rewrite a path
that contains "", "..", "a/b" or "%".
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

import httpx

from sdstore.client import replies
from sdstore.client.records import (
    AncestorsPage,
    Channel,
    Frame,
    Gap,
    Key,
    LookupResult,
    MessagePage,
    NodeInfo,
    OrderPage,
    Peer,
    PublishItem,
    PublishOutcome,
    StoredMessage,
    Sync,
    WakuEnvelope,
)
from sdstore.client.replies import Reply
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.wire import store_pb2 as wire

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"

Order = Literal["log", "arrival"]
Direction = Literal["asc", "desc"]
MvdsMode = Literal["interactive", "batch"]
Parameters = Mapping[str, str | int | None]
ItemT = TypeVar("ItemT")
Items = tuple[tuple[ItemT, ...], str | None]
"""Items of one page, and the cursor of the next page."""
_Result_co = TypeVar("_Result_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[_Result_co]):
    """A request that is ready to be sent.

    `target` is relative to the node's address. `is_repeatable` says that sending it twice does
    the same as sending it once.
    """

    method: str
    target: str
    read: Callable[[Reply], _Result_co]
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    is_repeatable: bool = True

    def request(
        self, http: httpx.Client | httpx.AsyncClient, timeout: httpx.Timeout | None = None
    ) -> httpx.Request:
        """The request for httpx; `timeout` in place of the client's."""
        return http.build_request(
            self.method,
            self.target,
            content=self.body,
            headers=self.headers,
            timeout=timeout or http.timeout,
        )


def info() -> Call[NodeInfo]:
    """The node's identity and capabilities."""
    return Call("GET", "v1/info", replies.node_info, _accept(JSON))


def publish(message: bytes | Message, retrieval_hints: Sequence[bytes]) -> Call[PublishOutcome]:
    """One frame or message. The store is a set, so the call can be repeated."""
    hints = tuple(("retrieval-hint", hint.hex()) for hint in retrieval_hints)
    headers = (*_protobuf_both_ways(), *hints)
    frame = encode(message) if isinstance(message, Message) else message
    return Call("POST", "v1/messages", replies.publish_outcome, headers, frame)


def publish_batch(items: Sequence[PublishItem]) -> Call[Sequence[PublishOutcome]]:
    """Many frames; outcomes come in the order of the items."""
    body = wire.PublishBatch(items=map(_publish_item, items)).SerializeToString()
    read = replies.publish_outcomes(len(items))
    return Call("POST", "v1/messages/batch", read, _protobuf_both_ways(), body)


Publishable = bytes | Message | PublishItem
"""A frame, a message (sent as a frame of the latest dialect), or a frame with hints."""

BATCH_ITEMS_MAX = 1_000
"""Larger batches gain little from group commit; nodes accept 10,000."""

BATCH_BYTES_MAX = 8 * 1024 * 1024
"""400 frames of js-waku's size; nodes accept 32 MiB. A larger frame is sent alone."""

_ITEM_OVERHEAD_BYTES = 16


class Batcher:
    """Collects items; `add` returns the batch when the next item does not fit into it."""

    def __init__(self, items_max: int = BATCH_ITEMS_MAX, bytes_max: int = BATCH_BYTES_MAX) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._items: list[PublishItem] = []
        self._bytes = 0

    def add(self, item: Publishable) -> list[PublishItem]:
        """A full batch, or an empty list while there is room.

        `MessageError` for a message that is not valid.
        """
        if isinstance(item, Message):
            item = encode(item)
        if isinstance(item, bytes):
            item = PublishItem(item)
        size_bytes = _size_bytes(item)
        is_full = len(self._items) >= self._items_max or self._bytes + size_bytes > self._bytes_max
        full = self.rest() if is_full else []
        self._items.append(item)
        self._bytes += size_bytes
        return full

    def rest(self) -> list[PublishItem]:
        """Remove and return the waiting items."""
        items, self._items, self._bytes = self._items, [], 0
        return items


def batches(frames: Iterable[Publishable], batcher: Batcher) -> Iterator[list[PublishItem]]:
    """All frames in non-empty batches, in order."""
    for frame in frames:
        if full := batcher.add(frame):
            yield full
    if rest := batcher.rest():
        yield rest


def _size_bytes(item: PublishItem) -> int:
    hints_bytes = sum(map(len, item.retrieval_hints))
    return len(item.frame) + hints_bytes + _ITEM_OVERHEAD_BYTES * (1 + len(item.retrieval_hints))


def get(message_id: str, channel_id: str | None, digest: bytes | None) -> Call[Frame]:
    """A frame by message ID; the variant with `digest`, if given."""
    query = {
        "message_id": message_id,
        "channel_id": channel_id,
        "digest": None if digest is None else digest.hex(),
    }
    return _get("v1/messages", replies.frame, query)


def get_entry(digest: bytes) -> Call[Frame]:
    """A frame by digest; the reply is checked against it."""
    return _get(f"v1/entries/{digest.hex()}", replies.frame_of_digest(digest), {})


def lookup(
    keys: Sequence[Key], channel_id: str | None, *, presence_only: bool
) -> Call[LookupResult]:
    """Many message IDs (text) and retrieval hints (bytes) at once."""
    request = wire.LookupRequest(
        message_ids=[key for key in keys if isinstance(key, str)],
        retrieval_hints=[key for key in keys if isinstance(key, bytes)],
        channel_id=channel_id,
        presence_only=presence_only,
    )
    return _post("v1/messages/lookup", replies.lookup_result, request.SerializeToString())


def hint(
    retrieval_hint: bytes, channel_id: str | None, after: str | None, limit: int | None
) -> Call[MessagePage]:
    """The entries that a hint can lead to, likeliest first."""
    query = {"channel_id": channel_id, "after": after, "limit": limit}
    return _get(f"v1/hints/{retrieval_hint.hex()}", replies.message_page, query)


def channels(
    after: str | None, prefix: str | None = None, limit: int | None = None
) -> Call[Items[Channel]]:
    """A page of the channels that begin with `prefix`."""
    query = {"after": after, "prefix": prefix, "limit": limit}
    return _get("v1/channels", replies.channel_page, query)


def channel(channel_id: str) -> Call[Channel]:
    """One channel, with its root."""
    return _get("v1/channels", replies.channel, {"channel_id": channel_id})


@dataclass(frozen=True, slots=True)
class MessagesQuery:
    """Filter and order for messages of a channel; `from_lamport` and `to_lamport` are bounds."""

    channel_id: str
    order: Order = "log"
    direction: Direction = "asc"
    from_lamport: int | None = None
    to_lamport: int | None = None
    page_size: int | None = None
    on_left_out: Callable[[tuple[bytes, ...]], None] | None = None


def messages(query: MessagesQuery, after: str | None) -> Call[Items[StoredMessage]]:
    """A page of a channel's messages."""
    parameters = {
        "channel_id": query.channel_id,
        "order": query.order,
        "direction": query.direction,
        "from_lamport": query.from_lamport,
        "to_lamport": query.to_lamport,
        "limit": query.page_size,
        "after": after,
    }
    read = replies.message_items(query.on_left_out)
    return _get("v1/channels/messages", read, parameters)


def feed(after: str | None, limit: int | None) -> Call[MessagePage]:
    """A page of all readable messages, in arrival order."""
    return _get("v1/feed", replies.message_page, {"after": after, "limit": limit})


def live(channel_id: str | None, after: str | None) -> Call[None]:
    """The endless stream of live events of a channel, or of all channels."""
    path = "v1/live" if channel_id is None else "v1/channels/live"
    query = {"channel_id": channel_id, "after": after}
    given = {name: value for name, value in query.items() if value is not None}
    target = f"{path}?{urlencode(given)}" if given else path
    return Call("GET", target, replies.nothing, _accept(EVENT_STREAM))


def gaps(channel_id: str, after: str | None) -> Call[Items[Gap]]:
    """A page of a channel's gaps."""
    query = {"channel_id": channel_id, "after": after}
    return _get("v1/channels/gaps", replies.gap_page, query)


def ancestors(
    channel_id: str,
    heads: Sequence[str],
    known: Sequence[str],
    after: str | None,
    limit: int | None,
) -> Call[AncestorsPage]:
    """The messages causally before `heads`; the walk stops at `known`."""
    request = wire.AncestorsRequest(
        channel_id=channel_id, heads=heads, known=known, limit=limit or 0, after=after or ""
    )
    return _post("v1/messages/ancestors", replies.ancestors_page, request.SerializeToString())


@dataclass(frozen=True, slots=True)
class OrderQuery:
    """The writers of an order with a role; see docs/ordering.md."""

    channel_id: str
    indexers: Sequence[str]
    non_indexers: Sequence[str] = ()
    relayed: Sequence[str] = ()
    with_messages: bool = False


def order(query: OrderQuery, after: str | None, limit: int | None) -> Call[OrderPage]:
    """A page of a channel's order."""
    fields = {
        "channel_id": query.channel_id,
        "indexer": query.indexers,
        "non_indexer": query.non_indexers,
        "relayed": query.relayed,
        "include": "messages" if query.with_messages else (),
        "after": () if after is None else after,
        "limit": () if limit is None else str(limit),
    }
    target = f"v1/channels/order?{urlencode(fields, doseq=True)}"
    return Call("GET", target, replies.order_page, _accept(PROTOBUF))


def recon(request: bytes) -> Call[bytes]:
    """One step of a reconciliation; the node keeps no state between steps."""
    return _post("v1/recon", replies.body_bytes, request)


def mvds(peer_id: str, channel_ids: Sequence[str], payload: bytes, mode: MvdsMode) -> Call[bytes]:
    """One epoch with the node as an MVDS peer. A payload that comes twice does no harm."""
    fields = [("mode", mode), *(("channel_id", each) for each in channel_ids)]
    target = f"v1/mvds/{quote(peer_id, safe='')}?{urlencode(fields)}"
    return _post(target, replies.body_bytes, payload)


def peers() -> Call[list[Peer]]:
    """The node's peers."""
    return Call("GET", "v1/peers", replies.peers, _accept(JSON))


def peer(peer_id: str) -> Call[Peer]:
    """One peer with its state."""
    return Call("GET", f"v1/peers/{quote(peer_id, safe='')}", replies.peer, _accept(JSON))


def peer_status(peer_id: str) -> Call[Mapping[str, Any]]:
    """A peer's health and the record of divergence from it."""
    target = f"v1/peers/{quote(peer_id, safe='')}/status"
    return Call("GET", target, replies.document, _accept(JSON))


def add_peer(url: str, token: str | None) -> Call[Peer]:
    """A new peer, or the existing peer with this URL."""
    body = {"url": url} | ({} if token is None else {"token": token})
    return _post_json("v1/peers", replies.peer, body, is_repeatable=True)


def remove_peer(peer_id: str) -> Call[None]:
    """Forget a peer; `not_found` if it does not exist."""
    target = f"v1/peers/{quote(peer_id, safe='')}"
    return Call("DELETE", target, replies.no_content, is_repeatable=False)


def interests() -> Call[Mapping[str, Any]]:
    """What the node wants of its peers, and who said so."""
    return Call("GET", "v1/recon/interests", replies.document, _accept(JSON))


def set_interests(interest: Mapping[str, object]) -> Call[Mapping[str, Any]]:
    """Another interest, which wins over the node's settings."""
    headers = (("accept", JSON), ("content-type", JSON))
    body = json.dumps(interest).encode()
    return Call("PUT", "v1/recon/interests", replies.document, headers, body, is_repeatable=True)


def reset_interests() -> Call[Mapping[str, Any]]:
    """The interest of the node's settings again."""
    return Call("DELETE", "v1/recon/interests", replies.document, _accept(JSON), is_repeatable=True)


def reload() -> Call[Mapping[str, Any]]:
    """The settings read again: which were taken over, and which take a restart."""
    return Call("POST", "v1/reload", replies.document, _accept(JSON))


def quarantine(after: str | None) -> Call[Items[Mapping[str, Any]]]:
    """A page of the messages in the quarantine."""
    target = "v1/quarantine?limit=1000" + ("" if after is None else f"&after={after}")
    return Call("GET", target, replies.quarantine_page, _accept(JSON))


def release_quarantined(digest: bytes) -> Call[Mapping[str, Any]]:
    """Store a message that is in the quarantine."""
    # A repeated call would answer `not_found` for a message that the first one released.
    target = f"v1/quarantine/{digest.hex()}/release"
    return Call("POST", target, replies.document, _accept(JSON), is_repeatable=False)


def drop_quarantined(digest: bytes) -> Call[None]:
    """Delete a message that is in the quarantine, and refuse it from now on."""
    return Call("DELETE", f"v1/quarantine/{digest.hex()}", replies.no_content, is_repeatable=False)


def syncs() -> Call[list[Sync]]:
    """The sync sessions that the node remembers."""
    return Call("GET", "v1/syncs", replies.syncs, _accept(JSON))


def sync(sync_id: str) -> Call[Sync]:
    """One sync session with its progress."""
    return Call("GET", f"v1/syncs/{quote(sync_id, safe='')}", replies.sync, _accept(JSON))


def start_sync(peer_url: str, channel_ids: Sequence[str], *, dry_run: bool) -> Call[Sync]:
    """Start a sync with any store."""
    document = {"peer_url": peer_url, "channels": list(channel_ids), "dry_run": dry_run}
    return _post_json("v1/syncs", replies.sync, document, is_repeatable=False)


def sync_peer(peer_id: str, channel_ids: Sequence[str], *, dry_run: bool) -> Call[Sync]:
    """Start a sync with one of the node's peers."""
    target = f"v1/peers/{quote(peer_id, safe='')}/sync"
    document = {"channels": list(channel_ids), "dry_run": dry_run}
    return _post_json(target, replies.sync, document, is_repeatable=False)


def _accept(media_type: str) -> tuple[tuple[str, str], ...]:
    return (("accept", media_type),)


def _protobuf_both_ways() -> tuple[tuple[str, str], ...]:
    return (("accept", PROTOBUF), ("content-type", PROTOBUF))


def _get(path: str, read: Callable[[Reply], _Result_co], query: Parameters) -> Call[_Result_co]:
    given = {name: value for name, value in query.items() if value is not None}
    target = f"{path}?{urlencode(given)}" if given else path
    return Call("GET", target, read, _accept(PROTOBUF))


def _post(target: str, read: Callable[[Reply], _Result_co], body: bytes) -> Call[_Result_co]:
    return Call("POST", target, read, _protobuf_both_ways(), body)


def _post_json(
    target: str,
    read: Callable[[Reply], _Result_co],
    document: Mapping[str, object],
    *,
    is_repeatable: bool,
) -> Call[_Result_co]:
    headers = (("accept", JSON), ("content-type", JSON))
    return Call("POST", target, read, headers, json.dumps(document).encode(), is_repeatable)


def _publish_item(item: PublishItem) -> wire.PublishItem:
    return wire.PublishItem(
        frame=item.frame,
        retrieval_hints=item.retrieval_hints,
        waku=None if item.waku is None else _envelope(item.waku),
        without_quarantine=item.without_quarantine,
    )


def _envelope(waku: WakuEnvelope) -> wire.WakuEnvelope:
    return wire.WakuEnvelope(
        pubsub_topic=waku.pubsub_topic,
        content_topic=waku.content_topic,
        meta=waku.meta,
        timestamp_ns=waku.timestamp_ns,
    )
