"""TLS on one connection: a layer between the transport of a socket and `app.server.connection`.

The event loops have TLS of their own. A server that must bound its connections cannot use it:

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
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from app.server.connection import BODY_STEP_BYTES, Connection

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
