"""HTTP/1.1 to a sibling over its UNIX socket: the client's side, one request at a time on a connection.

A publish goes through here, so it does without a general client: 40 us a request instead of 400. The
other side is this service's own server (`app.http.connection`), so framing and status are trusted, but a
sibling can end at any byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence

import httptools

from app.http.call import Headers

READ_AHEAD_BYTES = 256 * 1024
"""Of a reply that its reader has not taken: then the sibling waits."""

IDLE_MAX = 64
"""Connections kept for the next request: more only in a burst."""


class SiblingGoneError(Exception):
    """The sibling does not listen, or ended before its reply was complete."""


class Upstreams:
    """Connections to one sibling. `running_count` of them work on a request."""

    def __init__(self, path: str) -> None:
        self.running_count = 0
        self._path = path
        self._idle: list[Upstream] = []

    async def ask(
        self, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> Upstream:
        """The reply to a request, once its head is here. `close` it. Raises `SiblingGoneError`."""
        self.running_count += 1
        upstream = None
        try:
            upstream = self._kept() or await self._new()
            await upstream.ask(method, target, headers, body)
        except BaseException:
            self.running_count -= 1
            if upstream is not None:
                upstream.abort()
            raise
        return upstream

    def close(self, upstream: Upstream) -> None:
        """Keep the connection of a reply that was read to its end; cut any other."""
        self.running_count -= 1
        if upstream.is_reusable and len(self._idle) < IDLE_MAX:
            self._idle.append(upstream)
        else:
            upstream.abort()

    def close_all(self) -> None:
        """Cut the connections that wait for a request."""
        while self._idle:
            self._idle.pop().abort()

    def _kept(self) -> Upstream | None:
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.is_lost:
                return upstream
        return None

    async def _new(self) -> Upstream:
        loop = asyncio.get_running_loop()
        try:
            _, upstream = await loop.create_unix_connection(Upstream, self._path)
        except OSError as error:
            raise SiblingGoneError(str(error)) from error
        return upstream


class Upstream(asyncio.Protocol):
    """One connection, and the reply that it receives: `status`, `headers`, then the body in pieces."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = 0
        self._has_head = False
        self._has_ended = False
        self._is_paused = False
        self._news: asyncio.Future[None] | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether the reply was read to its end and the sibling keeps the connection."""
        return (
            self._has_ended
            and not self._pieces
            and not self.is_lost
            and self._parser is not None
            and self._parser.should_keep_alive()
        )

    async def ask(
        self, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Send a request and wait for the head of the reply. Raises `SiblingGoneError`."""
        self._parser = httptools.HttpResponseParser(self)
        self.headers = []
        self._has_head = self._has_ended = False
        lines = [b"%s %s HTTP/1.1\r\n" % (method, target)]
        lines += [b"%s: %s\r\n" % header for header in headers]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        if self._transport is None or self.is_lost:
            raise SiblingGoneError("the connection is closed")
        self._transport.writelines((b"".join(lines), body))
        del body
        while not self._has_head:
            await self._wait()

    async def piece(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises `SiblingGoneError`."""
        while not self._pieces:
            if self._has_ended:
                return b""
            await self._wait()
        piece = self._pieces.popleft()
        self._unread_bytes -= len(piece)
        if self._is_paused and self._unread_bytes <= READ_AHEAD_BYTES and self._transport:
            self._is_paused = False
            self._transport.resume_reading()
        return piece

    async def body(self) -> bytes:
        """All of the body. Raises `SiblingGoneError`."""
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def parts(self, upstreams: Upstreams) -> AsyncGenerator[Sequence[bytes], None]:
        """The body in pieces, for a reply in parts; cuts the connection if it is left before the end.

        The first part is empty: once it was taken, closing the generator closes the reply.
        """
        try:
            yield ()
            while piece := await self.piece():
                yield (piece,)
        finally:
            upstreams.close(self)

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self.is_lost:
            raise SiblingGoneError("the connection ended before the reply was complete")
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # --- asyncio ----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.Protocol`."""
        self.is_lost = True
        self._tell()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
        self._tell()

    # --- httptools --------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._parser is not None:
            self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(body)
        self._unread_bytes += len(body)
        if self._unread_bytes > READ_AHEAD_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The reply is complete."""
        self._has_ended = True
