"""Live messages of a node: a stream of server-sent events that resumes where it breaks.

`Following` does no I/O: it tracks the reader's place, parses chunks into messages and computes the
pause before the next connection. `AsyncLiveStream` does the I/O, and `LiveStream` is the same for a blocking client.
"""

import json
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from sdstore.client.exchange import (
    CONNECT_TIMEOUT_S,
    EVENT_STREAM,
    Body,
    BoundedBody,
    Call,
    ClientOptions,
    Network,
    Query,
    finished,
    get,
    network_errors,
    send_json,
)
from sdstore.client.records import LiveMessage, Reply, checked, nothing
from sdstore.errors import StoreError, malformed_reply
from sdstore.sds.codec import from_json
from sdstore.sds.model import MessageError, entry_digest

SILENCE_S_MAX = 60.0
"""A node sends an event or a comment several times in this time."""


class ServerEvent(NamedTuple):
    """One event. `event_id` is empty if absent; `data` is empty if the event has only an ID."""

    name: str
    event_id: str
    data: str


PIECE_BYTES = 64 * 1024
"""Of a decompressed stream at once."""

LeftOut = Callable[[str, bytes], None]
"""Called with the channel and the digest of a stored message whose content the node has lost."""


class _LeftOut(NamedTuple):
    channel_id: str
    digest: bytes


class EventReader:
    """Parses server-sent events (WHATWG HTML) from chunks as they arrive.

    An ID with only a comment makes an event without data. An event, or lines without one (comments,
    empty lines), of more than `bytes_max` bytes is a `StoreError`.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._rest: list[bytes] = []  # of an unfinished line
        self._rest_bytes = 0
        self._fields: dict[str, str] = {}  # `event` and `id`
        self._data: list[str] = []
        self._event_bytes = 0  # since the last event, comments included

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that end in `chunk`."""
        first, *lines = chunk.split(b"\n")
        self._rest.append(first)
        self._rest_bytes += len(first)
        events = []
        for line in lines:
            if event := self._line(b"".join(self._rest).removesuffix(b"\r")):
                events.append(event)
            self._rest, self._rest_bytes = [line], len(line)
        if self._rest_bytes + self._event_bytes > self._bytes_max:
            raise StoreError(
                "reply_too_large",
                0,
                f"the stream sent more than {self._bytes_max} bytes without a complete event",
            )
        return events

    def _line(self, line: bytes) -> ServerEvent | None:
        self._event_bytes += len(line) + 1
        if line:
            name, _, value = line.decode(errors="replace").partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name in ("event", "id"):
                self._fields[name] = value
            return None
        fields, data = self._fields, self._data
        self._fields, self._data = {}, []
        if not data and "id" not in fields:
            return None
        self._event_bytes = 0
        return ServerEvent(fields.get("event", "message"), fields.get("id", ""), "\n".join(data))


class Following:
    """A reader's place in the live stream, and the messages that it has not taken yet."""

    def __init__(
        self,
        wanted: str | Mapping[str, Sequence[str]] | None,
        after: str | None,
        options: ClientOptions,
        on_left_out: LeftOut | None = None,
        *,
        bloom_filter: bool = False,
    ) -> None:
        """`wanted`: a channel, lists of `channels` and `prefixes`, or None for everything."""
        self.cursor = after
        self._wanted = wanted
        self._filter = None if bloom_filter else "none"
        self._unpacking: Any = None  # zlib's decompressor of a compressed stream
        self._on_left_out = on_left_out
        self.options = options
        self._after = after  # of received messages; `cursor` is of taken ones
        self._waiting: deque[tuple[str | None, LiveMessage | _LeftOut | None]] = deque()
        self._events = EventReader(options.reply_bytes_max)
        self._attempt = 0
        self._idle_gaps_count = 0  # gaps in a row without anything new between them
        self._has_news = True
        self.has_gap = False
        self.is_placed = False

    def call(self) -> Call[None]:
        """The request of the next connection."""
        self._events = EventReader(self.options.reply_bytes_max)
        self.has_gap = self.is_placed = False
        does_compress = self.options.compress_live
        query: dict[str, Query] = {"filter": self._filter}
        query["compress"] = "true" if does_compress else None
        wanted = self._wanted
        if wanted is None or isinstance(wanted, str):
            path = "v1/live" if wanted is None else "v1/channels/live"
            query |= {"channel_id": wanted, "after": self._after}
            call = get(path, nothing, EVENT_STREAM, **query)
        else:
            document = {**wanted, "after": self._after}
            call = send_json("POST", "v1/live", nothing, document, is_repeatable=True, **query)
        if does_compress:
            call = replace(call, headers=(*call.headers, ("accept-encoding", "gzip")))
        return call

    def opened(self, encoding: str) -> None:
        """The answer to the request has this content coding."""
        if encoding not in ("gzip", "identity"):
            raise malformed_reply(f"a stream in {encoding}, which was not requested")
        self._unpacking = zlib.decompressobj(31) if encoding == "gzip" else None

    def _pieces(self, chunk: bytes) -> Iterator[bytes]:
        """The chunk, decompressed in pieces of a bounded size."""
        if self._unpacking is None:
            yield chunk
            return
        try:
            while piece := self._unpacking.decompress(chunk, PIECE_BYTES):
                chunk = self._unpacking.unconsumed_tail
                yield piece
        except zlib.error as error:
            raise malformed_reply(f"the stream is not gzip: {error}") from None

    def feed(self, chunk: bytes | None) -> None:
        """Add a chunk; None at the end of the connection. After a gap the rest of it is useless."""
        if chunk is None:
            raise StoreError("unreachable", 0, "the node ended the stream")
        for event in (each for piece in self._pieces(chunk) for each in self._events.feed(piece)):
            if event.name == "gap":
                self._after = _text(_object(event.data), "cursor")
                self._note_gap()
                return
            if event.data:
                self._has_news = True
                self._idle_gaps_count = 0
            if event.data or self.is_placed:
                self._attempt = 0  # but the comment that begins a connection shows nothing
            self.is_placed = True
            self._after = event.event_id or self._after
            received = self._read(event)
            if received is None and not self._waiting:
                self.cursor = self._after  # nothing is left to take before this place
            else:
                self._waiting.append((self._after, received))

    def take(self) -> LiveMessage | None:
        """The next received message."""
        while self._waiting:
            self.cursor, taken = self._waiting.popleft()
            if isinstance(taken, LiveMessage):
                return taken
            if taken is not None and self._on_left_out is not None:
                self._on_left_out(*taken)
        return None

    def pause_s(self, error: StoreError) -> float:
        """The pause before the next connection; raises `error` to give up."""
        self._attempt += 1
        delay_s = self.options.retry.delay_s(self._attempt, error)
        if delay_s is None:
            raise error
        return delay_s

    def _note_gap(self) -> None:
        """Connect again at once if anything new has come; else a node could keep us busy with gaps."""
        if not self._has_news:
            self._idle_gaps_count += 1
            self._attempt = max(self._attempt, self._idle_gaps_count - 1)
            raise StoreError("unreachable", 0, "the node sent two gaps and nothing between them")
        self._has_news = False
        self.has_gap = True

    def _read(self, event: ServerEvent) -> LiveMessage | _LeftOut | None:
        """A message, or a left-out one; None for an event with only a cursor."""
        if not event.data or event.name not in ("message", "relayed", "left_out"):
            return None  # also for an event of a later version
        document = _object(event.data)
        if event.name == "left_out":
            return _LeftOut(_text(document, "channel_id"), _digest(document))
        meta = document.get("meta")
        if not isinstance(meta, dict):
            raise malformed_reply("a live event has no meta")
        try:
            message = from_json(document.get("message"))
        except MessageError as error:
            raise malformed_reply(f"a live event does not hold an SDS message: {error}") from None
        digest = _digest(meta) if event.name == "message" else None
        if digest is not None and entry_digest(message) != digest:
            raise StoreError("digest_mismatch", 200, "the message is another entry's")
        return LiveMessage(message, digest, _text(meta, "dialect"), self._after, document)


