"""The HTTP servers of a process, on uvicorn, and their layer of TLS.

**TLS** is a layer between the transport of a socket and `app.server.connection`. The event loops have TLS of
their own. A server that must bound its connections cannot use it:

- The loops tell a protocol of its connection only after the handshake. Until then nobody can count,
  displace or close it.
- They encrypt a whole reply and pass it to the socket's transport, so `get_write_buffer_size` is 0 while
  megabytes are unread. Their buffers then keep the size of the largest reply.
- They hold up to 512 KiB of input of a connection that does not read.
- With a high-water mark of 0 they pause and resume writing in turns, whether or not anything is unread.

Tried with both loops (`start_tls` with a handshake timeout, and a protocol beneath it that counts each accepted
socket), the attacks of `tests/app/http/test_tls.py` succeed: unread replies of 8 MiB count as 0 bytes
(`test_replies_that_are_not_read_over_tls_count_to_the_byte_and_no_longer_once_they_are`), connections that rest
after them hold 150 MiB (`test_connections_that_rest_after_large_replies_over_tls_hold_no_memory_of_them`), and
records of one byte and input sent ahead are read without a bound
(`test_records_of_one_byte_leave_other_connections_their_turns`,
`test_what_a_client_sends_ahead_over_tls_waits_in_its_socket`). A loop without these needs no layer of ours.

`TlsLayer` is the protocol of the socket's transport and the transport of a connection. The connection is
made when the socket is accepted, so its bounds and its deadline for headers cover the handshake.

**The end.** On SIGTERM the node reports at once that it is not ready, and goes on answering for `drain_s` seconds,
so that a load balancer has time to notice. Live readers get their cursor and the end of the stream;
replies carry `Connection: close`. Then the listener closes, and requests in flight are finished.
Ctrl-C skips the wait.

While a worker waits for its database it has no node yet: then a `WaitingServer` answers, so that load
balancers, operators and clients learn the reason.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import orjson
import uvicorn

from app.access.proxies import Proxies
from app.errors import Code, Problem
from app.http.call import App, AsgiScope, Receive, Reply, Send, length_of, problem_reply
from app.server.connection import BODY_STEP_BYTES, Connection, bounded_protocol
from app.server.limits import Limits
from app.server.node import Node, checked_certificate, warn_of
from app.server.settings import Settings

# ---- TLS on one connection

STEP_BYTES = 16_384
"""Encrypted at once: the plaintext of one record. OpenSSL's buffers never shrink, so they stay this small."""

RECORD_FRAMING_BYTES = 512
"""Read beside what a connection takes: the headers and tags of its records."""

RECORDS_PER_PASS = 16
"""Decrypted before other connections have their turn. Honest records have 1 to 16 KiB; one of a byte costs as
much work, and 64 KiB contain 2,800 of them."""


