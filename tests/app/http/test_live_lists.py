"""One live stream of many channels, and compressed streams: what they carry, and what they cost."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from app.access.callers import EVERY_SCOPE, Caller
from app.server.limits import DEFAULT_LIMITS
from recon.agreement import Interest
from sdstore.client import StoreClient
from sdstore.client.exchange import ClientOptions
from sdstore.sds import SHA256_MESSAGE
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from tests.app.http.test_live import Event, events_of, message
from tests.support.server import RunningNode, running_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as opened:
        yield opened


@contextmanager
def posted(node: RunningNode, **body: Any) -> Iterator[Iterator[Event]]:
    """The events of a list of channels, once the reader is connected."""
    with (
        httpx.Client(base_url=node.url, timeout=20) as client,
        client.stream("POST", "/v1/live", json=body) as stream,
    ):
        assert stream.status_code == 200
        events = events_of(stream.iter_lines())
        assert next(events).name == "comment"
        yield events


def test_one_stream_has_the_channels_of_a_list_and_those_with_a_prefix(node: RunningNode) -> None:
    with posted(node, channels=["a", "b"], prefixes=["/rooms/"]) as events:
        for number, channel_id in enumerate(["a", "c", "ab", "/rooms/1", "/room", "b"]):
            node.publish(message(number, channel_id))
        shown = [next(events).data["message"]["channel_id"] for _ in range(3)]
    assert shown == ["a", "/rooms/1", "b"]


def test_another_list_goes_on_where_the_one_before_ended(node: RunningNode) -> None:
    with posted(node, channels=["d"]) as events:
        node.publish(message("d1", "d"))
        cursor = next(events).event_id
    for name in ("d2", "e2"):
        node.publish(message(name, name[0]))
    with posted(node, channels=["d", "e"], after=cursor) as events:
        assert [next(events).message_id, next(events).message_id] == ["md2", "me2"]
    with posted(node, channels=["e"], after=cursor) as events:
        assert next(events).message_id == "me2"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_body"),
        ({"channels": ["x"] * 100, "prefixes": ["y"] * 101}, 413, "too_many_items"),
        ({"channels": ["x" * 257]}, 422, "channel_id_too_long"),
        ({"channels": "x"}, 400, "invalid_body"),
        ({"channels": ["x"], "names": []}, 400, "invalid_body"),
        ({"channels": ["x"], "after": "nonsense"}, 400, "invalid_cursor"),
        ({"channels": ["x" * 600_000]}, 413, "body_too_large"),
    ],
)
def test_a_list_that_is_none_is_refused(
    node: RunningNode, body: dict[str, Any], status: int, code: str
) -> None:
    reply = node.http.post("/v1/live", json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


def test_a_refused_list_says_which_name_is_at_fault(tmp_path: Path) -> None:
    class Limited:
        def identify(self, _host: str, _headers: object) -> Caller:
            granted = Interest.make(channels=frozenset({"a"}), prefixes=frozenset({"/rooms/"}))
            return Caller("limited", EVERY_SCOPE, granted)

    with running_node(tmp_path, authorizer=Limited()) as node:
        with posted(node, channels=["a", "/rooms/2"], prefixes=["/rooms/3"]):
            pass
        for body, fault in (
            ({"channels": ["a", "z"]}, {"list": "channels", "index": 1}),
            ({"channels": ["a"], "prefixes": ["/room"]}, {"list": "prefixes", "index": 0}),
        ):
            document = node.http.post("/v1/live", json=body).json()
            assert document["code"] == "forbidden"
            assert fault.items() <= document.items()


def test_streams_that_last_keep_no_room_for_bodies(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, bodies_bytes_max=100_000)
    names = [f"{number:0256}" for number in range(200)]
    with (
        running_node(tmp_path, limits) as node,
        posted(node, channels=names),
        posted(node, channels=names),
        posted(node, channels=names) as events,
    ):
        node.publish(message(1, names[7]))
        assert next(events).message_id == "m1"


# ---- compression


def unpacker(coding: str) -> Callable[[bytes], bytes]:
    if coding == "gzip":
        return zlib.decompressobj(31).decompress
    return zstandard.ZstdDecompressor().decompressobj().decompress


@contextmanager
def packed(
    node: RunningNode, accept: str, path: str = "/v1/live", **query: str
) -> Iterator[tuple[httpx.Headers, Iterator[bytes]]]:
    """The headers of a stream, and its bytes as they come from the socket."""
    headers = {"accept-encoding": accept}
    with (
        httpx.Client(base_url=node.url, timeout=20, headers=headers) as client,
        client.stream("GET", path, params=query) as stream,
    ):
        yield stream.headers, stream.iter_raw()


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("zstd", "zstd"),
        ("gzip", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip;q=1, zstd;q=0.5", "gzip"),
        ("gzip;q=0", None),
        ("identity", None),
        ("br", None),
    ],
)
def test_each_event_can_be_read_as_soon_as_it_is_sent(
    node: RunningNode, accept: str, coding: str | None
) -> None:
    with packed(node, accept, compress="true") as (headers, chunks):
        assert headers.get("content-encoding") == coding
        assert headers["vary"] == "accept-encoding"
        unpack = unpacker(coding) if coding else bytes
        assert b"still here" in unpack(next(chunks))
        for number in range(5):
            node.publish(message(f"{accept}{number}"))
            text = b""
            while not text.endswith(b"\n\n"):
                text += unpack(next(chunks))
            assert f'"m{accept}{number}"'.encode() in text


def test_nothing_is_compressed_unless_the_reader_says_so(node: RunningNode) -> None:
    with packed(node, "gzip, zstd") as (headers, chunks):
        assert "content-encoding" not in headers
        assert next(chunks).startswith(b": still here")


def test_beyond_their_bound_streams_are_sent_uncompressed(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, live_compressed_max=1)
    with (
        running_node(tmp_path, limits) as node,
        packed(node, "zstd", compress="1") as (first, chunks),
        packed(node, "zstd", compress="1") as (second, _),
    ):
        assert first["content-encoding"] == "zstd"
        assert "content-encoding" not in second
        next(chunks)


@pytest.mark.parametrize(
    ("accept", "query", "bytes_max"),
    [
        ("zstd", {"filter": "none"}, 220),
        ("gzip", {"filter": "none"}, 250),
        ("zstd", {"filter": "none", "meta": "short"}, 140),
    ],
)
def test_a_hello_costs_little_on_the_wire(
    tmp_path: Path, accept: str, query: dict[str, str], bytes_max: int
) -> None:
    channel_id, ids = "/garden/1/bees/proto", [secrets.token_hex(32) for _ in range(2)]
    bloom_filter = secrets.token_bytes(18_752)
    with (
        running_node(tmp_path) as node,
        packed(node, accept, "/v1/channels/live", channel_id=channel_id, compress="1", **query) as (
            _,
            chunks,
        ),
    ):
        unpack = unpacker(accept)
        unpack(next(chunks))
        sizes = []
        for number in range(96):
            ids.append(secrets.token_hex(32))
            causes = tuple(HistoryEntry(each, b"", "ada") for each in ids[-3:-1])
            lamport = 1_763_000_000_000 + 1_000 * number + secrets.randbelow(1_000)
            text = b"hello %02d" % number
            node.publish(
                Message(ids[-1], channel_id, "ada", lamport, causes, bloom_filter, (), text)
            )
            size, event = 0, b""
            while not event.endswith(b"\n\n"):
                size += len(chunk := next(chunks))
                event += unpack(chunk)
            assert ids[-1].encode() in event
            sizes.append(size)
        steady = sizes[-48:]
        assert sum(steady) / len(steady) <= bytes_max


def test_the_client_reads_lists_and_compressed_streams(node: RunningNode) -> None:
    for compress in (False, True):
        options = ClientOptions(compress_live=compress)
        with StoreClient(node.url, options=options) as client:
            with client.live_of(["f"], ["/g/"]) as stream:
                for name, channel_id in ((1, "f"), (2, "h"), (3, "/g/1")):
                    node.publish(
                        message(f"{name}{compress}", channel_id, json.dumps(name).encode())
                    )
                got = [next(stream).message.message_id for _ in range(2)]
                assert got == [f"m1{compress}", f"m3{compress}"]
            with client.live("f", stream.cursor) as stream:
                node.publish(message(f"5{compress}", "f"))
                assert next(stream).message.message_id == f"m5{compress}"


def test_readers_learn_that_a_message_was_retired(node: RunningNode) -> None:
    gone = message("gone", "r", b"personal")
    with posted(node, channels=["r"]) as events, posted(node, channels=["q"]) as others:
        digest = node.publish(gone).json()["digest"]
        assert next(events).message_id == "mgone"
        asked = {"digest": digest, "reason": "a test"}
        assert node.http.post("/v1/retirements", json=asked).status_code == 200
        told = next(events)
        assert (told.name, told.event_id) == ("retired", None)
        assert told.data == {"channel_id": "r", "message_id": "mgone", "digest": digest}
        node.publish(message("q", "q"))
        assert next(others).message_id == "mq"


def test_readers_learn_that_an_id_has_another_message_now(node: RunningNode) -> None:
    content = b"the real one"
    real_id = SHA256_MESSAGE.make(Message("", "s", lamport_timestamp=1, content=content))
    forged = Message(real_id, "s", lamport_timestamp=1, content=b"forged")
    real = replace(forged, content=content)
    with posted(node, channels=["s"]) as events:
        node.publish(forged)
        node.publish(real)
        node.publish(replace(forged, content=b"forged again"))
        node.publish(message("last", "s"))
        shown = [next(events) for _ in range(5)]
    names = [each.name for each in shown]
    assert names == ["message", "message", "superseded", "message", "message"]
    assert shown[2].data["digest"] == entry_digest(real).hex()
