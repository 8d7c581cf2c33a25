"""HTTP/1.1 on one connection, and each request with its answer: httptools parses, uvicorn's server accepts,
the bounds are ours.

uvicorn's own protocol class accepts trailers without a bound, keeps a connection open while the body of
an answered request is unfinished, queues every pipelined request, and does not bound the memory of all
connections together. `Connection` serves the same ASGI application with these differences:

- It reads input into one buffer per process, in steps, so that parsing ahead is bounded.
- It counts headers, trailers and chunk headers, and sets a deadline for them.
- It runs one request at a time, and pauses reading while the body is not consumed or requests wait.
- It counts unread replies in a `Share`: a client that does not read is cut when others need memory.
- It closes the connection, after a short linger, if the answer comes before the end of the body.

The state of a connection: `_reading` is the exchange whose message is arriving, `_answering` the one
whose application is running, `_waiting` those in between, `_rest` the bytes that are not parsed yet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter, deque
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from app.access.proxies import Proxies, address_key
from app.errors import Code, Problem
from app.http.call import (
    EXCHANGE_KEY,
    Headers,
    Parts,
    Reply,
    internal_error,
    length_of,
    problem_reply,
)
from app.server.limits import Limits
from app.server.sharing import Holding, Sharing

READ_BYTES = 16_384
"""Read at once outside of bodies."""

REQUEST_BYTES_MIN = 18
"""Of `GET / HTTP/1.1` and its empty line: so many bytes hold at most one request."""

BODY_STEP_BYTES = 65_536

LINGER_BYTES_MAX = 64 * 1_048_576
"""Maximum bytes of an unfinished body to drop behind its answer, most of a second's work: many clients send
the whole body before they read the answer. Twice the largest body."""

LINGER_STEP_BYTES = 2 * 1_048_576
"""The node keeps reading while this many bytes arrive in `unread_body_linger_s`. It drops at most as many after it
refused data that is not a body."""

LIVE_SEND_BUFFER_BYTES = 128 * 1_024
"""Size of the socket's send buffer for live readers, which holds unread events."""

_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")
_STATUS_LINE = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}

_HEADERS_TOO_LARGE = Problem(Code.HEADERS_TOO_LARGE, "request line and headers together")
_TRAILERS_TOO_LARGE = Problem(Code.HEADERS_TOO_LARGE, "trailers and chunk headers")
_HEADERS_LATE = Problem(Code.REQUEST_TIMEOUT, "the headers or trailers did not arrive in time")


_log = logging.getLogger(__name__)


