"""The worked examples of the design document of Autobase.

The drawings leave out the reference of a writer to its own message before; it is written here.
"""

import pytest

from sdstore.ordering import Ordering, Roles
from sdstore.ordering.order import degrees
from tests.ordering.graphs import Sent, graph

CHAIN = "a0, b0: a0, c0: b0, a1: c0 a0, b1: a1 b0"
CROSSED = "a0, c0, b0: a0 c0, a1: a0 c0, c1: b0 c0, b1: b0 a1, b2: c1 b1"
TWO_QUORUMS = "a0, c0, c1: a0 c0, b0: c0"
DOUBLE_QUORUM = "c0, b0: c0, c1: b0 c0"
WORST_CASE = "a0, b0, c0: a0, a1: c0 a0, c1: c0 b0, b1: c1 b0"


def ordered(text: str | list[Sent], head: str = "", indexers: str = "abc") -> Ordering:
    """The order of the whole graph, or of the view of `head`."""
    sent = graph(text) if isinstance(text, str) else text
    if head:
        view = {head}
        for each in reversed(sent):
            if each.message_id in view:
                view.update(each.causes)
        sent = [each for each in sent if each.message_id in view]
    ordering = Ordering(Roles(indexers=tuple(indexers)))
    for each in sent:
        ordering.add(*each)
    assert not ordering.breaches
    return ordering


def whole(ordering: Ordering) -> list[str]:
    return ordering.confirmed + ordering.tail


def degrees_of(text: str, target: str) -> dict[str, int]:
    sent = graph(text)
    causes = {each.message_id: each.causes for each in sent}
    senders = {each.message_id: each.sender_id for each in sent}
    return degrees(target, causes, senders, "abc")


def test_a_chain_has_one_linearisation() -> None:
    assert whole(ordered(CHAIN)) == ["a0", "b0", "c0", "a1", "b1"]


def test_branches_are_sorted_by_key() -> None:
    assert whole(ordered("a0, b0, c0: a0 b0, a1: c0 a0")) == ["a0", "b0", "c0", "a1"]


def test_a_crossed_graph_is_sorted_recursively() -> None:
    assert whole(ordered(CROSSED)) == ["a0", "c0", "a1", "b0", "b1", "c1", "b2"]


def test_a_writer_s_own_view_of_the_crossed_graph_differs() -> None:
    assert whole(ordered(CROSSED, "c1")) == ["a0", "c0", "b0", "c1"]


def test_the_degree_of_a_quorum_grows_along_a_chain() -> None:
    assert degrees_of(CHAIN, "a0") == {"a0": 0, "b0": 1, "c0": 2, "a1": 3, "b1": 4}


def test_two_nodes_can_have_single_quorums_at_once() -> None:
    assert degrees_of(TWO_QUORUMS, "a0")["c1"] == 1
    assert degrees_of(TWO_QUORUMS, "c0")["b0"] == 1


@pytest.mark.parametrize(
    ("head", "view"), [("a0", ["a0"]), ("b0", ["c0", "b0"]), ("c1", ["a0", "c0", "c1"])]
)
def test_a_single_quorum_confirms_nothing_because_the_views_conflict(
    head: str, view: list[str]
) -> None:
    ordering = ordered(TWO_QUORUMS, head)
    assert (ordering.confirmed, ordering.tail) == ([], view)


def test_a_double_quorum_confirms_the_node_and_nothing_after_it() -> None:
    assert degrees_of(DOUBLE_QUORUM, "c0") == {"c0": 0, "b0": 1, "c1": 2}
    assert degrees_of(DOUBLE_QUORUM, "b0")["c1"] == 1
    ordering = ordered(DOUBLE_QUORUM)
    assert (ordering.confirmed, ordering.tail) == (["c0"], ["b0", "c1"])


def test_the_chain_s_first_node_is_confirmed_by_the_writer_that_closes_its_double_quorum() -> None:
    assert ordered(CHAIN, "b0").confirmed == []
    assert ordered(CHAIN, "c0").confirmed == ["a0"]
    assert ordered(CHAIN, "a1").confirmed == ["a0", "b0"]


def test_the_worst_case_is_assumed_of_a_writer_that_is_not_heard() -> None:
    # a has confirmed a0 at a1. b and c do not know a1, and put a0 first all the same.
    assert ordered(WORST_CASE, "a1").confirmed == ["a0"]
    assert whole(ordered(WORST_CASE, "b1")) == ["a0", "b0", "c0", "c1", "b1"]


def test_the_worst_case_holds_where_the_key_says_otherwise() -> None:
    # The same graph, in which the node that somebody may have confirmed has the greatest key.
    text = WORST_CASE.translate(str.maketrans("abc", "zab"))
    assert ordered(text, "z1", "zab").confirmed == ["z0"]
    assert whole(ordered(text, "a1", "zab")) == ["z0", "a0", "b0", "b1", "a1"]


def test_writers_that_go_on_confirm_what_the_absent_writer_has_confirmed() -> None:
    sent = graph(WORST_CASE + ", c2: b1 c1, b2: c2 b1, c3: b2 c2")
    confirmed = ordered(sent, "c3").confirmed
    assert confirmed[:1] == ["a0"]
    assert confirmed[:4] == ["a0", "b0", "c0", "c1"]


def test_one_indexer_decides_alone_and_others_only_write() -> None:
    ordering = ordered("x0, y0, s0: y0, x1: s0 x0, s1: s0 x0 x1, y1: s1 y0", indexers="s")
    assert ordering.confirmed == ["y0", "s0", "x0", "x1", "s1"]
    assert ordering.tail == ["y1"]


def test_a_message_of_no_indexer_is_no_contender() -> None:
    text = "a0, x0, b0: a0 x0, c0: b0"
    assert ordered(text).confirmed == ["a0"]
    assert ordered(text, indexers="abcx").confirmed == []


def test_a_relayed_message_enters_the_tail_when_any_indexer_names_it() -> None:
    ordering = Ordering(Roles(indexers=tuple("abc"), relayed=frozenset("r")))
    for each in graph("a0, r0: a0"):
        ordering.add(*each)
    assert whole(ordering) == ["a0"]
    ordering.add("b0", "b", ("a0", "r0"))
    assert (ordering.confirmed, ordering.tail) == ([], ["a0", "r0", "b0"])


def test_a_relayed_message_is_ordered_once_an_indexer_names_it() -> None:
    ordering = Ordering(Roles(indexers=("s",), relayed=frozenset("r")))
    for each in graph("s0, r0: s0, r1: r0"):
        ordering.add(*each)
    assert whole(ordering) == ["s0"]
    ordering.add("s1", "s", ("s0", "r0"))
    assert ordering.confirmed == ["s0", "r0", "s1"]
    assert ordering.tail == []
