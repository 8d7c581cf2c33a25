"""Federation over real sockets: sessions, peers and their loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.access.operator import token_for
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from tests.support.cli import http_server
from tests.support.federation import message
from tests.support.server import RunningNode, running_node


def peers_of(node: RunningNode) -> dict[str, dict[str, Any]]:
    """Documents of a node's peers by URL."""
    return {each["url"]: each for each in node.http.get("/v1/peers").json()["peers"]}


WAIT_SECONDS_MAX = 60
examples = count()
drafts = st.lists(
    st.tuples(
        st.sampled_from(["left", "right", "both"]),
        st.integers(0, 3),  # channel
        st.integers(-5, 30),  # message and Lamport timestamp
        st.integers(0, 1),  # variant
        st.lists(st.integers(0, 5), max_size=2, unique=True),  # hints
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[StoreClient, StoreClient, str]]:
    """Clients of two nodes, and the URL of the second."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        running_node(folder / "one") as one,
        running_node(folder / "two") as two,
        StoreClient(one.url, token=token_for(one.url)) as first,
        StoreClient(two.url, token=token_for(two.url)) as second,
    ):
        yield first, second, two.url


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drafts=drafts)
def test_two_nodes_are_equal_after_one_sync_and_answer_the_same_hints(
    pair: tuple[StoreClient, StoreClient, str], drafts: list[Any]
) -> None:
    one, two, url = pair
    example = next(examples)
    for client, side in ((one, "left"), (two, "right")):
        items = [
            PublishItem(
                encode(message(number, f"{example}/{channel}", content=b"%d" % variant)),
                tuple(b"%d %d" % (example, hint) for hint in hints),
            )
            for where, channel, number, variant, hints in drafts
            if where in (side, "both")
        ]
        assert all(each.error is None for each in client.publish_batch(items))
    report = finished(one, one.start_sync(url).id)
    assert report["outcome"] == "in_sync", report
    assert channels(one) == channels(two)
    for hint in range(6):
        key = b"%d %d" % (example, hint)
        assert digests_of(one, key) == digests_of(two, key)


def channels(client: StoreClient) -> dict[str, bytes | None]:
    """Name and root of every channel."""
    return {c.channel_id: client.channel(c.channel_id).root for c in client.channels()}


def digests_of(client: StoreClient, hint: bytes) -> set[bytes]:
    return {each.digest for each in client.hint(hint).messages}


def finished(client: StoreClient, sync_id: str) -> dict[str, Any]:
    """The report of a session, once it is there."""
    until(lambda: client.sync(sync_id).state == "finished")
    report: dict[str, Any] = client.sync(sync_id).document["report"]
    return report


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_dead_and_a_lying_peer_delay_nobody(tmp_path: Path) -> None:
    with (
        http_server(200, b"no store") as liar,
        running_node(tmp_path / "healthy") as healthy,
        running_node(
            tmp_path / "node",
            peers=["http://127.0.0.1:9", liar, healthy.url],
            sync_interval_s=0.1,
        ) as node,
    ):
        for number in range(3):  # each message needs a later sync than the one before
            healthy.publish(message(number))
            until(lambda number=number: node.http.get(f"/v1/messages/m{number}").is_success)
        until(lambda: peers_of(node)["http://127.0.0.1:9"]["failures"] > 1)
        expected = {"http://127.0.0.1:9": "unreachable", liar: "failing", healthy.url: "healthy"}
        # A message is here before the session that brought it has ended.
        until(lambda: {url: peer["state"] for url, peer in peers_of(node).items()} == expected)


def test_a_node_that_others_can_reach_connects_to_no_private_address(tmp_path: Path) -> None:
    with running_node(tmp_path, private_peers=False) as node:
        for path, body in (("/v1/peers", "url"), ("/v1/syncs", "peer_url")):
            answer = node.http.post(path, json={body: "http://127.0.0.1:8000"})
            assert (answer.status_code, answer.json()["code"]) == (422, "peer_url_refused")


def test_a_node_does_not_become_its_own_peer(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        answer = node.http.post("/v1/peers", json={"url": node.url})
        assert (answer.status_code, answer.json()["code"]) == (422, "peer_url_refused")
        assert "this node itself" in answer.json()["detail"]
        assert node.http.get("/v1/peers").json()["peers"] == []


def test_events_of_a_session_end_with_its_report(tmp_path: Path) -> None:
    with running_node(tmp_path / "a") as a, running_node(tmp_path / "b") as b:
        b.publish(message(1))
        sync = a.http.post("/v1/syncs", json={"peer_url": b.url}).json()
        stream = a.http.get(f"/v1/syncs/{sync['id']}/events").text
        *_, last = stream.strip().split("\n\n")
        assert "event: end" in last
        assert '"outcome":"in_sync"' in last


def test_hints_beyond_the_most_are_said_to_their_publisher_and_a_pair_settles_on_the_same(
    tmp_path: Path,
) -> None:
    frame = encode(message(1))
    hints = [b"hint %d" % n for n in range(96)]
    with (
        running_node(tmp_path / "one") as one,
        running_node(tmp_path / "two") as two,
        StoreClient(one.url, token=token_for(one.url)) as first,
        StoreClient(two.url, token=token_for(two.url)) as second,
    ):
        for client, some in ((first, hints), (second, hints[::-1])):
            parts = [tuple(some[at : at + 16]) for at in range(0, len(some), 16)]
            outcomes = [client.publish(frame, part) for part in parts]
            assert [each.hints_dropped for each in outcomes] == [0, 0, 0, 0, 16, 16]
            batch = list(client.publish_batch([PublishItem(frame, parts[-1])]))
            assert [each.hints_dropped for each in batch] == [16]
            found = client.lookup(hints, presence_only=True)
            assert set(found.missing) == set(some[64:])
        body = {"content-type": "application/x-protobuf", "retrieval-hint": hints[-1].hex()}
        assert (
            one.http.post("/v1/messages", content=frame, headers=body).json()["hints_dropped"] == 1
        )
        report = finished(first, first.start_sync(two.url).id)
        assert (report["outcome"], report["proved"]) == ("in_sync", True)
        assert report["set_aside_count"] == 0
        for client in (first, second):
            assert not client.lookup(hints, presence_only=True).missing
