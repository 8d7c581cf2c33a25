"""Relayed messages and nudges between stores: real nodes over real sockets."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from app.access.callers import Scope
from app.access.tokens import HOLDS_AFTER_S, TokenFile
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.wire import store_pb2 as wire
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node
from tests.support.stores import PostgresStores

SECONDS_MAX = 60
SETTLE_S = 0.3
"""After this a message that could still come would have come."""

Heard = list[str]


def ephemeral(message_id: str, channel_id: str = "c", content: bytes = b"now") -> Message:
    return Message(message_id, channel_id, content=content)


def stored(message_id: str, channel_id: str = "c") -> Message:
    return Message(message_id, channel_id, lamport_timestamp=1, content=b"kept")


def wait_until(is_so: Callable[[], bool], seconds: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric(node: RunningNode, name: str) -> float:
    text = node.http.get("/metrics").text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


def links_up(node: RunningNode, count: int) -> None:
    wait_until(lambda: metric(node, "sdstore_relay_links ") == count)


@contextmanager
def hearing(node: RunningNode, path: str = "/v1/live") -> Iterator[Heard]:
    """The IDs of the relayed messages that a live reader of a node gets, as they come."""
    heard: Heard = []
    with (
        httpx.Client(base_url=node.url, timeout=SECONDS_MAX, trust_env=False) as client,
        client.stream("GET", path) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        reading = threading.Thread(target=_collect, args=(lines, heard), daemon=True)
        reading.start()
        try:
            yield heard
        finally:
            # Ends the thread's wait for the next line.
            stream.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            reading.join(SECONDS_MAX)


def _collect(lines: Iterator[str], heard: Heard) -> None:
    name = ""
    try:
        for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "relayed":
                document = json.loads(line.removeprefix("data: "))
                heard.append(document["message"]["message_id"])
    except httpx.HTTPError:
        pass


@contextmanager
def federation(
    tmp_path: Path, peers: Sequence[Sequence[int]], **settings: Any
) -> Iterator[list[RunningNode]]:
    """Nodes; `peers[n]` are the numbers of those that node n has as its peers. All links are up."""
    with ExitStack() as closing:
        listeners = [closing.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in peers]
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in listeners]
        nodes = [
            closing.enter_context(
                running_node(
                    tmp_path / str(number),
                    listener=listeners[number],
                    peers=[urls[each] for each in wanted],
                    **{"sync_interval_s": 3_600, **settings},
                )
            )
            for number, wanted in enumerate(peers)
        ]
        for node, wanted in zip(nodes, peers, strict=True):
            links_up(node, len(wanted))
        yield nodes


@pytest.mark.parametrize(
    "peers",
    [
        [[1], [2], [0]],
        pytest.param([[1, 2], [0, 2], [0, 1]], marks=pytest.mark.slow),
        pytest.param([[1, 2], [2], []], marks=pytest.mark.slow),
    ],
)
def test_each_reader_of_a_triangle_hears_a_message_once(
    tmp_path: Path, peers: list[list[int]]
) -> None:
    with (
        federation(tmp_path, peers) as nodes,
        hearing(nodes[0]) as first,
        hearing(nodes[1]) as second,
        hearing(nodes[2]) as third,
    ):
        sent = [f"m{number}" for number in range(30)]
        for number, name in enumerate(sent):
            nodes[number % 3].publish(ephemeral(name))
        wait_until(lambda: all(set(each) >= set(sent) for each in (first, second, third)))
        time.sleep(SETTLE_S)
        assert sorted(first) == sorted(second) == sorted(third) == sorted(sent)


def test_a_message_goes_through_a_chain_of_four_stores_and_back(tmp_path: Path) -> None:
    with (
        federation(tmp_path, [[1], [], [1, 3], []]) as nodes,
        hearing(nodes[0]) as first,
        hearing(nodes[3]) as last,
    ):
        nodes[0].publish(ephemeral("there"))
        nodes[3].publish(ephemeral("back"))
        wait_until(lambda: set(first) == set(last) == {"there", "back"})
        time.sleep(SETTLE_S)
        assert len(first) == len(last) == 2


def test_no_message_circles_in_a_ring_of_stores_that_remember_next_to_nothing(
    tmp_path: Path,
) -> None:
    """Each way round ends at the latest where it meets a store that it has passed."""
    limits = replace(DEFAULT_LIMITS, relay_seen_max=2)
    ring = [[1], [2], [3], [4], [0]]
    with (
        federation(tmp_path, ring, limits=limits) as nodes,
        hearing(nodes[0]) as at_origin,
        hearing(nodes[2]) as heard,
    ):
        sent = [f"m{number}" for number in range(20)]
        for name in sent:
            nodes[0].publish(ephemeral(name)).raise_for_status()
        wait_until(lambda: set(heard) == set(sent))

        def passed() -> list[float]:
            return [metric(each, 'sdstore_relayed_total{outcome="passed"}') for each in nodes]

        counts = passed()
        time.sleep(SETTLE_S)
        while counts != (counts := passed()):
            time.sleep(SETTLE_S)
            # Once for each way round, at most.
            assert max(counts) <= 2 * len(sent)
        assert sorted(at_origin) == sorted(sent)
        assert max(len([each for each in heard if each == name]) for name in sent) <= 2


def test_only_channels_of_the_interest_are_relayed(tmp_path: Path) -> None:
    with (
        federation(tmp_path, [[1], []], channels=["mine"]) as (a, b),
        hearing(a) as at_a,
        hearing(b) as at_b,
    ):
        for node, name in ((a, "a"), (b, "b")):
            node.publish(ephemeral(f"other-{name}", "other"))
            node.publish(ephemeral(f"mine-{name}", "mine"))
        wait_until(lambda: {"mine-a", "mine-b"} <= set(at_a) & set(at_b))
        time.sleep(SETTLE_S)
        assert set(at_a) == {"other-a", "mine-a", "mine-b"}
        assert set(at_b) == {"other-b", "mine-a", "mine-b"}


@contextmanager
def streaming(
    node: RunningNode, headers: dict[str, str] | None = None
) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of `GET /v1/relay`; the first one says that the node does not read the caller."""
    with (
        httpx.Client(base_url=node.url, timeout=SECONDS_MAX, trust_env=False) as client,
        client.stream("GET", "/v1/relay", headers=headers) as stream,
    ):
        stream.read() if stream.status_code != 200 else None
        stream.raise_for_status()
        events = _events(stream.iter_lines())
        assert next(events) == ("reading", {"is_read": False})
        yield events


