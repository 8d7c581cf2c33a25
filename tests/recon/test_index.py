"""The index is a set; views hold their groups and window, and grow with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.agreement import SessionKey
from recon.elements import WHOLE, OrderWindow
from recon.errors import LocalProtocolError
from recon.index import NO_SUMS, SCAN_ROWS_MAX, RangeIndex, Run
from recon.view import View, ViewCache
from tests.recon.test_sync import ELEMENTS, crowd
from tests.support.recon_talk import HEADER, Element, columns_of, insert, set_of, summary_of

KEY = HEADER.key()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ELEMENTS, st.integers(0, 3)), max_size=8), st.data())
def test_inserting_counts_what_is_new_and_views_hold_their_groups(
    batches: list[tuple[set[Element], int]], data: st.DataObject
) -> None:
    index, model = RangeIndex(), {}
    groups = data.draw(st.none() | st.sets(st.integers(0, 4)))
    window = OrderWindow(data.draw(st.integers(0, 5)), data.draw(st.none() | st.integers(3, 9)))
    early = View(index, KEY, groups, window)
    for elements, group in batches:
        assert insert(index, elements, group) == len(elements - model.keys())
        model = dict.fromkeys(elements, group) | model
        early.refresh()
    assert len(index) == len(model)
    lower, upper = window
    wanted = {
        element
        for element, group in model.items()
        if (groups is None or group in groups)
        and lower <= element[0]
        and (upper is None or element[0] < upper)
    }
    late = View(index, KEY, groups, window)
    assert len(early) == len(late) == len(wanted)
    assert set_of(*early.elements(WHOLE)) == set_of(*late.elements(WHOLE)) == wanted
    assert summary_of(early) == summary_of(late)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([1, 1000, 2**63]), st.integers(0, 700))
def test_many_searches_in_a_long_column_find_what_single_ones_find(
    seed: int, orders_max: int, extra: int
) -> None:
    rng = np.random.default_rng(seed)
    column = np.sort(rng.integers(0, orders_max, (1 << 17) + extra, dtype=np.uint64))
    near = column[rng.integers(0, len(column), 400)] + rng.integers(0, 2, 400, dtype=np.uint64)
    edges = [0, 1, orders_max, 2**64 - 1, column[0], column[-1], column[-1] + np.uint64(1)]
    wanted = np.concatenate((near, np.array(edges, np.uint64)))
    run = Run(column, None, NO_SUMS, NO_SUMS)
    assert (run.first_at_least(wanted) == np.searchsorted(column, wanted)).all()


def test_another_key_gives_other_hashes_and_short_ids() -> None:
    index = RangeIndex()
    insert(index, crowd(1, 50, 50))
    views = [View(index, SessionKey(raw)) for raw in (b"a" * 16, b"b" * 16)]
    assert summary_of(views[0]) != summary_of(views[1])
    columns = columns_of(crowd(1, 50, 50))
    assert not (views[0].short_ids(*columns) == views[1].short_ids(*columns)).all(axis=1).any()


def test_the_order_is_part_of_what_is_hashed() -> None:
    summaries = set()
    for order in (0, 1, 256, 2**63):
        index = RangeIndex()
        insert(index, [(order, b"x" * 32)])
        summaries.add(summary_of(View(index, KEY)))
    assert len(summaries) == 4


def test_sorted_columns_are_taken_as_they_are_and_others_refused() -> None:
    elements = sorted(crowd(2, 500, 20))
    orders, ids = columns_of(elements)
    groups = np.zeros(500, np.uint32)
    index = RangeIndex.from_sorted(orders, ids, groups)
    assert set_of(*View(index, KEY).elements(WHOLE)) == set(elements)
    for wrong in (np.roll(np.arange(500), 1), np.zeros(500, np.int64)):
        with pytest.raises(LocalProtocolError):
            RangeIndex.from_sorted(orders[wrong], ids[wrong], groups)


def test_columns_of_the_wrong_shape_or_type_are_the_callers_fault() -> None:
    orders, ids = columns_of(crowd(1, 3, 3))
    groups = np.zeros(3, np.uint32)
    for columns in (
        (orders[:2], ids, groups),
        (orders, ids[:, :31], groups),
        (orders.astype(np.int64), ids, groups),
        (orders, ids, groups.astype(np.uint64)),
    ):
        for take in (RangeIndex().insert, RangeIndex.from_sorted):
            with pytest.raises(LocalProtocolError, match="go together"):
                take(*columns)


def test_the_rows_of_groups_end_where_a_reader_stopped() -> None:
    count = 2 * SCAN_ROWS_MAX
    orders, ids = columns_of(sorted(crowd(4, count, count)))
    index = RangeIndex.from_sorted(orders, ids, np.zeros(count, np.uint32))
    snapshot, rows = index.rows_of([0])
    for stop in (0, 1, 4_999, count - 1, count):
        found = index.postings.rows_of(snapshot, [0], stop)
        assert set(found.tolist()) == set(rows[rows < stop].tolist()), stop


def test_the_cache_of_views_is_bounded_in_bytes_and_keeps_what_was_used_last() -> None:
    index = RangeIndex()
    insert(index, crowd(1, 100, 100))
    views = [View(index, SessionKey(bytes([n]) * 16)) for n in range(4)]
    cache = ViewCache(3 * views[0].bytes_kept)
    for name in (0, 1, 2, 0, 3):
        cache.keep(name, views[name])
    assert [name in cache for name in range(4)] == [True, False, True, True]
    assert cache.find(1) is None
    assert cache.find(2) is views[2]
    insert(index, crowd(2, 30, 100))
    found = cache.find(0)
    assert found is views[0]
    assert len(found) == 130
    assert [name in cache for name in range(4)] == [True, False, True, False]  # it has grown
    cache.keep(1, views[1], beside_bytes=10 * views[1].bytes_kept)
    assert [name in cache for name in range(4)] == [False, True, False, False]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ELEMENTS, st.integers(0, 3)), max_size=8), st.data())
def test_a_view_of_an_earlier_one_under_another_key_equals_a_view_of_its_own(
    batches: list[tuple[set[Element], int]], data: st.DataObject
) -> None:
    index = RangeIndex()
    groups = data.draw(st.none() | st.sets(st.integers(0, 4)))
    window = OrderWindow(data.draw(st.integers(0, 5)), data.draw(st.none() | st.integers(3, 9)))
    earlier = View(index, KEY, groups, window)
    for number, (elements, group) in enumerate(batches):
        insert(index, elements, group)
        key = SessionKey(bytes([number]) * 16)
        shared, alone = earlier.under(key), View(index, key, groups, window)
        shared.refresh()
        assert set_of(*shared.elements(WHOLE)) == set_of(*alone.elements(WHOLE))
        assert summary_of(shared) == summary_of(alone)
        assert shared.total() == alone.total()
        earlier = shared


@pytest.fixture
def threads_in_turns() -> Iterator[ThreadPoolExecutor]:
    """Threads that take turns as often as the interpreter lets them."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            yield threads
    finally:
        sys.setswitchinterval(interval_s)


