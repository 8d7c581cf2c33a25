"""Attacks on a real process with the default limits: memory stays bounded, honest clients served.

Each attack goes on while an honest client reads and publishes. The short ones run with every test
run; `slow` ones are longer and have more attackers.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest
import zstandard

from app.access.callers import Scope
from app.access.tokens import TokenFile
from app.server.connection import LINGER_BYTES_MAX
from app.server.limits import DEFAULT_LIMITS as LIMITS
from bench.frame_workloads import small_frames
from recon.limits import PROTOCOL_VERSION
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Message
from sdstore.wire import recon_pb2 as recon_wire
from sdstore.wire import store_pb2 as wire
from tests.support.attacked import (
    KNOWN_ID,
    MEMORY_MIB_MAX,
    Attacked,
    attack_with,
    attacked_node,
    eventually,
    honest_waits,
    load_entries,
)

MARGIN_S = 5
HEAD = b"host: localhost\r\ncontent-type: application/x-protobuf\r\n"
POST = b"POST /v1/messages HTTP/1.1\r\n" + HEAD
BATCH = b"POST /v1/messages/batch HTTP/1.1\r\n" + HEAD
NDJSON_BATCH = BATCH.replace(b"x-protobuf", b"x-ndjson")
LOOKUP = (
    b"POST /v1/messages/lookup HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)
RECON = b"POST /v1/recon HTTP/1.1\r\n" + HEAD
PAGE = b"GET /v1/channels/large/messages?limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n"
LIVE = b"GET /v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n"

LONG_WINDOW_S = 10.0
"""Of the slow ones, which also wait until every attacker's connection is gone."""

FULL = pytest.param(LONG_WINDOW_S, marks=pytest.mark.slow)
durations = pytest.mark.parametrize("window_s", [1.0, FULL])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked")
    load_entries(folder / "sdstore.db")
    return folder


@pytest.fixture
def node(data_dir: Path) -> Iterator[Attacked]:
    """A fresh process: what one attack leaves in memory is not blamed on the next."""
    with attacked_node(data_dir) as running:
        # Its index and its caches are part of what it needs anyway.
        honest_waits(running, 0.1)
        yield running


def endure(node: Attacked, work: list[Callable[[], None]], window_s: float) -> None:
    """Attack in a thread for each of `work` while an honest client is served."""
    attackers = attack_with(work)
    waits = honest_waits(node, window_s)
    node.stopped.set()
    for attacker in attackers:
        attacker.join(60)
    print(f"peak {node.peak_mib:.0f} MiB, {waits}")
    assert node.peak_mib < MEMORY_MIB_MAX
    waits.check()


def again_and_again(node: Attacked, attack: Callable[[socket.socket], None]) -> Callable[[], None]:
    """The attack over new connections, until the honest client is done."""

    def work() -> None:
        while not node.stopped.is_set():
            try:
                with node.connect() as connection:
                    attack(connection)
            except OSError:
                time.sleep(0.02)

    return work


