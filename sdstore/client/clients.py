"""`AsyncStoreClient` and `StoreClient`: a store node for programs on an event loop, and for those that block.

`StoreCalls` has the methods that both share, over any `Network`; those of `StoreClient` run them to their end
over one that blocks.
"""

import asyncio
import ssl
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from sdstore.client import records
from sdstore.client.exchange import (
    JSON,
    AsyncNetwork,
    Batcher,
    BlockingNetwork,
    BoundedBody,
    Call,
    ClientOptions,
    Direction,
    EmptyPages,
    MvdsMode,
    Network,
    Order,
    Publishable,
    Query,
    base_headers,
    batches,
    checked_url,
    finished,
    get,
    network_errors,
    next_cursor,
    path_of,
    post,
    publish_item,
    send_json,
)
from sdstore.client.live import AsyncLiveStream, Following, LiveStream
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
    Reply,
    StoredMessage,
    Sync,
    checked,
)
from sdstore.errors import StoreError, bad_argument, check_argument
from sdstore.ordering import RolesChange
from sdstore.sds.codec import encode
from sdstore.sds.log import BackfillLog
from sdstore.sds.model import Message
from sdstore.sync.report import Progress, SyncReport
from sdstore.wire import store_pb2 as wire

if TYPE_CHECKING:
    from sdstore.participant.backfill import Memories


_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Page = tuple[tuple[_Item, ...], str | None]
"""Items, and the cursor of the next page."""
Frames = Iterable[Publishable] | AsyncIterable[Publishable]