class AsyncLiveStream:
    """Messages as they reach a node; see `AsyncStoreClient.live`. Use it in an `async with`."""

    def __init__(self, network: Network, following: Following) -> None:
        self._network = network
        self._following = following
        self._body: Body | None = None

    @property
    def cursor(self) -> str | None:
        """Cursor after the last message that was taken, initially the start: `after` of a stream that continues."""
        return self._following.cursor

    async def __aenter__(self) -> Self:
        while not self._following.is_placed or self._body is None:
            await self._read()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[LiveMessage]:
        return self

    async def __anext__(self) -> LiveMessage:
        while (message := self._following.take()) is None:
            await self._read()
        return message

    async def close(self) -> None:
        """Close the connection."""
        body, self._body = self._body, None
        if body is not None:
            await body.close()

    async def _read(self) -> None:
        try:
            with network_errors():
                body = self._body
                if body is None or self._following.has_gap:
                    body = await self._connect()
                chunk = await body.chunk()
            self._following.feed(chunk)
        except StoreError as error:
            await self.close()
            await self._network.sleep(self._following.pause_s(error))

    async def _connect(self) -> Body:
        await self.close()
        timeout = httpx.Timeout(SILENCE_S_MAX, connect=CONNECT_TIMEOUT_S)
        request = self._following.call().request(self._network.http, timeout)
        self._body = body = await self._network.send(request)
        if not is_stream(body.response):
            whole = BoundedBody(self._following.options, time.monotonic())
            raise not_a_stream(await whole.read(body))
        self._following.opened(body.response.headers.get("content-encoding", "identity"))
        return body


class LiveStream:
    """Messages as they reach a node; see `StoreClient.live`. Use it in a `with` statement."""

    def __init__(self, stream: AsyncLiveStream) -> None:
        self._stream = stream  # over a `BlockingNetwork`

    @property
    def cursor(self) -> str | None:
        """See `AsyncLiveStream`."""
        return self._stream.cursor

    def __enter__(self) -> Self:
        finished(self._stream.__aenter__())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[LiveMessage]:
        return self

    def __next__(self) -> LiveMessage:
        return finished(self._stream.__anext__())

    def close(self) -> None:
        """Close the connection."""
        finished(self._stream.close())


def is_stream(response: httpx.Response) -> bool:
    """Whether an answer is a stream of events."""
    media_type = response.headers.get("content-type", EVENT_STREAM)
    return response.is_success and media_type.startswith(EVENT_STREAM)


def not_a_stream(reply: Reply) -> StoreError:
    """The error for an answer that is not a stream of events."""
    try:
        checked(reply)
    except StoreError as error:
        return error
    media_type = reply.headers.get("content-type")
    return malformed_reply(f"the answer is {media_type}, not {EVENT_STREAM}", reply.status)


def _object(data: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed_reply("a live event is not JSON") from None
    if not isinstance(document, dict):
        raise malformed_reply("a live event is not a JSON object")
    return document


def _digest(members: dict[str, Any]) -> bytes:
    try:
        return bytes.fromhex(_text(members, "digest"))
    except ValueError:
        raise malformed_reply("the digest of a live event is not hexadecimal") from None


def _text(members: dict[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise malformed_reply(f"{name} of a live event is missing or not a string")
    return value
