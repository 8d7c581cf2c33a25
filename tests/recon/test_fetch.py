"""Fetching by range and short id: bounded, checked, continued."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.elements import END, WHOLE, Bound, Range, bound_bytes
from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.fetch import FetchQueue, pack_fetch, read_fetch, resolve
from recon.initiator import Initiator
from recon.limits import Limits
from tests.recon.test_sync import crowd
from tests.support.recon_talk import HEADER, columns_of, serve, set_of, view_of

ELEMENTS = sorted(crowd(1, 200, 2**40))
VIEW = view_of(ELEMENTS)
MIDDLE = Bound(ELEMENTS[100][0])
NOTHING = columns_of([])
LOWER, UPPER = Range(WHOLE.lower, MIDDLE), Range(MIDDLE, END)


def names(elements: list[tuple[int, bytes]]) -> np.ndarray:
    return VIEW.short_ids(*columns_of(elements))


def test_only_what_was_asked_for_is_accepted() -> None:
    queue = FetchQueue(VIEW)
    batch = [Need(LOWER, names(ELEMENTS[:3]), 3), Need(UPPER, None, 100)]
    arrived = [*ELEMENTS[:5], ELEMENTS[150]]
    assert queue.accept(batch, *columns_of(arrived)).tolist() == [True] * 3 + [False] * 2 + [True]
    assert queue.accept(batch[:1], *columns_of([ELEMENTS[150]])).tolist() == [False]
    assert queue.accept(batch[1:], *columns_of([ELEMENTS[0]])).tolist() == [False]
    assert len(queue.accept(batch, *columns_of([]))) == 0


def test_a_short_id_means_something_inside_its_range_only() -> None:
    batch = [Need(UPPER, names(ELEMENTS[:3]), 3)]
    assert not FetchQueue(VIEW).accept(batch, *columns_of(ELEMENTS[:3])).any()
    assert len(resolve(VIEW, read_fetch(pack_fetch(batch))).orders) == 0


def test_batches_are_bounded_ascend_and_do_not_overlap() -> None:
    queue = FetchQueue(VIEW)
    queue.add(Need(UPPER, names(ELEMENTS[100:]), 100))
    queue.add(Need(LOWER, names(ELEMENTS[:100]), 100))
    queue.add(Need(LOWER, names(ELEMENTS[:2]), 2))
    asked = 0
    while len(queue):
        batch = queue.next_batch(30)
        fetched = read_fetch(pack_fetch(batch))
        assert [fetched.ranges[at] for at in range(len(batch))] == [n.range for n in batch]
        count = sum(need.count for need in batch)
        assert 0 < count <= 30
        asked += count
    assert asked == 202


@pytest.mark.parametrize("wanted", [None, names(ELEMENTS)])
def test_a_cut_answer_is_continued_until_everything_is_there(wanted: np.ndarray | None) -> None:
    queue = FetchQueue(VIEW)
    queue.add(Need(LOWER, None if wanted is None else wanted[:100], 100))
    queue.add(Need(UPPER, None if wanted is None else wanted[100:], 100))
    found: set[tuple[int, bytes]] = set()
    rounds = 0
    while len(queue):
        batch = queue.next_batch(500)
        orders, ids, resume = serve(VIEW, pack_fetch(batch), 17)
        found |= set_of(orders, ids)
        queue.settle(batch, orders, ids, resume)
        rounds += 1
    assert found == set(ELEMENTS)
    assert rounds == 12


def test_a_cut_answer_that_brought_nothing_is_the_peers_fault() -> None:
    queue = FetchQueue(VIEW)
    batch = [Need(UPPER, None, 100)]
    for raw in (bound_bytes(MIDDLE), bound_bytes(WHOLE.lower), b"", b"x" * 17):
        with pytest.raises(RemoteProtocolError):
            queue.settle(batch, *columns_of(ELEMENTS[:1]), raw)


@pytest.mark.parametrize(
    ("arrived", "resume", "code"),
    [
        ([ELEMENTS[2], ELEMENTS[1]], None, "malformed"),
        ([ELEMENTS[1], ELEMENTS[1]], None, "malformed"),
        (ELEMENTS[:3], Bound(ELEMENTS[1][0]), "no_progress"),
    ],
    ids=["descending", "twice", "above the resume bound"],
)
def test_each_element_comes_once_ascending_and_below_the_bound(
    arrived: list[tuple[int, bytes]], resume: Bound | None, code: str
) -> None:
    raw = None if resume is None else bound_bytes(resume)
    with pytest.raises(RemoteProtocolError) as fault:
        FetchQueue(VIEW).accept([Need(WHOLE, None, 200)], *columns_of(arrived), raw)
    assert fault.value.code == code


def test_what_was_named_or_counted_and_never_came_is_known() -> None:
    queue = FetchQueue(VIEW)
    batch = [Need(LOWER, names(ELEMENTS[:5]), 5), Need(UPPER, None, 7)]
    queue.settle(batch, *columns_of(ELEMENTS[1:3]), bound_bytes(Bound(*key_of(150))))
    assert queue.unserved_count == 3
    queue.settle(queue.next_batch(100), *columns_of(ELEMENTS[150:154]))
    assert (len(queue), queue.unserved_count) == (0, 6)


def test_what_came_is_not_asked_for_again() -> None:
    queue = FetchQueue(VIEW)
    raw = bound_bytes(Bound(*key_of(3)))
    queue.settle([Need(LOWER, names(ELEMENTS[:5]), 5)], *columns_of(ELEMENTS[:3]), raw)
    assert queue.accept(batch := queue.next_batch(9), *columns_of(ELEMENTS[:5])).sum() == 2
    assert [need.count for need in batch] == [2]


def test_calls_for_content_are_paid_from_the_sessions_budget() -> None:
    limits = Limits(bytes_base=100, bytes_per_element=0, bytes_per_credit=4, seconds_base=9)
    initiator = Initiator(VIEW, HEADER, limits=limits)
    initiator.charge(100, 9.0)
    initiator.credit(10)
    initiator.charge(40)
    with pytest.raises(RemoteProtocolError, match="budget_bytes"):
        initiator.charge(1)
    with pytest.raises(RemoteProtocolError, match="budget_seconds"):
        Initiator(VIEW, HEADER, limits=limits).charge(1, 9.1)


def test_few_cut_answers_of_a_session_may_bring_nothing() -> None:
    queue = FetchQueue(VIEW, Limits(fetch_barren_max=2))
    queue.add(Need(WHOLE, names(ELEMENTS[:2]), 2))
    for order, brought in ((1, []), (2, ELEMENTS[:1]), (3, [])):
        batch = queue.next_batch(1)
        queue.settle(batch, *columns_of(brought), bound_bytes(Bound(order)))
    with pytest.raises(RemoteProtocolError):
        queue.settle(queue.next_batch(1), *NOTHING, bound_bytes(Bound(4)))


@settings(deadline=None, max_examples=60)
@given(
    edges=st.sets(st.integers(1, 198), min_size=1, max_size=8),
    whole=st.integers(0, 255),
    named=st.sets(st.integers(0, 199), max_size=30),
    batch=st.sampled_from([1000, 60, 7]),
    scan_max=st.sampled_from([12, 40, 1000]),
    ranges_max=st.sampled_from([1, 3, 100]),
)
def test_a_fetch_brings_what_it_names_however_little_each_answer_may_look_at(
    edges: set[int], whole: int, named: set[int], batch: int, scan_max: int, ranges_max: int
) -> None:
    theirs = view_of(ELEMENTS, batch)
    limits = Limits(
        fetch_scan_max=scan_max,
        fetch_elements_max=scan_max // 4,
        ranges_answered_max=ranges_max,
        fetch_barren_max=1000,
    )
    queue, wanted = FetchQueue(VIEW, limits), set()
    marks = [0, *sorted(edges), 200]
    for number, (start, stop) in enumerate(pairwise(marks)):
        some = ELEMENTS[start:stop]
        if not whole >> number & 1:
            some = [ELEMENTS[at] for at in sorted(named) if start <= at < stop]
        lower, upper = Bound(*key_of(start)), Bound(*key_of(stop)) if stop < 200 else END
        if some:
            short_ids = None if whole >> number & 1 else names(some)
            queue.add(Need(Range(lower, upper), short_ids, len(some)))
            wanted |= set(some)
    found: set[tuple[int, bytes]] = set()
    while len(queue):
        fetched = queue.next_batch(1000)
        orders, ids, resume = resolve(theirs, read_fetch(pack_fetch(fetched)), limits)
        assert queue.accept(fetched, orders, ids).all()
        found |= set_of(orders, ids)
        queue.settle(fetched, orders, ids, None if resume is None else bound_bytes(resume))
    assert found == wanted
    assert queue.unserved_count == 0


def key_of(place: int) -> tuple[int, int]:
    order, raw = ELEMENTS[place]
    return order, int.from_bytes(raw[:8], "big")


def test_one_answer_looks_at_a_bounded_number_of_elements() -> None:
    limits = Limits(fetch_scan_max=32, fetch_elements_max=8)
    everything = resolve(VIEW, read_fetch(pack_fetch([Need(WHOLE, None, 200)])), limits)
    assert set_of(everything.orders, everything.ids) == set(ELEMENTS[:8])
    assert everything.resume == Bound(*key_of(8))
    last = resolve(VIEW, read_fetch(pack_fetch([Need(WHOLE, names(ELEMENTS[-1:]), 1)])), limits)
    assert (len(last.orders), last.resume) == (0, Bound(*key_of(32)))
    second = [Need(LOWER, names(ELEMENTS[:1]), 1), Need(UPPER, None, 100)]
    first = resolve(VIEW, read_fetch(pack_fetch(second)), Limits(ranges_answered_max=1))
    assert (len(first.orders), first.resume) == (1, MIDDLE)


def test_a_greedy_fetch_is_refused() -> None:
    fetch = pack_fetch([Need(WHOLE, names(ELEMENTS), 200)])
    with pytest.raises(RemoteProtocolError):
        read_fetch(fetch, Limits(fetch_ids_max=199))
    fetch.counts = b"\x01"
    with pytest.raises(RemoteProtocolError):
        read_fetch(fetch)
