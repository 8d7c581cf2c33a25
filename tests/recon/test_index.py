"""The index is a set; views hold their groups and window, and grow with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.elements import ALL_ORDERS, WHOLE, OrderWindow
from recon.errors import LocalProtocolError
from recon.index import SCAN_ROWS_MAX, RangeIndex
from recon.limits import SELECTED_ELEMENT_BYTES, VIEW_BYTES, VIEW_ELEMENT_BYTES
from recon.session import SessionKey
from recon.store import NO_SUMS, Run
from recon.view import SELECTION_BEHIND_MAX, CacheBounds, ViewCache
from tests.recon.test_sync import ELEMENTS, crowd
from tests.support.recon_talk import HEADER, Element, columns_of, insert, set_of

KEY = HEADER.key()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ELEMENTS, st.integers(0, 3)), max_size=8), st.data())
def test_inserting_counts_what_is_new_and_views_hold_their_groups(
    batches: list[tuple[set[Element], int]], data: st.DataObject
) -> None:
    index, model = RangeIndex(), {}
    groups = data.draw(st.none() | st.sets(st.integers(0, 4)))
    window = OrderWindow(data.draw(st.integers(0, 5)), data.draw(st.none() | st.integers(3, 9)))
    early = index.view(KEY, groups, window)
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
    late = index.view(KEY, groups, window)
    assert len(early) == len(late) == len(wanted)
    assert set_of(*early.elements(WHOLE)) == set_of(*late.elements(WHOLE)) == wanted
    assert early.summary(WHOLE) == late.summary(WHOLE)


def test_large_batches_keep_duplicates_out_whatever_ties_and_heads_they_share() -> None:
    for head_bytes in (1, 32):
        elements = crowd(1, 4000, 30, head_bytes)
        index, model = RangeIndex(), set()
        for start in range(0, 4000, 900):
            batch = elements[max(0, start - 500) : start + 900]
            batch += batch[:50]
            assert insert(index, batch) == len(set(batch) - model)
            model |= set(batch)
        view = index.view(KEY, None, ALL_ORDERS)
        assert set_of(*view.elements(WHOLE)) == model


def test_a_small_channel_is_found_among_many_rows() -> None:
    index = RangeIndex()
    for group in range(40):
        insert(index, crowd(group, 1000, 2**40), group)
    late = crowd(99, 20, 2**40)
    insert(index, late, 7)
    view = index.view(KEY, [7], ALL_ORDERS)
    assert set_of(*view.elements(WHOLE)) == set(crowd(7, 1000, 2**40)) | set(late)
    more = crowd(98, 30, 2**40)
    insert(index, more, 7)
    insert(index, crowd(97, 30, 2**40), 8)
    assert view.refresh() == 30


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
    views = [index.view(SessionKey(raw), None, ALL_ORDERS) for raw in (b"a" * 16, b"b" * 16)]
    assert views[0].summary(WHOLE) != views[1].summary(WHOLE)
    columns = columns_of(crowd(1, 50, 50))
    assert not (views[0].short_ids(*columns) == views[1].short_ids(*columns)).all(axis=1).any()


def test_the_order_is_part_of_what_is_hashed() -> None:
    summaries = set()
    for order in (0, 1, 256, 2**63):
        index = RangeIndex()
        insert(index, [(order, b"x" * 32)])
        summaries.add(index.view(KEY, None, ALL_ORDERS).summary(WHOLE))
    assert len(summaries) == 4


def test_sorted_columns_are_taken_as_they_are_and_others_refused() -> None:
    elements = sorted(crowd(2, 500, 20))
    orders, ids = columns_of(elements)
    groups = np.zeros(500, np.uint32)
    index = RangeIndex.from_sorted(orders, ids, groups)
    assert set_of(*index.view(KEY, None, ALL_ORDERS).elements(WHOLE)) == set(elements)
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


def test_elements_that_came_after_a_checkpoint_are_known_one_by_one() -> None:
    elements = sorted(crowd(2, 6_000, 5_500))
    orders, ids = columns_of(elements[:1_000])
    index = RangeIndex.from_sorted(orders, ids, np.zeros(1_000, np.uint32))
    assert insert(index, elements[1_000:]) == 5_000
    assert [insert(index, [each]) for each in elements[::97]] == [0] * len(elements[::97])
    assert len(index) == 6_000


def test_the_rows_of_groups_end_where_a_reader_stopped() -> None:
    count = 2 * SCAN_ROWS_MAX
    orders, ids = columns_of(sorted(crowd(4, count, count)))
    index = RangeIndex.from_sorted(orders, ids, np.zeros(count, np.uint32))
    snapshot, rows = index.rows_of([0])
    for stop in (0, 1, 4_999, count - 1, count):
        found = index.postings.rows_of(snapshot, [0], stop)
        assert set(found.tolist()) == set(rows[rows < stop].tolist()), stop


BOUNDS = CacheBounds(
    small_elements_max=200,
    large_max=2,
    large_bytes_max=3 * VIEW_BYTES,
    small_bytes_max=3 * VIEW_BYTES + 250 * VIEW_ELEMENT_BYTES,
    selections_bytes_max=2_000 * SELECTED_ELEMENT_BYTES,
)


def test_the_cache_of_views_is_bounded_and_keeps_what_was_used_last() -> None:
    index = RangeIndex()
    insert(index, crowd(1, 100, 100))
    cache = ViewCache(
        index, replace(BOUNDS, small_bytes_max=2 * VIEW_BYTES + 250 * VIEW_ELEMENT_BYTES)
    )
    keys = [SessionKey(bytes([n]) * 16) for n in range(4)]
    views = [cache.get(key, None, ALL_ORDERS) for key in keys]
    assert len(cache) == 2
    assert cache.get(keys[3], None, ALL_ORDERS) is views[3]
    assert not cache.holds(keys[0], None, ALL_ORDERS)
    insert(index, crowd(2, 30, 100))
    assert len(cache.get(keys[3], None, ALL_ORDERS)) == 130


def test_large_views_do_not_drop_small_ones_and_a_view_that_grows_large_counts_as_large() -> None:
    index = RangeIndex()
    insert(index, crowd(1, 50, 100), 1)
    insert(index, crowd(2, 300, 100), 2)
    cache, window = ViewCache(index, BOUNDS), ALL_ORDERS
    keys = [SessionKey(bytes([n]) * 16) for n in range(9)]
    small = cache.get(keys[0], (1,), window)
    for key in keys:
        cache.get(key, (2,), window)
    assert len(cache) == 3  # one small and the two large ones that are allowed
    assert cache.get(keys[0], (1,), window) is small
    insert(index, crowd(3, 200, 100), 1)
    assert cache.get(keys[0], (1,), window) is small
    assert len(small) == 250
    assert not cache.holds(keys[7], (2,), window)
    assert cache.holds(keys[8], (2,), window)


def test_an_empty_view_is_cached() -> None:
    cache = ViewCache(RangeIndex(), BOUNDS)
    assert cache.get(KEY, (1,), ALL_ORDERS) is cache.get(KEY, (1,), ALL_ORDERS)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ELEMENTS, st.integers(0, 3)), max_size=8), st.data())
def test_a_view_from_the_selection_of_an_earlier_one_equals_a_view_of_its_own(
    batches: list[tuple[set[Element], int]], data: st.DataObject
) -> None:
    index = RangeIndex()
    groups = data.draw(st.sets(st.integers(0, 4)))
    window = OrderWindow(data.draw(st.integers(0, 5)), data.draw(st.none() | st.integers(3, 9)))
    cache = ViewCache(index, BOUNDS)
    for number, (elements, group) in enumerate(batches):
        insert(index, elements, group)
        key = SessionKey(bytes([number]) * 16)
        shared, alone = cache.get(key, groups, window), index.view(key, groups, window)
        assert set_of(*shared.elements(WHOLE)) == set_of(*alone.elements(WHOLE))
        assert shared.summary(WHOLE) == alone.summary(WHOLE)
        assert shared.total() == alone.total()


def test_a_selection_is_made_again_when_many_rows_came_since() -> None:
    index, rng = RangeIndex(), np.random.default_rng(1)
    cache = ViewCache(index, replace(BOUNDS, small_elements_max=1 << 20))
    held, are_selected_anew = 0, []
    for count in (100, SELECTION_BEHIND_MAX, 1, SELECTION_BEHIND_MAX + 1, 3):
        ids = rng.integers(0, 256, (count, 32), dtype=np.uint8)
        orders = np.arange(held, held + count, dtype=np.uint64)
        index.insert(orders, ids, (orders % 2).astype(np.uint32))
        held += count
        views = [cache.get(SessionKey(rng.bytes(16)), (1,), ALL_ORDERS) for _ in range(2)]
        for view in views:
            assert view.elements(WHOLE)[0].tolist() == list(range(1, held, 2))
        runs = [view.runs for view in views]
        shared_all = len(runs[0]) == 1 and runs[0][0].orders is runs[1][0].orders
        are_selected_anew.append(shared_all)
    assert are_selected_anew == [True, False, True, True, False]


def test_views_of_one_interest_share_what_it_selects() -> None:
    index, count = RangeIndex(), 10_000
    ids = np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)
    index.insert(np.arange(count, dtype=np.uint64), ids, np.ones(count, np.uint32))
    cache = ViewCache(index, replace(BOUNDS, small_elements_max=1 << 16, small_bytes_max=1 << 30))
    runs = [cache.get(SessionKey(bytes([n]) * 16), (1,), ALL_ORDERS).runs[0] for n in range(3)]
    assert runs[0].orders is runs[1].orders is runs[2].orders
    assert runs[0].rows is runs[1].rows
    assert not np.array_equal(runs[0].low, runs[1].low)


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
            view = index.view(KEY, (group,), ALL_ORDERS)
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


def test_elements_that_wait_unsorted_are_in_a_view_once_also_where_a_segment_covers_them() -> None:
    index, ids = RangeIndex(), np.random.default_rng(1).integers(0, 256, (SCAN_ROWS_MAX + 9, 32))
    ids, orders = ids.astype(np.uint8), np.arange(SCAN_ROWS_MAX + 9, dtype=np.uint64)
    groups = (orders % 40).astype(np.uint32)
    for part in (slice(SCAN_ROWS_MAX - 9), slice(SCAN_ROWS_MAX - 9, None)):
        index.insert(orders[part], ids[part], groups[part])
    found = index.view(KEY, (20,), ALL_ORDERS).elements(WHOLE)[0]
    assert found.tolist() == orders[groups == 20].tolist()


def test_choosing_the_rows_of_a_group_costs_what_the_group_holds() -> None:
    count, groups_count = 1_000_000, 1_000
    ids = np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)
    groups = np.arange(count, dtype=np.uint32) % groups_count
    index = RangeIndex.from_sorted(np.arange(count, dtype=np.uint64), ids, groups)
    start_s = time.process_time()
    for group in range(groups_count):
        assert len(index.rows_of((group,))[1]) == count // groups_count
    # A scan takes a millisecond each; the rows of a thousand groups are found in some 50 ms.
    assert time.process_time() - start_s < 0.4
