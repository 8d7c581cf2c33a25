"""TLS connections have the bounds of plain ones from the moment they are accepted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trustme
import uvloop
from uvicorn.server import ServerState

from app.server.connection import Connection, bounded_protocol
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.server import tls_layers
from app.server.sharing import Sharing
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import cli, command
from tests.support.server import running_node

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE_BYTES = 8 << 20
POST = (
    b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/x-protobuf\r\ncontent-length: %d\r\n\r\n"
)
SECONDS_MAX = 20
ALERT, APPLICATION_DATA = 21, 23  # types of records (RFC 8446, section 5.1)

Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Loops = Callable[[], asyncio.AbstractEventLoop]
every_loop = pytest.mark.parametrize("loops", [uvloop.new_event_loop, asyncio.new_event_loop])


@dataclass(frozen=True)
class Certified:
    """A server's context and certificate file, and the context of a client that trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    file: Path


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued = authority.issue_cert("127.0.0.1")
    issued.configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    file = tmp_path_factory.mktemp("tls") / "node.pem"
    issued.private_key_and_cert_chain_pem.write_to_path(file)
    return Certified(server, client, file)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path, the scheme and the length of the body; or with a large body."""
    received, more = 0, scope["method"] == "POST"
    while more and scope["path"] != "/early":
        message = await receive()
        received += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = f"{scope['path']} {scope['scheme']} {received}".encode()
    body = bytes(LARGE_BYTES) if scope["path"] == "/large" else text
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Served:
    """A server with TLS in the running loop."""

    def __init__(self, certified: Certified, limits: Limits) -> None:
        self.certified = certified
        self.state = ServerState()
        self.sharing = Sharing(limits)
        self.protocol: Any = bounded_protocol(limits, self.sharing)
        self.port = 0
        self._clients: list[asyncio.StreamWriter] = []

    @property
    def connections(self) -> list[Connection]:
        """Those that count."""
        return cast("list[Connection]", list(self.state.connections))

    async def raw(self, host: str = "127.0.0.1", **tls: Any) -> Connected:
        """A client without TLS, from an address."""
        client = socket.socket()
        client.setblocking(False)
        # Few unread bytes fit into the kernel's buffers.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.bind((host, 0))
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        connected = await asyncio.open_connection(sock=client, **tls)
        self._clients.append(connected[1])
        return connected

    async def client(self, host: str = "127.0.0.1") -> Connected:
        """A client with TLS, from an address."""
        return await self.raw(host, ssl=self.certified.client, server_hostname="127.0.0.1")

    def close(self) -> None:
        """End all connections."""
        for client in self._clients:
            client.transport.abort()
        for each in self.connections:
            each.transport.abort()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(SECONDS_MAX):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def run(
    loops: Loops,
    certified: Certified,
    test: Callable[[Served], Awaitable[None]],
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Run a test in a loop beside a server; afterwards nothing must count as open."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        faults: list[Any] = []
        loop.set_exception_handler(lambda _loop, context: faults.append(context))
        served = Served(certified, limits)
        config = SimpleNamespace(loaded_app=application)
        connect = partial(served.protocol, config, served.state, {})
        server = await loop.create_server(tls_layers(certified.server, connect), "127.0.0.1", 0)
        served.port = server.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(SECONDS_MAX):
                await test(served)
        finally:
            server.close()
            served.close()
            await served.until(lambda: not served.state.connections)
        assert not served.protocol.open_count
        assert served.sharing.replies.free_units == limits.replies_bytes_max
        assert not faults

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(main())


async def answer_of(connected: Connected) -> bytes:
    """The body of the next answer."""
    reader, _ = connected
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return await reader.readexactly(length)


async def is_served(connected: Connected) -> bool:
    connected[1].write(LIVEZ)
    return await answer_of(connected) == b"/livez https 0"


async def is_cut(connected: Connected) -> bool:
    """Whether the server closes a connection; whatever it sends before is dropped."""
    with suppress(ConnectionError, ssl.SSLError):
        while await connected[0].read(65_536):
            pass
    return True


def talking(
    served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[ssl.SSLObject, Callable[[Callable[[], Any]], Awaitable[Any]]]:
    """A client that makes its records itself: its session, and what does one thing with it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = served.certified.client
    session = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")

    async def step(act: Callable[[], Any]) -> Any:
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                if received := await reader.read(65_536):
                    incoming.write(received)
                else:
                    incoming.write_eof()  # then `act` fails
            finally:
                writer.write(outgoing.read())

    return session, step