class StoreCalls:
    """The calls of a store node, over a network. Each raises `StoreError` and nothing else for its faults."""

    def __init__(self, network: Network, options: ClientOptions) -> None:
        self._network = network
        self._options = options

    async def info(self) -> NodeInfo:
        """The node's identity and capabilities."""
        return await self._send(get("v1/info", records.node_info, JSON))

    async def publish(
        self, message: bytes | Message, retrieval_hints: Sequence[bytes] = ()
    ) -> PublishOutcome:
        """Publish one frame or message, with retrieval hints (raw bytes) for it.

        A `Message` is sent as a frame of the latest dialect; `MessageError` if it is not valid.
        """
        hints = tuple(("retrieval-hint", hint.hex()) for hint in retrieval_hints)
        frame = encode(message) if isinstance(message, Message) else message
        call = post("v1/messages", records.publish_outcome, frame)
        return await self._send(replace(call, headers=(*call.headers, *hints)))

    async def publish_batch(self, frames: Frames) -> list[PublishOutcome]:
        """Publish frames and messages in bounded batches; returns one outcome each, in order.

        A refused frame does not affect the others: its outcome contains the error. If a batch fails,
        those before it are published all the same; publishing a frame again is harmless.
        """
        return [outcome async for outcome in self.publish_stream(frames)]

    async def publish_stream(
        self, frames: Frames, batcher: Batcher | None = None
    ) -> AsyncIterator[PublishOutcome]:
        """As `publish_batch` for any number of frames: they are read and sent as the outcomes are read.

        Read the iterator to its end.
        """
        async for batch in _batches(frames, batcher or Batcher()):
            body = wire.PublishBatch(items=map(publish_item, batch)).SerializeToString()
            read = records.publish_outcomes(len(batch))
            for outcome in await self._send(post("v1/messages/batch", read, body)):
                yield outcome

    async def get(
        self, message_id: str, channel_id: str | None = None, digest: bytes | None = None
    ) -> Frame:
        """The frame served under a message ID, or its variant with `digest`."""
        hexadecimal = None if digest is None else digest.hex()
        query = {"message_id": message_id, "channel_id": channel_id, "digest": hexadecimal}
        return await self._send(get("v1/messages", records.frame, **query))

    async def get_entry(self, digest: bytes) -> Frame:
        """The frame of an entry; `digest_mismatch` if the node returns another one."""
        path = f"v1/entries/{digest.hex()}"
        return await self._send(get(path, records.frame_of_digest(digest)))

    async def lookup(
        self, keys: Sequence[Key], channel_id: str | None = None, *, presence_only: bool = False
    ) -> LookupResult:
        """Find many message IDs (text) and retrieval hints (bytes) at once."""
        request = wire.LookupRequest(
            message_ids=[key for key in keys if isinstance(key, str)],
            retrieval_hints=[key for key in keys if isinstance(key, bytes)],
            channel_id=channel_id,
            presence_only=presence_only,
        )
        body = request.SerializeToString()
        return await self._send(post("v1/messages/lookup", records.lookup_result, body))

    async def hint(
        self,
        retrieval_hint: bytes,
        channel_id: str | None = None,
        *,
        after: str | None = None,
        limit: int | None = None,
    ) -> MessagePage:
        """The entries that a hint can lead to, likeliest first."""
        path, query = f"v1/hints/{retrieval_hint.hex()}", {"after": after, "limit": limit}
        return await self._send(get(path, records.message_page, channel_id=channel_id, **query))

    def channels(
        self, prefix: str | None = None, *, page_size: int | None = None
    ) -> AsyncIterator[Channel]:
        """The channels that begin with `prefix`, page by page as they are read; None: all of them."""
        path, query = "v1/channels", {"prefix": prefix, "limit": page_size}
        return self._pages(lambda after: get(path, records.channel_page, after=after, **query))

    async def channel(self, channel_id: str) -> Channel:
        """One channel, with its root."""
        return await self._send(get("v1/channels", records.channel, channel_id=channel_id))

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
        bloom_filter: bool = True,
    ) -> AsyncIterator[StoredMessage]:
        """All messages of a channel, page by page as they are read.

        `after` is a cursor of the same order; one of a live stream or of the feed is of arrival order.
        `on_left_out` is called with the digests of messages whose content the node has lost.
        Without `bloom_filter`, frames come without theirs: 200 bytes of a short message, not 20 kB.
        """
        read = records.message_items(on_left_out)
        query: dict[str, Query] = {
            "channel_id": channel_id,
            "order": order,
            "direction": direction,
            "from_lamport": from_lamport,
            "to_lamport": to_lamport,
            "limit": page_size,
            "filter": None if bloom_filter else "none",
        }
        path = "v1/channels/messages"
        return self._pages(lambda following: get(path, read, after=following or after, **query))

    async def feed(
        self, after: str | None = None, limit: int | None = None, *, bloom_filter: bool = True
    ) -> MessagePage:
        """A page of all readable messages, in arrival order; follow `next` to miss none.

        `bloom_filter` as in `messages`.
        """
        query: dict[str, Query] = {"after": after, "limit": limit}
        query["filter"] = None if bloom_filter else "none"
        return await self._send(get("v1/feed", records.message_page, **query))

    def live(
        self,
        channel_id: str | None = None,
        after: str | None = None,
        *,
        on_left_out: Callable[[tuple[bytes, ...]], None] | None = None,
        bloom_filter: bool = False,
    ) -> AsyncLiveStream:
        """Messages of one channel, or of all, as they reach the node.

            async with store.live("/garden/1/bees/proto") as stream:
                async for each in stream:  # without `async` for a `StoreClient`
                    print(each.message)

        After the start of the `with` no stored message is missed: a broken connection is reopened at
        the place where it broke, as `ClientOptions.retry` says. `after` is the cursor of an earlier stream
        or of the feed; without it the stream begins now. The node does not store sync and ephemeral
        messages, so they come only while the connection is open. `on_left_out` is called with the
        digests of stored messages whose content the node has lost. Messages come without their bloom
        filters, which only a participant needs, unless `bloom_filter` asks for them.
        """

        def left_out(_channel_id: str, digest: bytes) -> None:
            if on_left_out is not None:
                on_left_out((digest,))

        following = Following(channel_id, after, self._options, left_out, bloom_filter=bloom_filter)
        return AsyncLiveStream(self._network, following)

    def live_of(
        self,
        channels: Sequence[str] = (),
        prefixes: Sequence[str] = (),
        after: str | None = None,
        *,
        on_left_out: Callable[[str, bytes], None] | None = None,
        bloom_filter: bool = False,
    ) -> AsyncLiveStream:
        """As `live`, for some channels and all that begin with a prefix, in one stream: up to 200 names.

        To change the list, open another stream `after` the cursor of this one. `on_left_out` is called with the
        channel and the digest.
        """
        wanted = {"channels": list(channels), "prefixes": list(prefixes)}
        following = Following(wanted, after, self._options, on_left_out, bloom_filter=bloom_filter)
        return AsyncLiveStream(self._network, following)

    def gaps(self, channel_id: str) -> AsyncIterator[Gap]:
        """The messages that the channel's histories name and the node lacks."""
        path, query = "v1/channels/gaps", {"channel_id": channel_id}
        return self._pages(lambda after: get(path, records.gap_page, after=after, **query))

    async def ancestors(
        self,
        channel_id: str,
        heads: Sequence[str],
        known: Sequence[str] = (),
        *,
        after: str | None = None,
        limit: int | None = None,
    ) -> AncestorsPage:
        """The messages causally before `heads`; the walk stops at `known`."""
        request = wire.AncestorsRequest(
            channel_id=channel_id, heads=heads, known=known, limit=limit or 0, after=after or ""
        )
        body = request.SerializeToString()
        return await self._send(post("v1/messages/ancestors", records.ancestors_page, body))

    async def order(
        self,
        channel_id: str,
        indexers: Sequence[str],
        *,
        non_indexers: Sequence[str] = (),
        relayed: Sequence[str] = (),
        changes: Sequence[RolesChange] = (),
        with_messages: bool = False,
        after: str | None = None,
        limit: int | None = None,
    ) -> OrderPage:
        """A page of a channel's order: the confirmed prefix, which never changes, then the tail.

        `indexers` are the senders whose references confirm, until the first of `changes`. Pass `next` as `after` until it is None; a
        cursor in a tail that was ordered anew raises `cursor_rewound`, and `next_confirmed` holds for ever.
        """
        query: dict[str, Query] = {
            "channel_id": channel_id,
            "indexer": indexers,
            "non_indexer": non_indexers,
            "relayed": relayed,
            "change": [records.change_text(each) for each in changes],
            "include": "messages" if with_messages else None,
            "after": after,
            "limit": limit,
        }
        return await self._send(get("v1/channels/order", records.order_page, **query))

    async def recon(self, request: bytes) -> bytes:
        """One step of a reconciliation: `ReconRequest` bytes in, `ReconResponse` bytes out."""
        return await self._send(post("v1/recon", records.body_bytes, request))

    async def mvds(
        self,
        peer_id: str,
        channel_ids: Sequence[str],
        payload: bytes,
        *,
        mode: MvdsMode = "interactive",
    ) -> bytes:
        """One MVDS payload to the node, and the one it returns; `MvdsSession` calls this."""
        path, query = path_of("v1/mvds", peer_id), {"mode": mode, "channel_id": channel_ids}
        return await self._send(post(path, records.body_bytes, payload, **query))

    async def peers(self) -> list[Peer]:
        """The node's peers."""
        return await self._send(get("v1/peers", records.peers, JSON))

    async def peer(self, peer_id: str) -> Peer:
        """One peer."""
        return await self._send(get(path_of("v1/peers", peer_id), records.peer, JSON))

    async def peer_status(self, peer_id: str) -> Mapping[str, Any]:
        """A peer's health and the record of divergence from it."""
        return await self._send(get(path_of("v1/peers", peer_id, "status"), records.document, JSON))

    async def add_peer(self, url: str, token: str | None = None) -> Peer:
        """Add a peer, or return the existing peer with this URL; `token` is an access token of it."""
        body = {"url": url} | ({} if token is None else {"token": token})
        return await self._send(
            send_json("POST", "v1/peers", records.peer, body, is_repeatable=True)
        )

    async def remove_peer(self, peer_id: str) -> None:
        """Forget a peer."""
        path = path_of("v1/peers", peer_id)
        await self._send(Call("DELETE", path, records.no_content, is_repeatable=False))

    async def interests(self) -> Mapping[str, Any]:
        """What the node wants of its peers: all, channels, prefixes, a Lamport window, the origin."""
        return await self._send(get("v1/recon/interests", records.document, JSON))

    async def set_interests(self, interest: Mapping[str, object]) -> Mapping[str, Any]:
        """Change what the node syncs; the answer counts what it holds outside."""
        path, read = "v1/recon/interests", records.document
        return await self._send(send_json("PUT", path, read, interest, is_repeatable=True))

    async def reset_interests(self) -> Mapping[str, Any]:
        """Return to the interest of the node's settings."""
        call = get("v1/recon/interests", records.document, JSON)
        return await self._send(replace(call, method="DELETE"))

    async def reload(self) -> Mapping[str, Any]:
        """Have the node read its settings again; names what changed and what takes a restart."""
        return await self._send(replace(get("v1/reload", records.document, JSON), method="POST"))

    def quarantine(self) -> AsyncIterator[Mapping[str, Any]]:
        """The messages that the node's policy keeps apart, oldest first, without their content."""
        path, read = "v1/quarantine", records.quarantine_page
        return self._pages(lambda after: get(path, read, JSON, limit=1_000, after=after))

    async def release_quarantined(self, digest: bytes) -> Mapping[str, Any]:
        """Store a message that is in the quarantine; the policy does not see it again."""
        # A repeated call would answer `not_found` for a message that the first one released.
        call = get(f"v1/quarantine/{digest.hex()}/release", records.document, JSON)
        return await self._send(replace(call, method="POST", is_repeatable=False))

    async def drop_quarantined(self, digest: bytes) -> None:
        """Delete a message that is in the quarantine; the node refuses it from now on."""
        path = f"v1/quarantine/{digest.hex()}"
        await self._send(Call("DELETE", path, records.no_content, is_repeatable=False))

    async def retire(
        self,
        reason: str,
        *,
        message_id: str | None = None,
        channel_id: str | None = None,
        digest: bytes | None = None,
        with_history: bool = False,
    ) -> Mapping[str, Any]:
        """Drop the content of all entries under an ID, or of one by its digest, for good.

        The answer counts entries: `retired`, `ahead`, `already`; `erasure` says whether the content is out of
        the files of the node's database.
        """
        body: dict[str, object] = {"reason": reason, "with_history": with_history}
        if digest is not None:
            body["digest"] = digest.hex()
        else:
            body |= {"message_id": message_id, "channel_id": channel_id}
        path, read = "v1/retirements", records.document
        return await self._send(send_json("POST", path, read, body, is_repeatable=True))

    async def retirements(self) -> Mapping[str, Any]:
        """The number of retired entries, `retired`, and `erasure` as of `retire`."""
        return await self._send(get("v1/retirements", records.document, JSON))

    async def retention(self) -> Mapping[str, Any]:
        """The `rules` by which the node retires what is old; it takes them from its settings."""
        return await self._send(get("v1/retention", records.document, JSON))

    def retention_dry_run(
        self, rules: Sequence[Mapping[str, Any]] | None = None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """What rules (None: those in force) would retire now, channel by channel; nothing changes."""
        path, read = "v1/retention/dry-run", records.retention_page
        return self._pages(
            lambda after: send_json(
                "POST", path, read, {"rules": rules, "after": int(after or 0)}, is_repeatable=True
            )
        )

    async def syncs(self) -> list[Sync]:
        """The sync sessions that the node remembers, newest first."""
        return await self._send(get("v1/syncs", records.syncs, JSON))

    async def sync(self, sync_id: str) -> Sync:
        """One sync session with its progress."""
        return await self._send(get(path_of("v1/syncs", sync_id), records.sync, JSON))

    async def start_sync(
        self, peer_url: str, channel_ids: Sequence[str] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync of the node with the store at `peer_url`."""
        body = {"peer_url": peer_url, "channels": list(channel_ids), "dry_run": dry_run}
        return await self._send(
            send_json("POST", "v1/syncs", records.sync, body, is_repeatable=False)
        )

    async def sync_peer(
        self, peer_id: str, channel_ids: Sequence[str] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync of the node with one of its peers."""
        path = path_of("v1/peers", peer_id, "sync")
        body = {"channels": list(channel_ids), "dry_run": dry_run}
        return await self._send(send_json("POST", path, records.sync, body, is_repeatable=False))

    async def _pages(
        self, page_call: Callable[[str | None], Call[_Page[_Item]]]
    ) -> AsyncIterator[_Item]:
        empty_pages = EmptyPages()
        items, after = await self._send(page_call(None))
        for item in items:
            yield item
        while after is not None:
            items, following = await self._send(page_call(after))
            empty_pages.add(len(items))
            for item in items:
                yield item
            after = next_cursor(after, following)

    async def _send(self, call: Call[_Result]) -> _Result:
        attempt = 1
        while True:
            try:
                return call.read(checked(await self._exchange(call)))
            except StoreError as error:
                delay_s = self._options.delay_s(call, attempt, error)
                if delay_s is None:
                    raise
            await self._network.sleep(delay_s)
            attempt += 1

    async def _exchange(self, call: Call[object]) -> Reply:
        whole = BoundedBody(self._options, time.monotonic())
        with network_errors():
            body = await self._network.send(call.request(self._network.http))
            try:
                return await whole.read(body)
            finally:
                await body.close()


class AsyncStoreClient(StoreCalls):
    """One store node. Every method raises `StoreError` and nothing else for the node's faults.

    `base_url` is the node's address, such as "http://127.0.0.1:8000"; `token` an access token of it;
    `tls` the context of https URLs, for a CA of your own (`ssl.create_default_context(cafile=…)`).
    Use it in an `async with` statement, or `close` it; it belongs to one event loop.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        options: ClientOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        options = options or ClientOptions()
        http = httpx.AsyncClient(
            base_url=checked_url(base_url),
            headers=base_headers(token),
            verify=True if tls is None else tls,
            timeout=options.timeout,
            transport=transport,
        )
        super().__init__(AsyncNetwork(http), options)
        self._http = http
        self._memories: Memories | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._network.close()

    async def backfill(
        self,
        channel_id: str,
        log: BackfillLog,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        send: bool = False,
    ) -> SyncReport:
        """Stage in `log` exactly the messages of a channel that it lacks, by reconciliation.

        `sdstore.participant.backfill.drain` then feeds them to the participant. With `send` the store gets
        what it lacks, too. Does not raise for faults of the node: the report has the outcome and a
        code. What was fetched by then is staged, and the next call fetches the rest. If the node
        does not reconcile with this caller, the whole channel is read in pages. Raises
        `LocalProtocolError` (`bad_argument`) for arguments of wrong types.
        """
        check_argument("channel_id", channel_id, str, "a string")
        if not hasattr(log, "elements"):
            raise bad_argument("log", log, "a BackfillLog")
        from sdstore.client.transport import HttpTransport, HttpxCalls  # noqa: PLC0415 - likewise
        from sdstore.participant.backfill import (  # noqa: PLC0415 - brings numpy
            PAGE_MESSAGES,
            Memories,
            reconcile,
        )

        self._memories = self._memories or Memories()
        transport = HttpTransport(
            HttpxCalls(self._http),
            reply_bytes_max=self._options.reply_bytes_max,
            delay_s=self._options.retry.delay_s,
        )
        return await reconcile(
            channel_id,
            log,
            transport,
            self._memories,
            lambda: self.messages(channel_id, page_size=PAGE_MESSAGES),
            on_progress=on_progress,
            send=send,
        )


async def _batches(frames: Frames, batcher: Batcher) -> AsyncIterator[list[PublishItem]]:
    if isinstance(frames, AsyncIterable):
        async for frame in frames:
            if full := batcher.add(frame):
                yield full
        frames = ()
    for batch in batches(frames, batcher):
        yield batch


_P = ParamSpec("_P")
_Waiting = TypeVar("_Waiting")


def _each(items: AsyncIterator[_Item]) -> Iterator[_Item]:
    async def following() -> list[_Item]:
        try:
            return [await anext(items)]
        except StopAsyncIteration:
            return []

    while item := finished(following()):
        yield from item


def _blocking(
    method: Callable[Concatenate[StoreCalls, _P], _Waiting],
    wait: Callable[[_Waiting], _Result],
) -> Callable[Concatenate["StoreClient", _P], _Result]:
    """The method of `StoreClient` that waits for what `method` returns."""

    @wraps(method)
    def call(self: "StoreClient", /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        return wait(method(self._calls, *args, **kwargs))

    return call


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
        options: ClientOptions | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        options = options or ClientOptions()
        http = httpx.Client(
            base_url=checked_url(base_url),
            headers=base_headers(token),
            verify=True if tls is None else tls,
            timeout=options.timeout,
            transport=transport,
        )
        self._network = BlockingNetwork(http)
        self._calls = StoreCalls(self._network, options)
        self._async_client: Callable[[], AsyncStoreClient] = lambda: AsyncStoreClient(
            base_url, token=token, tls=tls, options=options
        )

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
        finished(self._network.close())

    def publish_batch(self, frames: Iterable[Publishable]) -> list[PublishOutcome]:
        """See `StoreCalls.publish_batch`."""
        return finished(self._calls.publish_batch(frames))

    def publish_stream(
        self, frames: Iterable[Publishable], batcher: Batcher | None = None
    ) -> Iterator[PublishOutcome]:
        """See `StoreCalls.publish_stream`."""
        return _each(self._calls.publish_stream(frames, batcher))

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
            async with self._async_client() as client:
                return await client.backfill(channel_id, log, on_progress, send=send)

        return asyncio.run(run())

    live = _blocking(StoreCalls.live, LiveStream)
    live_of = _blocking(StoreCalls.live_of, LiveStream)

    channels = _blocking(StoreCalls.channels, _each)
    gaps = _blocking(StoreCalls.gaps, _each)
    messages = _blocking(StoreCalls.messages, _each)
    quarantine = _blocking(StoreCalls.quarantine, _each)

    add_peer = _blocking(StoreCalls.add_peer, finished)
    ancestors = _blocking(StoreCalls.ancestors, finished)
    channel = _blocking(StoreCalls.channel, finished)
    drop_quarantined = _blocking(StoreCalls.drop_quarantined, finished)
    feed = _blocking(StoreCalls.feed, finished)
    get = _blocking(StoreCalls.get, finished)
    get_entry = _blocking(StoreCalls.get_entry, finished)
    hint = _blocking(StoreCalls.hint, finished)
    info = _blocking(StoreCalls.info, finished)
    interests = _blocking(StoreCalls.interests, finished)
    lookup = _blocking(StoreCalls.lookup, finished)
    mvds = _blocking(StoreCalls.mvds, finished)
    order = _blocking(StoreCalls.order, finished)
    peer = _blocking(StoreCalls.peer, finished)
    peer_status = _blocking(StoreCalls.peer_status, finished)
    peers = _blocking(StoreCalls.peers, finished)
    publish = _blocking(StoreCalls.publish, finished)
    recon = _blocking(StoreCalls.recon, finished)
    release_quarantined = _blocking(StoreCalls.release_quarantined, finished)
    reload = _blocking(StoreCalls.reload, finished)
    remove_peer = _blocking(StoreCalls.remove_peer, finished)
    reset_interests = _blocking(StoreCalls.reset_interests, finished)
    retention = _blocking(StoreCalls.retention, finished)
    retention_dry_run = _blocking(StoreCalls.retention_dry_run, _each)
    retire = _blocking(StoreCalls.retire, finished)
    retirements = _blocking(StoreCalls.retirements, finished)
    set_interests = _blocking(StoreCalls.set_interests, finished)
    start_sync = _blocking(StoreCalls.start_sync, finished)
    sync = _blocking(StoreCalls.sync, finished)
    sync_peer = _blocking(StoreCalls.sync_peer, finished)
    syncs = _blocking(StoreCalls.syncs, finished)
