"""Peers and sessions over HTTP: two nodes on real sockets made equal through their operators' routes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.errors import Code, Problem
from app.recon.index import NodeIndex
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
        ("POST", "/v1/syncs", {"peer_url": "http://xn--a"}, "peer_url_refused"),
        ("POST", "/v1/peers", {"url": "http://xn--a"}, "peer_url_refused"),
        ("POST", "/v1/peers", {"url": "http://xn--a.example:80/x"}, "peer_url_refused"),
    ],
)
def test_wrong_requests_have_their_codes(
    pair: tuple[RunningNode, RunningNode], method: str, path: str, body: object, code: str
) -> None:
    answer = pair[0].http.request(method, path, json=body)
    assert answer.json()["code"] == code


def state_of(node: RunningNode, url: str) -> dict[str, Any]:
    """The node's document of a peer, once it has tried to sync with it."""
    deadline = time.monotonic() + SYNC_SECONDS_MAX
    while True:
        (peer,) = (p for p in node.http.get("/v1/peers").json()["peers"] if p["url"] == url)
        if peer["state"] != "new":
            return dict(peer)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_node_is_never_its_own_peer(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as a, running_node(tmp_path / "b") as b:
        for url in (a.url, a.url.replace("127.0.0.1", "localhost")):
            added = a.http.post("/v1/peers", json={"url": url})
            assert (added.status_code, added.json().get("code")) == (422, "peer_url_refused")
            assert "this node" in added.json()["detail"]
            report = finished(a, a.http.post("/v1/syncs", json={"peer_url": url}).json())["report"]
            assert (report["outcome"], report["code"]) == ("refused", "peer_url_refused")
        assert a.http.get("/v1/peers").json()["peers"] == []
        assert a.http.post("/v1/peers", json={"url": b.url}).status_code == 201


def test_a_copy_of_a_database_is_another_node(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as a:
        fill(a, range(3))
    (tmp_path / "b").mkdir()
    copyfile(tmp_path / "a" / "sdstore.db", tmp_path / "b" / "sdstore.db")
    with running_node(tmp_path / "a") as a, running_node(tmp_path / "b") as b:
        fill(b, range(3, 6))
        report = finished(a, a.http.post("/v1/syncs", json={"peer_url": b.url}).json())["report"]
        assert (report["outcome"], report["entries_received"]) == ("in_sync", 3), report


def test_a_peer_of_the_settings_that_is_the_node_itself_is_refused_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        # A name for the same place, so that nothing but the contact can tell.
        with running_node(tmp_path, listener=free, peers=[url]) as node:
            peer = state_of(node, url)
    assert (peer["state"], peer.get("code")) == ("refused", "peer_url_refused")
    assert "this node" in peer["reason"]
    (line,) = (r for r in caplog.records if r.levelname == "ERROR" and url in r.getMessage())
    assert "refused" in line.getMessage()


def test_a_peer_whose_name_leads_to_a_private_address_is_an_error_at_start_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "http://localhost:1"
    with running_node(tmp_path, peers=[url], private_peers=False) as node:
        peer = state_of(node, url)
    assert (peer["state"], peer.get("code")) == ("refused", "peer_url_refused")
    assert "private_peers" in peer["reason"]
    assert [r.levelname for r in caplog.records if url in r.getMessage()] == ["ERROR"]


def samples(node: RunningNode, prefix: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples of `/metrics` by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(node.http.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def test_metrics_tell_of_each_peer_what_its_syncs_came_to(
    pair: tuple[RunningNode, RunningNode],
) -> None:
    a, b = pair
    fill(a, range(3))
    fill(b, range(10, 15))
    peer = a.http.post("/v1/peers", json={"url": b.url}).json()
    assert state_of(a, b.url)["state"] == "healthy"
    dead = "http://127.0.0.1:1"
    a.http.post("/v1/peers", json={"url": dead})
    state_of(a, dead)
    report = a.http.get(f"/v1/peers/{peer['id']}/status").json()["last_report"]
    found = samples(a, "sdstore_peer_")

    def value(name: str, url: str = b.url, **labels: str) -> float | None:
        return found.get((name, frozenset({"peer": url, **labels}.items())))

    assert value("sdstore_peer_syncs_total", outcome="in_sync") == 1
    assert value("sdstore_peer_syncs_total", dead, outcome="peer_fault") == 1
    assert value("sdstore_peer_sync_seconds_total") == pytest.approx(report["seconds"])
    assert value("sdstore_peer_sync_bytes_total", direction="up") == report["bytes_up"]
    assert value("sdstore_peer_sync_bytes_total", direction="down") == report["bytes_down"]
    assert value("sdstore_peer_sync_rounds_total") == report["rounds"]
    moved = {
        (direction, kind): value("sdstore_peer_elements_total", direction=direction, kind=kind)
        for direction in ("received", "sent", "refused")
        for kind in ("entries", "claims")
    }
    assert moved["received", "entries"] == 5
    assert moved["sent", "entries"] == 3
    assert moved["refused", "entries"] == 0
    assert abs(time.time() - (value("sdstore_peer_last_proof_timestamp_seconds") or 0)) < 60
    assert ("sdstore_peer_last_proof_timestamp_seconds", frozenset({("peer", dead)})) not in found
    assert value("sdstore_peer_lost_content") == value("sdstore_peer_set_aside") == 0
    assert value("sdstore_peer_mended_total") == 0
    assert value("sdstore_peer_state", state="healthy") == 1
    assert value("sdstore_peer_state", dead, state="unreachable") == 1
    # A sync with a store that is no peer makes no series of its own.
    finished(a, a.http.post("/v1/syncs", json={"peer_url": "http://127.0.0.1:2"}).json())
    after = samples(a, "sdstore_peer_")
    assert {dict(labels)["peer"] for _, labels in after} == {b.url, dead, "other"}
    a.http.delete(f"/v1/peers/{peer['id']}")
    assert b.url not in {dict(labels)["peer"] for _, labels in samples(a, "sdstore_peer_")}


def test_a_fault_of_this_node_is_not_blamed_on_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_node(tmp_path / "a", sync_interval_s=3_600) as a,
        running_node(tmp_path / "b") as b,
    ):
        peer = a.http.post("/v1/peers", json={"url": b.url}).json()
        assert state_of(a, b.url)["state"] == "healthy"

        async def away(*_: object) -> None:
            raise Problem(Code.STORE_UNAVAILABLE, "the database cannot be used")

        with monkeypatch.context() as outage:
            outage.setattr(NodeIndex, "catch_up", away)
            fill(b, range(3))
            sync = finished(a, a.http.post(f"/v1/peers/{peer['id']}/sync").json())
        shown = a.http.get(f"/v1/peers/{peer['id']}").json()
    report = sync["report"]
    assert (report["outcome"], report["code"]) == ("local_fault", "store_unavailable")
    assert (shown["state"], shown["failures"]) == ("healthy", 0)
    assert shown["reason"].startswith("the fault is this node's, not the peer's: ")
    assert not [r for r in caplog.records if f"{b.url} is failing" in r.getMessage()]
