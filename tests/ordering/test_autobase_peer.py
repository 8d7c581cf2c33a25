"""Our order beside that of Autobase itself (npm `autobase`) on the same graphs.

Autobase makes the graphs: its bases write and replicate as a script says. What it wrote is then given to
`Ordering`, each base's view by itself. docs/ordering.md explains the differences that are asserted here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from sdstore.ordering import Ordering, Roles
from tests.ordering.graphs import Sent
from tests.ordering.naive import Naive
from tests.support.autobase import Autobase, State, autobase

pytestmark = pytest.mark.slow

SEEDS = [*range(5), 30]  # in view 2 of the last one, Autobase confirms by unanimity
STEPS = 60


@pytest.fixture(scope="module")
def bases() -> Iterator[Autobase]:
    with autobase() as running:
        yield running


class Unanimous(Naive):
    """Our definitions with one more rule of Autobase: a message is confirmed as well if every indexer
    has a node after it, and none of them has seen a contender. Then there can never be one."""

    def confirmed(self, view: set[str]) -> list[str]:
        highest = super().confirmed(view)
        for c in view:
            last = [self._last(view, indexer) for indexer in self.indexers]
            if self.is_candidate(c) and all(each and self.is_clean(each, c) for each in last):
                highest = max(highest, self.order_up_to(c), key=len)
        return highest

    def _last(self, view: set[str], indexer: str) -> str | None:
        own = [each for each in view if self.sender[each] == indexer]
        return max(own, key=lambda each: len(self.view[each]), default=None)


def ordered(keys: Sequence[str], sent: Sequence[Sent]) -> Ordering:
    ordering = Ordering(Roles(indexers=keys))
    for each in sent:
        ordering.add(*each)
    assert not ordering.breaches
    assert not ordering.waiting
    return ordering


def known(state: State, sent: Sequence[Sent]) -> list[Sent]:
    """The part of a graph that a base knows."""
    ids = {*state.indexed, *state.tip}
    return [each for each in sent if each.message_id in ids]


def agree(prefixes: Sequence[list[str]]) -> bool:
    by_length = sorted(prefixes, key=len)
    return all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(by_length))


@pytest.mark.parametrize("seed", SEEDS)
def test_both_confirm_the_same_messages_but_for_the_rule_of_unanimity(
    bases: Autobase, seed: int
) -> None:
    rng = random.Random(seed)
    count = rng.choice([3, 3, 4, 5])
    share_of_writes = rng.choice([0.3, 0.5, 0.7])
    bases.open(count)
    for _ in range(STEPS):
        if rng.random() < share_of_writes:
            bases.append(rng.randrange(count))
        else:
            bases.sync(*rng.sample(range(count), 2))
    states, sent = [bases.state(writer) for writer in range(count)], bases.graph()
    ours = [ordered(bases.keys, known(each, sent)) for each in states]
    assert agree([each.indexed for each in states])
    assert agree([each.confirmed for each in ours])
    for state, ordering in zip(states, ours, strict=True):
        assert state.signed == state.indexed[: len(state.signed)]
        assert set(ordering.confirmed) <= set(state.indexed), f"seed {seed}"
        naive = Unanimous(bases.keys, known(state, sent))
        confirmed = naive.confirmed({*state.indexed, *state.tip})
        assert set(confirmed) == set(state.indexed), f"seed {seed}"


# A letter writes; two letters replicate with each other. The keys of the writers ascend: a < b < c.
EXAMPLES = {
    "chain": "a ab b bc c ac a ab b",
    "crossed": "a c bc ab b a bc c ab b bc b",
    "two quorums": "c bc b a ac c",
    "double quorum": "c bc b bc c",
    "worst case": "a b ac c ac a bc c bc b",
    "worst case, and they go on": "a b ac c ac a bc c bc b bc c bc b bc c",
}


@pytest.mark.parametrize("script", EXAMPLES.values(), ids=EXAMPLES)
def test_both_confirm_the_same_order_of_the_worked_examples(bases: Autobase, script: str) -> None:
    bases.open(3)
    ascending = sorted(range(3), key=lambda writer: bases.keys[writer])
    for step in script.split():
        writers = [ascending["abc".index(letter)] for letter in step]
        if len(writers) == 1:
            bases.append(*writers)
        else:
            bases.sync(*writers)
    sent = bases.graph()
    for writer in range(3):
        state = bases.state(writer)
        ours = ordered(bases.keys, known(state, sent))
        assert ours.confirmed == state.indexed
        assert set(ours.tail) == set(state.tip)
