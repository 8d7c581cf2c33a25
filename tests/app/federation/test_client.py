"""Connections to peers stay open between sessions, and lead only to checked addresses."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import zstandard

from app.errors import Code, Problem
from app.federation.client import PeerClients, open_http_transport
from app.server.limits import DEFAULT_LIMITS
from sdstore.client import transport as calls
from sdstore.sync.report import SyncError

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


async def one_session(clients: PeerClients, url: str, *, private: bool = True) -> None:
    async with open_http_transport(
        httpx.URL(url), DEFAULT_LIMITS, private_allowed=private, clients=clients
    ) as transport:
        await transport.recon(b"")


def test_sessions_with_a_peer_share_a_connection() -> None:
    async def scenario() -> int:
        clients = PeerClients()
        async with a_peer() as peer:
            for _ in range(5):
                await one_session(clients, f"http://127.0.0.1:{peer.port}")
            await clients.close()
            return peer.accepted

    assert asyncio.run(scenario()) == 1


def test_a_peer_that_closed_the_connection_is_connected_to_again() -> None:
    async def scenario() -> int:
        clients = PeerClients()
        async with a_peer() as peer:
            await one_session(clients, f"http://127.0.0.1:{peer.port}")
            peer.writers[0].close()
            await peer.writers[0].wait_closed()
            await one_session(clients, f"http://127.0.0.1:{peer.port}")
            await clients.close()
            return peer.accepted

    assert asyncio.run(scenario()) == 2


def test_an_open_connection_does_not_outlive_the_check_of_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = ["127.0.0.1"]

    async def resolved(_: Any, __: str, port: int, **___: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[0], port))]

    async def scenario() -> tuple[Problem, int]:
        clients = PeerClients()
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
        async with a_peer() as peer:
            url = f"http://peer.example:{peer.port}"
            await one_session(clients, url)
            addresses[0] = "169.254.169.254"
            with pytest.raises(Problem) as refused:
                await one_session(clients, url)
            await clients.close()
            return refused.value, peer.accepted

    problem, accepted = asyncio.run(scenario())
    assert problem.code is Code.PEER_URL_REFUSED
    assert accepted == 1


# --- answers of any server -----------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BOMB = zstandard.compress(bytes(1 << 20))
LIMITS = replace(DEFAULT_LIMITS, recon_reply_bytes_max=1_000)


class Script:
    """A server that answers each request on a connection with the next of some bytes.

    None: it closes the connection instead. `closes`: it does so after the last answer.
    """

    def __init__(self, *connections: list[bytes | None], closes: bool = False) -> None:
        self._connections = list(connections)
        self._closes = closes
        self.requests: list[bytes] = []
        self.serving: list[asyncio.Task[Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.current_task())  # type: ignore[arg-type]
        answers = self._connections.pop(0)
        try:
            for answer in answers:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
            if not self._closes and answers[-1] is not None:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def talk(script: Script, calls: int = 1, **options: Any) -> list[bytes | str]:
    """What each call over kept connections returned, or the detail of its error."""
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    url = httpx.URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/")
    clients, results = PeerClients(), list[bytes | str]()
    try:
        for _ in range(calls):
            async with open_http_transport(
                url, LIMITS, private_allowed=True, clients=clients, **options
            ) as transport:
                try:
                    results.append(await transport.recon(b""))
                except SyncError as error:
                    results.append(error.detail)
    finally:
        await clients.close()
        server.close()
        await asyncio.gather(*script.serving)
    return results


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"content-length: 4\r\n\r\nnews",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nnew\r\n1\r\ns\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + HEAD + b"content-length: 4\r\n\r\nnews",
    ],
)
def test_a_body_is_read_however_it_is_framed_and_the_connection_serves_on(answer: bytes) -> None:
    script = Script([answer, answer])
    assert asyncio.run(talk(script, 2)) == [b"news", b"news"]


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    script = Script([HEAD + b"\r\nnews"], [HEAD + b"\r\nmore"], closes=True)
    assert asyncio.run(talk(script, 2)) == [b"news", b"more"]


def test_a_call_is_repeated_if_a_kept_connection_ends_without_an_answer() -> None:
    first, second = HEAD + b"content-length: 1\r\n\r\n1", HEAD + b"content-length: 1\r\n\r\n2"
    script = Script([first, None], [second])
    assert asyncio.run(talk(script, 2)) == [b"1", b"2"]
    assert len(script.requests) == 3


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (HEAD + b"content-length: 1001\r\n\r\n" + bytes(1_001), "a reply larger than 1000 bytes"),
        (HEAD + b"".join(b"x%d: %s\r\n" % (n, b"y" * 98) for n in range(900)), "bytes of headers"),
        (HEAD + b"a:b\r\n" * 6_900, "bytes of headers"),
        (b"HTTP/1.1 100 \r\n\r\n" * 2_000, "bytes of headers"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17), "bytes of headers"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 999, "small chunks"),
        (CHUNKED + b"1;" + b"x" * (1 << 17) + b"\r\nx\r\n", "a reply larger than 1000 bytes"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * (1 << 15), "a reply larger than 1000 bytes"),
        (
            HEAD + b"content-encoding: zstd\r\ncontent-length: %d\r\n\r\n" % len(BOMB) + BOMB,
            "larger",
        ),
        (HEAD + b"content-length: 9\r\n\r\nhalf", "closed connection"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "illegal chunk header"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "illegal status line"),
        (b"SSH-2.0-OpenSSH\r\n", "closed the connection"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "UPGRADE"),
        (
            b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n",
            "redirect",
        ),
        (None, "closed the connection"),
    ],
)
def test_a_bad_answer_ends_the_session_and_its_connection(answer: bytes, detail: str) -> None:
    good = HEAD + b"content-length: 4\r\n\r\nnews"
    script = Script([answer], [good], closes=True)
    bad, after = asyncio.run(talk(script, 2))
    assert isinstance(bad, str), bad
    assert detail in bad
    assert after == b"news"


def test_an_answer_to_nothing_is_not_the_answer_to_the_next_call() -> None:
    good = HEAD + b"content-length: 4\r\n\r\nnews"
    script = Script([good + good.replace(b"news", b"lies")], [good])
    assert asyncio.run(talk(script, 2)) == [b"news", b"news"]


def test_a_call_that_was_cancelled_leaves_no_answer_to_the_next_one() -> None:
    async def scenario() -> bytes:
        late, ended = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            is_first = not late.is_set()
            late.set()
            if is_first:
                await asyncio.sleep(0.05)
            writer.write(HEAD + b"content-length: 4\r\n\r\n" + (b"late" if is_first else b"news"))
            await closed(writer)
            if is_first:
                ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = httpx.URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        clients = PeerClients()
        async with open_http_transport(
            url, LIMITS, private_allowed=True, clients=clients
        ) as transport:
            call = asyncio.create_task(transport.recon(b""))
            await late.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            answer = await transport.recon(b"")
        await ended.wait()
        await clients.close()
        server.close()
        return answer

    assert asyncio.run(scenario()) == b"news"


def test_a_token_cannot_add_a_line_to_a_request() -> None:
    script = Script([HEAD + b"content-length: 0\r\n\r\n"])
    [detail] = asyncio.run(talk(script, token="a\r\nx: y"))
    assert "Illegal header value" in str(detail)
    assert script.requests == []


async def slowly(writer: asyncio.StreamWriter, answer: bytes, pause_s: float) -> None:
    for at in range(len(answer)):
        writer.write(answer[at : at + 1])
        await writer.drain()
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize(
    "answer",
    [HEAD + b"content-length: 4\r\n\r\nnews", HEAD + b"content-length: 500\r\n\r\n" + bytes(500)],
)
def test_an_answer_that_trickles_in_ends_with_the_deadline_of_the_whole_call(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "REQUEST_TIMEOUT_S", 1.0)
    serving: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            await slowly(writer, answer, pause_s=0.1)
        await closed(writer)

    async def scenario() -> tuple[str, float]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = httpx.URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        clients, began_s = PeerClients(), asyncio.get_running_loop().time()
        async with open_http_transport(
            url, LIMITS, private_allowed=True, clients=clients
        ) as transport:
            with pytest.raises(SyncError) as caught:
                await transport.recon(b"")
        took_s = asyncio.get_running_loop().time() - began_s
        await clients.close()
        server.close()
        await asyncio.gather(*serving)
        return caught.value.detail, took_s

    detail, took_s = asyncio.run(scenario())
    assert "no answer in time" in detail
    assert took_s < 3


def test_two_names_of_one_address_share_no_verified_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("one.example").configure_cert(context)

    async def resolved(_: Any, __: str, port: int, **___: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def scenario() -> list[str]:
        peer, clients, found = Peer(), PeerClients(), []
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
        for name in ("one.example", "two.example", "one.example"):
            async with open_http_transport(
                httpx.URL(f"https://{name}:{port}"),
                LIMITS,
                private_allowed=True,
                ca_file=tmp_path / "ca.pem",
                clients=clients,
            ) as transport:
                try:
                    await transport.recon(b"")
                    found.append("an answer")
                except SyncError as error:
                    found.append(error.detail)
        assert peer.accepted == 1  # the handshake for the other name failed
        await clients.close()
        server.close()
        for writer in peer.writers:
            await closed(writer)
        return found

    first, other, again = asyncio.run(scenario())
    assert (first, again) == ("an answer", "an answer")
    assert "the certificate is not trusted" in other
    assert "two.example" in other
