"""Indexers that change at a confirmed message."""

import random
import string

import pytest

from sdstore.ordering import BreachKind, Ordering, OrderingError, Roles
from tests.ordering.graphs import Sent, graph, random_graph
from tests.ordering.naive import Naive

CHAIN = "a0, b0: a0, c0: b0, a1: c0 a0, b1: a1 b0"


def ordered(sent: list[Sent], indexers: str) -> Ordering:
    ordering = Ordering(Roles(indexers=tuple(indexers)))
    for each in sent:
        ordering.add(*each)
    return ordering


def whole(ordering: Ordering) -> list[str]:
    return ordering.confirmed + ordering.tail


def test_new_indexers_confirm_what_comes_after_the_message() -> None:
    # c is gone; d takes its place. Whoever has changed names b0, and what came after it.
    sent = graph(f"{CHAIN}, d0: b0 c0 a1 b1, a2: d0 a1, d1: a2 d0")
    ordering = ordered(sent, "abc")
    assert ordering.confirmed == ["a0", "b0", "c0"]
    changed = ordering.with_roles(Roles(indexers=("a", "b", "d")), after="b0")
    assert changed.confirmed == ["a0", "b0", "a1", "b1", "c0", "d0"]
    assert changed.tail == ["a2", "d1"]


def test_indexers_change_at_confirmed_messages_only() -> None:
    ordering = ordered(graph(CHAIN), "abc")
    for each in ("a1", "unknown"):
        with pytest.raises(OrderingError, match="not_confirmed"):
            ordering.with_roles(Roles(indexers=("a",)), after=each)


def test_a_forked_indexer_can_be_left_out_at_the_last_confirmed_message() -> None:
    sent = graph(f"{CHAIN}, c1: b1, a2: c0 b1 c1 a1, b2: a2 b1, a3: b2 a2, b3: a3 b2")
    ordering = ordered(sent, "abc")
    assert [each.kind for each in ordering.breaches] == [BreachKind.FORK]
    assert ordering.confirmed == ["a0", "b0", "c0"]
    changed = ordering.with_roles(Roles(indexers=("a", "b")), after="c0")
    assert not changed.breaches
    assert changed.confirmed == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2"]
    assert ordering.with_roles(Roles(indexers=("a", "b", "c")), after="c0").breaches == []
    later = changed.with_roles(Roles(indexers=("c",)), after="b1")
    later.add("c2", "c", ("b1", "c1"))
    assert later.confirmed == ["a0", "b0", "c0", "a1", "b1", "c1", "c2"]


@pytest.mark.parametrize("seed", range(25))
def test_views_that_change_at_the_same_message_agree(seed: int) -> None:
    rng = random.Random(seed)
    letters = string.ascii_letters
    writer_count = rng.randint(3, 12)
    sent = random_graph(rng, writer_count, rng.randint(20, 40), rng.choice([0.6, 0.8, 0.9]))
    first = letters[: rng.randint(1, min(4, writer_count))]
    second = rng.sample(letters[:writer_count], rng.randint(1, min(5, writer_count)))
    naive = Naive(first, sent)
    large = ordered(rng.sample(sent, len(sent)), first)
    views = [
        set().union(*[naive.past[each.message_id] for each in rng.sample(sent, 3)])
        for _ in range(4)
    ]
    for view in views:
        part = [each for each in sent if each.message_id in view]
        small = ordered(rng.sample(part, len(part)), first)
        if not small.confirmed:
            continue
        after = rng.choice(small.confirmed)
        base = small.confirmed[: small.confirmed.index(after) + 1]
        roles = Roles(indexers=tuple(second))
        changed, larger = small.with_roles(roles, after), large.with_roles(roles, after)
        assert changed.confirmed[: len(base)] == base
        assert larger.confirmed[: len(changed.confirmed)] == changed.confirmed
        # What comes after the message is a channel of its own.
        rest = [each for each in part if each.message_id not in base]
        alone = Naive(second, rest, base=base)
        names = {each.message_id for each in rest}
        assert whole(changed) == base + alone.order(names)
        assert changed.confirmed == base + alone.confirmed(names)
        # Messages may also arrive after the change.
        grown = ordered(part, first).with_roles(roles, after)
        for each in sent:
            grown.add(*each)
        assert whole(grown) == whole(larger)
        assert grown.confirmed == larger.confirmed
