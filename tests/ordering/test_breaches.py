"""Preconditions that do not hold: they are named, and nothing is confirmed on top of them."""

import pytest

from sdstore.ordering import BreachKind, Ordering, OrderingError, Roles
from sdstore.ordering import order as order_module
from tests.ordering.graphs import graph

CHAIN = "a0, b0: a0, c0: b0, a1: c0 a0, b1: a1 b0"


def ordered(text: str, indexers: str = "abc") -> Ordering:
    ordering = Ordering(Roles(indexers=tuple(indexers)))
    for each in graph(text):
        ordering.add(*each)
    return ordering


def test_an_ordering_says_which_indexer_never_wrote_and_which_is_behind() -> None:
    ordering = ordered("a0, b0: a0, a1: b0 a0, b1: a1 b0, x0, x1: x0", indexers="abcd")
    assert [(e.sender_id, e.message_count, e.last_message_id) for e in ordering.indexers] == [
        ("a", 2, "a1"), ("b", 2, "b1"), ("c", 0, ""), ("d", 0, ""),
    ]  # fmt: skip
    assert [each.unseen_count for each in ordering.indexers] == [1, 0, 4, 4]


def test_without_indexers_the_order_is_tentative_and_says_why() -> None:
    ordering = ordered(CHAIN, indexers="")
    assert [each.kind for each in ordering.breaches] == [BreachKind.NO_INDEXERS]
    assert (ordering.confirmed, ordering.tail) == ([], ["a0", "b0", "c0", "a1", "b1"])


def test_an_indexer_that_does_not_refer_to_its_own_message_is_a_fork() -> None:
    # An ordinary SDS participant: c1 refers to what it saw last, and not to its own c0.
    ordering = ordered(f"{CHAIN}, c1: b1")
    [breach] = ordering.breaches
    assert (breach.kind, breach.sender_id, breach.message_id) == (BreachKind.FORK, "c", "c1")
    assert breach.other_message_id == "c0"
    assert "its own message" in breach.detail


def test_a_breach_names_the_paths_of_its_two_messages() -> None:
    for others in (("b", "c"), ("c", "b")):  # also if the forged one waits for a cause first
        ordering = Ordering(Roles(indexers=tuple("abc")))
        ordering.add("a0", "a", [], "friends")
        ordering.add("a1", "a", others, "store")
        for name in others:
            ordering.add(name, name, [])
        assert [(e.path, e.other_path) for e in ordering.breaches] == [("store", "friends")]
        ordering.add("b", "b", ["a0"], "elsewhere")
        assert ordering.breaches[1].kind is BreachKind.VARIANT
        assert (ordering.breaches[1].path, ordering.breaches[1].other_path) == ("elsewhere", "")
        assert ordering.proof.breaches == tuple(ordering.breaches)


def test_two_messages_after_the_same_one_are_a_fork() -> None:
    [breach] = ordered("a0, a1: a0, a2: a1, b0: a0, a3: a0 b0").breaches
    assert (breach.kind, breach.sender_id) == (BreachKind.FORK, "a")
    assert (breach.message_id, breach.other_message_id) == ("a3", "a1")


def test_the_message_beside_a_fork_is_the_first_that_it_does_not_see_of_whichever_indexer() -> None:
    text = "a0, b0: a0, b1: b0, b2: b1, c0: b0, b3: b0 c0"
    [breach] = ordered(text).breaches
    assert (breach.sender_id, breach.message_id, breach.other_message_id) == ("b", "b3", "b1")


def test_after_a_fork_nothing_more_is_confirmed_and_nothing_confirmed_moves() -> None:
    ordering = ordered(CHAIN)
    confirmed = ordering.confirmed
    for each in graph("c1: b1, c2: c1 c0, a2: c2 a1, b2: a2 b1, a3: b2 a2, b3: a3 b2"):
        assert not ordering.add(*each).confirmed
    assert ordering.confirmed == confirmed == ["a0", "b0", "c0"]
    assert ordering.tail == ["a1", "b1", "c1", "c2", "a2", "b2", "a3", "b3"]


def test_the_messages_of_an_indexer_without_a_sender_id_do_not_vote() -> None:
    ordering = Ordering(Roles(indexers=("a", "b", "c")))
    for message_id, sender_id, causes in (("1", "a", ()), ("2", "", ("1",)), ("3", "", ("2",))):
        ordering.add(message_id, sender_id, causes)
    assert ordering.confirmed == []
    assert not ordering.breaches


@pytest.mark.parametrize(
    "roles",
    [
        Roles(indexers=("a", "a")),
        Roles(indexers=("a", "")),
        Roles(indexers=("a", "b"), relayed=frozenset("b")),
    ],
)
def test_roles_that_contradict_themselves_are_refused(roles: Roles) -> None:
    with pytest.raises(OrderingError, match="invalid_indexers"):
        Ordering(roles)


def test_a_message_waits_for_its_causes_and_circles_wait_for_ever() -> None:
    ordering = Ordering(Roles(indexers=("a", "b")))
    ordering.add("b0", "b", ("a0", "lost"))
    ordering.add("x", "x", ("y",))
    ordering.add("y", "y", ("x",))
    ordering.add("self", "z", ("self",))
    assert ordering.tail == ["self"]
    assert set(ordering.missing) == {"a0", "lost"}  # x and y are here
    assert ordering.waiting_count == 3
    ordering.add("a0", "a", ())
    change = ordering.add("lost", "c", ())
    assert change.placed == 2
    assert ordering.tail == ["a0", "lost", "b0", "self"]
    ordering.add("b1", "b", ("b0", "x"))  # a node names x, which waits no longer
    assert ordering.tail == ["a0", "lost", "b0", "x", "b1", "y", "self"]


def test_no_more_causes_are_waited_for_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "WAITING_CAUSES_MAX", 5)
    ordering = Ordering(Roles(indexers=("a",)))
    ordering.add("1", "a", ("x", "y", "z"))
    with pytest.raises(OrderingError, match="too_many_waiting"):
        ordering.add("2", "a", ("1", "v", "w"))
    ordering.add("x", "b", ())
    ordering.add("2", "a", ("1", "v", "w"))
    assert ordering.waiting == ["1", "2"]
    for each in "vwyz":
        ordering.add(each, "b", ())
    assert not ordering.waiting


def test_other_writers_who_name_ghosts_leave_room_for_indexers_messages_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_module, "WAITING_MAX", 8)
    ordering = Ordering(Roles(indexers=("a",)))
    for number in range(40):
        ordering.add(f"{number}", "m", (f"ghost {number}",))
    assert ordering.waiting_count == 4
    for number in range(4):
        ordering.add(f"a{number}", "a", ("later", *([f"a{number - 1}"] if number else [])))
    ordering.add("later", "b", ())
    assert ordering.confirmed == ["later", "a0", "a1", "a2", "a3"]


@pytest.mark.parametrize(
    ("message_id", "sender_id", "causes"),
    [("b0", "b", ["c0"]), ("b0", "c", ["a0"]), ("w", "b", ["lost"])],
)
def test_another_message_with_a_known_id_is_named_and_confirmation_ends(
    message_id: str, sender_id: str, causes: list[str]
) -> None:
    ordering = ordered(f"{CHAIN}, w: lost x")
    before = ordering.confirmed, ordering.tail
    ordering.add(message_id, sender_id, causes)
    assert [each.kind for each in ordering.breaches] == [BreachKind.VARIANT]
    assert ordering.breaches[0].message_id == message_id
    assert (ordering.confirmed, ordering.tail) == before
    assert not ordering.add("c1", "c", ["b1", "c0"]).confirmed