class Connection(asyncio.BufferedProtocol):
    """See the module. The attributes of the class belong to one server (`bounded_protocol`)."""

    limits: Limits
    sharing: Sharing
    proxies: Proxies
    open_count: Counter[str]
    buffer: memoryview

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002 - what uvicorn's server passes
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.app = config.loaded_app
        self.loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.address = ""
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        # Whether a trusted proxy has opened it: each request has a client of its own.
        self.is_proxy = False
        self.scheme = "http"
        self.is_gone = False
        # Whether the answer consists of events shared with other readers.
        self.is_live = False
        self._server_state = server_state
        self._parser = httptools.HttpRequestParser(self)
        # Data after a request with `Connection: close` is ignored without an error.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._reading: Exchange | None = None
        self._answering: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._rest = b""
        self._refusal: Problem | None = None
        # Whether arriving data is ignored.
        self._is_deaf = False
        self._is_finishing = False
        self._is_reading_paused = False
        # State of the arriving message.
        self._url = b""
        self._headers: Headers = []
        self._is_in_headers = False
        self._head_bytes = 0
        self._body_bytes_left = 0
        self._body_bytes = 0
        self._framing_bytes = 0
        self._is_refused = False
        self._dropped_bytes = 0
        self._linger_bytes_max = LINGER_BYTES_MAX
        # By `time.monotonic`: the loop counts milliseconds, and two connections can share one.
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._headers_timer: asyncio.TimerHandle | None = None
        self._closing_timer: asyncio.TimerHandle | None = None
        # State while replies are unread.
        self._unread: Holding | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._drained: asyncio.Future[None] | None = None

    # --- the transport --------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; close it if there are too many."""
        self.transport = transport
        self._idle_since = time.monotonic()
        # With a mark of 0, paused writing means that bytes are unread.
        transport.set_write_buffer_limits(high=0)
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self.server = (str(own[0]), int(own[1])) if isinstance(own, tuple) else None
        self.address = address_key(self.client[0]) if self.client else ""
        self.is_proxy = self.client is not None and self.proxies.trusts(self.client[0])
        if transport.get_extra_info("sslcontext") is not None:
            self.scheme = "https"
        connections = self._server_state.connections
        connections.add(self)  # type: ignore[arg-type]
        self.open_count[self.address] += 1
        is_full = len(connections) > self.limits.connections_max and not self._displace_idle()
        is_greedy = self.open_count[self.address] > self.limits.connections_per_address_max
        if is_full or (is_greedy and not self.is_proxy):
            self._is_deaf = True
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Forget the connection."""
        self.is_gone = self._is_deaf = True
        self._server_state.connections.discard(self)
        self.open_count[self.address] -= 1
        if not self.open_count[self.address]:
            del self.open_count[self.address]
        for timer in (self._idle_timer, self._headers_timer, self._closing_timer):
            if timer is not None:
                timer.cancel()
        self.resume_writing()
        self._waiting.clear()
        self._rest = b""
        for exchange in (self._answering, self._reading):
            if exchange is not None:
                exchange.client_left()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """The buffer for the next bytes; for a body with a length, no more than its remainder."""
        if self._body_bytes_left:
            return self.buffer[: min(self._body_bytes_left, BODY_STEP_BYTES)]
        return self.buffer[:READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived."""
        if self._is_deaf:
            self._drop(nbytes)
        else:
            self._parse(self.buffer[:nbytes])

    def eof_received(self) -> None:
        """The client sends no more: the transport closes."""

    def pause_writing(self) -> None:
        """Not all bytes could be written: the client must read first."""
        self._unread_bytes = self.transport.get_write_buffer_size()
        share = self.sharing.live if self.is_live else self.sharing.replies
        self._unread = share.take_now(self._unread_bytes, self)
        self._unread_timer = self.loop.call_later(
            self.limits.write_stall_timeout_s, self._look_at_reader
        )

    def resume_writing(self) -> None:
        """All bytes are written, or the connection is gone."""
        if self._unread is not None:
            self._unread.release()
            self._unread = None
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None
        if not self.is_gone and self._answering is None:
            self._go_on()

    async def drained(self) -> None:
        """Wait until the client has read all written bytes."""
        if self._unread is not None:
            if self._drained is None:
                self._drained = self.loop.create_future()
            await self._drained

    def moved_bytes(self) -> int:
        """See `app.server.sharing.Holder`."""
        unread_bytes = self.transport.get_write_buffer_size()
        if self._unread is not None:
            self._unread.resize(unread_bytes)
        return -unread_bytes

    def cut(self) -> None:
        """See `app.server.sharing.Holder`."""
        self.transport.abort()

    def _look_at_reader(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes - unread_bytes < BODY_STEP_BYTES:
            self.transport.abort()
            return
        self._unread_bytes = unread_bytes
        self._unread_timer = self.loop.call_later(
            self.limits.write_stall_timeout_s, self._look_at_reader
        )

    # --- parsing --------------------------------------------------------------------------------
    def _parse(self, data: memoryview | bytes) -> None:
        at = 0
        while at < len(data):
            if len(self._waiting) >= self.limits.pipelined_requests_max:
                self._rest = bytes(data[at:])
                self.adjust_reading()
                return
            # Feed no more bytes than can contain as many requests as there are places.
            places = self.limits.pipelined_requests_max - len(self._waiting)
            step = self._body_bytes_left or REQUEST_BYTES_MIN * places
            self._feed(data[at : at + step])
            if self._is_deaf:
                return
            at += step
        if self._is_in_headers:
            self._await_headers()

    def _feed(self, data: memoryview | bytes) -> None:
        self._head_bytes += len(data)
        body_bytes = self._body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Upgrades are not supported: answer the request, which is the connection's last.
            self._body_bytes_left = 0
        except httptools.HttpParserError as error:
            if not self._is_refused:
                is_target = isinstance(error, httptools.HttpParserCallbackError)
                why = "the request target is not a URL" if is_target else str(error)
                self._refuse(Problem(Code.MALFORMED_REQUEST, why))
            return
        if self._is_in_headers:
            if self._head_bytes > self.limits.header_bytes_max:
                self._refuse(_HEADERS_TOO_LARGE)
        elif self._reading is not None and not self._body_bytes_left:
            self._count_framing(len(data), self._body_bytes - body_bytes)

    def _count_framing(self, fed_bytes: int, body_bytes: int) -> None:
        """Bound chunk headers and trailers, between pieces of the body and relative to all of it."""
        self._framing_bytes += max(0, fed_bytes - body_bytes)
        if self._framing_bytes > self.limits.header_bytes_max + self._body_bytes:
            self._refuse(_TRAILERS_TOO_LARGE)
        elif body_bytes:
            self._head_bytes = 0
        elif self._head_bytes > self.limits.header_bytes_max:
            self._refuse(_TRAILERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url = b""
        self._headers = []
        self._is_in_headers = True

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which is dropped and has the deadline of headers."""
        if not self._is_in_headers:
            self._await_headers()
            return
        self._headers.append((name.lower(), value))
        if len(self._headers) > self.limits.header_lines_max:
            self._fail(_HEADERS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """The headers of a request have arrived."""
        # The step can contain a part of the body, so count the headers exactly only beyond the bound.
        if self._head_bytes > self.limits.header_bytes_max:
            lines = sum(len(name) + len(value) for name, value in self._headers)
            if len(self._url) + lines > self.limits.header_bytes_max:
                self._fail(_HEADERS_TOO_LARGE)
        self._headers_arrived()
        self._head_bytes = self._framing_bytes = self._body_bytes = 0
        version = self._parser.get_http_version()
        length_bytes, expects_continue = self._read_framing(version)
        exchange = Exchange(
            self,
            self._scope(version),
            keep_alive=(
                version != "1.0"
                and self._parser.should_keep_alive()
                and not self._parser.should_upgrade()
            ),
            expects_continue=expects_continue,
        )
        self._reading = exchange
        self._body_bytes_left = length_bytes
        if self._answering is None and self._unread is None:
            self._answer(exchange)
        else:
            self._waiting.append(exchange)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body_bytes += len(body)
        if self._body_bytes_left:
            self._body_bytes_left -= len(body)
        if self._reading is not None:
            self._reading.body_arrived(body)
            if len(self._reading.body) > self.limits.body_free_bytes:
                self.adjust_reading()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._headers_arrived()
        exchange, self._reading = self._reading, None
        self._head_bytes = 0
        if exchange is not None:
            exchange.body_ended()
            if not exchange.keep_alive:
                self._is_deaf = True

    def _read_framing(self, version: str) -> tuple[int, bool]:
        """The declared length of the body (0: none, or chunked); whether 100 is waited for."""
        length_bytes, expects_continue, encodings = 0, False, 0
        for name, value in self._headers:
            if name == b"content-length":
                # The parser has checked that it occurs once and contains digits.
                length_bytes = int(value)
            elif name == b"transfer-encoding":
                encodings += 1
                # RFC 9112 section 6.1: refuse framing that a proxy might read in another way.
                if value.strip().lower() != b"chunked" or encodings > 1 or version == "1.0":
                    self._fail(
                        Problem(
                            Code.MALFORMED_REQUEST, "Transfer-Encoding is chunked, in HTTP/1.1 only"
                        )
                    )
            elif name == b"expect" and value.lower() == b"100-continue":
                expects_continue = True
        return length_bytes, expects_continue

    def _scope(self, version: str) -> MutableMapping[str, Any]:
        url = httptools.parse_url(self._url)
        raw_path: bytes = url.path or b""
        path = raw_path.decode("ascii")
        client, scheme = self.client, self.scheme
        if self.is_proxy and client is not None:
            seen = self.proxies.client(client[0], self._headers)
            client, scheme = (seen.host, 0), seen.scheme or scheme
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": client,
            "scheme": scheme,
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }

    def _fail(self, problem: Problem) -> None:
        """Refuse from within the parser, which stops at an exception."""
        self._is_refused = True
        self._refuse(problem)
        raise ValueError(problem.detail)

    # --- answering ------------------------------------------------------------------------------
    def _answer(self, exchange: Exchange) -> None:
        self._answering = exchange
        exchange.scope[EXCHANGE_KEY] = exchange
        task = exchange.task = self.loop.create_task(exchange.run())
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def answered(self, *, is_last: bool, is_read: bool) -> None:
        """The application has answered: start the next request if the connection stays open."""
        self._server_state.total_requests += 1
        self._answering = None
        if is_last:
            self._finish(is_read=is_read)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Answer the next waiting request, then continue reading."""
        if self._is_finishing or self._unread is not None or self.transport.is_closing():
            return
        if self._waiting:
            self._answer(self._waiting.popleft())
        elif self._refusal is not None:
            self._write_refusal(self._refusal)
            return
        elif not self._is_in_headers and not self._rest:
            self._idle_since = time.monotonic()
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(
                    self.limits.connection_idle_s, self._look_at_idler
                )
        # Only with half the places free: with one, the parser would get lines in pieces.
        if self._rest and len(self._waiting) <= self.limits.pipelined_requests_max // 2:
            rest, self._rest = self._rest, b""
            self._parse(rest)
        self.adjust_reading()

    def _look_at_idler(self) -> None:
        """Close an idle connection; one timer serves many requests, so none needs to be cancelled."""
        self._idle_timer = None
        if not self.is_idle:
            return
        left_s = self._idle_since + self.limits.connection_idle_s - time.monotonic()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._look_at_idler)
        else:
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is arriving or running and no reply is unread."""
        return (
            self._answering is None
            and self._reading is None
            and self._unread is None
            and not self._is_in_headers
        )

    def _displace_idle(self) -> bool:
        """Close the longest idle connection of the address with the most connections."""
        address = max(self.open_count, key=self.open_count.__getitem__)
        idle = [
            each
            for each in self._server_state.connections
            if isinstance(each, Connection)
            and each is not self
            and each.address == address
            and each.is_idle
        ]
        if not idle:
            return False
        min(idle, key=lambda each: each._idle_since).transport.abort()  # noqa: SLF001
        return True

    def adjust_reading(self) -> None:
        """Read while arriving data can be consumed; pause otherwise."""
        is_full = bool(self._rest) or (
            self._reading is not None
            and len(self._reading.body) > self.limits.body_free_bytes
            and not self._is_deaf
        )
        if is_full is not self._is_reading_paused and not self.transport.is_closing():
            self._is_reading_paused = is_full
            if is_full:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # --- ending ---------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """The server stops: finish the running request, then close (uvicorn calls this)."""
        self._waiting.clear()
        self._rest = b""
        if self._answering is None:
            self._is_deaf = True
            self.transport.close()
            return
        self._answering.keep_alive = False
        # Only the rest of its body is still needed.
        self._is_deaf = self._reading is not self._answering
        self.adjust_reading()

    def _await_headers(self) -> None:
        # Most headers arrive in one piece and need no timer.
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(
                self.limits.headers_timeout_s, self._refuse, _HEADERS_LATE
            )

    def _headers_arrived(self) -> None:
        self._is_in_headers = False
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _refuse(self, problem: Problem) -> None:
        """Read no more; send the refusal once all earlier requests are answered."""
        self._headers_arrived()
        self._is_deaf = True
        self._rest = b""
        self._body_bytes_left = 0
        exchange, self._reading = self._reading, None
        if exchange is not None and exchange is self._answering and not exchange.is_started:
            # Its own body is at fault: the refusal is its answer.
            exchange.client_left()
            self._answering = None
        elif exchange is not None and exchange in self._waiting:
            self._waiting.remove(exchange)
        elif exchange is not None:
            # Its answer has begun, so it is too late for a refusal.
            exchange.client_left()
            self.transport.abort()
            return
        self._refusal = problem
        if self._answering is None:
            self._go_on()

    def _write_refusal(self, problem: Problem) -> None:
        if not self.transport.is_closing():
            reply = problem_reply(problem)
            self.transport.write(
                response_head(reply.status_code, reply.raw_headers, length_of(reply), is_last=True)
            )
            self.transport.write(reply.body)
            self._finish(is_read=False, linger_bytes_max=LINGER_STEP_BYTES)

    def _finish(self, *, is_read: bool, linger_bytes_max: int = LINGER_BYTES_MAX) -> None:
        """Close once everything is written; with unread input, linger until it can have arrived."""
        self._linger_bytes_max = linger_bytes_max
        self._is_finishing = self._is_deaf = True
        self._waiting.clear()
        self._rest = b""
        self._body_bytes_left = 0
        if self.transport.is_closing():
            return
        if is_read:
            # Unread bytes would keep even a closed connection for ever, so the timer of unread
            # replies stays active.
            self.transport.close()
            return
        # Closing with unread input resets the connection, and the client might lose the answer.
        self._linger(-LINGER_STEP_BYTES)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.adjust_reading()

    def _linger(self, dropped_bytes: int) -> None:
        """Close, unless enough has arrived since `dropped_bytes` were dropped."""
        if self._dropped_bytes - dropped_bytes < LINGER_STEP_BYTES:
            self.transport.close()
            return
        self._closing_timer = self.loop.call_later(
            self.limits.unread_body_linger_s, self._linger, self._dropped_bytes
        )

    def _drop(self, nbytes: int) -> None:
        self._dropped_bytes += nbytes
        if self._dropped_bytes > self._linger_bytes_max and not self.transport.is_closing():
            # Not closed yet: a client that reads while it sends still gets the answer.
            self.transport.pause_reading()


def bounded_protocol(
    limits: Limits, sharing: Sharing | None = None, proxies: Proxies | None = None
) -> type[Any]:
    """The protocol class of one server; `sharing`: the node's shares, if it has any."""
    attributes: dict[str, Any] = {
        "limits": limits,
        "sharing": sharing or Sharing(limits),
        "proxies": proxies or Proxies(()),
        "open_count": Counter(),
        # One buffer for all connections: it is filled and parsed within one callback of the loop.
        "buffer": memoryview(bytearray(BODY_STEP_BYTES)),
    }
    return type("ServerConnection", (Connection,), attributes)


# --- one request and its answer -------------------------------------------------------------------


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
        is_last = self._is_last(reply.raw_headers)
        head = response_head(
            reply.status_code, reply.raw_headers, length_of(reply), is_last=is_last
        )
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