def _events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_news_reach_the_store_that_dials_in_within_a_second(tmp_path: Path) -> None:
    with federation(tmp_path, [[], [0]]) as (a, b):
        wait_until(lambda: metric(b, "sdstore_peer_last_proof") > 0)
        time.sleep(SETTLE_S)  # the session of the new link
        seconds = []
        for number in range(3):
            started = time.monotonic()
            assert a.publish(stored(f"m{number}")).status_code == 201
            wait_until(lambda n=number: b.http.get(f"/v1/messages/m{n}").status_code == 200)  # type: ignore[misc]
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 1
        assert max(seconds) < 5  # the machine may be busy for a moment


def post(node: RunningNode, frames: Sequence[bytes], **headers: str) -> httpx.Response:
    batch = wire.PublishBatch(items=[wire.PublishItem(frame=frame) for frame in frames])
    return node.http.post(
        "/v1/relay", content=batch.SerializeToString(), headers=PROTOBUF | headers
    )


def test_content_and_garbage_are_refused_with_codes_and_the_rest_is_relayed(
    tmp_path: Path,
) -> None:
    frames = [
        encode(stored("kept")),
        b"\xff\xff",
        encode(ephemeral("good")),
        encode(ephemeral("good")),
        encode(ephemeral("outside", "elsewhere")),
        encode(ephemeral("i" * 2_000)),
    ]
    with running_node(tmp_path, channels=["c"]) as node, hearing(node) as heard:
        outcomes = post(node, frames).raise_for_status().json()["outcomes"]
        assert [each["outcome"] for each in outcomes] == [
            "refused", "refused", "relayed", "duplicate", "refused", "refused",
        ]  # fmt: skip
        codes = [each["problem"]["code"] for each in outcomes if "problem" in each]
        assert codes == ["not_relayed", "malformed_frame", "not_relayed", "message_id_too_long"]
        wait_until(lambda: heard == ["good"])
        assert node.http.get("/v1/feed").json()["messages"] == []
        assert metric(node, 'sdstore_relayed_total{outcome="refused"}') == 4