def client_hello(certified: Certified) -> bytes:
    """The first bytes of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = certified.client.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


# --- handshakes -----------------------------------------------------------------------------------
@every_loop
def test_half_handshakes_of_an_address_are_bounded_like_its_connections(
    loops: Loops, certified: Certified
) -> None:
    async def test(served: Served) -> None:
        hello = client_hello(certified)
        held = []
        for number in range(4):
            held.append(await served.raw())
            # Nothing, a piece of a ClientHello, and a whole one.
            held[-1][1].write(hello[: (0, 6, len(hello))[number % 3]])
        await served.until(lambda: len(served.state.connections) == 4)
        assert await is_cut(await served.raw())
        other = await served.client("127.0.0.9")
        assert await is_served(other)
        assert served.protocol.open_count == {"127.0.0.1": 4, "127.0.0.9": 1}
        for _, writer in held:
            writer.close()
        await served.until(lambda: len(served.state.connections) == 1)
        assert await is_served(other)
        assert await is_served(await served.client())

    limits = replace(DEFAULT_LIMITS, connections_max=8, connections_per_address_max=4)
    run(loops, certified, test, limits)


def test_a_handshake_that_drips_or_says_nothing_ends_at_the_deadline_of_headers(
    certified: Certified,
) -> None:
    async def test(served: Served) -> None:
        started_s = time.monotonic()
        silent, dripping, half, idle = [await served.raw() for _ in range(4)]
        half[1].write(client_hello(certified))
        _, idle_writer = idle
        # One that finishes its handshake has no more time for its headers.
        late = await served.client()

        async def drip() -> None:
            for byte in client_hello(certified):
                dripping[1].write(bytes([byte]))
                await asyncio.sleep(0.05)

        idle_writer.close()
        dripper = asyncio.create_task(drip())
        for each in (silent, dripping, half):
            assert await is_cut(each)
        assert (await late[0].read(65_536)).startswith(b"HTTP/1.1 408 ")
        assert 0.9 < time.monotonic() - started_s < SECONDS_MAX / 2
        dripper.cancel()
        await served.until(lambda: served.protocol.open_count["127.0.0.1"] <= 1)

    run(uvloop.new_event_loop, certified, test, replace(DEFAULT_LIMITS, headers_timeout_s=1))


@every_loop
def test_garbage_and_clients_that_hang_up_anywhere_in_a_handshake_leave_nothing_behind(
    loops: Loops, certified: Certified
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    dice = random.Random(seed)

    def beginning() -> bytes:
        hello = client_hello(certified)
        at = dice.randrange(len(hello))
        return dice.choice(
            [
                dice.randbytes(dice.randint(1, 2_000)),
                LIVEZ,  # http to a port of https
                hello[:at] + bytes([hello[at] ^ 1 << dice.randrange(8)]) + hello[at + 1 :],
                hello[:at],
                hello,
            ]
        )

    async def one(served: Served) -> None:
        reader, writer = await served.raw()
        with suppress(ConnectionError, TimeoutError):
            writer.write(beginning())
            if dice.random() < 0.5:
                async with asyncio.timeout(0.05):
                    await reader.read(65_536)
            if dice.random() < 0.3:
                writer.write_eof()
        if dice.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def test(served: Served) -> None:
        for _ in range(8):
            await asyncio.gather(*(one(served) for _ in range(25)))
        await served.until(lambda: not served.state.connections)
        assert not served.protocol.open_count
        assert await is_served(await served.client())

    run(loops, certified, test)


# --- requests -------------------------------------------------------------------------------------


@every_loop
def test_requests_sent_ahead_over_tls_are_all_answered_in_order(
    loops: Loops, certified: Certified
) -> None:
    async def test(served: Served) -> None:
        connected = await served.client()
        count = 3_000
        request = b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n"
        connected[1].write(b"".join(request % number for number in range(count)))
        for number in range(count):
            assert await answer_of(connected) == b"/%d https 0" % number

    run(loops, certified, test)


@every_loop
def test_records_of_one_byte_leave_other_connections_their_turns(
    loops: Loops, certified: Certified, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes_count = 0
    records_in_pass: Counter[int] = Counter()
    right = Connection.buffer_updated

    def counting(self: Connection, nbytes: int) -> None:
        records_in_pass[passes_count] += 1
        right(self, nbytes)

    async def test(served: Served) -> None:
        def count_passes() -> None:
            nonlocal passes_count
            passes_count += 1
            loop.call_soon(count_passes)

        loop = asyncio.get_running_loop()
        count_passes()
        reader, writer = await served.raw()
        session, step = talking(served, reader, writer)
        await step(session.do_handshake)
        session.write(b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: 5000\r\n\r\n")
        for _ in range(5_000):
            session.write(b"x")
        answer = b""
        while b"\r\n\r\n/p https 5000" not in answer:
            answer += await step(lambda: session.read(65_536))
        assert sum(records_in_pass.values()) > 5_000
        # A callback of the socket and one of the loop can come in the same pass.
        assert max(records_in_pass.values()) <= 32

    monkeypatch.setattr(Connection, "buffer_updated", counting)
    run(loops, certified, test)


@every_loop
def test_replies_that_are_not_read_over_tls_count_to_the_byte_and_no_longer_once_they_are(
    loops: Loops, certified: Certified
) -> None:
    async def test(served: Served) -> None:
        connected = await served.client()
        _, writer = connected
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        share = served.sharing.replies
        writer.write(LARGE + LIVEZ)
        # The kernel and the client's buffers hold a part.
        await served.until(lambda: share.free_units < DEFAULT_LIMITS.replies_bytes_max)
        (held,) = served.connections
        held.moved_bytes()
        unread_bytes = DEFAULT_LIMITS.replies_bytes_max - share.free_units
        assert 1 << 20 < unread_bytes <= 1.01 * LARGE_BYTES
        assert unread_bytes == held.transport.get_write_buffer_size()
        # The second request waits, and the connection cannot be mistaken for one at rest.
        assert not held.is_idle
        assert served.state.total_requests == 1
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await answer_of(connected)) == LARGE_BYTES
        assert await answer_of(connected) == b"/livez https 0"
        await served.until(lambda: held.is_idle)

    run(loops, certified, test)


def test_a_client_that_reads_nothing_over_tls_is_cut_off(certified: Certified) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.client()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        # One reply that stays open, and one after which the server closes.
        other_reader, other_writer = await served.client()
        other_writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(LARGE)
        other_writer.write(LARGE.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        await served.until(lambda: served.state.total_requests == 2)
        await served.until(lambda: not served.state.connections)
        for each in (reader, other_reader):
            each._transport.resume_reading()  # type: ignore[attr-defined]
            assert await is_cut((each, writer))

    limits = replace(DEFAULT_LIMITS, write_stall_timeout_s=1)
    run(uvloop.new_event_loop, certified, test, limits)


# --- the end --------------------------------------------------------------------------------------
@every_loop
def test_an_answer_before_the_end_of_the_body_arrives_with_a_proper_end(
    loops: Loops, certified: Certified
) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.raw()
        session, step = talking(served, reader, writer)
        await step(session.do_handshake)
        session.write(b"POST /early HTTP/1.1\r\nhost: h\r\ncontent-length: 90000\r\n\r\n")
        answer = b""
        while piece := await step(lambda: session.read(65_536)):
            answer += piece
            # The rest of the body goes on arriving, and is dropped.
            session.write(bytes(10_000))
        # `read` returned b"": close_notify came, so the client knows that nothing was cut off.
        assert answer.endswith(b"/early https 0")
        assert b"connection: close" in answer
        writer.close()
        await served.until(lambda: not served.state.connections)

    run(loops, certified, test, replace(DEFAULT_LIMITS, unread_body_linger_s=1))


@every_loop
def test_a_damaged_record_ends_the_connection_and_only_that(
    loops: Loops, certified: Certified
) -> None:
    async def test(served: Served) -> None:
        good = await served.client()
        for spoilt in (b"\x17\x03\x03\x00\x20" + bytes(32), b"\x17\x03\x03\xff\xff", LIVEZ):
            connected = await served.client()
            assert await is_served(connected)
            os.write(connected[1].get_extra_info("socket").fileno(), spoilt)  # below its TLS
            assert await is_cut(connected)
        assert await is_served(good)
        await served.until(lambda: len(served.state.connections) == 1)

    run(loops, certified, test)


# --- from outside ---------------------------------------------------------------------------------


@contextmanager
def https_node(folder: Path, certified: Certified) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`sdstore serve` with TLS and the default limits: the process and its port."""
    arguments = ("--port", 0, "--data-dir", folder, "--json", "--tls-cert", certified.file)
    environment = os.environ | {"SDSTORE_DRAIN_S": "0"}
    with subprocess.Popen(
        command("serve", *arguments), stdout=subprocess.PIPE, env=environment
    ) as node:
        try:
            assert node.stdout is not None
            yield node, int(json.loads(node.stdout.readline())["url"].rpartition(":")[2])
        finally:
            node.kill()


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1_024


