"""Live readers over real sockets: nothing missed, nothing twice, resumable, told when too slow."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from app.server.limits import DEFAULT_LIMITS
from bench.postgres_server import own_postgres
from sdstore.sds.model import Message
from tests.support.server import RunningNode, running_node
from tests.support.stores import PostgresStores, Stores


@dataclass
class Event:
    """One server-sent event; `name` is "comment" for a comment."""

    name: str
    data: dict[str, Any]
    event_id: str | None

    @property
    def message_id(self) -> str:
        return str(self.data["message"]["message_id"])


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
            continue
        data = json.loads(fields.get("data", "{}"))
        yield Event(fields.get("event", "comment"), data, fields.get("id"))
        fields = {}


@contextmanager
def live(
    node: RunningNode, path: str = "/v1/live", headers: dict[str, str] | None = None, **query: str
) -> Iterator[Iterator[Event]]:
    """The events of a reader that is connected: its first comment has come."""
    with (
        httpx.Client(base_url=node.url, timeout=20) as client,
        client.stream("GET", path, params=query, headers=headers) as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = events_of(stream.iter_lines())
        assert next(events).name == "comment"
        yield events


def message(number: int | str, channel_id: str = "c", content: bytes = b"hi") -> Message:
    return Message(f"m{number}", channel_id, lamport_timestamp=1, content=content)


@pytest.fixture
def node(tmp_path: Path, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path, database_url=stores.new_url()) as running:
        yield running


def test_a_new_message_is_shown_as_json_with_an_id(node: RunningNode) -> None:
    node.publish(message("old"))
    with live(node) as events:
        node.publish(message("new"))
        event = next(events)
    assert (event.name, event.message_id) == ("message", "mnew")
    assert event.data["meta"]["seq"] == 2
    assert event.event_id is not None


def test_sync_and_ephemeral_messages_are_relayed_without_an_id(node: RunningNode) -> None:
    with live(node) as events:
        node.publish(Message("s", "c", lamport_timestamp=1))
        node.publish(Message("e", "c", content=b"now"))
        shown = [next(events), next(events)]
    assert [(e.name, e.message_id, e.event_id) for e in shown] == [
        ("relayed", "s", None),
        ("relayed", "e", None),
    ]
    assert [e.data["meta"]["kind"] for e in shown] == ["sync", "ephemeral"]


def test_a_reader_hears_what_another_process_of_the_node_commits(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    url = postgres_stores.new_url()
    with (
        running_node(tmp_path / "a", database_url=url) as here,
        running_node(tmp_path / "b", database_url=url) as there,
        live(here) as events,
    ):
        sent = [f"m{number}" for number in range(20)]
        for number in range(20):
            (here, there)[number % 2].publish(message(number))
        assert [next(events).message_id for _ in sent] == sent


@pytest.mark.parametrize("by_header", [True, False])
def test_a_reader_goes_on_where_it_was(node: RunningNode, by_header: bool) -> None:
    with live(node) as events:
        for n in range(3):
            node.publish(message(n))
        cursor = next(events).event_id or ""
    for n in range(3, 6):
        node.publish(message(n))
    headers = {"last-event-id": cursor} if by_header else None
    query = {} if by_header else {"after": cursor}
    with live(node, headers=headers, **query) as events:
        node.publish(message(6))
        assert [next(events).message_id for _ in range(6)] == [f"m{n}" for n in range(1, 7)]


def test_an_event_id_is_a_cursor_of_the_feed(node: RunningNode) -> None:
    with live(node) as events:
        for n in range(3):
            node.publish(message(n))
        first = next(events)
    page = node.http.get("/v1/feed", params={"after": first.event_id}).json()
    assert [m["message"]["message_id"] for m in page["messages"]] == ["m1", "m2"]


@pytest.mark.parametrize(
    ("cursor", "status"),
    [("nonsense", 400), ("uedoeXbqHP4jRogKZXJ4gHUYBPjo8t3ROSZHNjd4RAe600L8A7fmX8er6g", 410)],
)
def test_a_cursor_that_is_none_is_refused(node: RunningNode, cursor: str, status: int) -> None:
    assert node.http.get("/v1/live", params={"after": cursor}).status_code == status
    assert node.http.get("/v1/live", headers={"last-event-id": cursor}).status_code == status


def test_silence_is_filled_with_comments_that_say_how_far_the_reader_is(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, live_heartbeat_s=1)
    with running_node(tmp_path, limits) as node:
        with live(node, "/v1/channels/live", channel_id="quiet") as events:
            node.publish(message(1, "busy"))
            comment = next(events)
        page = node.http.get("/v1/feed", params={"after": comment.event_id}).json()
    assert (comment.name, page["messages"]) == ("comment", [])


def test_too_many_readers_are_turned_away_and_a_place_becomes_free(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, live_readers_max=1)
    with running_node(tmp_path, limits) as node:
        with live(node):
            refused = node.http.get("/v1/live")
            assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"] == "10"
        while "sdstore_live_readers 1.0" in node.http.get("/metrics").text:
            pass
        with live(node) as events:
            node.publish(message(1))
            assert next(events).message_id == "m1"


def test_a_reader_that_does_not_read_is_told_of_its_gap(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, live_queue_items_max=4)
    large = bytes(500_000)
    with running_node(tmp_path, limits) as node, connected(node) as lines:
        # More than the socket buffers hold: the reader is stuck, the writer is not.
        for n in range(30):
            node.publish(message(n, content=large))
        seen, gap = [], None
        for event in events_of(line.rstrip("\n") for line in lines):
            if event.name == "gap":
                gap = event
                break
            if event.name == "message":
                seen.append(event.message_id)
        assert gap is not None
        assert gap.event_id is None
        assert seen == [f"m{n}" for n in range(len(seen))]
        page = node.http.get("/v1/feed", params={"after": gap.data["cursor"], "limit": 1}).json()
        assert page["messages"][0]["message"]["message_id"] == f"m{len(seen)}"


def publish_until_stored(node: RunningNode, number: int) -> None:
    deadline = time.monotonic() + 60
    while node.publish(message(number)).status_code != 201:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_reader_outlasts_a_restart_of_the_database_server(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, database_wait_s=1)
    with (
        own_postgres() as server,
        running_node(tmp_path, limits, database_url=server.url) as node,
        live(node) as events,
    ):
        node.publish(message(1))
        assert next(events).message_id == "m1"
        server.stop()
        assert node.publish(message(2)).status_code == 503
        refused = node.http.get("/v1/live")
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        server.start()
        publish_until_stored(node, 3)
        assert next(events).message_id == "m3"


def test_a_reader_outlasts_statements_that_take_too_long(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    limits = replace(DEFAULT_LIMITS, database_statement_s=1, database_read_s=1)
    url = postgres_stores.new_url()
    with running_node(tmp_path, limits, database_url=url) as node, live(node) as events:
        with psycopg.connect(url) as other:
            other.execute("LOCK TABLE messages IN ACCESS EXCLUSIVE MODE")
            for path in ("/v1/feed", "/v1/messages/m1", "/v1/live"):
                refused = node.http.get(path)
                assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
            assert node.publish(message(1)).status_code == 503
            other.rollback()
        publish_until_stored(node, 2)
        assert next(events).message_id == "m2"


@contextmanager
def connected(node: RunningNode) -> Iterator[IO[str]]:
    """The lines of a reader that is connected and reads no more; HTTP/1.0, so they are not chunked."""
    parts = urlsplit(node.url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=20) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.sendall(b"GET /v1/live HTTP/1.0\r\nhost: localhost\r\n\r\n")
        with connection.makefile("r", encoding="utf-8", newline="\n") as lines:
            while not lines.readline().startswith(":"):
                pass
            lines.readline()
            yield lines
