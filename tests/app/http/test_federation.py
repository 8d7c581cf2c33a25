"""Peers and sessions over HTTP: two nodes on real sockets made equal through their operators' routes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sdstore.sds.model import Message
from tests.support.server import RunningNode, running_node

SYNC_SECONDS_MAX = 30


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningNode, RunningNode]]:
    # The loop of a configured peer stays out of the way: sessions are started by hand.
    folders = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    with running_node(folders[0], sync_interval_s=3_600) as a, running_node(folders[1]) as b:
        yield a, b


def fill(node: RunningNode, numbers: range) -> None:
    for n in numbers:
        node.publish(Message(f"m{n}", f"c{n % 2}", lamport_timestamp=n, content=b"hi"))


def finished(node: RunningNode, sync: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + SYNC_SECONDS_MAX
    while sync["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)
        sync = node.http.get(f"/v1/syncs/{sync['id']}").json()
    return sync


def channels(node: RunningNode) -> list[dict[str, Any]]:
    names = [c["channel_id"] for c in node.http.get("/v1/channels").json()["channels"]]
    return [node.http.get("/v1/channels", params={"channel_id": name}).json() for name in names]


def test_one_session_by_url_makes_two_nodes_equal(pair: tuple[RunningNode, RunningNode]) -> None:
    a, b = pair
    fill(a, range(60))
    fill(b, range(40, 100))
    assert channels(a) != channels(b)
    started = a.http.post("/v1/syncs", json={"peer_url": b.url})
    assert started.status_code == 202
    assert started.headers["location"] == f"/v1/syncs/{started.json()['id']}"
    report = finished(a, started.json())["report"]
    assert report["outcome"] == "in_sync", report
    assert (report["entries_received"], report["entries_sent"]) == (40, 40)
    assert channels(a) == channels(b)
    assert sum(c["count"] for c in channels(a)) == 100


def test_a_dry_run_moves_nothing(pair: tuple[RunningNode, RunningNode]) -> None:
    a, b = pair
    fill(a, range(5))
    started = a.http.post("/v1/syncs", json={"peer_url": b.url, "dry_run": True})
    report = finished(a, started.json())["report"]
    assert (report["outcome"], report["missing_there"]) == ("different", 5)
    assert channels(b) == []


def test_a_peer_is_added_synced_watched_and_removed(pair: tuple[RunningNode, RunningNode]) -> None:
    a, b = pair
    fill(b, range(10))
    added = a.http.post("/v1/peers", json={"url": b.url})
    assert added.status_code == 201
    peer_id = added.json()["id"]
    assert added.headers["location"] == f"/v1/peers/{peer_id}"
    assert a.http.post("/v1/peers", json={"url": b.url}).status_code == 200
    assert [p["id"] for p in a.http.get("/v1/peers").json()["peers"]] == [peer_id]
    started = a.http.post(f"/v1/peers/{peer_id}/sync")
    if started.status_code == 409:  # the first turn of the peer's own loop
        assert started.json()["code"] == "sync_busy"
        started = httpx.Response(202, json=a.http.get("/v1/syncs").json()["syncs"][0])
    assert finished(a, started.json())["report"]["outcome"] == "in_sync"
    assert a.http.get(f"/v1/peers/{peer_id}/status").json()["id"] == peer_id
    assert a.http.delete(f"/v1/peers/{peer_id}").status_code == 204
    gone = a.http.get(f"/v1/peers/{peer_id}")
    assert (gone.status_code, gone.json()["code"]) == (404, "not_found")


def test_a_session_is_shown_live_until_its_end(pair: tuple[RunningNode, RunningNode]) -> None:
    a, b = pair
    fill(b, range(30))
    sync = a.http.post("/v1/syncs", json={"peer_url": b.url}).json()
    with a.http.stream("GET", f"/v1/syncs/{sync['id']}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = list(stream.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names[-1] == "end"
    assert set(names[:-1]) <= {"progress"}
    assert data[-1]["report"]["entries_received"] == 30


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/v1/syncs/nope", None, "not_found"),
        ("GET", "/v1/syncs/nope/events", None, "not_found"),
        ("POST", "/v1/peers/nope/sync", None, "not_found"),
        ("GET", "/v1/peers/nope/status", None, "not_found"),
        ("DELETE", "/v1/peers/nope", None, "not_found"),
        ("POST", "/v1/peers", {}, "invalid_body"),
        ("POST", "/v1/peers", {"url": 5}, "invalid_body"),
        ("POST", "/v1/peers", {"url": "http://x", "more": 1}, "invalid_body"),
        ("POST", "/v1/syncs", {"peer_url": "file:///etc/passwd"}, "peer_url_refused"),
    ],
)
def test_wrong_requests_have_their_codes(
    pair: tuple[RunningNode, RunningNode], method: str, path: str, body: object, code: str
) -> None:
    answer = pair[0].http.request(method, path, json=body)
    assert answer.json()["code"] == code