def is_cut(connection: socket.socket) -> bool:
    """Whether the node has closed a connection, whatever it had sent before."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def send_slowly(connection: socket.socket, data: bytes) -> None:
    """All of it, or until the node has not read for two seconds."""
    connection.settimeout(2)
    connection.sendall(data)


# --- trailers -------------------------------------------------------------------------------------
TRAILED = [
    b"GET /livez HTTP/1.1\r\nhost: localhost\r\n",
    b"GET /v1/feed HTTP/1.1\r\nhost: localhost\r\n",
    b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n",
    b"GET /v1/live HTTP/1.1\r\nhost: localhost\r\n",
    POST,
    BATCH,
]


def trailers(node: Attacked, head: bytes, filler: bytes) -> Callable[[], None]:
    def attack(connection: socket.socket) -> None:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        connection.settimeout(2)
        while not node.stopped.is_set():
            connection.sendall(filler)

    return again_and_again(node, attack)


@durations
def test_endless_trailers_are_cut_off(node: Attacked, window_s: float) -> None:
    fillers = [b"x-filler: " + b"x" * 4_000 + b"\r\n", b"x" * 4_000, b"a:b\r\n" * 800]
    work = [trailers(node, head, fillers[n % 3]) for n, head in enumerate(TRAILED)]
    endure(node, work, window_s)


# --- packed and dear bodies -----------------------------------------------------------------------
def _packed(head: bytes, plain: bytes) -> bytes:
    body = zstandard.compress(plain)
    return head + b"content-encoding: zstd\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _plain(head: bytes, body: bytes) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def _gzipped(head: bytes, plain: bytes) -> bytes:
    body = gzip.compress(plain)
    return head + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _padded(head: bytes, plain: bytes) -> bytes:
    """Packed, with noise so that it does not unpack to more than may be unpacked."""
    return _packed(head, plain + os.urandom(200_000).hex().encode())


def dear_requests() -> dict[str, bytes]:
    """Requests of few bytes that ask for much work."""
    hints = wire.PublishBatch(items=[wire.PublishItem(retrieval_hints=[b""] * 1_000_000)])
    faults = b'{"message_ids":[' + b"1," * 1_000_000 + b"1]}"
    lists = b'{"message":{"message_id":"x","content":[' + b"[]," * 690_000 + b"[]]}}\n"
    return {
        "32 MiB of newlines": _packed(NDJSON_BATCH, b"\n" * LIMITS.body_bytes_max),
        "2 MiB of newlines": _packed(NDJSON_BATCH, b"\n" * (2 << 20)),
        "ten thousand empty objects": _plain(NDJSON_BATCH, b"{}\n" * 10_000),
        "a line of a million lists": _plain(NDJSON_BATCH, b"[" + b"[]," * 600_000 + b"[]]"),
        "a batch of 15 lines with many lists each": _padded(NDJSON_BATCH, lists * 15),
        "16 million items": _packed(BATCH, b"\x0a\0" * (16 << 20)),
        "a million items": _plain(BATCH, b"\x0a\0" * 1_000_000),
        "ten thousand empty items": _plain(BATCH, b"\x0a\0" * 10_000),
        "a million hints": _gzipped(BATCH, hints.SerializeToString()),
        "a million faults": _gzipped(LOOKUP, faults),
        "a million pushed items": _plain(RECON, b"\x2a\0" * 1_000_000),
        "pushed items that unpack": _packed(RECON, b"\x2a\0" * (8 << 20)),
    }


@durations
def test_small_bodies_that_are_dear_to_parse_delay_nobody(node: Attacked, window_s: float) -> None:
    def asking(request: bytes) -> Callable[[], None]:
        def attack(connection: socket.socket) -> None:
            while not node.stopped.is_set():
                connection.sendall(request)
                connection.settimeout(20)
                assert connection.recv(65_536)

        return again_and_again(node, attack)

    endure(node, [asking(request) for request in dear_requests().values()], window_s)


# --- bodies that stall ----------------------------------------------------------------------------
@durations
def test_stalled_bodies_share_a_bounded_room(node: Attacked, window_s: float) -> None:
    size = LIMITS.body_bytes_max
    before = node.sockets_count
    connections = [node.connect() for _ in range(100)]

    def stalling(connection: socket.socket) -> Callable[[], None]:
        def work() -> None:
            send_slowly(connection, BATCH + b"content-length: %d\r\n\r\n" % size)
            for _ in range(31):
                send_slowly(connection, bytes(1 << 20))

        return work

    endure(node, [stalling(each) for each in connections], window_s)
    if window_s < LONG_WINDOW_S:
        for connection in connections:
            connection.close()
        return
    # They leave nothing behind, and are told that they were late or that there was no room.
    allowed_s = LIMITS.body_read_timeout_s + LIMITS.unread_body_linger_s + MARGIN_S
    assert eventually(lambda: node.sockets_count <= before, allowed_s)
    answers = []
    for connection in connections:
        connection.settimeout(5)
        try:
            answers.append(connection.recv(65_536))
        except OSError:
            answers.append(b"")
        connection.close()
    codes = {answer.split(b" ")[1] for answer in answers if answer}
    assert codes <= {b"408", b"503"}
    assert codes


# --- replies that nobody reads --------------------------------------------------------------------
@durations
def test_replies_that_nobody_reads_share_a_bounded_room(node: Attacked, window_s: float) -> None:
    before = node.sockets_count
    connections = [node.connect() for _ in range(150)]
    for connection in connections:
        connection.sendall(PAGE)
    endure(node, [], window_s)
    if window_s >= LONG_WINDOW_S:
        # Those that were refused for want of room may rest as any other connection may.
        allowed_s = LIMITS.write_stall_timeout_s + LIMITS.share_wait_s + LIMITS.connection_idle_s
        assert eventually(lambda: node.sockets_count <= before, allowed_s + MARGIN_S)
    for connection in connections:
        connection.close()


# --- connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["content-length: 52428800", "transfer-encoding: chunked"])
@pytest.mark.parametrize("pause_s", [0.0, 0.04])
def test_a_client_that_sends_its_whole_body_first_reads_why_it_was_refused(
    empty_node: Attacked, framing: str, pause_s: float
) -> None:
    """50 MiB, at once and in some seconds."""
    piece = bytes(1 << 19)
    if framing.endswith("chunked"):
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    with empty_node.connect() as connection:
        connection.sendall(POST + framing.encode() + b"\r\n\r\n")
        for _ in range(100):
            connection.sendall(piece)
            time.sleep(pause_s)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
        assert json.loads(answer.read())["code"] == "body_too_large"
        assert connection.recv(1) == b""


def test_a_body_without_end_is_left_soon_after_its_answer(empty_node: Attacked) -> None:
    with empty_node.connect() as connection:
        connection.sendall(POST + b"content-length: 10000000000\r\n\r\n")
        sent_bytes, began_s = 0, time.monotonic()
        with suppress(OSError):
            while sent_bytes < 1 << 30:
                sent_bytes += connection.send(bytes(1 << 19))
        assert sent_bytes < 2 * LINGER_BYTES_MAX
        assert time.monotonic() - began_s < 3 * LIMITS.unread_body_linger_s + MARGIN_S


# --- live readers ---------------------------------------------------------------------------------
@durations
def test_live_readers_that_never_read_cost_nothing(node: Attacked, window_s: float) -> None:
    readers = [node.connect() for _ in range(LIMITS.live_readers_max - 10)]
    for reader in readers:
        reader.sendall(LIVE)
    for reader in readers:
        assert reader.recv(64).startswith(b"HTTP/1.1 200")

    def publish(number: int) -> float:
        items = [
            wire.PublishItem(
                frame=encode(
                    Message(
                        f"{number} {n} {time.time_ns()}",
                        "live",
                        lamport_timestamp=n,
                        content=bytes(20_000),
                    )
                )
            )
            for n in range(200)
        ]
        body = wire.PublishBatch(items=items).SerializeToString()
        started_s = time.monotonic()
        with node.connect(60) as connection:
            connection.sendall(_plain(BATCH, body))
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        return time.monotonic() - started_s

    took_s: list[float] = []

    def publishing() -> None:
        while not node.stopped.is_set():
            took_s.append(publish(len(took_s)))

    endure(node, [publishing], window_s)
    print(f"batches took {took_s}")
    # A batch that waits for a reader waits for `write_stall_timeout_s`.
    assert max(took_s) < LIMITS.write_stall_timeout_s / 2, took_s
    assert min(took_s[1:]) < 1, took_s
    for reader in readers:
        reader.close()


# --- turns ----------------------------------------------------------------------------------------
@durations
def test_pages_asked_for_by_the_hundred_delay_no_look_up(node: Attacked, window_s: float) -> None:
    channel = "%2Fapp%2F1%2Froom-1%2Fproto"
    page = (
        f"GET /v1/channels/{channel}/messages?limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    ).encode()
    pipelined = node.connect()
    pipelined.sendall(page * 900)
    others = [node.connect() for _ in range(300)]
    for connection in others:
        connection.sendall(page * 3)
    threading.Thread(target=lambda: list(map(is_cut, [pipelined, *others])), daemon=True).start()
    endure(node, [], window_s)
    for connection in (pipelined, *others):
        connection.close()


@durations
@pytest.mark.parametrize("what", ["hints", "ancestors", "order"])
def test_a_limited_token_that_asks_and_publishes_without_end_delays_nobody(
    data_dir: Path, what: str, window_s: float
) -> None:
    """Hints of its own messages, ancestors of the newest of a channel, and orders of ever other writers."""
    channel = decode(next(small_frames(1)))[0].channel_id
    _, token = TokenFile(data_dir / "tokens.json").create(
        scopes=[Scope.READ, Scope.PUBLISH], channels=[channel, "spam"]
    )
    head = f"host: localhost\r\nauthorization: Bearer {token}\r\n"
    path = quote(channel, safe="")

    def request(number: int) -> bytes:
        if what == "order":
            line = f"GET /v1/channels/{path}/order?indexer=w{number} HTTP/1.1"
            return f"{line}\r\n{head}\r\n".encode()
        if what == "ancestors":
            line = f"GET /v1/messages/{KNOWN_ID}/ancestors?limit=1000 HTTP/1.1"
            return f"{line}\r\n{head}\r\n".encode()
        hints = "".join(f"retrieval-hint: {number:08x}{each:02x}\r\n" for each in range(16))
        frame = encode(Message("spam", "spam", lamport_timestamp=1, content=b"spam"))
        size = f"content-type: application/x-protobuf\r\ncontent-length: {len(frame)}\r\n"
        return f"POST /v1/messages HTTP/1.1\r\n{head}{hints}{size}\r\n".encode() + frame

    numbers = count()
    answers: Counter[bytes] = Counter()

    def attack(connection: socket.socket) -> None:
        while not node.stopped.is_set():
            connection.sendall(b"".join(request(next(numbers)) for _ in range(16)))
            answers[connection.recv(1 << 20)[:12]] += 1

    with attacked_node(data_dir) as node:
        honest_waits(node, 0.1)
        endure(node, [again_and_again(node, attack)] * 16, window_s)
    print(answers.most_common(5))
    assert any(each.startswith(b"HTTP/1.1 2") for each in answers), answers.most_common(5)


# --- framing --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: identity, chunked",
        b"transfer-encoding: identity",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: chunked, chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
        b"transfer-encoding: xchunked",
        b"transfer-encoding: chunked;q=1",
        b"transfer-encoding:\x0bchunked",
        b"transfer-encoding : chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 3",
        b"content-length: 3\r\ntransfer-encoding: chunked",
        b"content-length: 3\r\ncontent-length: 4",
        b"content-length: 3, 3",
        b"content-length: +3",
        b"content-length: -3",
        b"content-length: 0x3",
        b"content-length: 3 3",
        b"content-length:",
        b" content-length: 3",
        b"x: y\r\n content-length: 3",
        b"x\ny: z",
        b"x: y\rz: w",
        b"x: a\0b",
    ],
)
def test_a_request_whose_length_could_be_read_in_two_ways_is_refused(
    empty_node: Attacked, lines: bytes
) -> None:
    with empty_node.connect() as connection:
        connection.sendall(POST + lines + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert answer.count(b"HTTP/1.1 4") == 1
        assert eventually(lambda: is_cut(connection), MARGIN_S)


def test_chunks_in_http_1_0_are_refused(empty_node: Attacked) -> None:
    with empty_node.connect() as connection:
        head = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 400 ")


@pytest.fixture(scope="module")
def empty_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked_node(tmp_path_factory.mktemp("forms")) as running:
        yield running


FORGERS = 16
FORGED_GET_P99_S_MAX = 0.1
"""A forged mark is refused before anything is read; 60,000 rows take longer than this."""


def test_forged_marks_cost_the_node_next_to_nothing(node: Attacked) -> None:
    """Each asks for all that arrived after a mark which this node never gave."""
    session = recon_wire.Session(initiator_nonce=bytes(16), interest_bytes=b"\x08\x01")
    request = recon_wire.ReconRequest(version=PROTOCOL_VERSION, session=session)
    with node.connect() as connection:
        connection.sendall(_plain(RECON, request.SerializeToString()))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        session.responder_nonce = recon_wire.ReconResponse.FromString(answer.read()).responder_nonce
    # With both numbers where they used to be in clear: 60,000 entries came after it.
    mark = (40_000).to_bytes(6, "big") + bytes(18)
    request = recon_wire.ReconRequest(
        version=PROTOCOL_VERSION, session=session, total=True, since=mark
    )
    forged = _plain(RECON, request.SerializeToString())

    def forge(connection: socket.socket) -> None:
        while not node.stopped.is_set():
            connection.sendall(forged)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            answer.read()
            time.sleep(0.02)

    attackers = attack_with([again_and_again(node, forge)] * FORGERS)
    waits = honest_waits(node, 1.0)
    node.stopped.set()
    for attacker in attackers:
        attacker.join(60)
    print(waits)
    assert min(waits.get_p99_s) < FORGED_GET_P99_S_MAX, waits
