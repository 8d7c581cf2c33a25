"""Rows of elements in order of arrival, and sorted runs over them.

**Rows.** A row number never changes. The first rows can be a base segment that the caller owns (a
memory-mapped checkpoint, or the sorted columns of a bulk load); later rows go to a growing tail. A
published row is never written again, so a reader with an older snapshot needs no lock.

**Runs.** A run is a permutation of rows in element order (order, head), and immutable. Adding makes a
new small run; neighbours of similar size are merged (as in an LSM tree), so an element is moved a
few times, and a query looks at few runs. Elements that agree in order and head are in any sequence
among themselves: no bound separates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from recon.elements import END, I64, U8, U32, U64, Mask, heads_of, laid
from recon.limits import ID_BYTES


@dataclass(frozen=True, slots=True)
class Columns:
    """orders u64[n], ids u8[n, 32], groups u32[n]."""

    orders: U64
    ids: U8
    groups: U32

    def __len__(self) -> int:
        return len(self.orders)

    def take(self, rows: slice | U32 | I64 | Mask) -> Columns:
        """Some rows."""
        return Columns(self.orders[rows], self.ids[rows], self.groups[rows])

    def put(self, rows: slice | Mask, source: Columns) -> None:
        """Write rows."""
        self.orders[rows] = source.orders
        self.ids[rows] = source.ids
        self.groups[rows] = source.groups


def empty_columns(rows: int) -> Columns:
    """Columns with room for `rows`, not initialised."""
    return Columns(
        np.empty(rows, np.uint64), np.empty((rows, ID_BYTES), np.uint8), np.empty(rows, np.uint32)
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The store at one moment: `size` rows, the first `len(base)` of them in the base."""

    base: Columns
    tail: Columns
    size: int

    def take(self, rows: U32) -> Columns:
        """Rows by number, in the given order."""
        split = len(self.base)
        if len(rows) == 0 or int(rows.max()) < split:
            return self.base.take(rows)
        if split == 0 or int(rows.min()) >= split:
            return self.tail.take(rows - np.uint32(split) if split else rows)
        in_base = rows < split
        out = empty_columns(len(rows))
        out.put(in_base, self.base.take(rows[in_base]))
        out.put(~in_base, self.tail.take(rows[~in_base] - np.uint32(split)))
        return out

    def ids_of(self, rows: U32) -> U8:
        """Ids u8[n, 32] of rows."""
        if len(self.base) == 0:
            return self.tail.ids[rows]
        if len(self.base) == self.size:
            return self.base.ids[rows]
        return self.take(rows).ids

    def slice(self, start: int, stop: int) -> Columns:
        """Rows `start` to `stop` in order of arrival."""
        split = len(self.base)
        if stop <= split:
            return self.base.take(slice(start, stop))
        if start >= split:
            return self.tail.take(slice(start - split, stop - split))
        return self.take(np.arange(start, stop, dtype=np.uint32))


class ElementStore:
    """The growing columns. One thread appends; any thread reads `snapshot`."""

    def __init__(self, base: Columns | None = None) -> None:
        base = empty_columns(0) if base is None else base
        self.snapshot = Snapshot(base, empty_columns(0), len(base))

    def append(self, news: Columns) -> int:
        """Add rows; returns the number of the first."""
        base, tail, size = self.snapshot.base, self.snapshot.tail, self.snapshot.size
        used = size - len(base)
        end = used + len(news)
        if end > len(tail):
            grown = empty_columns(max(end, 2 * len(tail)))
            grown.put(slice(0, used), tail.take(slice(0, used)))
            tail = grown
        tail.put(slice(used, end), news)
        self.snapshot = Snapshot(base, tail, size + len(news))
        return size


# ---- runs


_BLOCK = 64  # elements between samples: a sample of 10^6 fits the second-level cache
_LONG_COLUMN = 1 << 17  # shorter ones live in the cache
_MANY_SEARCHES = 128  # fewer do not pay for the vector steps
_TIES_AT_ONCE = 6  # elements of one order that are compared side by side; more are halved first
MERGE_RATIO = 8  # a run is merged into its elder when that is less than 8 times its size


