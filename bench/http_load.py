"""A bounded HTTP load generator: some connections, one request at a time on each, no pauses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import cast
from urllib.parse import urlsplit

import uvloop

ANSWER_SECONDS_MAX = 60
HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length: "


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of a run of requests."""

    requests_count: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float

    def figures(self) -> dict[str, float]:
        """By the names that tables give them."""
        return {
            "per s": round(self.requests_per_s),
            "p50 ms": self.p50_ms,
            "p99 ms": self.p99_ms,
        }


def generate(
    url: str, make_request: Callable[[], bytes], *, connections: int, seconds: float
) -> Load:
    """Send requests (whole, as bytes) for some seconds; every answer has to be a 200."""
    return uvloop.run(_generate(url, make_request, connections, seconds))


def request(
    method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> bytes:
    """One request as bytes."""
    lines = {"host": "127.0.0.1", **(headers or {})}
    if body:
        lines["content-length"] = str(len(body))
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target} HTTP/1.1\r\n{text}\r\n".encode() + body


def any_of(asked: Sequence[bytes], random: Random) -> Callable[[], bytes]:
    """Gives one of them at each call."""
    return lambda: asked[int(random.random() * len(asked))]


def answer_to(url: str, asked: bytes) -> tuple[bytes, bytes]:
    """Head and body of one answer, which has to be a 200."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80)) as connection:
        connection.sendall(asked)
        answer = b""
        while HEAD_END not in answer or len(answer) < _answer_bytes(answer):
            answer += connection.recv(65_536)
    head, _, body = answer.partition(HEAD_END)
    return head, body


def _answer_bytes(data: bytes) -> int:
    """The length of an answer with this complete head."""
    head_bytes = data.index(HEAD_END)
    if not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(data[:500].decode("latin-1"))
    at = data.index(LENGTH, 0, head_bytes) + len(LENGTH)
    return head_bytes + len(HEAD_END) + int(data[at : data.find(b"\r", at)])


async def _generate(
    url: str, make_request: Callable[[], bytes], connections: int, seconds: float
) -> Load:
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    started = time.perf_counter()
    clients = [_Client(make_request, started + seconds) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, parts.hostname, parts.port)
    async with asyncio.timeout(seconds + ANSWER_SECONDS_MAX):
        await asyncio.gather(*(client.done for client in clients))
    elapsed_s = time.perf_counter() - started
    times_ms = sorted(each for client in clients for each in client.times_ms)
    return Load(
        len(times_ms),
        len(times_ms) / elapsed_s,
        times_ms[len(times_ms) // 2],
        times_ms[len(times_ms) * 99 // 100],
    )


class _Client(asyncio.Protocol):
    def __init__(self, make_request: Callable[[], bytes], deadline: float) -> None:
        self.times_ms: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._make_request = make_request
        self._deadline = deadline
        self._missing_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._missing_bytes == 0:
            # Servers send the head of an answer in one piece.
            try:
                self._missing_bytes = _answer_bytes(data)
            except RuntimeError as refused:
                self.done.set_exception(refused)
                return
        self._missing_bytes -= len(data)
        if self._missing_bytes == 0:
            self._received()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server hung up"))

    def _received(self) -> None:
        now = time.perf_counter()
        self.times_ms.append((now - self._sent_at) * 1e3)
        if now < self._deadline:
            self._send()
            return
        self.done.set_result(None)
        assert self._transport is not None
        self._transport.close()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        self._transport.write(self._make_request())
