"""Causal order: after its causes, the lowest first, and an end to cycles."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.store.histories import causal_order
from tests.support.graphs import reaches

graphs = st.integers(1, 8).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, count - 1), max_size=3), min_size=count, max_size=count
    )
)


@given(graphs)
@settings(max_examples=300, deadline=None)
def test_every_number_comes_after_what_causes_it_unless_they_cause_each_other(
    causes: list[list[int]],
) -> None:
    order = causal_order(causes)
    assert sorted(order) == list(range(len(causes)))
    before = [reaches(causes, number) for number in range(len(causes))]
    for number, its_causes in enumerate(causes):
        for cause in its_causes:
            if number not in before[cause]:
                assert order.index(cause) < order.index(number)


@given(graphs)
@settings(max_examples=300, deadline=None)
def test_of_what_could_come_next_the_lowest_comes(causes: list[list[int]]) -> None:
    # Only causes with lower or higher numbers but without cycles: those are tested above.
    before = [reaches(causes, number) for number in range(len(causes))]
    if any(number in its for number, its in enumerate(before)):
        return
    taken: list[int] = []
    while len(taken) < len(causes):
        could = [n for n in range(len(causes)) if n not in taken and before[n] <= set(taken)]
        taken.append(min(could))
    assert causal_order(causes) == taken


def test_a_chain_of_any_length_needs_no_recursion() -> None:
    count = 20_000
    assert causal_order([[number + 1] for number in range(count - 1)] + [[]]) == list(
        range(count - 1, -1, -1)
    )


def test_a_cycle_begins_with_its_lowest_number_s_last_cause() -> None:
    # 0 names 1 names 2 names 0: walked from 0, the reference of 2 closes the cycle.
    assert causal_order([[1], [2], [0]]) == [2, 1, 0]
    assert causal_order([[0]]) == [0]