def test_rows_and_views_of_groups_are_right_in_every_thread_while_the_set_grows(
    threads_in_turns: ThreadPoolExecutor,
) -> None:
    rng, groups_count, batch = np.random.default_rng(1), 40, 10_000
    for _ in range(3):
        index = RangeIndex()

        def is_whole(group: int, index: RangeIndex = index) -> bool:
            snapshot, rows = index.rows_of((group,))
            view = View(index, KEY, (group,))
            found = view.elements(WHOLE)[0]
            expected = np.arange(group, snapshot.size, groups_count)
            are_all = np.array_equal(np.sort(rows), expected)
            # The view contains later elements, each once, and batches only as a whole.
            return (
                are_all
                and len(found) * groups_count % batch == 0
                and np.array_equal(found, np.arange(len(found)) * groups_count + group)
            )

        for start in range(0, 12 * batch, batch):
            orders = np.arange(start, start + batch, dtype=np.uint64)
            ids = rng.integers(0, 256, (batch, 32), dtype=np.uint8)
            asked = [threads_in_turns.submit(is_whole, group) for group in range(groups_count)]
            index.insert(orders, ids, (orders % groups_count).astype(np.uint32))
            assert all(each.result() for each in asked)


def test_elements_are_in_a_view_once_also_where_no_segment_covers_them_yet() -> None:
    index, ids = RangeIndex(), np.random.default_rng(1).integers(0, 256, (SCAN_ROWS_MAX + 9, 32))
    ids, orders = ids.astype(np.uint8), np.arange(SCAN_ROWS_MAX + 9, dtype=np.uint64)
    groups = (orders % 40).astype(np.uint32)
    for part in (slice(SCAN_ROWS_MAX - 9), slice(SCAN_ROWS_MAX - 9, None)):
        index.insert(orders[part], ids[part], groups[part])
    found = View(index, KEY, (20,)).elements(WHOLE)[0]
    assert found.tolist() == orders[groups == 20].tolist()