def test_a_node_under_half_handshakes_serves_others_in_bounded_memory_and_stops_at_once(
    tmp_path: Path, certified: Certified
) -> None:
    with https_node(tmp_path / "node", certified) as (node, port):

        def ask(request: bytes, host: str = "127.0.0.9") -> int:
            """Ask over a connection of its own: the bytes of the answer."""
            with (
                socket.create_connection(("127.0.0.1", port), 30, (host, 0)) as plain,
                certified.client.wrap_socket(plain, server_hostname="127.0.0.1") as own,
            ):
                own.sendall(request.replace(b"host:", b"connection: close\r\nhost:"))
                received = own.recv(65_536)
                assert received.split(b" ")[1][:1] == b"2", received
                count = len(received)
                while piece := own.recv(1 << 20):
                    count += len(piece)
                return count

        for number in range(8):
            message = Message(f"{number}", "c", lamport_timestamp=1, content=os.urandom(1_000_000))
            frame = encode(message)
            ask(POST % len(frame) + frame)
        page = (
            b"GET /v1/channels/c/messages HTTP/1.1\r\nhost: localhost\r\n"
            b"accept: application/x-protobuf\r\n\r\n"
        )
        assert ask(page) > 7_000_000
        before_mib = memory_mib(node.pid)
        hello = client_hello(certified)
        half = []
        for _ in range(DEFAULT_LIMITS.connections_per_address_max):
            half.append(socket.create_connection(("127.0.0.1", port), 30))
            half[-1].sendall(hello)
        for each in half:
            assert each.recv(1)  # the server has answered, and waits for the client
        one_more = socket.create_connection(("127.0.0.1", port), 30)
        with one_more, suppress(ConnectionError):
            assert one_more.recv(1) == b""
        assert ask(LIVEZ) > 0
        # A connection that got a large reply keeps no memory of its size.
        resting = []
        for _ in range(10):
            plain = socket.create_connection(("127.0.0.1", port), 30, ("127.0.0.8", 0))
            resting.append(certified.client.wrap_socket(plain, server_hostname="127.0.0.1"))
            resting[-1].sendall(page)
            left = 8_000_000
            while left > 0:
                left -= len(resting[-1].recv(1 << 20))
        assert memory_mib(node.pid) - before_mib < 150
        started_s = time.monotonic()
        node.send_signal(signal.SIGTERM)
        assert node.wait(SECONDS_MAX) == 0
        assert time.monotonic() - started_s < DEFAULT_LIMITS.headers_timeout_s / 2
        for each in (*half, *resting):
            each.close()


def test_a_client_that_speaks_http_is_told_of_https(certified: Certified, tmp_path: Path) -> None:
    with running_node(tmp_path / "node", tls_cert=certified.file) as node:
        url = f"http://127.0.0.1:{node.url.rpartition(':')[2]}"
        result = cli("channels", "--node", url)
    assert (result.code, "is this the URL of an https server?" in result.err) == (6, True)
