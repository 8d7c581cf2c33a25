"""A peer's answers that are expensive to read: the node serves others, whatever comes."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path

import pytest
import zstandard

from tests.support.attacked import Attacked, attacked_node, eventually

WINDOW_S = 3.0
GET_S_MAX = 0.25
CORES_MAX = 0.4
"""A tenth of a core for each link, and what the node and its honest callers need anyway."""


TRIES = 3
"""Of which the best counts: in the others the machine may be busy."""

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PACKED = EVENTS + b"Content-Encoding: zstd\r\n\r\n"
CHUNKED = EVENTS + b"Transfer-Encoding: chunked\r\n\r\n"
KIB_64 = 1 << 16


# A node reads no larger windows.
PACKING = zstandard.ZstdCompressionParameters.from_level(3, window_log=17)


def endless_zstd(content: bytes) -> Iterator[bytes]:
    packing = zstandard.ZstdCompressor(compression_params=PACKING).compressobj()
    while True:
        packed = packing.compress(content * max(1, KIB_64 // len(content)))
        yield packed + packing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


STREAMS: dict[str, Callable[[], Iterator[bytes]]] = {
    "32 MiB of empty lines": lambda: iter(
        [PACKED + zstandard.ZstdCompressor(compression_params=PACKING).compress(b"\n" * (32 << 20))]
    ),
    "empty lines without end": lambda: chain([PACKED], endless_zstd(b"\n")),
    "a million empty lines before each event": lambda: chain(
        [PACKED], endless_zstd(b"\n" * 1_000_000 + b"data: x\n\n")
    ),
    "comments without end": lambda: chain([EVENTS + b"\r\n"], repeat(b":\n" * (KIB_64 // 2))),
    "answers 100 without end": lambda: repeat(b"HTTP/1.1 100 \r\n\r\n" * (KIB_64 // 17)),
    "chunks of one byte": lambda: chain([CHUNKED], repeat(b"1\r\n:\r\n" * (KIB_64 // 6))),
}


@contextmanager
def hostile_peer(stream: Callable[[], Iterator[bytes]]) -> Iterator[tuple[str, threading.Event]]:
    """A server that answers each request for its relayed messages with this stream, and no other.

    The event is set once a node reads it.
    """
    is_read = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if b"GET /v1/relay" not in connection.recv(KIB_64):
                connection.sendall(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
                return
            is_read.set()
            for piece in stream():
                connection.sendall(piece)
            while connection.recv(KIB_64):
                pass

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", is_read
        listener.shutdown(socket.SHUT_RDWR)


def longest_get_s(node: Attacked) -> float:
    """The longest wait of an honest caller in a window."""
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    longest_s, ends_s = 0.0, time.monotonic() + WINDOW_S
    while (began_s := time.monotonic()) < ends_s:
        connection.request("GET", "/v1/channels")
        assert connection.getresponse().read()
        longest_s = max(longest_s, time.monotonic() - began_s)
        time.sleep(0.01)
    connection.close()
    return longest_s


@pytest.mark.parametrize("name", STREAMS)
def test_no_stream_of_a_peer_keeps_a_caller_waiting_or_takes_a_core(
    tmp_path: Path, name: str
) -> None:
    figures = []
    for attempt in range(TRIES):
        with (
            hostile_peer(STREAMS[name]) as (url, is_read),
            attacked_node(tmp_path / str(attempt), "--peer", url) as node,
        ):
            assert eventually(is_read.is_set, 20)
            before_s, began_s = node.busy_s, time.monotonic()
            wait_s = longest_get_s(node)
            cores = (node.busy_s - before_s) / (time.monotonic() - began_s)
            figures.append((wait_s, cores, node.peak_mib))
        if wait_s < GET_S_MAX and cores < CORES_MAX:
            return
    raise AssertionError(f"seconds of the longest GET, cores, MiB: {figures}")
