"""The order of a channel over a real socket: equal to `Ordering`, in pages that hold, within bounds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.entries import Entry
from app.orders import Order, Wanted
from app.server.limits import DEFAULT_LIMITS
from sdstore.ordering import Ordering, Roles
from sdstore.sds.codec import encode
from sdstore.sds.model import (
    SHA256_MESSAGE,
    Dialect,
    HistoryEntry,
    Message,
    entry_digest,
    message_id_layout,
)
from sdstore.wire import store_pb2 as wire
from tests.app.http.test_lost_content import harm_frame
from tests.app.store.test_frames import cut
from tests.ordering.graphs import Sent, graph, random_graph
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores, taken_back


def versions_of(written: Message) -> list[Message]:
    """A message and copies of it; the ID of the last one is the hash of its content."""
    return [
        written,
        replace(written, causal_history=(HistoryEntry("ghost", b"", "m"),)),
        replace(written, sender_id="mallory"),
        replace(written, content=message_id_layout(written)),
    ]


CHANNEL = "garden/1"
PATH = "/v1/channels/order"
CHAIN = graph(
    "a0, b0: a0, c0: b0, a1: a0 c0, b1: b0 a1, c1: c0 b1, a2: a1 c1, b2: b1 a2, c2: c1 b2"
)
ABC = {"channel_id": CHANNEL, "indexer": ["a", "b", "c"]}


def message(sent: Sent, lamport: int = 1, channel_id: str = CHANNEL) -> Message:
    history = tuple(map(HistoryEntry, sent.causes))
    content = b"by " + sent.sender_id.encode()
    return Message(sent.message_id, channel_id, sent.sender_id, lamport, history, content=content)


def publish(node: RunningNode, some: Iterable[Sent], channel_id: str = CHANNEL) -> None:
    items = [
        wire.PublishItem(frame=encode(message(each, at, channel_id)))
        for at, each in enumerate(some)
    ]
    body = wire.PublishBatch(items=items).SerializeToString()
    answer = node.http.post("/v1/messages/batch", content=body, headers=PROTOBUF)
    assert {each["outcome"] for each in answer.json()["outcomes"]} <= {"stored", "duplicate"}


def page(node: RunningNode, query: dict[str, Any] = ABC, **more: Any) -> dict[str, Any]:
    answer = node.http.get(PATH, params=query | more)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def walk(node: RunningNode, query: dict[str, Any] = ABC, **more: Any) -> list[dict[str, Any]]:
    """All items, going on by `Link` alone."""
    answer = node.http.get(PATH, params=query | more)
    items = []
    while True:
        assert answer.status_code == 200, answer.text
        items += answer.json()["items"]
        if answer.json()["next"] is None:
            return items
        answer = node.http.get(answer.links["next"]["url"])


def ids(items: Iterable[dict[str, Any]]) -> list[str]:
    return [each["message_id"] for each in items]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


@pytest.fixture
def node(tmp_path: Path, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path, database_url=stores.new_url()) as running:
        yield running


@pytest.mark.parametrize("seed", [1, 2])
def test_the_answer_is_that_of_an_ordering_fed_with_the_same_messages(
    node: RunningNode, seed: int
) -> None:
    """Also if some of them are retired meanwhile, and for who asks afterwards for the first time."""
    rng = random.Random(seed)
    sent = random_graph(rng, writer_count=5, message_count=60, news_share=0.8)
    arriving = sorted(sent, key=lambda each: int(each.message_id[1:]) + rng.uniform(0, 4))
    query = {"channel_id": CHANNEL, "indexer": ["b", "a", "c"], "relayed": ["e"]}
    ordering = Ordering(Roles(indexers=["a", "b", "c"], relayed=frozenset("e")))
    confirmed: list[str] = []
    for at in range(0, len(arriving), 7):
        publish(node, arriving[at : at + 7])
        for each in arriving[at : at + 7]:
            ordering.add(*each)
        for each in rng.sample(arriving[: at + 7], 2):
            retired = {"message_id": each.message_id, "reason": "a test"}
            node.http.post("/v1/retirements", json=retired).raise_for_status()
        items = walk(node, query, limit=rng.choice([1, 3, 1_000]))
        whole = page(node, query)
        assert ids(items) == [*ordering.confirmed, *ordering.tail]
        assert [each["confirmed"] for each in items] == [
            at < ordering.confirmed_count for at in range(len(items))
        ]
        assert whole["confirmed_count"] == ordering.confirmed_count
        assert whole["tail_count"] == len(ordering.tail)
        assert whole["waiting_count"] == ordering.waiting_count
        added = {each.message_id for each in arriving[: at + 7]}
        assert set(whole["missing"]) == set(ordering.missing) - added
        assert ids(items)[: len(confirmed)] == confirmed
        confirmed = ordering.confirmed
    assert len(confirmed) > 5
    newcomer = walk(node, {**query, "relayed": ["e", "nobody"]})
    assert ids(newcomer) == [*ordering.confirmed, *ordering.tail]
    assert {each["sender_id"] for each in items} == set("abcde")


def test_both_forms_say_the_same_and_an_item_can_have_its_message(node: RunningNode) -> None:
    publish(node, [*CHAIN[:5], Sent("zz", "", ()), Sent("b9", "b", ()), Sent("w", "w", ("gone",))])
    query = {**ABC, "include": "messages", "limit": 3}
    document = page(node, query)
    found = wire.OrderPage.FromString(
        node.http.get(PATH, params=query, headers=WANTS_PROTOBUF).content
    )
    assert ids(document["items"]) == [each.message_id for each in found.items]
    assert [each["digest"] for each in document["items"]] == [e.digest.hex() for e in found.items]
    assert [each["message"]["message_id"] for each in document["items"]] == ids(document["items"])
    assert all(each.message.digest == each.digest for each in found.items)
    for name in ("confirmed_count", "tail_count", "waiting_count", "senderless_count"):
        assert document[name] == getattr(found, name)
    assert (document["waiting_count"], document["senderless_count"]) == (1, 1)
    assert document["indexers"] == [
        {
            "sender_id": each.sender_id,
            "message_count": each.message_count,
            "last_message_id": each.last_message_id,
            "unseen_count": each.unseen_count,
        }
        for each in found.indexers
    ]
    assert [each["message_count"] for each in document["indexers"]] == [2, 2, 1]
    assert document["missing"] == list(found.missing) == ["gone"]
    assert [each["kind"] for each in document["breaches"]] == ["fork"]
    assert [each.kind for each in found.breaches] == ["fork"]
    assert (document["next"], document["next_confirmed"]) == (found.next, found.next_confirmed)
    assert document["complete"] is found.complete is True
    assert "message" not in page(node)["items"][0]


def test_without_indexers_everything_is_tentative_and_the_answer_names_the_breach(
    node: RunningNode,
) -> None:
    publish(node, CHAIN)
    found = page(node, {"channel_id": CHANNEL})
    assert (found["confirmed_count"], found["tail_count"]) == (0, 9)
    assert [each["kind"] for each in found["breaches"]] == ["no_indexers"]


def test_an_unknown_channel_has_an_empty_order(node: RunningNode) -> None:
    found = page(node, {"channel_id": "nothing", "indexer": ["a"]})
    assert (found["items"], found["next"], found["complete"]) == ([], None, True)


# ---- cursors


def test_a_cursor_of_the_confirmed_prefix_holds_for_ever(node: RunningNode) -> None:
    publish(node, CHAIN[:4])
    first = page(node)
    confirmed = ids(first["items"])[: first["confirmed_count"]]
    assert confirmed == ["a0", "b0"]
    publish(node, [*CHAIN[4:], Sent("z", "z", ()), Sent("x", "x", ("a0",))])
    following = page(node, after=first["next_confirmed"])
    assert confirmed + ids(following["items"]) == ids(page(node)["items"])
    assert ids(following["items"])[:2] == ["c0", "a1"]


def test_a_cursor_in_a_tail_that_was_rewound_is_refused(node: RunningNode) -> None:
    publish(node, [*CHAIN[:4], Sent("y0", "y", ())])
    found = page(node, limit=4)
    assert found["confirmed_count"] == 2
    tail_cursor = found["next"]
    assert ids(page(node, after=tail_cursor)["items"]) == ["y0"]
    publish(node, [Sent("z0", "z", ())])
    assert ids(page(node, after=tail_cursor)["items"]) == ["y0", "z0"]
    late = page(node, limit=5)["next"]
    publish(node, [Sent("x0", "x", ())])
    assert code_of(node.http.get(PATH, params={**ABC, "after": late})) == (410, "cursor_rewound")
    assert page(node, after=found["next_confirmed"])["items"]


def test_a_cursor_of_other_writers_another_channel_or_nobody_is_refused(node: RunningNode) -> None:
    publish(node, CHAIN)
    cursor = page(node, limit=1)["next"]
    invalid = (400, "invalid_cursor")
    for other in (
        {"channel_id": CHANNEL, "indexer": ["a", "b"]},
        {"channel_id": "other", "indexer": ["a", "b", "c"]},
        {**ABC, "relayed": "x"},
    ):
        assert code_of(node.http.get(PATH, params={**other, "after": cursor})) == invalid
    for made_up in ("", "x", cursor[:-2]):
        assert code_of(node.http.get(PATH, params={**ABC, "after": made_up})) == invalid
    same_writers = {"channel_id": CHANNEL, "indexer": ["c", "b", "a"], "non_indexer": "x"}
    assert page(node, same_writers, after=cursor)["items"]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"indexer": ["a", "a"]}, (400, "invalid_parameter")),
        ({"indexer": ["a"], "relayed": ["a"]}, (400, "invalid_parameter")),
        ({"indexer": ["a"], "non_indexer": ["a"]}, (400, "invalid_parameter")),
        ({"indexer": [""]}, (400, "invalid_parameter")),
        ({"indexers": ["a"]}, (400, "invalid_parameter")),
        ({"include": "everything"}, (400, "invalid_parameter")),
        ({"indexer": [str(n) for n in range(65)]}, (413, "too_many_items")),
    ],
)
def test_what_is_wrong_with_a_request_has_a_code(
    node: RunningNode, query: dict[str, Any], code: tuple[int, str]
) -> None:
    assert code_of(node.http.get(PATH, params={"channel_id": CHANNEL} | query)) == code


# ---- what a store can hold: variants, lost content, an older copy


def test_of_two_messages_with_one_id_the_first_is_ordered_and_nothing_more_is_confirmed(
    node: RunningNode,
) -> None:
    publish(node, CHAIN[:4])
    confirmed = page(node)["confirmed_count"]
    assert confirmed == 2
    first = page(node)["items"][1]
    same_causes = replace(message(CHAIN[1]), content=b"another content")
    assert node.publish(same_causes).status_code == 201
    assert page(node)["breaches"] == []
    publish(node, [Sent("b0", "b", ())])
    publish(node, CHAIN[4:])
    found = page(node)
    assert found["confirmed_count"] == confirmed
    assert ids(found["items"]) == ids(CHAIN_ITEMS)
    assert found["items"][1]["digest"] == first["digest"]
    [breach] = found["breaches"]
    assert (breach["kind"], breach["message_id"]) == ("variant", "b0")


def test_copies_of_indexers_messages_that_their_ids_disprove_are_no_breach_in_any_arrival(
    node: RunningNode,
) -> None:
    for arrival in permutations(range(4)):
        channel_id = f"copies {arrival}"
        previous: tuple[HistoryEntry, ...] = ()
        for number in range(2):
            written = Message("", channel_id, "a", number, previous, content=b"%d" % number)
            written = replace(written, message_id=SHA256_MESSAGE.make(written))
            versions = versions_of(written)
            for at in arrival:
                assert node.publish(versions[at]).status_code == 201
            previous = (HistoryEntry(written.message_id, b"", "a"),)
        found = page(node, {"channel_id": channel_id, "indexer": ["a"]})
        assert (found["confirmed_count"], found["breaches"]) == (2, []), arrival
        assert (found["tail_count"], found["waiting_count"], found["missing"]) == (0, 0, [])


CHAIN_ITEMS = [{"message_id": each.message_id} for each in CHAIN]


def test_lost_content_holds_back_what_refers_to_it_until_it_comes_back(
    stores: Stores, tmp_path: Path
) -> None:
    url = stores.new_url()
    with running_node(tmp_path, database_url=url) as node:
        publish(node, CHAIN)
        harm_frame(url, 4, cut)
    with running_node(tmp_path, database_url=url) as node:
        found = page(node)
        assert ids(found["items"]) == ["a0", "b0", "c0"]
        assert found["missing"] == ["a1"]
        assert len(found["left_out"]) == 1
        assert found["waiting_count"] == 5
        publish(node, [Sent("d0", "d", ())])
        assert ids(page(node)["items"]) == ["a0", "b0", "c0", "d0"]
        again = message(CHAIN[3], 3)
        assert node.publish(again).status_code == 201
        found = page(node)
        assert ids(found["items"]) == [*ids(CHAIN_ITEMS), "d0"]
        assert (found["left_out"], found["waiting_count"]) == ([], 0)


def test_a_database_that_went_back_has_the_order_of_what_it_holds(
    stores: Stores, tmp_path: Path
) -> None:
    url = stores.new_url()
    with running_node(tmp_path, database_url=url) as node:
        publish(node, CHAIN[:4])
        early = page(node)["next_confirmed"]
        with taken_back(url):
            publish(node, CHAIN[4:])
            late = page(node)
            assert late["confirmed_count"] > 2
        other = graph("c1: c0 a1, z0")
        publish(node, other)
        ordering = Ordering(Roles(indexers=["a", "b", "c"]))
        for each in [*CHAIN[:4], *other]:
            ordering.add(*each)
        found = page(node)
        assert found["confirmed_count"] == ordering.confirmed_count == 3
        assert ids(found["items"]) == [*ordering.confirmed, *ordering.tail]
        refused = node.http.get(PATH, params={**ABC, "after": late["next_confirmed"]})
        assert code_of(refused) == (410, "cursor_rewound")
        assert page(node, after=early)["items"]


# ---- bounds


def test_a_long_channel_is_ordered_in_several_calls_that_show_only_what_is_confirmed(
    tmp_path: Path, stores: Stores
) -> None:
    sent = [Sent(f"a{n}", "a", (f"a{n - 1}",) if n else ()) for n in range(450)]
    limits = replace(DEFAULT_LIMITS, order_messages_per_call_max=100)
    query = {"channel_id": CHANNEL, "indexer": ["a", "z"], "limit": 1_000}
    alone = {**query, "indexer": ["a"]}
    with running_node(tmp_path, limits, database_url=stores.new_url()) as node:
        publish(node, sent)
        first = page(node, query)
        assert (first["complete"], first["items"], first["tail_count"]) == (False, [], 100)
        for _ in range(3):
            assert page(node, query, after=first["next"])["complete"] is False
        assert page(node, query, after=first["next"])["complete"] is True
        assert ids(page(node, query, after=first["next"])["items"]) == [e.message_id for e in sent]
        # A single indexer confirms its own messages at once.
        part = page(node, alone)
        assert not part["complete"]
        assert len(part["items"]) == part["confirmed_count"] > 90
        assert ids(walk(node, alone)) == [each.message_id for each in sent]


def test_a_cursor_that_another_worker_made_waits_until_this_one_has_read_as_far(
    tmp_path: Path, stores: Stores
) -> None:
    limits = replace(DEFAULT_LIMITS, order_messages_per_call_max=100)
    sent = [Sent(f"a{n}", "a", (f"a{n - 1}",) if n else ()) for n in range(250)]
    query = {"channel_id": CHANNEL, "indexer": ["a", "b"], "limit": 200}
    url = stores.new_url()
    with running_node(tmp_path, database_url=url) as node:
        publish(node, sent)
        cursor = page(node, query)["next"]
    with running_node(tmp_path, limits, database_url=url) as node:
        for _ in range(2):
            part = page(node, query, after=cursor)
            assert (part["complete"], part["items"], part["next"]) == (False, [], cursor)
        assert len(page(node, query, after=cursor)["items"]) == 50


def test_two_hundred_sets_of_writers_leave_a_bounded_cache_and_every_answer_right(
    tmp_path: Path,
) -> None:
    limits = replace(DEFAULT_LIMITS, order_sets_max=8)
    with running_node(tmp_path, limits) as node:
        publish(node, CHAIN)
        sets = [["a", "b", "c", f"x{n}", f"y{n}"] for n in range(200)]

        def ask(indexers: list[str]) -> int:
            found = node.http.get(PATH, params={"channel_id": CHANNEL, "indexer": indexers})
            return int(found.json()["tail_count"])

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(ask, sets)) == {4}
        metrics = node.http.get("/metrics").text
        assert "sdstore_orders_cached 8.0" in metrics


def test_a_caller_that_spent_its_budget_waits_and_what_is_computed_is_still_served(
    tmp_path: Path,
) -> None:
    limits = replace(DEFAULT_LIMITS, order_ms_per_minute=10)
    with running_node(tmp_path, limits) as node:
        publish(node, CHAIN)
        assert len(page(node)["items"]) == 9
        statuses = set()
        for n in range(30):
            answer = node.http.get(PATH, params={"channel_id": CHANNEL, "indexer": [f"x{n}"]})
            statuses.add((answer.status_code, answer.json().get("code")))
        assert statuses == {(200, None), (429, "order_budget_spent")}
        assert int(answer.headers["retry-after"]) >= 1
        assert len(page(node)["items"]) == 9


def test_an_order_beyond_the_memory_of_one_is_refused_and_others_are_served(
    tmp_path: Path,
) -> None:
    limits = replace(DEFAULT_LIMITS, order_bytes_max=50_000)
    long = [Sent(f"a{n}", "a", (f"missing {n} " * 80,)) for n in range(30)]
    with running_node(tmp_path, limits) as node:
        publish(node, CHAIN)
        publish(node, long, "long")
        refused = {"channel_id": "long", "indexer": "a"}
        for _ in range(2):
            answer = node.http.get(PATH, params=refused)
            assert code_of(answer) == (422, "order_too_large")
        assert len(page(node)["items"]) == 9


# ---- the parts of an order


def entry(sent: Sent, seq: int) -> Entry:
    frame = encode(message(sent))
    digest = entry_digest(message(sent))
    return Entry(seq, CHANNEL, sent.message_id, 1, digest, bytes(32), Dialect.V2, 0, frame, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_place_names_exactly_the_order_before_it(seed: int) -> None:
    """The hashes that an order remembers are those of one that hashes everything anew."""
    rng = random.Random(seed)
    wanted = Wanted(CHANNEL, ("a", "b", "c"), ())
    sent = random_graph(rng, writer_count=6, message_count=700, news_share=0.3)
    sent.sort(key=lambda each: int(each.message_id[1:]) + rng.uniform(0, 10))
    order = Order(wanted)
    versions = [(0, 0, list[str]())]
    rewound_count = 0
    for at, each in enumerate(sent):
        order.take([entry(each, at + 1)])
        if at % 25:
            continue
        whole = order.ordering.page(0, len(order.ordering))
        number = rng.randint(0, len(whole))
        place = order.place(number)
        fresh = Order(wanted)
        fresh.ordering = order.ordering
        assert fresh.place(number) == place
        for version, length, before in versions[-5:]:
            first = min(length, order.first_changed_since(version))
            assert before[:first] == whole[:first]
            rewound_count += before[first:] != whole[first:length]
        versions.append((order.version, len(whole), whole))
    assert rewound_count > 10


def change(after: str, *indexers: str) -> str:
    return orjson.dumps({"after": after, "indexers": indexers}).decode()


@pytest.mark.parametrize("seed", range(3))
def test_roles_that_change_at_a_message_give_the_order_of_with_roles_in_any_arrival(
    node: RunningNode, seed: int
) -> None:
    rng = random.Random(seed)
    sent = random_graph(rng, writer_count=5, message_count=60, news_share=0.8)
    publish(node, rng.sample(sent, len(sent)))
    first = Ordering(Roles(indexers=("a", "b", "c")))
    for each in sent:
        first.add(*each)
    at = rng.randrange(first.confirmed_count // 2)
    after = first.confirmed[at]
    expected = first.with_roles(Roles(indexers=("b", "d")), after)
    changes = [change(after, "b", "d")]
    if expected.confirmed_count > at + 2:
        then = expected.confirmed[at + 1]
        expected = expected.with_roles(Roles(indexers=("b",)), then)
        changes.append(change(then, "b"))
    items = walk(node, change=changes, limit=7)
    assert ids(items) == expected.confirmed + expected.tail
    assert page(node, change=changes)["confirmed_count"] == expected.confirmed_count


def test_a_change_at_a_message_that_is_not_confirmed_waits_and_leaves_the_order(
    node: RunningNode,
) -> None:
    publish(node, CHAIN)
    without = page(node)
    last = without["items"][-1]
    assert not last["confirmed"]
    changed = page(node, change=[change(last["message_id"], "a")])
    assert changed["items"] == without["items"]


@pytest.mark.parametrize(
    "changes",
    [
        ["no JSON"],
        ["{}"],
        ['{"after": 1, "indexers": []}'],
        ['{"after": "a0", "indexers": ["a"], "more": 1}'],
        ['{"after": "a0", "indexers": ["a", "a"]}'],
        ['{"after": "a0", "indexers": ["a"], "relayed": ["a"]}'],
        [change("c0", "a"), change("a0", "b")],
    ],
)
def test_changes_that_make_no_sense_are_refused(node: RunningNode, changes: list[str]) -> None:
    publish(node, CHAIN)
    for _ in range(2):
        answer = node.http.get(PATH, params=ABC | {"change": changes})
        assert code_of(answer) == (400, "invalid_parameter"), answer.text


def test_a_change_counts_among_the_senders_of_a_request(node: RunningNode) -> None:
    many = [change("x", "a")] * 31
    assert code_of(node.http.get(PATH, params=ABC | {"change": many})) == (413, "too_many_items")


def test_the_answer_says_what_confirmation_waits_for(node: RunningNode) -> None:
    publish(node, CHAIN[:1])
    assert page(node)["waits_for"] == {"message_id": "a0", "count": 1, "sender_ids": ["b", "c"]}
    publish(node, CHAIN[1:2])  # a majority has seen a0, and b alone knows it
    assert page(node)["waits_for"] == {"message_id": "a0", "count": 1, "sender_ids": ["a", "c"]}
    publish(node, CHAIN[2:3])
    assert page(node)["confirmed_count"] >= 1
    other = ABC | {"indexer": ["x", "y", "z"]}
    assert page(node, other)["waits_for"] == {
        "message_id": "a0", "count": 1, "sender_ids": ["x", "y", "z"],
    }  # fmt: skip
    assert page(node, {"channel_id": "empty", "indexer": ["a"]})["waits_for"] is None
