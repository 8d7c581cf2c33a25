"""The range index: columns of elements in order of arrival, sorted runs over them, rows by group.

**Rows.** A row number never changes. The first rows can be a base segment that the caller owns (a
memory-mapped checkpoint, or the sorted columns of a bulk load); later rows go to a growing tail. A
published row is never written again, so a reader with an older snapshot needs no lock.

**Runs.** A run is a permutation of rows in element order (order, head), and immutable. Adding makes a
new small run; neighbours of similar size are merged (as in an LSM tree), so an element is moved a
few times, and a query looks at few runs. Elements that agree in order and head are in any sequence
among themselves: no bound separates them.

The index holds columns and their order, no sums: summaries belong to a session's view (`recon.view`).

**Threads.** One thread inserts. Any thread may call `len`, look up rows and make views; a view belongs
to the thread that uses it. Readers change nothing here: all that they see hangs on one reference
(`state`, and the segments of `postings`), which the inserting thread replaces as a whole. So a batch
becomes visible as a whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from recon.elements import END, I64, U8, U32, U64, Mask, heads_of, laid, spread
from recon.errors import LocalProtocolError
from recon.limits import ID_BYTES

# ---- rows


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
            within = self.within_ties(snapshot, orders[inside], heads[inside], places[inside])
            places[inside] = within
        return places

    def holds_order(self, places: I64, orders: U64) -> Mask:
        """Whether the element at each place has just that order; False past the end."""
        size = len(self.orders)
        if not size:
            return np.zeros(places.shape, bool)
        there: Mask = self.orders[np.minimum(places, size - 1)] == orders
        there &= places < size
        return there

    def within_ties(self, snapshot: Snapshot, orders: U64, heads: U64, first: I64) -> I64:
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
    if len(orders) == 1:
        return np.zeros(1, np.int64)
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


# ---- rows by group


SCAN_ROWS_MAX = 1 << 14  # rows without a segment: scanned in 0.1 ms
_MERGE_RATIO = 2  # stretches double: a row is moved a few times, a look-up searches a few segments
_ROW_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    stop: int
    groups: U32  # ascending, unique
    firsts: I64  # where each group's rows begin; one more at the end
    rows: U32  # ascending within each group

    def _places(self, wanted: U32) -> I64:
        places = np.searchsorted(self.groups, wanted)
        known = places < len(self.groups)
        known[known] = self.groups[places[known]] == wanted[known]
        return places[known]

    def count(self, wanted: U32) -> int:
        places = self._places(wanted)
        return int((self.firsts[places + 1] - self.firsts[places]).sum())

    def rows_of(self, wanted: U32) -> U32:
        places = self._places(wanted)
        counts = self.firsts[places + 1] - self.firsts[places]
        owner, within = spread(counts)
        rows: U32 = self.rows[self.firsts[places][owner] + within]
        return rows


class Postings:
    """The rows of each group, so that a view of a small channel costs what the channel costs.

    Segments cover the rows in stretches. Each is sorted by group, and neighbours of similar size are
    merged. Rows younger than the last segment are scanned. Costs four bytes per element.
    """

    def __init__(self) -> None:
        self._segments: tuple[_Segment, ...] = ()

    def rows_of(self, snapshot: Snapshot, groups: Collection[int], stop: int) -> U32:
        """Rows below `stop` of the groups, in no order."""
        segments = self._segments  # read once: the inserting thread may replace them meanwhile
        wanted = np.unique(np.fromiter(groups, dtype=np.uint32, count=len(groups)))
        covered = segments[-1].stop if segments else 0
        pieces = [segment.rows_of(wanted) for segment in segments]
        if covered < stop:
            young = np.flatnonzero(np.isin(snapshot.slice(covered, stop).groups, wanted))
            pieces.append((young + covered).astype(np.uint32))
        rows = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        return rows[rows < stop] if covered > stop else rows

    def count(self, groups: Collection[int]) -> int:
        """Rows of the groups, but for the youngest ones, which no segment covers yet."""
        wanted = np.fromiter(groups, dtype=np.uint32, count=len(groups))
        return sum(segment.count(wanted) for segment in self._segments)

    def extend(self, snapshot: Snapshot) -> None:
        """Cover the rows of a snapshot, once there are enough of them. The inserting thread only."""
        segments = self._segments
        start = segments[-1].stop if segments else 0
        if snapshot.size - start <= SCAN_ROWS_MAX:
            return
        new = _segment(snapshot, start)
        while segments and len(segments[-1].rows) < _MERGE_RATIO * len(new.rows):
            new, segments = _merged(segments[-1], new), segments[:-1]
        self._segments = (*segments, new)


def _segment(snapshot: Snapshot, start: int) -> _Segment:
    groups = snapshot.slice(start, snapshot.size).groups
    rows = np.arange(start, snapshot.size, dtype=np.uint64)
    packed = (groups.astype(np.uint64) << _ROW_BITS) | rows
    packed.sort()
    ordered = (packed >> _ROW_BITS).astype(np.uint32)
    firsts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    ends = np.append(firsts, len(ordered))
    return _Segment(start, snapshot.size, ordered[firsts], ends, packed.astype(np.uint32))


def _merged(elder: _Segment, younger: _Segment) -> _Segment:
    """One segment of two neighbours: one pass over both, no sorting."""
    groups = np.union1d(elder.groups, younger.groups)
    counts = np.zeros((2, len(groups)), np.int64)
    for count, segment in zip(counts, (elder, younger), strict=True):
        count[np.searchsorted(groups, segment.groups)] = np.diff(segment.firsts)
    firsts = np.zeros(len(groups) + 1, np.int64)
    np.cumsum(counts.sum(axis=0), out=firsts[1:])
    rows = np.empty(int(firsts[-1]), np.uint32)
    begins = firsts[:-1], firsts[:-1] + counts[0]
    for begin, count, segment in zip(begins, counts, (elder, younger), strict=True):
        owner, within = spread(count)
        rows[begin[owner] + within] = segment.rows
    return _Segment(elder.start, younger.stop, groups, firsts, rows)


# ---- the index


_DTYPES = np.dtype(np.uint64), np.dtype(np.uint8), np.dtype(np.uint32)


class IndexState(NamedTuple):
    """The state that readers see: the columns, and the runs over all their rows."""

    snapshot: Snapshot
    runs: tuple[Run, ...]


class RangeIndex:
    """Elements (order, id) with the caller's group number, grow-only."""

    def __init__(self) -> None:
        self._start(None, ())

    def _start(self, base: Columns | None, runs: tuple[Run, ...]) -> None:
        self._store = ElementStore(base)
        self.postings = Postings()
        self.state = IndexState(self._store.snapshot, runs)
        self.postings.extend(self._store.snapshot)

    @classmethod
    def from_sorted(cls, orders: U64, ids: U8, groups: U32) -> RangeIndex:
        """An index over columns that are sorted by (order, id) and without duplicates.

        The columns are kept, not copied: they must not be written afterwards (they may be a memory
        map). Raises `LocalProtocolError` when they are not sorted.
        """
        _check_columns(orders, ids, groups)
        if not _strictly_ascending(orders, ids):
            raise LocalProtocolError("columns must ascend by (order, id) without duplicates")
        index = cls()
        run = Run(orders, None, NO_SUMS, NO_SUMS)
        index._start(Columns(orders, ids, groups), (run,) if len(orders) else ())
        return index

    def __len__(self) -> int:
        return self.state.snapshot.size

    def rows_of(self, groups: Collection[int]) -> tuple[Snapshot, U32]:
        """The rows of some groups as of now, in no order, and the snapshot that holds them.

        Both stay as they are: another thread may read the columns of the rows.
        """
        snapshot = self.state.snapshot
        return snapshot, self.postings.rows_of(snapshot, groups, snapshot.size)

    def insert(self, orders: U64, ids: U8, groups: U32) -> int:
        """Add elements: orders u64[n], ids u8[n, 32], groups u32[n]. Returns how many were new.

        An element that is already there keeps its group.
        """
        _check_columns(orders, ids, groups)
        ids = np.ascontiguousarray(ids)
        heads = heads_of(ids)
        sequence = element_sequence(orders, heads)
        news, heads = Columns(orders, ids, groups).take(sequence), heads[sequence]
        is_new = ~self._held(news.orders, news.ids, heads)
        is_new &= ~_repeats(news.orders, heads, news.ids)
        if not is_new.all():
            news = news.take(is_new)
        if len(news):
            first = self._store.append(news)
            snapshot = self._store.snapshot
            rows = np.arange(first, snapshot.size, dtype=np.uint32)
            run = Run(news.orders, rows, NO_SUMS, NO_SUMS)
            self.state = IndexState(
                snapshot, push_run(snapshot, self.state.runs, run, summed=False)
            )
            self.postings.extend(snapshot)
        return len(news)

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements, orders u64[n] and ids u8[n, 32], are in the index: bool[n]."""
        ids = np.ascontiguousarray(ids)
        return self._held(orders, ids, heads_of(ids))

    def _held(self, orders: U64, ids: U8, heads: U64) -> Mask:
        return self.rows_of_elements(orders, ids, heads)[1]

    def rows_of_elements(self, orders: U64, ids: U8, heads: U64 | None = None) -> tuple[U32, Mask]:
        """The rows of elements, u32[n], and which of them are in the index, bool[n]."""
        heads = heads_of(ids) if heads is None else heads
        snapshot, runs = self.state
        held, found = np.zeros(len(orders), bool), np.zeros(len(orders), np.uint32)
        for run in runs:
            places = run.first_at_least(orders)
            left = run.holds_order(places, orders).nonzero()[0]
            if not len(left):
                continue  # most runs, if few elements are looked up
            places[left] = run.within_ties(snapshot, orders[left], heads[left], places[left])
            left = left[run.holds_order(places[left], orders[left])]
            while len(left):
                rows = run.rows_at(places[left])
                stored = snapshot.take(rows)
                is_tied = stored.orders == orders[left]
                is_same = is_tied & (stored.ids == ids[left]).all(axis=1)
                held[left[is_same]], found[left[is_same]] = True, rows[is_same]
                # Elements that agree in order and head are neighbours in any sequence: look further.
                more = is_tied & ~is_same & (heads_of(stored.ids) == heads[left])
                left = left[more & (places[left] + 1 < len(run))]
                places[left] += 1
        return found, held


def _check_columns(orders: U64, ids: U8, groups: U32) -> None:
    shapes_fit = ids.shape == (len(orders), ID_BYTES) and groups.shape == orders.shape
    types_fit = (orders.dtype, ids.dtype, groups.dtype) == _DTYPES
    if not (shapes_fit and types_fit):
        raise LocalProtocolError("orders u64[n], ids u8[n, 32] and groups u32[n] go together")


def _strictly_ascending(orders: U64, ids: U8) -> bool:
    if not bool((orders[1:] >= orders[:-1]).all()):
        return False
    ties = np.flatnonzero(orders[1:] == orders[:-1])
    words = ids.view(">u8")
    undecided = ties
    for word in range(ID_BYTES // 8):
        first, second = words[undecided, word], words[undecided + 1, word]
        if (first > second).any():
            return False
        undecided = undecided[first == second]
    return len(undecided) == 0


def _repeats(orders: U64, heads: U64, ids: U8) -> Mask:
    """Which of these sorted elements repeat one before them, bool[n]."""
    repeats = np.zeros(len(orders), dtype=bool)
    close = (orders[1:] == orders[:-1]) & (heads[1:] == heads[:-1])
    if close.any():
        involved = np.flatnonzero(np.append(close, False) | np.append(False, close))
        seen: set[tuple[int, bytes]] = set()
        for place in involved.tolist():
            element = (int(orders[place]), ids[place].tobytes())
            repeats[place] = element in seen
            seen.add(element)
    return repeats
