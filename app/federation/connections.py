"""Connections to peers, kept open between sessions, and the calls over them.

A session with little news is two short requests. A general HTTP client would take more of the processor
for them than the session does, so this one knows what such calls need and no more: HTTP/1.1, one request
at a time on a connection, no redirects, no cookies, no proxies. The parser of answers is llhttp, as in the
server.

What is kept belongs to one checked address and one TLS name, so the check of the addresses before each
session still decides where a session connects.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, cast

import httptools
import httpx

from sdstore.client.exchange import CONNECT_TIMEOUT_S
from sdstore.client.transport import Answer
from sdstore.sync.report import misbehaved

IDLE_S = 50.0
"""Seconds for which a connection is kept without a request: servers close it after 60 or more."""

PER_PEER_MAX = 4
"""Idle connections to one peer: as many as a session has requests in flight."""

PEERS_KEPT_MAX = 64
"""Peers with idle connections; those used longest ago are closed. 256 descriptors at most."""

HEAD_BYTES_MAX = 1 << 15
"""Of all header fields of an answer, trailers too: as much as a node takes in a request."""

FRAMING_FACTOR = 2
"""Bytes on the wire for each byte of a body: chunks of ten bytes and more have less around them."""

PART_BYTES_MIN = 64
"""As many bytes count for the smallest part of an answer, an answer 1xx or a chunk: each takes 2 us."""


class Place(NamedTuple):
    """Where connections lead: the URL of a checked address, its TLS name, and the CAs to trust."""

    base_url: httpx.URL
    tls_name: str
    context: ssl.SSLContext


class Connections:
    """The kept connections of a node. Belongs to one event loop; call `close` at the end."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, Pool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def to(self, place: Place) -> AsyncIterator[Pool]:
        """The connections to a place, for one session, and at once for others too."""
        pool = self._kept.get(place)
        if pool is None:
            pool = self._kept[place] = Pool(place)
        self._kept.move_to_end(place)
        pool.users += 1
        try:
            yield pool
        finally:
            pool.users -= 1
            pool.used_at_s = _now_s()
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Close what was not used for `IDLE_S`, and the oldest beyond the bound."""
        surplus = len(self._kept) - PEERS_KEPT_MAX
        for place, pool in list(self._kept.items()):
            if pool.users or (surplus <= 0 and _now_s() - pool.used_at_s < IDLE_S):
                continue
            del self._kept[place]
            surplus -= 1
            pool.close()

    def close(self) -> None:
        """Close all connections."""
        while self._kept:
            self._kept.popitem()[1].close()


class Pool:
    """The connections to one place. `users`: sessions that use them; `used_at_s`: when the last ended."""

    def __init__(self, place: Place) -> None:
        self.users = 0
        self.used_at_s = 0.0
        self._place = place
        self._idle: list[tuple[Connection, float]] = []

    async def call(self, request: bytes, bytes_max: int) -> Answer:
        """One call; `request` has its header section and its body. The answer's body is bounded.

        A server may close a kept connection at the moment of the request: then the request goes out
        again, on a new one. Raises OSError, SyncError.
        """
        kept = self._take()
        if kept is not None:
            try:
                return await self._call_over(kept, request, bytes_max)
            except ConnectionError:
                if kept.has_answer:
                    raise
        return await self._call_over(await self._connected(), request, bytes_max)

    async def _call_over(self, connection: Connection, request: bytes, bytes_max: int) -> Answer:
        try:
            answer = await connection.call(request, bytes_max)
        except BaseException:
            connection.close()  # an answer that nobody waits for may still come
            raise
        if connection.is_reusable and len(self._idle) < PER_PEER_MAX:
            self._idle.append((connection, _now_s()))
        else:
            connection.close()
        return answer

    def _take(self) -> Connection | None:
        """The connection that was used last, if one is open still."""
        while self._idle:
            connection, idle_since_s = self._idle.pop()
            if connection.is_reusable and _now_s() - idle_since_s < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connected(self) -> Connection:
        url, tls_name, context = self._place
        is_tls = url.scheme == "https"
        connecting = asyncio.get_running_loop().create_connection(
            Connection,
            url.host,
            url.port or (443 if is_tls else 80),
            ssl=context if is_tls else None,
            server_hostname=tls_name if is_tls else None,
        )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await connecting
        except TimeoutError:
            raise TimeoutError(f"no connection after {CONNECT_TIMEOUT_S:.0f} s") from None
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection, _ in self._idle:
            connection.close()
        self._idle.clear()


class Connection(asyncio.Protocol):
    """One connection, with one call at a time.

    `is_reusable`: another call can follow; `has_answer`: the peer has sent something for the last one.
    """

    def __init__(self) -> None:
        self.is_reusable = False
        self.has_answer = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._bytes_max = 0
        self._received_count = 0
        self._head_bytes = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._ends_with_connection = False

    async def call(self, request: bytes, bytes_max: int) -> Answer:
        """Send a request and return its answer. Raises ConnectionError, SyncError."""
        self.is_reusable, self.has_answer = False, False
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._bytes_max, self._received_count, self._head_bytes = bytes_max, 0, 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Close the connection at once."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.close()  # nothing was asked
            return
        self.has_answer = True
        if not self._count(len(data)):
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the answer is not HTTP ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self.is_reusable = None, False
        if exc is None and self._ends_with_connection:
            self.on_message_complete()
        elif exc is None:
            self._fail(ConnectionResetError("the peer closed the connection without an answer"))
        else:
            self._fail(ConnectionResetError(str(exc) or type(exc).__name__))

    def _count(self, bytes_count: int) -> bool:
        """Whether the bytes of an answer are within their bound."""
        self._received_count += bytes_count
        is_within = self._received_count <= FRAMING_FACTOR * self._bytes_max + HEAD_BYTES_MAX
        if not is_within or len(self._body) > self._bytes_max:
            self._fail(misbehaved(f"a reply larger than {self._bytes_max} bytes"))
        return is_within

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    # --- called by the parser

    def on_message_begin(self) -> None:
        """An answer begins."""
        self._headers, self._body = {}, bytearray()
        if self._waiter is None or self._waiter.done():
            self.close()  # an answer to nothing, behind the one to the call
        self._count_head(PART_BYTES_MIN)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer field. Of repeated ones the first counts."""
        if self._count_head(len(name) + len(b": \r\n") + len(value)):
            self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def _count_head(self, bytes_count: int) -> bool:
        """Whether the heads of the answers to a call, 1xx included, are within their bound."""
        self._head_bytes += bytes_count
        if self._head_bytes > HEAD_BYTES_MAX:
            self._fail(misbehaved(f"a reply with more than {HEAD_BYTES_MAX} bytes of headers"))
        return self._head_bytes <= HEAD_BYTES_MAX

    def on_headers_complete(self) -> None:
        """The header section is complete."""
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._ends_with_connection = not has_length

    def on_body(self, part: bytes) -> None:
        """Some bytes of the body."""
        self._body += part
        self._count(max(0, PART_BYTES_MIN - len(part)))

    def on_message_complete(self) -> None:
        """The answer is complete, or one that announces another one."""
        self._ends_with_connection = False
        status = self._parser.get_status_code()
        if status < httpx.codes.OK or self._waiter is None or self._waiter.done():
            return
        self.is_reusable = self._transport is not None and self._parser.should_keep_alive()
        body, self._body = self._body, bytearray()  # an idle connection keeps none of it
        self._waiter.set_result(Answer(status, self._headers, bytes(body)))


def request_bytes(
    method: str, target: bytes, headers: Mapping[str, str], body: bytes | None
) -> bytes:
    """A request as it is sent. Header values must be visible ASCII; raises ValueError."""
    lines = [method.encode(), b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"the header {name} has characters that HTTP does not allow")
        lines.append(f"{name}: {value}\r\n".encode())
    if body is not None:
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body or b""])


def _now_s() -> float:
    return asyncio.get_running_loop().time()
