"""Bodies that pretend, never end or drip: stopped early, answered, and nobody else waits."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.limits import DEFAULT_LIMITS
from tests.support.server import RunningNode, running_node

REQUEST_LINE = (
    b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-protobuf\r\n"
)
LIMIT = DEFAULT_LIMITS.small_body_bytes_max
# What the kernel's socket buffers take in although nobody reads any more.
BUFFERED_BYTES_MAX = 8 << 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    limits = replace(DEFAULT_LIMITS, body_read_timeout_s=1)
    with running_node(tmp_path_factory.mktemp("node"), limits) as running:
        yield running


def connect(node: RunningNode) -> socket.socket:
    host, port = node.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def sent_until_cut_off(connection: socket.socket) -> int:
    chunk = b"10000\r\n" + bytes(65_536) + b"\r\n"
    for sent_count in range(16_384):
        try:
            connection.sendall(chunk)
        except OSError:
            return sent_count * 65_536
    pytest.fail("a gigabyte was taken")


def everything(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while chunk := connection.recv(65_536):
            answer += chunk
    except ConnectionResetError:
        pass
    return answer


def test_a_pretended_10_gib_body_is_refused_before_it_is_sent(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(REQUEST_LINE + b"content-length: 10737418240\r\n\r\nx")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


def test_an_endless_chunked_body_is_cut_off(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(REQUEST_LINE + b"transfer-encoding: chunked\r\n\r\n")
        assert sent_until_cut_off(connection) < LIMIT + BUFFERED_BYTES_MAX


def test_a_body_that_drips_is_answered_at_the_deadline(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(REQUEST_LINE + b"content-length: 100\r\n\r\nx")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer


def test_a_client_that_hangs_up_leaves_the_node_well(node: RunningNode) -> None:
    for _ in range(20):
        with connect(node) as connection:
            connection.sendall(REQUEST_LINE + b"content-length: 100\r\n\r\nx")
    assert node.http.get("/livez").json() == {"status": "alive"}
