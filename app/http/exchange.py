"""One request on a connection and its answer, complete or in parts."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from app.http.call import Headers, Parts, Reply, length_of
from app.http.replies import internal_error, problem_reply
from app.proxies import address_key

if TYPE_CHECKING:
    from app.http.connection import Connection

LIVE_SEND_BUFFER_BYTES = 128 * 1_024
"""Size of the socket's send buffer for live readers, which holds unread events."""

_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")
_STATUS_LINE = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}

_log = logging.getLogger(__name__)


class Exchange:
    """One request and its answer: an ASGI call that can be answered at once or in parts."""

    __slots__ = (
        "_connection",
        "_expects_continue",
        "_head",
        "_is_body_taken",
        "_is_chunked",
        "_is_complete",
        "_left_bytes",
        "_more_body",
        "_news",
        "_streaming",
        "body",
        "is_started",
        "keep_alive",
        "scope",
        "task",
    )

    task: asyncio.Task[None]
    """The one that runs `run`."""

    def __init__(
        self,
        connection: Connection,
        scope: MutableMapping[str, Any],
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.scope = scope
        self.body: bytes | bytearray = b""
        self.keep_alive = keep_alive
        self.is_started = False
        self._connection = connection
        self._expects_continue = expects_continue
        self._more_body = True
        self._is_body_taken = False
        self._news: asyncio.Future[None] | None = None
        self._is_complete = False
        self._streaming: asyncio.Task[Any] | None = None
        # For an answer in ASGI messages: the head is sent with the first piece of the body.
        self._head = b""
        self._is_chunked = False
        self._left_bytes = 0

    @property
    def caller(self) -> str:
        """The client's address, which identifies it in shares and turns."""
        if self._connection.is_proxy:
            return address_key(self.scope["client"][0])
        return self._connection.address

    @property
    def has_left(self) -> bool:
        """Whether the client hung up before it got a reply."""
        return self._is_complete and not self.is_started

    async def run(self) -> None:
        """Let the application answer."""
        connection = self._connection
        try:
            await connection.app(self.scope, self.receive, self.send)
        except Exception:  # noqa: BLE001 - whatever it is, the connection goes on or ends
            _log.exception("the application failed")
            if not self.is_started:
                await self.give(problem_reply(internal_error()))
        finally:
            if not self._is_complete:
                # An answer that has begun can only be cut short.
                connection.transport.abort()

    # --- the request ----------------------------------------------------------------------------
    def body_arrived(self, piece: bytes) -> None:
        """A piece of the body; dropped once it is answered."""
        if self._is_complete:
            return
        if not self.body:
            self.body = piece
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += piece
        self._tell()

    def body_ended(self) -> None:
        """The body is complete."""
        self._more_body = False
        self._tell()

    def client_left(self) -> None:
        """The client has disconnected."""
        self._is_complete = True
        self._tell()
        if self._streaming is not None:
            self._streaming.cancel()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def receive(self) -> dict[str, Any]:
        """ASGI: the bytes of the body since the last call; after its end, the disconnection."""
        if self._expects_continue and self._more_body and not self.body:
            self._expects_continue = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self._is_complete and (
            self._is_body_taken or (self._more_body and not self.body)
        ):
            self._news = self._connection.loop.create_future()
            await self._news
        if self._is_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), b""
        self._is_body_taken = not self._more_body
        if self._more_body:
            self._connection.adjust_reading()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    # --- the answer -----------------------------------------------------------------------------
    async def give(self, reply: Reply) -> None:
        """Answer with a complete reply, in one write."""
        if self._is_complete:
            return
        is_last = self._is_last(reply.headers)
        head = response_head(reply.status, reply.headers, length_of(reply), is_last=is_last)
        body = b"" if self.scope["method"] == "HEAD" else reply.body
        self._connection.transport.writelines((head, body))
        self._complete(is_last=is_last)

    async def stream(self, status: int, headers: Headers, parts: Parts, *, is_live: bool) -> None:
        """Answer in parts; the next one is requested when the client has read the one before."""
        connection = self._connection
        connection.is_live = is_live
        transport = connection.transport
        self._streaming = asyncio.current_task()
        if is_live and (own := transport.get_extra_info("socket")) is not None:
            # For a thousand readers that never read, the system would copy megabytes for each.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIVE_SEND_BUFFER_BYTES)
        try:
            if not self._is_complete:
                self.keep_alive = self.keep_alive and self.scope["http_version"] == "1.1"
                is_chunked = self.scope["http_version"] == "1.1"
                is_last = self._is_last(headers)
                framing = [_CHUNKED] if is_chunked else []
                transport.write(response_head(status, headers, framing, is_last=is_last))
                async for part in parts:
                    if length := sum(map(len, part)):
                        # Readers share these bytes, so do not join them into a copy.
                        chunk = (b"%x\r\n" % length, *part, b"\r\n") if is_chunked else part
                        transport.writelines(chunk)
                        # Yield: writes that the system accepts at once would otherwise keep all other
                        # tasks waiting.
                        await asyncio.sleep(0)
                        await connection.drained()
                if is_chunked:
                    transport.write(b"0\r\n\r\n")
                self._complete(is_last=is_last)
        except asyncio.CancelledError:
            # Cancelled because the client disconnected, or because the server stops.
            if not self._is_complete:
                raise
        finally:
            connection.is_live = False
            self._streaming = None
            await parts.aclose()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI: an answer in messages."""
        await self._connection.drained()
        if self._is_complete:
            return
        if message["type"] == "http.response.start":
            headers: Headers = list(message.get("headers", ()))
            self.keep_alive = not self._is_last(headers)
            names = dict(headers)
            self._is_chunked = (
                b"content-length" not in names
                and message["status"] not in (204, 304)
                and self.scope["method"] != "HEAD"
            )
            self._left_bytes = int(names.get(b"content-length", 0))
            framing = [_CHUNKED] if self._is_chunked else []
            self._head = response_head(
                message["status"], headers, framing, is_last=not self.keep_alive
            )
            return
        body: bytes = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        more_body = message.get("more_body", False)
        head, self._head = self._head, b""
        if self._is_chunked:
            chunk = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            end = () if more_body else (b"0\r\n\r\n",)
            self._connection.transport.writelines((head, *chunk, *end))
        else:
            self._left_bytes -= len(body)
            self._connection.transport.writelines((head, body))
        if not more_body:
            is_cut = self._left_bytes and not self._is_chunked and self.scope["method"] != "HEAD"
            if is_cut:
                self._connection.transport.abort()
            self._complete(is_last=not self.keep_alive)

    def _is_last(self, headers: Headers) -> bool:
        """Whether the connection ends with this answer. It has begun from here on."""
        self.is_started = True
        self._expects_continue = False
        return (
            not self.keep_alive
            # The rest of the body would have to be read before the next request.
            or self._more_body
            or self._connection.sharing.is_draining
            or _CLOSE in headers
        )

    def _complete(self, *, is_last: bool) -> None:
        self._is_complete = True
        self.body = b""
        self._tell()
        self._connection.answered(is_last=is_last, is_read=not self._more_body)


def response_head(status: int, headers: Headers, framing: Headers, *, is_last: bool) -> bytes:
    """The status line and the headers of an answer; `is_last`: the connection closes after it.

    Raises ValueError if a header contains a line break."""
    lines = [_STATUS_LINE[status]]
    lines += [b"%s: %s\r\n" % header for header in headers]
    lines += [b"%s: %s\r\n" % header for header in framing]
    if is_last and _CLOSE not in headers:
        lines.append(b"connection: close\r\n")
    head = b"".join(lines)
    if head.count(b"\n") != len(lines):
        raise ValueError("a header contains a line break")
    return head + b"\r\n"