class TlsLayer(asyncio.BufferedProtocol, asyncio.Transport):
    """See the module. `buffer` is shared: it is filled and decrypted within one callback of the loop."""

    def __init__(self, context: ssl.SSLContext, connection: Connection, buffer: memoryview) -> None:
        super().__init__()
        self._context = context
        self._connection = connection
        self._buffer = buffer
        self._socket: asyncio.Transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # Made when the first bytes arrive, because it takes some 40 KiB.
        self._session: ssl.SSLObject | None = None
        self._is_open = False  # the handshake is complete
        self._is_paused = False
        self._is_scheduled = False  # `_go_on_reading`; until then the socket is not read
        self._is_ended = False  # close_notify is sent
        self._is_closing = False

    # --- the protocol of the socket -----------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A socket was accepted."""
        self._socket = transport
        self._connection.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._is_closing = True
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """As many bytes as the connection wants, so that few are left over if it pauses."""
        return self._buffer[: len(self._connection.get_buffer(sizehint)) + RECORD_FRAMING_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived."""
        if self._is_ended:
            # The connection ignores input by now, and only counts it.
            self._connection.buffer_updated(nbytes)
            return
        self._incoming.write(self._buffer[:nbytes])
        self._advance()

    def eof_received(self) -> None:
        """The client sends no more: the transport closes."""

    def pause_writing(self) -> None:
        """Not all bytes could be written."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """All bytes are written."""
        self._connection.resume_writing()

    def _advance(self) -> None:
        """Go on with the handshake, then decrypt what has arrived, until the connection pauses."""
        if self._session is None:
            self._session = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        session = self._session
        records_count = 0
        try:
            if not self._is_open:
                session.do_handshake()
                self._is_open = True
            while not (self._is_paused or self._is_ended or self.is_closing()) and (
                self._incoming.pending or session.pending()
            ):
                if records_count == RECORDS_PER_PASS:
                    self._schedule_reading()
                    break
                records_count += 1
                room = self._connection.get_buffer(-1)
                # The stubs know neither a view as a buffer nor the count that is returned.
                nbytes: Any = session.read(len(room), room)
                if not nbytes:  # close_notify
                    self._connection.eof_received()
                    self.close()
                    return
                self._connection.buffer_updated(nbytes)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            # Tell the client why, if it is a TLS client, and close.
            self._is_ended = True
            self._flush()
            self.close()
            return
        self._flush()

    # --- the transport of the connection ------------------------------------------------------------
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.BaseTransport`."""
        return self._context if name == "sslcontext" else self._socket.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._is_closing or self._socket.is_closing()

    def close(self) -> None:
        """Close once everything is sent. Does not wait for the client's close_notify (RFC 8446, 6.1)."""
        if not self.is_closing():
            self._end()
            self._is_closing = True
            self._socket.close()

    def abort(self) -> None:
        """See `asyncio.WriteTransport`."""
        self._is_closing = True
        self._socket.abort()

    def can_write_eof(self) -> bool:
        """See `asyncio.WriteTransport`."""
        return True

    def write_eof(self) -> None:
        """Send no more; what still arrives is counted and not decrypted."""
        self._end()
        self._socket.write_eof()

    def _end(self) -> None:
        if self._is_open and self._session is not None and not self._is_ended:
            with suppress(ssl.SSLError):  # it would wait for the client's close_notify
                self._session.unwrap()
            self._flush()
        self._is_ended = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.WriteTransport`. Before the end of the handshake nothing can be sent: it aborts."""
        if self.is_closing() or self._is_ended:
            return
        if not self._is_open or self._session is None:
            self.abort()
            return
        plain, records = memoryview(data), []
        try:
            while plain:
                plain = plain[self._session.write(plain[:STEP_BYTES]) :]
                records.append(self._outgoing.read())
        except ssl.SSLError:
            self.abort()
            return
        self._socket.writelines(records)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """See `asyncio.WriteTransport`."""
        pieces = list(list_of_data)
        if sum(map(len, pieces)) <= STEP_BYTES:
            pieces = [b"".join(pieces)]  # one record
        for piece in pieces:
            self.write(piece)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See `asyncio.WriteTransport`."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that are not sent yet."""
        return self._socket.get_write_buffer_size()

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._is_paused = True
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._is_paused = False
        # Not at once, because the connection can be parsing.
        self._schedule_reading()

    def _schedule_reading(self) -> None:
        """Decrypt what is left over in the next pass of the event loop, before the socket is read again."""
        self._socket.pause_reading()
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on_reading)

    def _go_on_reading(self) -> None:
        self._is_scheduled = False
        if not (self._is_ended or self.is_closing()):
            self._advance()
        if not (self._is_paused or self._is_scheduled or self.is_closing()):
            self._socket.resume_reading()

    def _flush(self) -> None:
        if self._outgoing.pending and not self.is_closing():
            self._socket.write(self._outgoing.read())


def tls_layers(
    context: ssl.SSLContext, connect: Callable[[], Connection]
) -> Callable[[], TlsLayer]:
    """Makes the protocol of each accepted socket; `connect` makes the connection above it."""
    buffer = memoryview(bytearray(BODY_STEP_BYTES + RECORD_FRAMING_BYTES))
    return lambda: TlsLayer(context, connect(), buffer)


# ---- servers

SHUTDOWN_TIMEOUT_S = 10
"""After it slow bodies and slow readers are cut."""

WAITING_SHUTDOWN_TIMEOUT_S = 2
RETRY_AFTER_S = 1

_TICK_S = 0.05


def tls_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's options for TLS; none if the node serves http."""
    if settings.tls_cert is None:
        return {}
    return {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}


def _proxies(settings: Settings) -> Proxies:
    return Proxies(settings.trusted_proxies, settings.proxy_header)


class _Server(uvicorn.Server):
    """Accepts connections with our layer of TLS (`app.server.server`). `tls`: uvicorn's options for it."""

    def __init__(self, app: App, http: Any, shutdown_timeout_s: int, tls: dict[str, Any]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=shutdown_timeout_s,
                **tls,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        tls = self.config.ssl
        if tls is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        loop = asyncio.get_running_loop()
        protocol_class: Any = self.config.http_protocol_class
        connect = partial(protocol_class, self.config, self.server_state, self.lifespan.state)
        layers = tls_layers(tls, connect)
        for each in sockets:
            server = await loop.create_server(layers, sock=each, backlog=self.config.backlog)
            self.servers.append(server)


class NodeServer(_Server):
    """Serves the application of a node."""

    def __init__(self, app: App, node: Node) -> None:
        self._node = node
        self._signals_count = 0
        self._drain_s = 0.0
        # Before it is loaded: a change meanwhile is found by the next reload.
        node.certificate = checked_certificate(node.settings)
        warn_of(node.certificate)
        super().__init__(
            app,
            bounded_protocol(node.limits, node.sharing, _proxies(node.settings)),
            SHUTDOWN_TIMEOUT_S,
            tls_options(node.settings),
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self._node.tls = self.config.ssl  # a certificate can be replaced in it

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`. Also called for signals that came before it served."""
        self._signals_count += 1
        if self._signals_count == 1 and sig == signal.SIGTERM:
            self._drain_s = self._node.settings.drain_s
        self._node.readiness.is_stopping = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        self._node.readiness.is_stopping = self._node.sharing.is_draining = True
        await self._node.live.hub.close()
        await self._node.live.relay.close()
        await self._drain()
        await super().shutdown(sockets)

    @property
    def _is_hurried(self) -> bool:
        worker = self._node.worker
        return worker is not None and worker.board.is_hurried

    async def _drain(self) -> None:
        """Go on answering for a while; a second signal ends it."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._drain_s
        signals_count = self._signals_count
        left_s = self._drain_s
        while left_s > 0 and self._signals_count == signals_count and not self._is_hurried:
            # A handler of signals cannot set an event of a loop that sleeps.
            await asyncio.sleep(min(_TICK_S, left_s))
            left_s = ends_s - loop.time()


class WaitingServer(_Server):
    """Answers every request with the reason why there is no node behind it, until `should_exit`.

    It leaves signals alone.
    """

    def __init__(self, reason: str, limits: Limits, settings: Settings) -> None:
        async def answer(scope: AsgiScope, _receive: Receive, send: Send) -> None:
            reply = _waiting_reply(scope["path"], reason)
            # Close the connection, because the client's next one may reach the open node.
            headers = [*reply.raw_headers, *length_of(reply), (b"connection", b"close")]
            start = {"type": "http.response.start", "status": reply.status_code, "headers": headers}
            await send(start)
            await send({"type": "http.response.body", "body": reply.body})

        http = bounded_protocol(limits, proxies=_proxies(settings))
        super().__init__(answer, http, WAITING_SHUTDOWN_TIMEOUT_S, tls_options(settings))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


@asynccontextmanager
async def serving(server: WaitingServer, listener: socket.socket) -> AsyncIterator[None]:
    """Serve while the block runs; the listener stays open for the next server."""
    running = asyncio.create_task(server.serve(sockets=[listener.dup()]))
    try:
        yield
    finally:
        server.should_exit = True
        await running


def _waiting_reply(path: str, reason: str) -> Reply:
    if path == "/livez":
        body = orjson.dumps({"status": "alive"})
        return Reply(200, [(b"content-type", b"application/json")], body)
    code = Code.NOT_READY if path == "/readyz" else Code.STORE_UNAVAILABLE
    return problem_reply(Problem(code, reason, headers={"Retry-After": str(RETRY_AFTER_S)}))
