"""When nodes sync, over real sockets: news goes at once, and nobody waits for another peer."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from tests.support.cli import http_server
from tests.support.federation import message
from tests.support.server import RunningNode, running_node

INTERVAL_S = 30.0
DEAD = "http://127.0.0.1:9"


def seconds_until_readable(node: RunningNode, number: int) -> float:
    """How long a message takes to a node; fails long before a cycle would bring it."""
    started_s = time.monotonic()
    while not node.http.get(f"/v1/messages/m{number}").is_success:
        assert time.monotonic() - started_s < INTERVAL_S / 3
        time.sleep(0.01)
    return time.monotonic() - started_s


def sessions(node: RunningNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.http.get("/v1/syncs").json()["syncs"]
    return found


def wait_for_peers(node: RunningNode, state: str = "healthy", count: int = 1) -> None:
    """Wait until so many peers are in a state; healthy ones with the links that carry their nudges."""
    until_s = time.monotonic() + 60
    while sum(peer["state"] == state for peer in peers_of(node)) < count or (
        state == "healthy" and links_count(node) < count
    ):
        assert time.monotonic() < until_s, peers_of(node)
        time.sleep(0.01)


def links_count(node: RunningNode) -> int:
    lines = node.http.get("/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("sdstore_relay_links ")]
    return int(float(value))


def peers_of(node: RunningNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.http.get("/v1/peers").json()["peers"]
    return found


def quiet_sessions(*nodes: RunningNode) -> list[int]:
    """The numbers of sessions of each node, once they have not changed for longer than a nudge takes."""
    counts: list[int] = []
    unchanged_s = time.monotonic()
    until_s = unchanged_s + 20
    while time.monotonic() - unchanged_s < 0.8:
        now = [len(sessions(node)) for node in nodes]
        if now != counts:
            counts, unchanged_s = now, time.monotonic()
        assert unchanged_s < until_s, "the nodes never stop"
        time.sleep(0.05)
    return counts


def test_a_message_is_readable_on_a_peer_within_a_second(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "b") as b,
        running_node(tmp_path / "a", peers=[b.url], sync_interval_s=INTERVAL_S) as a,
    ):
        wait_for_peers(a)
        took_s = []
        for number in range(5):
            a.publish(message(number))
            took_s.append(seconds_until_readable(b, number))
        assert min(took_s) < 1.0  # busy cores can delay some
        [peer] = peers_of(a)
        assert peer["state"] == "healthy"
        pause_s = peer["next_sync_at_ms"] / 1_000 - time.time()
        assert 0 < pause_s <= INTERVAL_S


def test_a_hanging_a_dead_and_a_lying_peer_delay_no_other_pair(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as hanging,
        http_server(200, b"no store") as liar,
        running_node(tmp_path / "b") as b,
    ):
        others = [f"http://127.0.0.1:{hanging.getsockname()[1]}", DEAD, liar]
        with running_node(tmp_path / "a", peers=[*others, b.url], sync_interval_s=INTERVAL_S) as a:
            wait_for_peers(a)
            took_s = []
            for number in range(5):
                a.publish(message(number))
                took_s.append(seconds_until_readable(b, number))
            assert min(took_s) < 1.0  # busy cores can delay some
            wait_for_peers(a, "unreachable")
            wait_for_peers(a, "failing")
            states = {peer["url"]: peer["state"] for peer in peers_of(a)}
            assert states == dict(
                zip([*others, b.url], ["new", "unreachable", "failing", "healthy"], strict=True)
            )
            text = a.http.get("/metrics").text
            assert f'sdstore_peer_state{{peer="{DEAD}",state="unreachable"}} 1.0' in text


def test_two_nodes_that_are_peers_of_each_other_need_one_session_for_a_message(
    tmp_path: Path,
) -> None:
    with (
        running_node(tmp_path / "b", sync_interval_s=INTERVAL_S) as b,
        running_node(tmp_path / "a", peers=[b.url], sync_interval_s=INTERVAL_S) as a,
    ):
        b.http.post("/v1/peers", json={"url": a.url}).raise_for_status()
        wait_for_peers(a)
        wait_for_peers(b)
        before = quiet_sessions(a, b)
        for number, (author, reader) in enumerate([(a, b), (b, a)]):
            author.publish(message(number))
            seconds_until_readable(reader, number)
            after = quiet_sessions(a, b)
            own = 1 if author is a else 0
            assert [after[0] - before[0], after[1] - before[1]] == [own, 1 - own]
            before = after


def test_what_a_peer_sent_is_news_for_all_peers_but_that_one(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "b") as b,
        running_node(tmp_path / "c") as c,
        running_node(tmp_path / "a", peers=[b.url, c.url], sync_interval_s=INTERVAL_S) as a,
    ):
        wait_for_peers(a, count=2)
        quiet_sessions(a)
        before = len(sessions(a))
        b.publish(message(1))  # and nudges a, which listens to it
        seconds_until_readable(c, 1)
        quiet_sessions(a)
        new = sessions(a)[: len(sessions(a)) - before]
        assert [each["peer_url"] for each in new] == [c.url, b.url]


def test_writes_that_a_peer_does_not_want_start_no_session_with_it(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "b", channels=["wanted"]) as b,
        running_node(tmp_path / "a", peers=[b.url], sync_interval_s=INTERVAL_S) as a,
    ):
        wait_for_peers(a)
        [before] = quiet_sessions(a)
        a.publish(message(1, "other"))
        assert quiet_sessions(a) == [before]
        a.publish(message(2, "wanted"))
        seconds_until_readable(b, 2)