def test_a_batch_is_bounded(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, relay_batch_items_max=2)
    with running_node(tmp_path, limits) as node:
        frames = [encode(ephemeral(f"m{number}")) for number in range(3)]
        assert post(node, frames).json()["code"] == "too_many_items"
        assert post(node, []).json()["code"] == "empty_body"
        many = post(node, frames[:2], **WANTS_PROTOBUF)
        answer = wire.PublishOutcomes.FromString(many.content)
        assert [each.outcome for each in answer.outcomes] == ["relayed", "relayed"]


def test_a_stream_gets_nothing_back_that_came_from_its_reader(tmp_path: Path) -> None:
    own, other = "a" * 32, "b" * 32
    with running_node(tmp_path) as node, streaming(node, {"sds-instance": own}) as events:
        post(node, [encode(ephemeral("mine"))], **{"sds-instance": own}).raise_for_status()
        post(node, [encode(ephemeral("theirs"))], **{"sds-instance": other}).raise_for_status()
        name, document = next(events)
        assert (name, base64.b64decode(document["frame"])) == (
            "relayed",
            encode(ephemeral("theirs")),
        )


def test_a_token_limited_to_a_channel_hears_and_relays_that_channel_alone(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    token, secret = file.create(scopes=[Scope.SYNC, Scope.PUBLISH], channels=["c"])
    bearer = {"authorization": f"Bearer {secret}"}
    with running_node(tmp_path) as node, streaming(node, bearer) as events:
        frames = [encode(ephemeral("m", "d")), encode(ephemeral("n", "c"))]
        first, second = post(node, frames, **bearer).json()["outcomes"]
        assert (first["problem"]["code"], second["outcome"]) == ("forbidden", "relayed")
        assert base64.b64decode(next(events)[1]["frame"]) == frames[1]
        # Neither a nudge nor a message of another channel.
        node.publish(stored("p", "d"))
        node.publish(ephemeral("q", "d"))
        node.publish(ephemeral("s", "c"))
        assert base64.b64decode(next(events)[1]["frame"]) == encode(ephemeral("s", "c"))
        node.publish(stored("r", "c"))
        assert next(events) == ("nudge", {})
        # A revoked token ends the stream.
        file.revoke(token.token_id)
        with pytest.raises(httpx.HTTPError):
            list(events)
        time.sleep(HOLDS_AFTER_S)
        assert post(node, frames, **bearer).status_code == 401


@pytest.mark.parametrize(
    ("scope", "is_heard"),
    [(Scope.READ, (403, 403)), (Scope.SYNC, (200, 403)), (Scope.PUBLISH, (403, 200))],
)
def test_the_scopes_of_both_ways(tmp_path: Path, scope: Scope, is_heard: tuple[int, int]) -> None:
    _, secret = TokenFile(tmp_path / "tokens.json").create(scopes=[scope])
    bearer = {"authorization": f"Bearer {secret}"}
    with (
        running_node(tmp_path) as node,
        node.http.stream("GET", "/v1/relay", headers=bearer) as stream,
    ):
        posted = post(node, [encode(ephemeral("m"))], **bearer)
        statuses = (stream.status_code, posted.status_code)
    assert statuses == is_heard


def test_a_peer_that_never_reads_holds_nothing_and_misses_the_oldest(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, relay_queue_items_max=50, relay_queue_bytes_max=2 << 20)
    with running_node(tmp_path, limits) as node, hearing(node) as heard:
        port = httpx.URL(node.url).port or 0
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect(("127.0.0.1", port))
            deaf.sendall(b"GET /v1/relay HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert deaf.recv(12) == b"HTTP/1.1 200"
            for number in range(200):
                node.publish(ephemeral(f"m{number}", content=bytes(100_000)))
            # Others hear everything meanwhile.
            wait_until(lambda: len(heard) == 200)
            while True:
                deaf.settimeout(0.5)
                try:
                    if not deaf.recv(1 << 20):
                        break
                except TimeoutError:
                    break
        wait_until(lambda: metric(node, 'sdstore_relayed_total{outcome="dropped"}') > 0)


@contextmanager
def hostile_peer(*chunks: bytes, encoding: str = "") -> Iterator[tuple[str, list[bytes]]]:
    """A server whose stream is these chunks, and the requests that it got; it reads on for ever."""
    encoded = f"Content-Encoding: {encoding}\r\n" if encoding else ""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection:
                try:
                    request = connection.recv(65_536)
                    requests.append(request)
                    if b"GET /v1/relay" not in request:
                        connection.sendall(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
                        return
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                        + encoded.encode()
                        + b"\r\n"
                    )
                    for chunk in chunks:
                        connection.sendall(chunk)
                    while connection.recv(65_536):
                        pass
                except OSError:
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests


def relayed_event(frame: bytes) -> bytes:
    document = json.dumps({"frame": base64.b64encode(frame).decode()}).encode()
    return b"event: relayed\ndata: " + document + b"\n\n"


@pytest.mark.parametrize(
    "garbage",
    [
        b'event: relayed\ndata: {"frame": "%%%"}\n\n',
        b"data: " + bytes(2 << 20) + b"\n\n",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                b"event: relayed\ndata: not json\n\n",
                b"event: relayed\ndata: {}\n\n",
                b'event: reading\ndata: {"is_read": 1}\n\n',
                b'event: relayed\ndata: {"frame": "", "via": "zz"}\n\n',
                b'event: relayed\ndata: {"frame": "", "via": 1}\n\n',
            )
        ),
    ],
)
def test_a_stream_that_is_not_one_ends_the_link_and_the_node_goes_on(
    tmp_path: Path, garbage: bytes
) -> None:
    with (
        hostile_peer(relayed_event(encode(ephemeral("first"))), garbage) as (url, requests),
        running_node(tmp_path, peers=[url], sync_interval_s=3_600) as node,
        hearing(node),
    ):
        # It connects again, after a pause.
        wait_until(lambda: sum(b"GET /v1/relay" in each for each in requests) >= 2)
        assert node.publish(stored("m")).status_code == 201


