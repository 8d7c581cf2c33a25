"""A live reader that names indexers hears what joins the confirmed prefix, and how far the tail moved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.server.limits import DEFAULT_LIMITS
from sdstore.ordering import Ordering, Roles
from tests.app.http.test_live import Event, live
from tests.app.http.test_order import CHAIN, CHANNEL, page, publish
from tests.ordering.graphs import Sent, random_graph
from tests.support.server import RunningNode, running_node
from tests.support.stores import Stores, taken_back

PATH = "/v1/channels/live"
ABC: dict[str, Any] = {"channel_id": CHANNEL, "indexer": ["a", "b", "c"]}


@pytest.fixture
def node(tmp_path: Path, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path, database_url=stores.new_url()) as running:
        yield running


def confirmed(events: Iterator[Event]) -> dict[str, Any]:
    """The data of the next event that is not about a message."""
    found = next(each for each in events if each.name not in ("comment", "message"))
    assert (found.name, found.event_id) == ("confirmed", None)
    return found.data


def test_a_reader_hears_of_confirmations_and_of_how_far_the_tail_was_rewound(
    node: RunningNode,
) -> None:
    """Against an ordering that gets the same messages, one by one."""
    sent = random_graph(random.Random(20), writer_count=5, message_count=40, news_share=0.8)
    ordering = Ordering(Roles(indexers=["a", "b", "c"]))
    shown: list[str] = []  # the order, as of the last event
    rewound_counts = set()
    with live(node, PATH, **ABC) as events:
        begin = confirmed(events)
        assert begin["message_ids"] == []
        for each in sent:
            before = ordering.confirmed_count
            ordering.add(*each)
            publish(node, [each])
            if ordering.confirmed_count == before:
                continue
            data = confirmed(events)
            assert data["message_ids"] == ordering.confirmed[before:]
            assert data["confirmed_count"] == ordering.confirmed_count
            assert data["tail_count"] == len(ordering.tail)
            now = [*ordering.confirmed, *ordering.tail]
            kept = len(shown) - data["rewound"]
            assert shown[:kept] == now[:kept]
            shown = now
            rewound_counts.add(data["rewound"])
    assert ordering.confirmed_count > 20
    assert max(rewound_counts) > 0


def test_a_reader_resumes_behind_the_confirmations_it_has(node: RunningNode) -> None:
    publish(node, CHAIN[:4])
    cursor = page(node)["next_confirmed"]
    with live(node, PATH, **ABC, confirmed_after=cursor) as events:
        assert confirmed(events)["message_ids"] == []
        publish(node, CHAIN[4:6])
        first = confirmed(events)
    publish(node, CHAIN[6:])
    with live(node, PATH, **ABC, confirmed_after=first["cursor"]) as events:
        following = confirmed(events)
    assert [*first["message_ids"], *following["message_ids"]] == ["c0", "a1", "b1", "c1", "a2"]
    # The same cursors serve the pages.
    assert page(node, after=following["cursor"])["items"][0]["message_id"] == "b2"


def test_a_database_that_went_back_ends_the_confirmations_and_not_the_messages(
    stores: Stores, tmp_path: Path
) -> None:
    url = stores.new_url()
    with running_node(tmp_path, database_url=url) as node, live(node, PATH, **ABC) as events:
        publish(node, CHAIN[:4])
        while confirmed(events)["confirmed_count"] < 2:
            pass
        with taken_back(url):
            publish(node, CHAIN[4:])
            while confirmed(events)["confirmed_count"] < 7:
                pass
        publish(node, [Sent("z0", "z", ())])
        problem = next(each for each in events if each.name == "problem")
        assert problem.data["code"] == "cursor_rewound"
        publish(node, [Sent("z1", "z", ())])
        while next(each for each in events if each.name == "message").message_id != "z1":
            pass


def test_an_order_that_becomes_too_large_ends_with_its_problem(tmp_path: Path) -> None:
    with (
        running_node(tmp_path, replace(DEFAULT_LIMITS, order_bytes_max=50_000)) as node,
        live(node, PATH, **ABC) as events,
    ):
        publish(node, [Sent(f"{n}", "z", ()) for n in range(60)])
        problem = next(each for each in events if each.name == "problem")
        assert problem.data["code"] == "order_too_large"


def test_a_caller_without_budget_gets_its_messages_and_the_confirmations_later(
    tmp_path: Path,
) -> None:
    """60 ms a minute are one each second; each look at the order takes one at least."""
    limits = replace(DEFAULT_LIMITS, order_ms_per_minute=60, live_heartbeat_s=1)
    with running_node(tmp_path, limits) as node, live(node, PATH, **ABC) as events:
        for n in range(100):
            answer = node.http.get("/v1/channels/order", params={"channel_id": "x", "indexer": n})
            if answer.status_code != 200:
                break
            publish(node, [Sent(f"x{n}", "x", ())], "x")
        else:
            pytest.fail("the budget was never spent")
        publish(node, CHAIN)
        heard = [next(events) for _ in range(9)]
        assert [each.message_id for each in heard if each.name == "message"]
        ids: list[str] = []
        while len(ids) < 7:
            ids += confirmed(events)["message_ids"]
