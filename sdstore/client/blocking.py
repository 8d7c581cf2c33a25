"""`StoreClient`: the blocking client of a store node.

Its methods are those of `StoreCalls`, run to their end over a network that blocks.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

import httpx

from sdstore.client.aio import AsyncStoreClient, StoreCalls
from sdstore.client.exchange import (
    Batcher,
    BlockingNetwork,
    Options,
    Publishable,
    base_headers,
    checked_url,
    finished,
)
from sdstore.client.live import LiveStream
from sdstore.client.records import PublishOutcome
from sdstore.sds.log import BackfillLog
from sdstore.sync.report import Progress, SyncReport

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Waiting = TypeVar("_Waiting")
_Item = TypeVar("_Item")


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
        options: Options | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        options = options or Options()
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
    set_interests = _blocking(StoreCalls.set_interests, finished)
    start_sync = _blocking(StoreCalls.start_sync, finished)
    sync = _blocking(StoreCalls.sync, finished)
    sync_peer = _blocking(StoreCalls.sync_peer, finished)
    syncs = _blocking(StoreCalls.syncs, finished)
