"""Ancestors over a real socket, in both forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sdstore.client import StoreClient
from sdstore.sds.model import HistoryEntry, Message
from sdstore.wire import store_pb2 as wire
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node

CHANNEL = "a/channel"
COUNT = 30


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """Messages m1 … m30, each naming the one before it; m1 names one that nobody sent."""
    with running_node(tmp_path_factory.mktemp("node")) as running:
        for number in range(1, COUNT + 1):
            history = (HistoryEntry(f"m{number - 1}"),)
            sent = Message(f"m{number}", CHANNEL, "", number, history, content=b"x")
            assert running.publish(sent).status_code == 201
        yield running


def ids(document: dict[str, Any]) -> list[str]:
    return [each["message"]["message_id"] for each in document["messages"]]


def names(first: int, last: int) -> list[str]:
    return [f"m{number}" for number in range(first, last + 1)]


def test_pages_of_one_message_go_back_in_time_and_run_forward_inside(node: RunningNode) -> None:
    first = node.http.get("/v1/messages/m30/ancestors", params={"limit": 20})
    assert ids(first.json()) == names(10, 29)
    assert first.json()["missing"] == []
    second = node.http.get(first.links["next"]["url"])
    assert ids(second.json()) == names(1, 9)
    assert (second.json()["missing"], second.json()["next"]) == (["m0"], None)


def test_the_query_form_takes_any_id_and_channel(node: RunningNode) -> None:
    answer = node.http.get(
        "/v1/messages/ancestors", params={"message_id": "m3", "channel_id": CHANNEL}
    )
    assert ids(answer.json()) == ["m1", "m2"]
    elsewhere = node.http.get(
        "/v1/messages/ancestors", params={"message_id": "m3", "channel_id": "another"}
    )
    assert (elsewhere.status_code, elsewhere.json()["code"]) == (404, "not_found")


def test_the_walk_does_not_pass_what_is_known(node: RunningNode) -> None:
    body = {"channel_id": CHANNEL, "heads": ["m30"], "known": ["m25"]}
    answer = node.http.post("/v1/messages/ancestors", json=body)
    assert ids(answer.json()) == names(26, 29)
    assert (answer.json()["missing"], answer.json()["next"]) == ([], None)


def test_both_forms_say_the_same(node: RunningNode) -> None:
    request = wire.AncestorsRequest(channel_id=CHANNEL, heads=["m9"], known=["m5"], limit=2)
    answer = node.http.post(
        "/v1/messages/ancestors",
        content=request.SerializeToString(),
        headers={**PROTOBUF, **WANTS_PROTOBUF},
    )
    page = wire.AncestorsPage.FromString(answer.content)
    json = node.http.post(
        "/v1/messages/ancestors",
        json={"channel_id": CHANNEL, "heads": ["m9"], "known": ["m5"], "limit": 2},
    ).json()
    assert [m.digest.hex() for m in page.messages] == [
        m["meta"]["digest"] for m in json["messages"]
    ]
    assert page.next == json["next"]


def test_the_client_reads_all_pages(node: RunningNode) -> None:
    with StoreClient(node.url) as client:
        found: list[str] = []
        after = None
        while True:
            page = client.ancestors(CHANNEL, ["m30"], ["m3"], after=after, limit=7)
            found = [each.message.message_id for each in page.messages] + found
            after = page.next
            if after is None:
                break
        assert found == names(4, 29)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"channel_id": CHANNEL, "heads": ["m"] * 1_001}, 413, "too_many_items"),
        ({"channel_id": CHANNEL, "heads": [], "known": ["m"] * 10_001}, 413, "too_many_items"),
        ({"channel_id": CHANNEL, "heads": ["\0"]}, 422, "nul_character"),
        ({"channel_id": CHANNEL, "heads": ["m"], "limit": 1_001}, 400, "invalid_body"),
        ({"channel_id": CHANNEL, "heads": ["m"], "after": "nonsense"}, 400, "invalid_cursor"),
        ({"heads": ["m"]}, 400, "invalid_body"),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    node: RunningNode, body: dict[str, Any], status: int, code: str
) -> None:
    answer = node.http.post("/v1/messages/ancestors", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_protobuf_bodies_have_the_same_bounds(node: RunningNode) -> None:
    request = wire.AncestorsRequest(channel_id=CHANNEL, heads=["m9"], limit=1_001)
    answer = node.http.post(
        "/v1/messages/ancestors", content=request.SerializeToString(), headers=PROTOBUF
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_body")