def bomb(bytes_count: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=17)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(bytes_count))


@pytest.mark.parametrize(
    ("encoding", "stream"),
    [("zstd", bomb(1 << 28)), ("zstd", b"not zstd at all"), ("gzip", b"\x1f\x8b")],
)
def test_a_compressed_stream_that_is_a_bomb_or_damaged_ends_the_link(
    tmp_path: Path, encoding: str, stream: bytes
) -> None:
    with (
        hostile_peer(stream, encoding=encoding) as (url, requests),
        running_node(tmp_path, peers=[url], sync_interval_s=3_600) as node,
    ):
        wait_until(lambda: sum(b"GET /v1/relay" in each for each in requests) >= 2)
        assert node.publish(stored("m")).status_code == 201


def test_content_and_garbage_in_a_peers_stream_are_refused_and_never_stored(
    tmp_path: Path,
) -> None:
    chunks = [
        relayed_event(encode(stored("content"))),
        relayed_event(b"\xff\xff"),
        b"event: later-version\ndata: {}\n\n",
        b": comment\n\n",
        relayed_event(encode(ephemeral("good"))),
    ]
    with (
        hostile_peer(*chunks) as (url, _),
        running_node(tmp_path, peers=[url], sync_interval_s=3_600) as node,
    ):
        wait_until(lambda: metric(node, 'sdstore_relayed_total{outcome="passed"}') == 1)
        assert metric(node, 'sdstore_relayed_total{outcome="refused"}') == 2
        assert metric(node, "sdstore_relay_links ") == 1
        assert node.http.get("/v1/feed").json()["messages"] == []


