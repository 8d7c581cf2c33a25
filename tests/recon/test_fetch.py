"""Fetching by range and short id: bounded, checked, continued."""

from __future__ import annotations

import numpy as np
import pytest

from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.fetch import FetchQueue, pack_fetch
from recon.limits import Limits
from recon.ranges import END, WHOLE, Bound, Range, bound_bytes
from recon.responder import read_fetch, resolve_short_ids
from tests.recon.test_sync import crowd
from tests.support.recon_talk import columns_of, serve, set_of, view_of

ELEMENTS = sorted(crowd(1, 200, 2**40))
VIEW = view_of(ELEMENTS)
MIDDLE = Bound(ELEMENTS[100][0])
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
    assert len(resolve_short_ids(VIEW, UPPER, names(ELEMENTS[:3]))[0]) == 0


def test_batches_are_bounded_ascend_and_do_not_overlap() -> None:
    queue = FetchQueue(VIEW)
    queue.add(Need(UPPER, names(ELEMENTS[100:]), 100))
    queue.add(Need(LOWER, names(ELEMENTS[:100]), 100))
    queue.add(Need(LOWER, names(ELEMENTS[:2]), 2))
    asked = 0
    while len(queue):
        batch = queue.next_batch(30)
        fetched = read_fetch(pack_fetch(batch))
        assert [span for span, _ in fetched] == [need.range for need in batch]
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
        if resume is not None:
            queue.resume(batch, resume, len(orders))
        rounds += 1
    assert found == set(ELEMENTS)
    assert rounds == 12


def test_a_cut_answer_that_brought_nothing_is_the_peers_fault() -> None:
    queue = FetchQueue(VIEW)
    batch = [Need(UPPER, None, 100)]
    for raw in (bound_bytes(MIDDLE), bound_bytes(WHOLE.lower), b"", b"x" * 17):
        with pytest.raises(RemoteProtocolError):
            queue.resume(batch, raw, 1)
    with pytest.raises(RemoteProtocolError):
        queue.resume(batch, bound_bytes(Bound(2**64 - 1, 0)), 0)


def test_a_greedy_fetch_is_refused() -> None:
    fetch = pack_fetch([Need(WHOLE, names(ELEMENTS), 200)])
    with pytest.raises(RemoteProtocolError):
        read_fetch(fetch, Limits(fetch_ids_max=199))
    fetch.counts = b"\x01"
    with pytest.raises(RemoteProtocolError):
        read_fetch(fetch)
