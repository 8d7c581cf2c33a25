"""Calls of the HTTP interface as values, and how requests and answers travel.

A call is a request, and how to read its answer. Message IDs and channel IDs are arbitrary strings. They go into
the query: a proxy might rewrite a path that contains "", "..", "a/b" or "%".

ClientOptions, retries, bounds on answers and errors of the network are here. The client is written once, as
coroutines over a `Network`. `AsyncNetwork` waits on the event loop. `BlockingNetwork` blocks instead, so a
coroutine over it never suspends, and `finished` runs it to its end without a loop: one stack, in the caller's
thread.
"""

import asyncio
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx

from sdstore.client.records import PublishItem, Reply, WakuEnvelope
from sdstore.errors import StoreError, malformed_reply
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.wire import store_pb2 as wire

# ---- calls

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"

Order = Literal["log", "arrival"]
Direction = Literal["asc", "desc"]
MvdsMode = Literal["interactive", "batch"]
Query = str | int | Sequence[str] | None
"""A parameter of a query: none, one or several values."""
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


def get(
    path: str, read: Callable[[Reply], _Result_co], accept: str = PROTOBUF, /, **query: Query
) -> Call[_Result_co]:
    """A reading call; parameters that are None are left out."""
    return Call("GET", _target(path, query), read, (("accept", accept),))


def post(
    path: str, read: Callable[[Reply], _Result_co], body: bytes, /, **query: Query
) -> Call[_Result_co]:
    """A call with a protobuf body, of those that can be repeated."""
    headers = (("accept", PROTOBUF), ("content-type", PROTOBUF))
    return Call("POST", _target(path, query), read, headers, body)


def send_json(
    method: str,
    path: str,
    read: Callable[[Reply], _Result_co],
    document: Mapping[str, object],
    *,
    is_repeatable: bool,
    **query: Query,
) -> Call[_Result_co]:
    """A call with a JSON body."""
    headers = (("accept", JSON), ("content-type", JSON))
    body = json.dumps(document).encode()
    return Call(method, _target(path, query), read, headers, body, is_repeatable)


def path_of(*parts: str) -> str:
    """A path whose parts after the first are IDs made by a node."""
    return "/".join((parts[0], *(quote(part, safe="") for part in parts[1:])))


def _target(path: str, query: Mapping[str, Query]) -> str:
    given = urlencode({k: v for k, v in query.items() if v is not None}, doseq=True)
    return f"{path}?{given}" if given else path


# --- frames to publish -------------------------------------------------------------------------------

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


def publish_item(item: PublishItem) -> wire.PublishItem:
    """A frame for a batch, as the interface has it."""
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


# ---- requests and answers

_Result = TypeVar("_Result")

REPLY_BYTES_MAX = 16 * 1024 * 1024
"""Twice the largest answer of this node's software."""

CONNECT_TIMEOUT_S = 5.0
"""A node that takes longer counts as down."""

EMPTY_PAGES_MAX = 1_000
"""Pages without an item in a row. Pages are empty where the node has lost the content of all that they
name: at most 1,000 messages each, a million in all."""


_PASSING_CODES = frozenset({"unreachable", "timeout"})
_PASSING_STATUS = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Retry:
    """Only repeatable calls are repeated, and only after transient errors.

    `attempts_max` counts the first attempt. Back-off doubles from `backoff_s` to `backoff_max_s`; the
    pause is drawn between half and all of it, so that clients do not return together. A pause that the
    node asks for is drawn between that and half as much again; if it asks for more than
    `retry_after_max_s`, its error is raised instead.
    """

    attempts_max: int = 4
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    retry_after_max_s: float = 30.0

    def delay_s(self, attempt: int, error: StoreError) -> float | None:
        """The pause after failed attempt number `attempt` (from 1); None to give up."""
        if attempt >= self.attempts_max or not _passes(error):
            return None
        if error.retry_after_s is not None:
            if error.retry_after_s > self.retry_after_max_s:
                return None
            return error.retry_after_s * random.uniform(1.0, 1.5)
        backoff_s = min(self.backoff_max_s, self.backoff_s * 2.0 ** (attempt - 1))
        return backoff_s * random.uniform(0.5, 1.0)


def _passes(error: StoreError) -> bool:
    return error.code in _PASSING_CODES or error.status in _PASSING_STATUS


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Timeouts, retries and bounds of a client.

    `timeout_s` bounds each wait for the network, `deadline_s` a whole exchange and `reply_bytes_max`
    the size of an answer; `retry` governs repeats after transient errors. `compress_live` compresses live
    streams (gzip): their lengths then tell whoever sees the network something of secrets in a stream that
    strangers also write to.
    """

    timeout_s: float = 30.0
    deadline_s: float = 120.0
    reply_bytes_max: int = REPLY_BYTES_MAX
    retry: Retry = field(default_factory=Retry)
    compress_live: bool = False

    @property
    def timeout(self) -> httpx.Timeout:
        """`timeout_s` for httpx."""
        return httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_TIMEOUT_S))

    def delay_s(self, call: Call[object], attempt: int, error: StoreError) -> float | None:
        """The pause before the next attempt; None to give up."""
        return self.retry.delay_s(attempt, error) if call.is_repeatable else None


def base_headers(token: str | None) -> dict[str, str]:
    """Headers of every request. They forbid compressed answers, whose size would be unbounded."""
    headers = {"accept-encoding": "identity"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return headers


class Body(Protocol):
    """An answer whose body has not been read yet."""

    response: httpx.Response

    async def chunk(self) -> bytes | None:
        """The next bytes; None at the end."""

    async def close(self) -> None:
        """Read no more."""


class Network(Protocol):
    """What a client waits for."""

    @property
    def http(self) -> httpx.Client | httpx.AsyncClient:
        """Builds the requests."""

    async def send(self, request: httpx.Request) -> Body:
        """Send a request; returns when the headers of the answer are here."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def close(self) -> None:
        """Close all connections."""