@dataclass(frozen=True)
class Run:
    """orders u64[n] ascending; rows u32[n] in the store, None if row i is at place i.

    With a session key, `low` and `high` are prefix sums u64[n + 1] of the element hashes. `ids` u8[n, 32]: of a
    run whose elements are not in the store.
    """

    orders: U64
    rows: U32 | None
    low: U64
    high: U64
    ids: U8 | None = None

    def __len__(self) -> int:
        return len(self.orders)

    def rows_at(self, places: I64) -> U32:
        """Row numbers of places."""
        return places.astype(np.uint32) if self.rows is None else self.rows[places]

    def rows_between(self, start: int, stop: int) -> U32:
        """Row numbers of a stretch."""
        if self.rows is None:
            return np.arange(start, stop, dtype=np.uint32)
        return self.rows[start:stop]

    def ids_at(self, snapshot: Snapshot, places: I64) -> U8:
        """IDs u8[n, 32] of places."""
        return snapshot.ids_of(self.rows_at(places)) if self.ids is None else self.ids[places]

    def heads_at(self, snapshot: Snapshot, places: I64) -> U64:
        """Heads of places."""
        return heads_of(self.ids_at(snapshot, places))

    @cached_property
    def _sample(self) -> U64:
        return np.ascontiguousarray(self.orders[::_BLOCK])

    def first_at_least(self, orders: U64) -> I64:
        """`searchsorted` in the orders, four times as fast for many searches in a long run.

        Each step of a search in a long column is a cache miss. Searching a sample first, and then
        all blocks side by side, lets the processor wait for many of them at once.
        """
        if len(self) < _LONG_COLUMN or len(orders) < _MANY_SEARCHES:
            return self.orders.searchsorted(orders)
        found = np.maximum(self._sample.searchsorted(orders) - 1, 0) * _BLOCK
        last = len(self) - 1
        step = _BLOCK
        while step:
            further = found + step
            below = self.orders[np.minimum(further - 1, last)] < orders
            below &= further <= len(self)
            found += below * step
            step >>= 1
        return found

    def lower_bounds(self, snapshot: Snapshot, orders: U64, heads: U64) -> I64:
        """First place at or above each bound (order, head); the highest bound is after all."""
        places = self.first_at_least(orders)
        inside = (self.holds_order(places, orders) & (heads != 0)).nonzero()[0]
        if len(inside):
            within = self._within_ties(snapshot, orders[inside], heads[inside], places[inside])
            places[inside] = within
        return places

    def holds_order(self, places: I64, orders: U64) -> Mask:
        """Whether the element at each place has just that order; False past the end."""
        if not len(self):
            return np.zeros(places.shape, bool)
        there: Mask = self.orders[np.minimum(places, len(self) - 1)] == orders
        there &= places < len(self)
        return there

    def _within_ties(self, snapshot: Snapshot, orders: U64, heads: U64, first: I64) -> I64:
        """Lower bounds, given the first place of each order."""
        near = first[:, None] + np.arange(_TIES_AT_ONCE)
        tied = self.holds_order(near, orders[:, None])
        below = tied.copy()
        below[tied] = self.heads_at(snapshot, near[tied]) < heads.repeat(tied.sum(axis=1))
        found: I64 = first + below.sum(axis=1)
        many = tied[:, -1].nonzero()[0]
        if len(many):
            found[many] = self._halving(snapshot, orders[many], heads[many], first[many])
        found[(orders == END.order) & (heads == END.head)] = len(self)
        return found

    def _halving(self, snapshot: Snapshot, orders: U64, heads: U64, low: I64) -> I64:
        high = self.first_at_least(orders + np.uint64(1))
        high[orders == END.order] = len(self)
        while len(open_ := (low < high).nonzero()[0]):
            middle = (low[open_] + high[open_]) >> 1
            below = self.heads_at(snapshot, middle) < heads[open_]
            low[open_[below]] = middle[below] + 1
            high[open_[~below]] = middle[~below]
        return low


def element_sequence(orders: U64, heads: U64) -> I64:
    """The permutation that sorts by (order, head)."""
    sequence = np.argsort(orders, kind="stable")
    ascending = orders[sequence]
    same = ascending[1:] == ascending[:-1]
    tied = (np.append(same, False) | np.append(False, same)).nonzero()[0]
    if len(tied):
        some = sequence[tied]
        sequence[tied] = some[np.lexsort((heads[some], orders[some]))]
    return sequence


NO_SUMS = np.zeros(1, np.uint64)
EMPTY_RUN = Run(np.empty(0, np.uint64), np.empty(0, np.uint32), NO_SUMS, NO_SUMS)


def merge_runs(snapshot: Snapshot, elder: Run, younger: Run, *, summed: bool) -> Run:
    """One run of two. Costs a pass over the elder."""
    heads = younger.heads_at(snapshot, np.arange(len(younger)))
    places = elder.lower_bounds(snapshot, younger.orders, heads)
    target = places + np.arange(len(younger))
    rows = younger.rows_between(0, len(younger)), elder.rows_between(0, len(elder))
    return Run(
        laid(younger.orders, target, elder.orders),
        laid(rows[0], target, rows[1]),
        _merge_sums(elder.low, younger.low, target) if summed else NO_SUMS,
        _merge_sums(elder.high, younger.high, target) if summed else NO_SUMS,
    )


def _merge_sums(elder: U64, younger: U64, target: I64) -> U64:
    return prefix_sums(laid(np.diff(younger), target, np.diff(elder)))


def prefix_sums(values: U64) -> U64:
    """Sums mod 2^64 of the first 0 … n values, u64[n + 1]."""
    sums = np.empty(len(values) + 1, np.uint64)
    sums[0] = 0
    np.cumsum(values, out=sums[1:])
    return sums


def push_run(
    snapshot: Snapshot, runs: tuple[Run, ...], new: Run, *, summed: bool
) -> tuple[Run, ...]:
    """Add a run, merging while the elder is not much larger."""
    if not len(new):
        return runs
    while runs and len(runs[-1]) < MERGE_RATIO * len(new):
        new = merge_runs(snapshot, runs[-1], new, summed=summed)
        runs = runs[:-1]
    return (*runs, new)
