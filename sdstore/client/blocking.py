"""`StoreClient`: the blocking client of a store node."""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from sdstore.client import calls
from sdstore.client.aio import AsyncStoreClient
from sdstore.client.batching import Batcher, Publishable, batches
from sdstore.client.calls import Call, Direction, Items, MessagesQuery, MvdsMode, Order, OrderQuery
from sdstore.client.errors import StoreError
from sdstore.client.exchange import (
    BoundedBody,
    EmptyPages,
    Options,
    base_headers,
    checked_url,
    network_errors,
    next_cursor,
)
from sdstore.client.live import Following, LiveStream
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
    PublishOutcome,
    StoredMessage,
    Sync,
)
from sdstore.client.replies import Reply, checked
from sdstore.sds.log import BackfillLog
from sdstore.sds.model import Message
from sdstore.sync.report import Progress, SyncReport

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class StoreClient:
    """One store node. Every method raises `StoreError` and nothing else for the node's faults.

    `base_url` is the node's address, such as "http://127.0.0.1:8000"; `token` an access token of it;
    `tls` the context of https URLs, for a CA of your own (`ssl.create_default_context(cafile=…)`).
    Use it in a `with` statement, or `close` it. Threads can share it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        options: Options | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._options = options or Options()
        self._http = httpx.Client(
            base_url=checked_url(base_url),
            headers=base_headers(token),
            verify=True if tls is None else tls,
            timeout=self._options.timeout,
            transport=transport,
        )
        self._base_url = base_url
        self._token = token
        self._tls = tls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def info(self) -> NodeInfo:
        """The node's identity and capabilities."""
        return self._send(calls.info())

    def publish(
        self, message: bytes | Message, retrieval_hints: Sequence[bytes] = ()
    ) -> PublishOutcome:
        """Publish one frame or message, with retrieval hints (raw bytes) for it.

        A `Message` is sent as a frame of the latest dialect; `MessageError` if it is not valid.
        """
        return self._send(calls.publish(message, retrieval_hints))

    def publish_batch(self, frames: Iterable[Publishable]) -> list[PublishOutcome]:
        """Publish frames and messages in bounded batches; returns one outcome each, in order.

        A refused frame does not affect the others: its outcome contains the error. If a batch fails,
        those before it are published all the same; publishing a frame again is harmless.
        """
        return list(self.publish_stream(frames))

    def publish_stream(
        self, frames: Iterable[Publishable], batcher: Batcher | None = None
    ) -> Iterator[PublishOutcome]:
        """As `publish_batch` for any number of frames: they are read and sent as the outcomes are read.

        Read the iterator to its end.
        """
        for batch in batches(frames, batcher or Batcher()):
            yield from self._send(calls.publish_batch(batch))

    def get(
        self, message_id: str, channel_id: str | None = None, digest: bytes | None = None
    ) -> Frame:
        """The frame served under a message ID, or its variant with `digest`."""
        return self._send(calls.get(message_id, channel_id, digest))

    def get_entry(self, digest: bytes) -> Frame:
        """The frame of an entry; `digest_mismatch` if the node returns another one."""
        return self._send(calls.get_entry(digest))

    def lookup(
        self, keys: Sequence[Key], channel_id: str | None = None, *, presence_only: bool = False
    ) -> LookupResult:
        """Find many message IDs (text) and retrieval hints (bytes) at once."""
        return self._send(calls.lookup(keys, channel_id, presence_only=presence_only))

    def hint(
        self,
        retrieval_hint: bytes,
        channel_id: str | None = None,
        *,
        after: str | None = None,
        limit: int | None = None,
    ) -> MessagePage:
        """The entries that a hint can lead to, likeliest first."""
        return self._send(calls.hint(retrieval_hint, channel_id, after, limit))

    def channels(
        self, prefix: str | None = None, *, page_size: int | None = None
    ) -> Iterator[Channel]:
        """The channels that begin with `prefix`, page by page as they are read; None: all of them."""
        return self._pages(lambda after: calls.channels(after, prefix, page_size))

    def channel(self, channel_id: str) -> Channel:
        """One channel, with its root."""
        return self._send(calls.channel(channel_id))

    def messages(
        self,
        channel_id: str,
        *,
        order: Order = "log",
        direction: Direction = "asc",
        from_lamport: int | None = None,
        to_lamport: int | None = None,
        after: str | None = None,
        page_size: int | None = None,
        on_left_out: Callable[[tuple[bytes, ...]], None] | None = None,
    ) -> Iterator[StoredMessage]:
        """All messages of a channel, page by page as they are read.

        `after` is a cursor of the same order; one of a live stream or of the feed is of arrival order.
        `on_left_out` is called with the digests of messages whose content the node has lost.
        """
        query = MessagesQuery(
            channel_id, order, direction, from_lamport, to_lamport, page_size, on_left_out
        )
        return self._pages(lambda following: calls.messages(query, following or after))

    def feed(self, after: str | None = None, limit: int | None = None) -> MessagePage:
        """A page of all readable messages, in arrival order; follow `next` to miss none."""
        return self._send(calls.feed(after, limit))

    def live(
        self,
        channel_id: str | None = None,
        after: str | None = None,
        *,
        on_left_out: Callable[[tuple[bytes, ...]], None] | None = None,
    ) -> LiveStream:
        """Messages of one channel, or of all, as they reach the node.

            with store.live("/garden/1/bees/proto") as stream:
                for each in stream:
                    print(each.message)

        After the start of the `with` no stored message is missed: a broken connection is reopened at
        the place where it broke, as `Options.retry` says. `after` is the cursor of an earlier stream
        or of the feed; without it the stream begins now. The node does not store sync and ephemeral
        messages, so they come only while the connection is open. `on_left_out` is called with the
        digests of stored messages whose content the node has lost.
        """
        return LiveStream(self._http, Following(channel_id, after, self._options, on_left_out))

    def gaps(self, channel_id: str) -> Iterator[Gap]:
        """The messages that the channel's histories name and the node lacks."""
        return self._pages(lambda after: calls.gaps(channel_id, after))

    def ancestors(
        self,
        channel_id: str,
        heads: Sequence[str],
        known: Sequence[str] = (),
        *,
        after: str | None = None,
        limit: int | None = None,
    ) -> AncestorsPage:
        """The messages causally before `heads`; the walk stops at `known`."""
        return self._send(calls.ancestors(channel_id, heads, known, after, limit))

    def order(
        self,
        channel_id: str,
        indexers: Sequence[str],
        *,
        non_indexers: Sequence[str] = (),
        relayed: Sequence[str] = (),
        with_messages: bool = False,
        after: str | None = None,
        limit: int | None = None,
    ) -> OrderPage:
        """A page of a channel's order: the confirmed prefix, which never changes, then the tail.

        `indexers` are the senders whose references confirm. Pass `next` as `after` until it is None; a
        cursor in a tail that was ordered anew raises `cursor_rewound`, and `next_confirmed` holds for ever.
        """
        query = OrderQuery(channel_id, indexers, non_indexers, relayed, with_messages)
        return self._send(calls.order(query, after, limit))

    def recon(self, request: bytes) -> bytes:
        """One step of a reconciliation: `ReconRequest` bytes in, `ReconResponse` bytes out."""
        return self._send(calls.recon(request))

    def backfill(
        self,
        channel_id: str,
        log: BackfillLog,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        send: bool = False,
    ) -> SyncReport:
        """See `AsyncStoreClient.backfill`. It runs an event loop with connections of its own."""

        async def run() -> SyncReport:
            async with AsyncStoreClient(
                self._base_url, token=self._token, tls=self._tls, options=self._options
            ) as client:
                return await client.backfill(channel_id, log, on_progress, send=send)

        return asyncio.run(run())

    def mvds(
        self,
        peer_id: str,
        channel_ids: Sequence[str],
        payload: bytes,
        *,
        mode: MvdsMode = "interactive",
    ) -> bytes:
        """One MVDS payload to the node, and the one it returns; `MvdsSession` calls this."""
        return self._send(calls.mvds(peer_id, channel_ids, payload, mode))

    def audit(self) -> dict[str, Any]:
        """What the node's audit has proved and found wrong (docs/operations.md)."""
        return self._send(calls.audit())

    def peers(self) -> list[Peer]:
        """The node's peers."""
        return self._send(calls.peers())

    def peer(self, peer_id: str) -> Peer:
        """One peer."""
        return self._send(calls.peer(peer_id))

    def peer_status(self, peer_id: str) -> Mapping[str, Any]:
        """A peer's health and the record of divergence from it."""
        return self._send(calls.peer_status(peer_id))

    def add_peer(self, url: str, token: str | None = None) -> Peer:
        """Add a peer, or return the existing peer with this URL; `token` is an access token of it."""
        return self._send(calls.add_peer(url, token))

    def remove_peer(self, peer_id: str) -> None:
        """Forget a peer."""
        self._send(calls.remove_peer(peer_id))

    def interests(self) -> Mapping[str, Any]:
        """What the node wants of its peers: all, channels, prefixes, a Lamport window, the origin."""
        return self._send(calls.interests())

    def set_interests(self, interest: Mapping[str, object]) -> Mapping[str, Any]:
        """Change what the node syncs; the answer counts what it holds outside."""
        return self._send(calls.set_interests(interest))

    def reset_interests(self) -> Mapping[str, Any]:
        """Return to the interest of the node's settings."""
        return self._send(calls.reset_interests())

    def reload(self) -> Mapping[str, Any]:
        """Have the node read its settings again; names what changed and what takes a restart."""
        return self._send(calls.reload())

    def quarantine(self) -> Iterator[Mapping[str, Any]]:
        """The messages that the node's policy keeps apart, oldest first, without their content."""
        return self._pages(calls.quarantine)

    def release_quarantined(self, digest: bytes) -> Mapping[str, Any]:
        """Store a message that is in the quarantine; the policy does not see it again."""
        return self._send(calls.release_quarantined(digest))

    def drop_quarantined(self, digest: bytes) -> None:
        """Delete a message that is in the quarantine; the node refuses it from now on."""
        self._send(calls.drop_quarantined(digest))

    def syncs(self) -> list[Sync]:
        """The sync sessions that the node remembers, newest first."""
        return self._send(calls.syncs())

    def sync(self, sync_id: str) -> Sync:
        """One sync session with its progress."""
        return self._send(calls.sync(sync_id))

    def start_sync(
        self, peer_url: str, channel_ids: Sequence[str] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync of the node with the store at `peer_url`."""
        return self._send(calls.start_sync(peer_url, channel_ids, dry_run=dry_run))

    def sync_peer(
        self, peer_id: str, channel_ids: Sequence[str] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync of the node with one of its peers."""
        return self._send(calls.sync_peer(peer_id, channel_ids, dry_run=dry_run))

    def _pages(self, page_call: Callable[[str | None], Call[Items[_Item]]]) -> Iterator[_Item]:
        empty_pages = EmptyPages()
        items, after = self._send(page_call(None))
        yield from items
        while after is not None:
            items, following = self._send(page_call(after))
            empty_pages.add(len(items))
            yield from items
            after = next_cursor(after, following)

    def _send(self, call: Call[_Result]) -> _Result:
        attempt = 1
        while True:
            try:
                return call.read(checked(self._exchange(call)))
            except StoreError as error:
                delay_s = self._options.delay_s(call, attempt, error)
                if delay_s is None:
                    raise
            time.sleep(delay_s)
            attempt += 1

    def _exchange(self, call: Call[object]) -> Reply:
        body = BoundedBody(self._options, time.monotonic())
        with (
            network_errors(),
            self._http.stream(
                call.method, call.target, content=call.body, headers=call.headers
            ) as response,
        ):
            for chunk in response.iter_raw():
                body.feed(chunk, time.monotonic())
            return body.reply(response)
