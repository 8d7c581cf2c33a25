"""Connections to peers stay open between sessions, and lead only to checked addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.errors import Code, Problem
from app.federation import connections as kept
from app.federation.connections import Connections
from app.federation.transport import open_http_transport
from app.limits import DEFAULT_LIMITS

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


class Peer:
    """A server of empty answers that counts its connections."""

    def __init__(self) -> None:
        self.accepted = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def a_peer() -> AsyncIterator[Peer]:
    peer = Peer()
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.port = server.sockets[0].getsockname()[1]
    try:
        yield peer
    finally:
        server.close()
        for writer in peer.writers:
            writer.close()


async def one_session(connections: Connections, url: str, *, private: bool = True) -> None:
    async with open_http_transport(
        httpx.URL(url), DEFAULT_LIMITS, private_allowed=private, connections=connections
    ) as transport:
        await transport.interest()


def test_sessions_with_a_peer_share_a_connection() -> None:
    async def scenario() -> int:
        connections = Connections()
        async with a_peer() as peer:
            for _ in range(5):
                await one_session(connections, f"http://127.0.0.1:{peer.port}")
            await connections.close()
            return peer.accepted

    assert asyncio.run(scenario()) == 1


def test_a_peer_that_closed_the_connection_is_connected_to_again() -> None:
    async def scenario() -> int:
        connections = Connections()
        async with a_peer() as peer:
            await one_session(connections, f"http://127.0.0.1:{peer.port}")
            peer.writers[0].close()
            await peer.writers[0].wait_closed()
            await one_session(connections, f"http://127.0.0.1:{peer.port}")
            await connections.close()
            return peer.accepted

    assert asyncio.run(scenario()) == 2


def test_an_open_connection_does_not_outlive_the_check_of_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["127.0.0.1"]

    async def resolved(_: Any, __: str, port: int, **___: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[0], port))]

    async def scenario() -> tuple[Problem, int]:
        connections = Connections()
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
        async with a_peer() as peer:
            url = f"http://peer.example:{peer.port}"
            await one_session(connections, url)
            addresses[0] = "169.254.169.254"
            with pytest.raises(Problem) as refused:
                await one_session(connections, url)
            await connections.close()
            return refused.value, peer.accepted

    problem, accepted = asyncio.run(scenario())
    assert problem.code is Code.PEER_URL_REFUSED
    assert accepted == 1


def test_a_connection_is_not_shared_between_two_names_of_one_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolved(_: Any, __: str, port: int, **___: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def scenario() -> int:
        connections = Connections()
        async with a_peer() as peer:
            monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
            for name in ("one.example", "two.example", "one.example"):
                await one_session(connections, f"http://{name}:{peer.port}")
            await connections.close()
            return peer.accepted

    assert asyncio.run(scenario()) == 2


@pytest.mark.parametrize(("name", "value"), [("PEERS_KEPT_MAX", 2), ("IDLE_S", 0.0)])
def test_connections_beyond_the_bound_or_too_long_unused_are_closed(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, name, value)

    async def scenario() -> tuple[int, int]:
        connections = Connections()
        async with a_peer() as one, a_peer() as two, a_peer() as three:
            for peer in (one, two, three):
                await one_session(connections, f"http://127.0.0.1:{peer.port}")
            count = len(connections)
            await one_session(connections, f"http://127.0.0.1:{one.port}")
            await connections.close()
            return count, one.accepted

    count, accepted = asyncio.run(scenario())
    assert count <= 2
    assert accepted == 2  # the first one's connection was closed
