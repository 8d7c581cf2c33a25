"""Channels, pages, feed, gaps and entries over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from blake3 import blake3
from google.protobuf.proto import parse_length_prefixed

from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from sdstore.wire import store_pb2 as wire
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores

CHANNEL = "page/channel"
# Published in an order that is not the log's.
LAMPORTS = [5, -3, 9, 0, 5, 2**63 - 1, 7, 1]
MESSAGES = [
    Message(f"m{n}", CHANNEL, lamport_timestamp=lamport, content=b"hi")
    for n, lamport in enumerate(LAMPORTS)
]
IN_LOG_ORDER = sorted(MESSAGES, key=lambda m: (m.lamport_timestamp, m.message_id.encode()))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node"), database_url=stores.new_url()) as running:
        for message in MESSAGES:
            running.publish(message)
        for name in ("alpha", "beta/1", "beta/2", "ü"):
            running.publish(Message("m", name, lamport_timestamp=1, content=b"hi"))
        yield running


def pages(node: RunningNode, path: str, query: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """All pages of a list, going on by `Link` alone."""
    found = []
    while True:
        answer = node.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        rows = document.get("messages", document.get("channels", document.get("gaps")))
        found.append(rows)
        if document["next"] is None:
            assert "next" not in answer.links
            return found
        target = urlsplit(answer.links["next"]["url"])
        path, query = target.path, dict(parse_qsl(target.query, keep_blank_values=True))
        assert query["after"] == document["next"]


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["message"]["message_id"] for row in rows]


@pytest.mark.parametrize("limit", [1, 3, 8, 1_000])
@pytest.mark.parametrize("direction", ["asc", "desc"])
@pytest.mark.parametrize("order", ["log", "arrival"])
def test_pages_together_are_the_channel_in_order(
    node: RunningNode, limit: int, direction: str, order: str
) -> None:
    query = {"channel_id": CHANNEL, "limit": limit, "direction": direction, "order": order}
    found = pages(node, "/v1/channels/messages", query)
    expected = [m.message_id for m in (IN_LOG_ORDER if order == "log" else MESSAGES)]
    whole = [message_id for rows in found for message_id in ids(rows)]
    assert whole == (expected if direction == "asc" else expected[::-1])
    assert all(len(rows) <= limit for rows in found)


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("/v1/channels/page%2Fchannel/messages?limit=3", "store.localhost:8080"),
        ("/v1/channels/messages?channel_id=page%2Fchannel&limit=3&order=arrival", "localhost"),
        ("/v1/messages/m0/ancestors?channel_id=..&limit=1", "[::1]:8000"),
        ("/v1/messages/ancestors?message_id=m0&channel_id=..&limit=1", "127.0.0.1"),
        ("/v1/feed?limit=2", "localhost"),
        ("/v1/channels?limit=1", "localhost"),
    ],
)
def test_the_link_to_the_next_page_is_absolute_and_in_the_form_that_was_asked(
    tmp_path: Path, target: str, host: str
) -> None:
    told = (HistoryEntry("m1"), HistoryEntry("m2"))
    linked = [Message(f"m{n}", "..", "", 1, told[2 * (n > 0) :], content=b"x") for n in range(3)]
    with running_node(tmp_path) as node:
        for message in (*MESSAGES, *linked):
            node.publish(message)
        answer = node.http.get(target, headers={"host": host})
        assert answer.status_code == 200, answer.text
        link = urlsplit(answer.links["next"]["url"])
        asked = urlsplit(target)
        assert (link.scheme, link.netloc, link.path) == ("http", host, asked.path)
        assert parse_qsl(link.query) == [*parse_qsl(asked.query), ("after", answer.json()["next"])]
        again = node.http.get(f"{link.path}?{link.query}", headers={"host": host})
        assert again.status_code == 200
        assert again.json() != answer.json()


def test_before_stops_where_after_would_go_on(node: RunningNode) -> None:
    query = {"channel_id": CHANNEL, "limit": 3}
    cursor = node.http.get("/v1/channels/messages", params=query).json()["next"]
    rest = node.http.get("/v1/channels/messages", params=query | {"after": cursor, "limit": 1})
    until = node.http.get(
        "/v1/channels/messages",
        params={"channel_id": CHANNEL, "before": rest.json()["next"]},
    )
    assert ids(until.json()["messages"]) == [m.message_id for m in IN_LOG_ORDER[:3]]


def test_lamport_bounds_narrow_a_page(node: RunningNode) -> None:
    query = {"channel_id": CHANNEL, "from_lamport": 0, "to_lamport": 7}
    found = node.http.get("/v1/channels/messages", params=query).json()["messages"]
    lamports = [int(row["message"]["lamport_timestamp"]) for row in found]
    assert lamports == [lamport for lamport in sorted(LAMPORTS) if 0 <= lamport <= 7]


def test_the_protobuf_form_of_a_page_holds_the_frames(node: RunningNode) -> None:
    query = {"channel_id": CHANNEL, "limit": 5}
    answer = node.http.get("/v1/channels/messages", params=query, headers=WANTS_PROTOBUF)
    page = wire.MessagePage.FromString(answer.content)
    assert [m.frame for m in page.messages] == [encode(m) for m in IN_LOG_ORDER[:5]]
    assert [m.digest for m in page.messages] == [entry_digest(m) for m in IN_LOG_ORDER[:5]]
    json = node.http.get("/v1/channels/messages", params=query).json()
    assert page.next == json["next"]
    assert [m.seq for m in page.messages] == [m["meta"]["seq"] for m in json["messages"]]


def test_a_page_is_cut_by_bytes_and_goes_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = replace(DEFAULT_LIMITS, reply_bytes_max=10_000)
    with running_node(tmp_path_factory.mktemp("small"), limits) as small:
        sent = [
            Message(f"m{n}", "c", lamport_timestamp=n, content=bytes(size))
            for n, size in enumerate([4_000, 4_000, 4_000, 50_000, 10, 10])
        ]
        for message in sent:
            small.publish(message)
        found = pages(small, "/v1/channels/messages", {"channel_id": "c"})
        # In base64 two of them would be longer than a reply may be.
        assert [ids(rows) for rows in found] == [["m0"], ["m1"], ["m2"], ["m3"], ["m4", "m5"]]
        feed = small.http.get("/v1/feed", headers=WANTS_PROTOBUF).content
        assert [m.seq for m in wire.MessagePage.FromString(feed).messages] == [1, 2]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"limit": 1_001}, "invalid_parameter"),
        ({"limit": "x"}, "invalid_parameter"),
        ({"order": "size"}, "invalid_parameter"),
        ({"direction": "up"}, "invalid_parameter"),
        ({"from_lamport": 2**63}, "invalid_parameter"),
        ({"after": "x"}, "invalid_cursor"),
        (
            {"before": "uedoeXbqHP4jRogKZXJ4gHUYBPjo8t3ROSZHNjd4RAe600L8A7fmX8er6g"},
            "foreign_cursor",
        ),
        (
            {
                "order": "arrival",
                "before": "uedoeXbqHP4jRogKZXJ4gHUYBPjo8t3ROSZHNjd4RAe600L8A7fmX8er6g",
            },
            "foreign_cursor",
        ),
    ],
)
def test_wrong_page_parameters_have_their_codes(
    node: RunningNode, query: dict[str, Any], code: str
) -> None:
    answer = node.http.get("/v1/channels/messages", params={"channel_id": CHANNEL, **query})
    assert answer.json()["code"] == code


def test_channels_are_listed_by_name_and_by_prefix(node: RunningNode) -> None:
    found = pages(node, "/v1/channels", {"limit": 2})
    names = [row["channel_id"] for rows in found for row in rows]
    assert names == sorted(["alpha", "beta/1", "beta/2", CHANNEL, "ü"], key=str.encode)
    prefixed = node.http.get("/v1/channels", params={"prefix": "beta/"}).json()["channels"]
    assert [row["channel_id"] for row in prefixed] == ["beta/1", "beta/2"]


def test_a_channel_has_count_bounds_and_the_root_of_its_sorted_digests(node: RunningNode) -> None:
    channel = node.http.get("/v1/channels", params={"channel_id": CHANNEL}).json()
    digests = sorted(map(entry_digest, MESSAGES))
    assert channel == {
        "channel_id": CHANNEL,
        "count": len(MESSAGES),
        "lamport_first": "-3",
        "lamport_last": str(2**63 - 1),
        "root": blake3(b"".join(digests)).hexdigest(),
    }


def test_an_unknown_channel_is_not_found_and_its_page_is_empty(node: RunningNode) -> None:
    assert node.http.get("/v1/channels/nobody").status_code == 404
    page = node.http.get("/v1/channels/nobody/messages").json()
    assert page == {"messages": [], "next": None, "left_out": []}


def test_gaps_are_what_histories_name_and_nobody_sent(node: RunningNode) -> None:
    history = (
        HistoryEntry("m0"),
        HistoryEntry("gap-1", b"\xab"),
        HistoryEntry("gap-2"),
        HistoryEntry("synced"),
    )
    channel = "gaps/channel"
    node.publish(Message("m0", channel, lamport_timestamp=1, content=b"x"))
    node.publish(Message("synced", channel, lamport_timestamp=1))
    node.publish(Message("m1", channel, lamport_timestamp=2, content=b"x", causal_history=history))
    found = pages(node, "/v1/channels/gaps", {"channel_id": channel, "limit": 1})
    assert [row for rows in found for row in rows] == [
        {
            "message_id": "gap-1",
            "hints": ["ab"],
            "met_as_sync": False,
            "state": "missing",
            "named_by": "history",
        },
        {
            "message_id": "gap-2",
            "hints": [],
            "met_as_sync": False,
            "state": "missing",
            "named_by": "history",
        },
        {
            "message_id": "synced",
            "hints": [],
            "met_as_sync": True,
            "state": "missing",
            "named_by": "history",
        },
    ]
    answer = node.http.get("/v1/channels/gaps%2Fchannel/gaps", headers=WANTS_PROTOBUF)
    page = wire.GapPage.FromString(answer.content)
    assert [(g.message_id, list(g.retrieval_hints)) for g in page.gaps] == [
        ("gap-1", [b"\xab"]),
        ("gap-2", []),
        ("synced", []),
    ]


def test_entries_are_streamed_in_the_order_asked(node: RunningNode) -> None:
    digests = [entry_digest(m) for m in reversed(MESSAGES)]
    asked = [*digests[:3], bytes(32), *digests[3:], b"\x01"]
    body = {"digests": [digest.hex() for digest in asked]}
    answer = node.http.post("/v1/entries", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    named = [line.get("missing") or line["meta"]["digest"] for line in lines]
    assert named == body["digests"]
    assert [line for line in lines if "missing" in line] == [
        {"missing": bytes(32).hex()},
        {"missing": "01"},
    ]


def test_entries_in_protobuf_are_length_delimited(node: RunningNode) -> None:
    asked = [entry_digest(MESSAGES[0]), bytes(32)]
    raw = wire.EntriesRequest(digests=asked).SerializeToString()
    answer = node.http.post("/v1/entries", content=raw, headers=PROTOBUF | WANTS_PROTOBUF)
    stream, items = BytesIO(answer.content), []
    while (item := parse_length_prefixed(wire.EntryItem, stream)) is not None:
        items.append(item)
    assert items[0].entry.frame == encode(MESSAGES[0])
    assert items[1].missing == bytes(32)
    assert len(items) == 2


def test_too_many_digests_are_refused(node: RunningNode) -> None:
    raw = wire.EntriesRequest(digests=[b"\0"] * 10_001).SerializeToString()
    answer = node.http.post("/v1/entries", content=raw, headers=PROTOBUF)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_many_items")
