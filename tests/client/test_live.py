"""Live streams of both clients: nothing missed over broken connections, gaps and restarts."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sdstore.client import (
    AsyncStoreClient,
    ClientOptions,
    LiveMessage,
    Retry,
    StoreClient,
    StoreError,
)
from sdstore.client.live import EventReader
from sdstore.sds import Message, entry_digest, to_json
from tests.support.server import RunningNode, running_node

QUICK = ClientOptions(retry=Retry(attempts_max=3, backoff_s=0.001))
HERE = b": here\nid: start\n\n"


def message(number: int) -> Message:
    return Message(f"m{number}", "garden", "ada", number, content=b"x")


def stored(number: int, **meta: Any) -> bytes:
    sent = message(number)
    about = {"digest": entry_digest(sent).hex(), "dialect": "v2", **meta}
    document = {"message": to_json(sent), "meta": about}
    return b"id: c%d\nevent: message\ndata: %s\n\n" % (number, json.dumps(document).encode())


def relayed(number: int) -> bytes:
    document = {"message": to_json(message(number)), "meta": {"kind": "sync", "dialect": "nim"}}
    return b"event: relayed\ndata: %s\n\n" % json.dumps(document).encode()


def gap(cursor: str) -> bytes:
    return b'event: gap\ndata: {"cursor": "%s"}\n\n' % cursor.encode()


def web_page(status: int) -> httpx.Response:
    """The answer of a captive portal."""
    return httpx.Response(status, html="<html><TITLE lang=en> Wi-Fi\x1b login</TITLE>")


class Node:
    """Gives each connection in turn a stream of its own, and remembers what was asked."""

    def __init__(self, *connections: bytes | httpx.Response | Exception) -> None:
        self.asked: list[dict[str, str]] = []
        self._connections = list(connections)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        params = dict(request.url.params)
        assert params.pop("filter") == "none"  # nobody here is a participant
        self.asked.append({"path": request.url.path, **params})
        answer = self._connections.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            stream = Pieces([answer.content])
            return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)
        pieces = [answer[at : at + 7] for at in range(0, len(answer), 7)]
        return httpx.Response(200, stream=Pieces(pieces))


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in small chunks, for either client."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)

    async def __aiter__(self) -> Any:
        for piece in self._pieces:
            yield piece


Read = Callable[..., tuple[list[LiveMessage], str | None]]


def read_blocking(
    url: str, count: int, *args: Any, on_open: Callable[[], Any] = int, **client: Any
) -> tuple[list[LiveMessage], str | None]:
    live = {"on_left_out": client.pop("on_left_out", None)}
    with StoreClient(url, **client) as store, store.live(*args, **live) as stream:
        on_open()
        return [next(stream) for _ in range(count)], stream.cursor


def read_async(
    url: str, count: int, *args: Any, on_open: Callable[[], Any] = int, **client: Any
) -> tuple[list[LiveMessage], str | None]:
    async def reading() -> tuple[list[LiveMessage], str | None]:
        live = {"on_left_out": client.pop("on_left_out", None)}
        async with AsyncStoreClient(url, **client) as store, store.live(*args, **live) as stream:
            await asyncio.to_thread(on_open)
            return [await anext(stream) for _ in range(count)], stream.cursor

    return asyncio.run(reading())


@pytest.fixture(params=[read_blocking, read_async])
def read(request: pytest.FixtureRequest) -> Read:
    """Takes so many messages of a live stream; also the cursor behind them."""
    return request.param  # type: ignore[no-any-return]


def read_from(read: Read, node: Node, count: int, *args: Any) -> tuple[list[str], str | None]:
    transport = httpx.MockTransport(node)
    found, cursor = read("http://node", count, *args, options=QUICK, transport=transport)
    return [each.message.message_id for each in found], cursor


def test_messages_come_in_order_with_digest_and_cursor(read: Read) -> None:
    node = Node(HERE + stored(1) + relayed(2) + stored(3))
    found, cursor = read(
        "http://node", 3, "garden", options=QUICK, transport=httpx.MockTransport(node)
    )
    assert [each.message for each in found] == [message(1), message(2), message(3)]
    assert [each.digest for each in found] == [
        entry_digest(message(1)),
        None,
        entry_digest(message(3)),
    ]
    assert [(each.cursor, each.dialect) for each in found] == [
        ("c1", "v2"),
        ("c1", "nim"),
        ("c3", "v2"),
    ]
    assert cursor == "c3"
    assert node.asked == [{"path": "/v1/channels/live", "channel_id": "garden"}]


def test_a_stream_of_all_channels_begins_behind_a_cursor(read: Read) -> None:
    node = Node(HERE + stored(1))
    assert read_from(read, node, 1, None, "earlier") == (["m1"], "c1")
    assert node.asked == [{"path": "/v1/live", "after": "earlier"}]


def test_a_connection_that_breaks_is_opened_again_where_it_broke(read: Read) -> None:
    node = Node(HERE + stored(1) + stored(2)[:-5], httpx.ConnectError("refused"), HERE + stored(2))
    assert read_from(read, node, 2) == (["m1", "m2"], "c2")
    assert [asked.get("after") for asked in node.asked] == [None, "c1", "c1"]


def test_a_gap_is_filled_by_the_next_connection(read: Read) -> None:
    node = Node(HERE + stored(1) + gap("c1+") + stored(9), HERE + stored(2) + stored(3))
    assert read_from(read, node, 3) == (["m1", "m2", "m3"], "c3")
    assert [asked.get("after") for asked in node.asked] == [None, "c1+"]


def test_a_node_that_sends_nothing_but_gaps_is_given_up_after_the_attempts(read: Read) -> None:
    node = Node(*[HERE + b": still here\nid: start\n\n" + gap("c1+")] * 5)
    with pytest.raises(StoreError) as failed:
        read_from(read, node, 1)
    assert (failed.value.code, len(node.asked)) == ("unreachable", 4)


@pytest.mark.parametrize(
    ("answer", "code", "detail"),
    [
        (web_page(200), "not_a_store", 'web page "Wi-Fi login"'),
        (web_page(511), "not_a_store", 'web page "Wi-Fi login"'),
        (httpx.Response(302, headers={"location": "http://a/b"}), "not_a_store", "http://a/b"),
        (web_page(502), "http_502", 'web page "Wi-Fi login"'),
        (httpx.Response(200, json={}), "malformed_reply", "application/json"),
    ],
)
def test_an_answer_that_is_no_stream_is_named(
    read: Read, answer: httpx.Response, code: str, detail: str
) -> None:
    with pytest.raises(StoreError) as failed:
        read_from(read, Node(answer), 1)
    assert failed.value.code == code
    assert detail in failed.value.detail


def test_what_the_node_leaves_out_is_told(read: Read) -> None:
    digests = [entry_digest(message(number)) for number in (2, 3)]
    left_out = b"".join(
        b'id: l\nevent: left_out\ndata: {"channel_id": "garden", "digest": "%s"}\n\n'
        % digest.hex().encode()
        for digest in digests
    )
    node = Node(HERE + stored(1) + left_out + stored(4))
    told: list[bytes] = []
    transport = httpx.MockTransport(node)
    found, _ = read("http://node", 2, options=QUICK, transport=transport, on_left_out=told.extend)
    assert [each.message for each in found] == [message(1), message(4)]
    assert told == digests


def test_events_of_a_later_version_are_passed_over(read: Read) -> None:
    node = Node(HERE + b"event: new\ndata: {}\n\n" + stored(1))
    assert read_from(read, node, 1)[0] == ["m1"]


def test_a_node_that_stays_away_is_reported_after_the_attempts(read: Read) -> None:
    away = httpx.ConnectError("refused")
    with pytest.raises(StoreError) as failed:
        read_from(read, Node(HERE + stored(1), away, away, away), 2)
    assert (failed.value.code, failed.value.status) == ("unreachable", 0)


def test_a_cursor_that_the_node_refuses_is_reported_at_once(read: Read) -> None:
    refusal = {"code": "foreign_cursor", "title": "another database", "status": 410}
    node = Node(httpx.Response(410, json=refusal))
    with pytest.raises(StoreError) as failed:
        read_from(read, node, 1, None, "foreign")
    assert (failed.value.code, len(node.asked)) == ("foreign_cursor", 1)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (stored(1, digest="00" * 32), "digest_mismatch"),
        (stored(1, digest="xyz"), "malformed_reply"),
        (b"event: message\ndata: [\n\n", "malformed_reply"),
        (b"event: message\ndata: []\n\n", "malformed_reply"),
        (b'event: message\ndata: {"message": {}}\n\n', "malformed_reply"),
        (b'event: message\ndata: {"message": {}, "meta": {}}\n\n', "malformed_reply"),
        (b"event: gap\ndata: {}\n\n", "malformed_reply"),
        (b"event: left_out\ndata: {}\n\n", "malformed_reply"),
    ],
)
def test_an_event_that_breaks_the_contract_is_reported(read: Read, event: bytes, code: str) -> None:
    with pytest.raises(StoreError) as failed:
        read_from(read, Node(HERE + event), 1)
    assert failed.value.code == code


@pytest.mark.parametrize(
    "endless", [b"data: " + b"x" * 200, b"data: xxxxxxx\n" * 20, b"\n" * 200, b": xxxx\n" * 20]
)
def test_an_event_without_an_end_is_bounded(endless: bytes) -> None:
    reader = EventReader(bytes_max=100)
    pieces = [endless[at : at + 10] for at in range(0, len(endless), 10)]
    with pytest.raises(StoreError) as failed:
        list(map(reader.feed, pieces))
    assert failed.value.code == "reply_too_large"


def test_events_are_read_alike_in_any_chunks() -> None:
    stream = HERE + stored(1).replace(b"\n", b"\r\n") + b"data: a\ndata: b\n\n"
    whole = EventReader(1000).feed(stream)
    assert [(each.name, each.event_id) for each in whole] == [
        ("message", "start"),
        ("message", "c1"),
        ("message", ""),
    ]
    assert whole[2].data == "a\nb"
    reader = EventReader(1000)
    assert [event for byte in stream for event in reader.feed(bytes([byte]))] == whole


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("live")) as running:
        yield running