class AsyncNetwork:
    """A `Network` for an event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> Body:
        """See `Network`."""
        return _AsyncBody(await self.http.send(request, stream=True))

    async def sleep(self, seconds: float) -> None:
        """See `Network`."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """See `Network`."""
        await self.http.aclose()


class _AsyncBody:
    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._chunks = response.aiter_raw()

    async def chunk(self) -> bytes | None:
        return await anext(self._chunks, None)

    async def close(self) -> None:
        await self.response.aclose()


class BlockingNetwork:
    """A `Network` that blocks its thread; see the module."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def send(self, request: httpx.Request) -> Body:
        """See `Network`."""
        return _BlockingBody(self.http.send(request, stream=True))

    async def sleep(self, seconds: float) -> None:
        """See `Network`."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this

    async def close(self) -> None:
        """See `Network`."""
        self.http.close()


class _BlockingBody:
    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._chunks = response.iter_raw()

    async def chunk(self) -> bytes | None:
        return next(self._chunks, None)

    async def close(self) -> None:
        self.response.close()


def finished(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine over a `BlockingNetwork`, which never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    work.close()
    raise RuntimeError("a call of the blocking client waited for an event loop")


class BoundedBody:
    """A body as it arrives, with a bound on size and time."""

    def __init__(self, options: ClientOptions, now_s: float) -> None:
        self._bytes_max = options.reply_bytes_max
        self._deadline_s = now_s + options.deadline_s
        self._chunks: list[bytes] = []
        self._bytes = 0

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Add a chunk that arrived at `now_s` (monotonic)."""
        self._bytes += len(chunk)
        if self._bytes > self._bytes_max:
            detail = f"the answer is larger than {self._bytes_max} bytes"
            raise StoreError("reply_too_large", 0, detail)
        if now_s > self._deadline_s:
            raise StoreError("timeout", 0, "the answer did not end before the deadline")
        self._chunks.append(chunk)

    async def read(self, body: Body) -> Reply:
        """The complete answer to a call."""
        while (chunk := await body.chunk()) is not None:
            self.feed(chunk, time.monotonic())
        return self.reply(body.response)

    def reply(self, response: httpx.Response) -> Reply:
        """The complete answer, of the chunks that were fed."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise malformed_reply("the answer is compressed", response.status_code)
        return Reply(response.status_code, response.headers, b"".join(self._chunks))


@contextmanager
def network_errors() -> Iterator[None]:
    """Turn httpx's errors into `StoreError`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise StoreError("timeout", 0, network_reason(error)) from error
    except httpx.TransportError as error:
        raise StoreError("unreachable", 0, network_reason(error)) from error


def checked_url(url: str) -> str:
    """`url`, if it is one that a store can have. Raises `ValueError`."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx.URL(url)
        url.encode()
    except (ValueError, httpx.InvalidURL):
        is_good = False
    if not is_good or "?" in url or "#" in url:
        raise ValueError(
            f"{without_password(url)} is not a URL of the form http(s)://HOST[:PORT][/PATH]"
        )
    return url


def without_password(url: str) -> str:
    """`url` without a user name and password, for people and files."""
    scheme, separator, rest = url.partition("//")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def next_cursor(before: str | None, after: str | None) -> str | None:
    """`after`; an error if it equals `before`, because then the paging would never end."""
    if after is not None and after == before:
        raise malformed_reply("the node returned the same cursor twice")
    return after


class EmptyPages:
    """Counts empty pages in a row, because the cursors of a node that always has another never repeat."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, items_count: int) -> None:
        """A page with so many items came; an error if too many pages in a row had none."""
        self._count = 0 if items_count else self._count + 1
        if self._count > EMPTY_PAGES_MAX:
            raise malformed_reply(f"the node returned {self._count} empty pages in a row")


def network_reason(error: BaseException) -> str:
    """Why a call failed, in the system's own words: httpx names some errors only in their causes."""
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "no answer in time"
    reason, cause = error, error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            reason = cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {reason.verify_message}"
    if isinstance(reason, ssl.SSLError) and reason.reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS: is this the URL of an http server?"
    if isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError | socket.gaierror):
        return os.strerror(reason.errno) if reason.errno else str(reason)
    if isinstance(error, httpx.RemoteProtocolError) and "without sending a response" in str(error):
        return "the server closed the connection without an answer: is this the URL of an https server?"
    return str(reason) or type(reason).__name__
