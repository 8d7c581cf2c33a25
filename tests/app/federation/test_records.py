"""What a node knows of its peers and sessions after a restart."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.support.federation import message
from tests.support.server import RunningNode, running_node

DEAD = "http://127.0.0.1:9"
MESSAGES_COUNT = 300
SEED = 15
QUIET_S = 3_600.0


def wait_until(is_so: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + 30
    while not (found := is_so()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return found


def peer_of(node: RunningNode) -> dict[str, Any]:
    [peer] = node.http.get("/v1/peers").json()["peers"]
    found: dict[str, Any] = peer
    return found


def status_of(node: RunningNode) -> dict[str, Any]:
    found: dict[str, Any] = node.http.get(f"/v1/peers/{peer_of(node)['id']}/status").json()
    return found


def synced(node: RunningNode) -> dict[str, Any]:
    """The report of a session that this starts, or of the one that is running."""
    started = node.http.post(f"/v1/peers/{peer_of(node)['id']}/sync").json()
    sync_id = started.get("id") or started["sync_id"]

    def ended() -> Any:
        return node.http.get(f"/v1/syncs/{sync_id}").json()["report"]

    report: dict[str, Any] = wait_until(ended)
    assert report["outcome"] == "in_sync", report
    return report


def first_session(node: RunningNode) -> dict[str, Any]:
    """The report of the first session of this process, which brings news."""

    def ended() -> Any:
        found = node.http.get("/v1/syncs").json()["syncs"]
        return [each["report"] for each in found if each["process"] == process and each["report"]]

    process = node.http.post("/v1/syncs", json={"peer_url": DEAD}).json()["process"]
    reports: list[dict[str, Any]] = wait_until(
        lambda: [each for each in ended() if each["entries_received"]]
    )
    return reports[-1]


def in_database(data_dir: Path, statement: str, *arguments: Any) -> list[Any]:
    [path] = data_dir.glob("*.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, arguments).fetchall()


def test_a_restart_costs_no_full_session_and_a_damaged_memory_costs_one(tmp_path: Path) -> None:
    a_dir = tmp_path / "a"
    with running_node(tmp_path / "b") as b:
        for number in range(MESSAGES_COUNT):
            b.publish(message(number))
        settings = {"peers": [b.url], "sync_interval_s": QUIET_S}
        with running_node(a_dir, **settings) as a:
            wait_until(lambda: peer_of(a)["state"] == "healthy")
            assert synced(a)["proved"]
            before = status_of(a)
            sessions = {each["id"]: each for each in a.http.get("/v1/syncs").json()["syncs"]}
        b.publish(message(MESSAGES_COUNT))
        with running_node(a_dir, **settings) as a:
            after = status_of(a)
            kept = ("state", "since_ms", "url", "origin")
            assert [after[name] for name in kept] == [before[name] for name in kept]
            assert after["divergence"]["proved_at_ms"] >= before["divergence"]["proved_at_ms"]
            remembered = {each["id"]: each for each in a.http.get("/v1/syncs").json()["syncs"]}
            moved = [each for each in sessions.values() if each["report"]["entries_received"]]
            assert moved
            assert all(remembered[each["id"]]["report"] == each["report"] for each in moved)
            news = first_session(a)
            assert news["rounds"] == 2
            assert news["bytes_up"] + news["bytes_down"] <= 500
        b.publish(message(MESSAGES_COUNT + 1))
        raw = random.Random(SEED).randbytes(500)
        in_database(a_dir, "UPDATE peers SET memory = ?", raw)
        with running_node(a_dir, **settings) as a:
            whole = first_session(a)
            assert whole["rounds"] > 2
            assert whole["bytes_up"] + whole["bytes_down"] > 500


def test_the_state_of_a_peer_survives_a_restart_and_peers_of_former_settings_go(
    tmp_path: Path,
) -> None:
    with running_node(tmp_path, peers=[DEAD]) as node:
        wait_until(lambda: peer_of(node)["state"] == "unreachable")
        before = peer_of(node)
    with running_node(tmp_path, peers=[DEAD]) as node:
        after = peer_of(node)
        assert (after["state"], after["since_ms"]) == (before["state"], before["since_ms"])
    with running_node(tmp_path) as node:
        assert node.http.get("/v1/peers").json()["peers"] == []


def test_the_record_of_divergence_counts_what_the_peer_lacks_and_how_old_it_is(
    tmp_path: Path,
) -> None:
    with running_node(tmp_path / "b") as b:
        for number in range(5):
            b.publish(message(number))
        with running_node(tmp_path / "a", peers=[b.url], sync_interval_s=QUIET_S) as a:
            wait_until(lambda: peer_of(a)["state"] == "healthy")
            synced(a)
            equal = status_of(a)["divergence"]
            assert (equal["missing_here"], equal["missing_there"]) == (0, 0)
            assert equal["missing_there_is_exact"]
            assert equal["oldest_difference_at_ms"] is None
            assert equal["proved_at_ms"] <= time.time() * 1_000
            url = b.url
    with running_node(tmp_path / "a", peers=[url], sync_interval_s=QUIET_S) as a:
        wait_until(lambda: peer_of(a)["state"] == "unreachable")
        for number in range(5, 8):
            a.publish(message(number))
        apart = status_of(a)["divergence"]
        assert (apart["missing_there"], apart["missing_there_is_exact"]) == (3, True)
        [(first_ms,)] = in_database(
            tmp_path / "a",
            "SELECT min(received_at_ms) FROM messages WHERE message_id IN (?, ?, ?)",
            "m5",
            "m6",
            "m7",
        )
        assert apart["oldest_difference_at_ms"] == first_ms
        assert 0 <= apart["oldest_difference_age_s"] < 60
        assert apart["proved_at_ms"] == equal["proved_at_ms"]
