"""What uvicorn leaves open on a connection: deadlines and bounds for headers and for writing.

Without them a client that sends a header a minute, or reads a byte a minute, holds a connection and
its buffers for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from app.errors import Code, Problem
from app.http.call import REPLY_KEY, Reply, length_of
from app.http.problems import problem_reply
from app.limits import Limits

_CLOSE = (b"connection", b"close")
_HEADERS_TOO_LARGE = Problem(Code.HEADERS_TOO_LARGE, "request line and headers together")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limits` and `open_count` (connections by address) belong to the server."""

    limits: Limits
    open_count: Counter[str]

    _in_headers = False
    _headers_timer: asyncio.TimerHandle | None = None
    _writing_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _chunk_bytes = 0
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; one too many is cut."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self.open_count[self._address] += 1
        if self.open_count[self._address] > self.limits.connections_per_address_max:
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._headers_arrived()
        self.resume_writing()
        self.open_count[self._address] -= 1
        if not self.open_count[self._address]:
            del self.open_count[self._address]

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of headers that have not ended are counted."""
        self._chunk_bytes = len(data)
        super().data_received(data)
        if self._in_headers:
            self._await_headers()
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.header_bytes_max:
                self._refuse(_HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        """The headers of a request have arrived."""
        # The chunk may hold a body too: a closer look is rarely needed.
        if self._header_bytes + self._chunk_bytes > self.limits.header_bytes_max:
            self._check_header_bytes()
        self._headers_arrived()
        super().on_headers_complete()
        # The application's task begins in the next turn of the loop.
        self.scope[REPLY_KEY] = partial(_give, self.cycle)  # type: ignore[literal-required]

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._writing_timer = self.loop.call_later(
            self.limits.write_stall_timeout_s, self.transport.abort
        )

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets a problem document too."""
        self._refuse(Problem(Code.MALFORMED_REQUEST, msg))

    def _check_header_bytes(self) -> None:
        lines = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.url) + lines > self.limits.header_bytes_max:
            self._refuse(_HEADERS_TOO_LARGE)
            # Makes the parser stop: the request must not be answered a second time.
            raise ValueError(_HEADERS_TOO_LARGE.detail)

    def _await_headers(self) -> None:
        # Most headers come whole: no timer is ever needed for them.
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(
                self.limits.headers_timeout_s, self._headers_late
            )

    def _headers_arrived(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _headers_late(self) -> None:
        self._refuse(Problem(Code.REQUEST_TIMEOUT, "the headers did not arrive in time"))

    def _refuse(self, problem: Problem) -> None:
        self._headers_arrived()
        if self.transport.is_closing():
            return
        reply = problem_reply(problem)
        self.transport.write(_head(reply, is_last=True) + reply.body)
        self.transport.close()


async def _give(cycle: RequestResponseCycle, reply: Reply) -> None:
    """Answer with a whole reply: one write instead of uvicorn's two, each a system call."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    if _CLOSE in reply.headers:
        cycle.keep_alive = False
    head = _head(reply, is_last=not cycle.keep_alive)
    cycle.transport.writelines((head, b"" if cycle.scope["method"] == "HEAD" else reply.body))
    cycle.response_started = cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


def _head(reply: Reply, *, is_last: bool) -> bytes:
    lines = [STATUS_LINE[reply.status]]
    lines += [b"%s: %s\r\n" % header for header in reply.headers]
    lines += [b"%s: %s\r\n" % header for header in length_of(reply)]
    if is_last and _CLOSE not in reply.headers:
        lines.append(b"connection: close\r\n")
    head = b"".join(lines)
    if head.count(b"\n") != len(lines):
        raise ValueError("a header holds a line break")
    return head + b"\r\n"


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """The protocol class of one server."""
    attributes: dict[str, Any] = {"limits": limits, "open_count": Counter()}
    return type("ServerProtocol", (BoundedProtocol,), attributes)
