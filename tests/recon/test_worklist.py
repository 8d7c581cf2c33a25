"""The work list ascends, and joins lists of neighbours up to a size."""

from __future__ import annotations

import numpy as np

from recon.elements import Bound, Range, RangeColumns
from recon.worklist import Work, join_lists, join_ranges


def work(*rows: tuple[int, int, bool, int]) -> Work:
    ranges = [Range(Bound(low), Bound(high)) for low, high, _, _ in rows]
    listed, sizes = (np.array([row[place] for row in rows]) for place in (2, 3))
    zeros, hashes = np.zeros(len(rows), np.int64), np.zeros((len(rows), 6), np.uint8)
    return Work(RangeColumns.of(*ranges), listed, zeros, sizes, sizes, hashes)


def shown(some: Work) -> list[tuple[int, int, bool, int]]:
    return [
        (some.ranges[at].lower.order, some.ranges[at].upper.order, bool(some.listed[at]), int(size))
        for at, size in enumerate(some.sizes)
    ]


def test_touching_lists_join_but_not_across_gaps_or_with_comparisons() -> None:
    rows = work(
        (0, 1, True, 5),
        (1, 2, True, 6),
        (2, 3, False, 7),
        (3, 4, True, 8),
        (5, 6, True, 9),
        (6, 7, True, 1),
        (7, 8, False, 2),
    )
    assert shown(join_lists(rows, 1000)) == [
        (0, 2, True, 11),
        (2, 3, False, 7),
        (3, 4, True, 8),
        (5, 7, True, 10),
        (7, 8, False, 2),
    ]


def test_ranges_that_touch_join_up_to_a_number_of_elements() -> None:
    ranges = RangeColumns.of(
        *(Range(Bound(low), Bound(low + 1)) for low in (0, 1, 2, 3, 5, 6)),
    )
    joined, counts = join_ranges(ranges, np.array([3, 4, 4, 1, 2, 2]), 6)
    assert [(lower.order, upper.order) for lower, upper in joined] == [(0, 2), (2, 4), (5, 7)]
    assert counts.tolist() == [7, 5, 4]