def test_a_peer_that_floods_is_read_at_a_bounded_rate(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, relay_messages_per_s=100)
    flood = b"".join(relayed_event(encode(ephemeral(f"m{number}"))) for number in range(10_000))
    with (
        hostile_peer(flood) as (url, _),
        running_node(tmp_path, limits, peers=[url], sync_interval_s=3_600) as node,
    ):
        wait_until(lambda: metric(node, "sdstore_relay_links ") == 1)
        time.sleep(1)
        # One chunk of a connection has some hundred of them.
        assert metric(node, 'sdstore_relayed_total{outcome="passed"}') < 3_000
        assert node.publish(stored("m")).status_code == 201


def test_another_store_in_the_place_of_a_peer_is_logged_once_and_a_restart_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    caplog.set_level("INFO", "app.federation")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = reserved.getsockname()
    url = f"http://127.0.0.1:{address[1]}"
    limits = replace(DEFAULT_LIMITS, relay_retry_s_max=0.2)
    with running_node(tmp_path / "a", limits, peers=[url], sync_interval_s=3_600) as a:
        stores = ["b", "b", "c", "c"]
        for links_count, name in enumerate(stores, 1):
            with running_node(tmp_path / name, listener=socket.create_server(address)):
                wait_until(lambda n=links_count: lines(f"the link with {url} is up") == n)  # type: ignore[misc]
                was_replaced = "c" in stores[:links_count]
                assert lines(f"peer {url} is another store than before") == was_replaced
            links_up(a, 0)


def test_a_removed_peer_loses_its_link(tmp_path: Path) -> None:
    with running_node(tmp_path / "b") as b, running_node(tmp_path / "a") as a:
        # Removed and added again at once: the link must not go on with the wrong token.
        wrong = a.http.post("/v1/peers", json={"url": b.url, "token": "sds_wrong"})
        refused = 'sdstore_http_requests_total{method="GET",route="/v1/relay",status="401"}'
        wait_until(lambda: metric(b, refused) > 0)
        a.http.delete(f"/v1/peers/{wrong.json()['id']}").raise_for_status()
        peer_id = a.http.post("/v1/peers", json={"url": b.url}).raise_for_status().json()["id"]
        links_up(a, 1)
        a.http.delete(f"/v1/peers/{peer_id}").raise_for_status()
        links_up(a, 0)


def test_processes_of_one_database_hear_what_the_others_relay_and_commit(
    tmp_path: Path, postgres_stores: PostgresStores
) -> None:
    url = postgres_stores.new_url()
    with (
        running_node(tmp_path / "a", database_url=url) as a,
        running_node(tmp_path / "b", database_url=url) as b,
        running_node(tmp_path / "c", peers=[b.url], sync_interval_s=3_600) as c,
        hearing(a) as at_a,
        hearing(b) as at_b,
        hearing(c) as at_c,
        streaming(b) as events,
    ):
        links_up(c, 1)
        sent = []
        # Sizes around those of a part, and the largest frame.
        for number, size in enumerate([1, 5_700, 5_900, 19_000, 1_000_000]):
            sent.append(f"m{number}")
            a.publish(ephemeral(sent[-1], content=bytes(size))).raise_for_status()
        for number in range(100):
            sent.append(f"n{number}")
            (a, b, c)[number % 3].publish(ephemeral(sent[-1])).raise_for_status()
        wait_until(lambda: all(set(each) >= set(sent) for each in (at_a, at_b, at_c)))
        time.sleep(SETTLE_S)
        assert sorted(at_a) == sorted(at_b) == sorted(at_c) == sorted(sent)
        took_s = []
        for number in range(3):
            started_s = time.monotonic()
            a.publish(stored(f"m{number}"))
            while next(events)[0] != "nudge":
                pass
            took_s.append(time.monotonic() - started_s)
        assert min(took_s) < 1  # busy cores can delay some
