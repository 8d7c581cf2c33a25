"""A view: the elements of one interest, hashed under one session key, with prefix sums.

A range's summary costs two searches and a subtraction per run. A view shares only the columns of the
index with other sessions. `refresh` takes in what was inserted since. Single new elements wait in a
small unsorted tail, so following a slow stream of them stays cheap.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from recon.elements import (
    END,
    I64,
    START,
    U8,
    U32,
    U64,
    Mask,
    OrderWindow,
    Range,
    RangeColumns,
    heads_of,
    spread,
)
from recon.hashing import ElementHasher, Total, short_ids_of, summary_hash, summary_hashes
from recon.limits import (
    ASIDE_ROW_FIRST,
    SELECTED_ELEMENT_BYTES,
    VIEW_BYTES,
    VIEW_ELEMENT_BYTES,
    VIEW_GROUP_BYTES,
)
from recon.session import SessionKey
from recon.store import EMPTY_RUN, Columns, Run, element_sequence, merge_runs, prefix_sums, push_run

if TYPE_CHECKING:
    from recon.index import IndexState, RangeIndex

_BUILD_CHUNK = 1 << 14  # elements gathered at a time: 512 KiB of ids
_WORD = (1 << 64) - 1
_NO_COUNT, _NO_SUM = np.zeros((), np.int64), np.zeros((), np.uint64)  # of a view without runs
_NO_TAIL = np.empty((4, 0), np.uint64)  # orders, rows, low, high
TAIL_MAX = 512  # new elements that wait unsorted; more become a run
SMALL_ELEMENTS_MAX = 1 << 16  # of a small interest: hashed in 1 ms
SELECTION_BEHIND_MAX = 2_048  # rows that a view looks through for what came after its selection
WIDE_SHARE = 8  # an interest in more than 1/8 of the rows is filtered by a scan, not by postings


@dataclass(frozen=True, slots=True)
class Places:
    """The places of m ranges: for each run, first places i64[m] and end places i64[m]."""

    starts: tuple[I64, ...]
    stops: tuple[I64, ...]

    def take(self, which: I64 | Mask | slice) -> Places:
        """Some of the ranges."""
        return Places(tuple(s[which] for s in self.starts), tuple(s[which] for s in self.stops))


@dataclass(frozen=True, slots=True)
class Selection:
    """The elements of an interest among the rows below `seen`, ascending, with their IDs in one piece.

    Choosing, sorting and gathering cost four times as much as hashing and do not depend on the session
    key, so the views of many sessions over one interest share a selection.
    """

    orders: U64
    rows: U32
    ids: U8
    seen: int

    def __len__(self) -> int:
        return len(self.orders)


def select(index: RangeIndex, groups: frozenset[int], window: OrderWindow) -> Selection:
    """The elements of `groups` in `window` as of now."""
    snapshot = index.state.snapshot
    rows = index.postings.rows_of(snapshot, groups, snapshot.size)
    columns = snapshot.take(rows)
    wanted = np.flatnonzero(_in_window(window, columns.orders))
    orders, ids = columns.orders[wanted], columns.ids[wanted]
    sequence = element_sequence(orders, heads_of(ids))
    return Selection(orders[sequence], rows[wanted[sequence]], ids[sequence], snapshot.size)


class View:
    """Elements of an interest, hashed under a session key. Belongs to one thread.

    `selection`: what the interest selects, if it is known already. Then the view costs one pass of the
    hash over it.
    """

    def __init__(
        self,
        index: RangeIndex,
        key: SessionKey,
        groups: frozenset[int] | None,
        window: OrderWindow,
        selection: Selection | None = None,
    ) -> None:
        self._index = index
        self._hasher = ElementHasher(key)
        self._groups = groups
        self._wanted = None if groups is None else np.array(sorted(groups), dtype=np.uint32)
        self._window = window
        self._tail = _NO_TAIL
        self._tail_count = 0
        self._tail_sums = 0, 0
        state = index.state
        self._snapshot = state.snapshot
        if selection is None:
            self._seen = state.sorted_count
            self._runs = self._first_runs(state)
        else:
            self._seen = selection.seen
            run = self._keyed(selection.orders, selection.rows, selection.ids)
            self._runs = (run,) if len(run) else ()
        self.refresh()

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs) + self._tail_count

    @property
    def runs(self) -> tuple[Run, ...]:
        """The sorted runs, the tail among them."""
        self._settle_tail()
        return self._runs or (EMPTY_RUN,)

    # Building and growing

    def _first_runs(self, state: IndexState) -> tuple[Run, ...]:
        if self._groups is not None:
            rows = self._index.postings.rows_of(state.snapshot, self._groups, state.sorted_count)
            if len(rows) * WIDE_SHARE < state.sorted_count:
                return self._run_of_rows(rows)
        runs = (self._keyed(*self._chosen(run)) for run in state.runs)
        return tuple(run for run in runs if len(run))

    def _run_of_rows(self, rows: U32) -> tuple[Run, ...]:
        columns = self._snapshot.take(rows)
        wanted = _in_window(self._window, columns.orders)
        orders, rows = columns.orders[wanted], rows[wanted]
        if not len(rows):
            return ()
        sequence = element_sequence(orders, heads_of(columns.ids[wanted]))
        return (self._keyed(orders[sequence], rows[sequence]),)

    def _chosen(self, run: Run) -> tuple[U64, U32 | None]:
        lower, upper = self._window
        start = int(np.searchsorted(run.orders, np.uint64(lower)))
        stop = len(run) if upper is None else int(np.searchsorted(run.orders, np.uint64(upper)))
        orders = run.orders[start:stop]
        if self._wanted is None:
            whole = run.rows is None and start == 0
            return orders, None if whole else run.rows_between(start, stop)
        rows = run.rows_between(start, stop)
        mine = np.isin(self._snapshot.take(rows).groups, self._wanted)
        return orders[mine], rows[mine]

    def _keyed(self, orders: U64, rows: U32 | None, ids_here: U8 | None = None) -> Run:
        """A run with its sums: one pass over the ids, in element order. `ids_here`: gathered already."""
        count = len(orders)
        low, high = np.empty(count + 1, np.uint64), np.empty(count + 1, np.uint64)
        low[0] = high[0] = 0
        for start in range(0, count, _BUILD_CHUNK):
            stop = min(start + _BUILD_CHUNK, count)
            if ids_here is not None:
                ids = ids_here[start:stop]
            elif rows is None:
                ids = self._snapshot.slice(start, stop).ids
            else:
                ids = self._snapshot.ids_of(rows[start:stop])
            span = slice(start + 1, stop + 1)
            self._hasher.hash_into(orders[start:stop], ids, low[span], high[span])
        np.cumsum(low, out=low)
        np.cumsum(high, out=high)
        return Run(orders, rows, low, high)

    def refresh(self) -> int:
        """Take in what was inserted since the last call; returns how many elements came."""
        self._snapshot = self._index.state.snapshot.beside(self._snapshot.aside)
        seen, self._seen = self._seen, self._snapshot.size
        if seen >= self._seen:
            return 0
        news = self._snapshot.slice(seen, self._seen)
        rows = np.arange(seen, self._seen, dtype=np.uint32)
        if self._groups is not None or self._window != (0, None):
            mine = _in_window(self._window, news.orders)
            if self._wanted is not None:
                mine &= np.isin(news.groups, self._wanted)
            news, rows = news.take(mine), rows[mine]
        if len(rows) + self._tail_count <= TAIL_MAX:
            self._add_to_tail(news.orders, news.ids, rows)
        else:
            self._settle_tail()
            sequence = element_sequence(news.orders, heads_of(news.ids))
            self._push(self._keyed(news.orders[sequence], rows[sequence]))
        return len(rows)

    def _add_to_tail(self, orders: U64, ids: U8, rows: U32) -> None:
        start, stop = self._tail_count, self._tail_count + len(rows)
        if stop and self._tail is _NO_TAIL:
            self._tail = np.empty((4, TAIL_MAX), np.uint64)
        tail = self._tail[:, start:stop]
        tail[0], tail[1] = orders, rows
        self._hasher.hash_into(orders, ids, tail[2], tail[3])
        self._tail_count = stop
        low, high = self._tail_sums
        self._tail_sums = low + sum(tail[2].tolist()), high + sum(tail[3].tolist())

    def _settle_tail(self) -> None:
        count, self._tail_count = self._tail_count, 0
        if not count:
            return
        self._tail_sums = 0, 0
        orders, low, high = (self._tail[lane, :count] for lane in (0, 2, 3))
        rows = self._tail[1, :count].astype(np.uint32)
        sequence = element_sequence(orders, heads_of(self._snapshot.ids_of(rows)))
        low, high = prefix_sums(low[sequence]), prefix_sums(high[sequence])
        self._push(Run(orders[sequence], rows[sequence], low, high))

    def _push(self, run: Run) -> None:
        if len(run):
            self._runs = push_run(self._snapshot, self._runs, run, summed=True)

    def consolidate(self) -> Run:
        """Merge all runs into one, so that every later question costs least; returns it."""
        runs = self.runs
        while len(runs) > 1:
            merged = merge_runs(self._snapshot, runs[-2], runs[-1], None, summed=True)
            runs = (*runs[:-2], merged)
        self._runs = runs
        return runs[0]

    # Questions about many ranges

    def locate(self, ranges: RangeColumns) -> Places:
        """The places of ranges. Neighbours that touch share a search."""
        if ranges.is_whole:
            ends = [np.array([len(run)]) for run in self.runs]
            return Places((np.zeros(1, np.int64),) * len(ends), tuple(ends))
        count = len(ranges)
        is_end = np.ones(count, dtype=bool)
        is_end[:-1] = ~ranges.touches_next()
        orders = np.concatenate((ranges.lower_orders, ranges.upper_orders[is_end]))
        heads = np.concatenate((ranges.lower_heads, ranges.upper_heads[is_end]))
        found = [run.lower_bounds(self._snapshot, orders, heads) for run in self.runs]
        stops = []
        for places in found:
            stop = np.empty(count, np.int64)
            stop[:-1] = places[1:count]
            stop[is_end] = places[count:]
            stops.append(stop)
        return Places(tuple(places[:count] for places in found), tuple(stops))

    def counts(self, places: Places) -> I64:
        """Elements in each range, i64[m]."""
        pairs = zip(places.starts, places.stops, strict=True)
        return sum((stop - start for start, stop in pairs), _NO_COUNT)

    def summaries(self, places: Places) -> tuple[U8, I64]:
        """Hashes u8[m, 6] and counts i64[m] of the ranges."""
        counts = self.counts(places)
        low = high = _NO_SUM
        for run, start, stop in zip(self.runs, places.starts, places.stops, strict=True):
            low = low + (run.low[stop] - run.low[start])
            high = high + (run.high[stop] - run.high[start])
        return summary_hashes(low, high, counts), counts

    def members(self, places: Places) -> tuple[I64, U64, U32]:
        """Elements of the ranges: owner range i64[k] ascending, hash lane u64[k], row u32[k]."""
        owners, lanes, rows = [], [], []
        for run, start, stop in zip(self.runs, places.starts, places.stops, strict=True):
            owner, within = spread(stop - start)
            at = start[owner] + within
            owners.append(owner)
            lanes.append(run.low[at + 1] - run.low[at])
            rows.append(run.rows_at(at))
        if len(owners) == 1:
            return owners[0], lanes[0], rows[0]
        owner = np.concatenate(owners) if owners else np.empty(0, np.int64)
        sequence = np.argsort(owner, kind="stable")
        lane = np.concatenate(lanes) if lanes else np.empty(0, np.uint64)
        row = np.concatenate(rows) if rows else np.empty(0, np.uint32)
        return owner[sequence], lane[sequence], row[sequence]

    def columns_of(self, rows: U32) -> tuple[U64, U8]:
        """orders u64[n] and ids u8[n, 32] of rows."""
        columns = self._snapshot.take(rows)
        return columns.orders, columns.ids

    def places_of_newest_rows(self, count: int) -> I64:
        """Places, in the one run of a consolidated view, of what was inserted last."""
        run = self.consolidate()
        oldest = self._seen - count
        if run.rows is None:
            return np.arange(max(oldest, 0), len(run))
        return np.flatnonzero((run.rows >= oldest) & (run.rows < ASIDE_ROW_FIRST))

    def heads_of_places(self, run: Run, places: I64) -> U64:
        """Heads of elements of one run."""
        return run.heads_at(self._snapshot, places)

    # Questions about one range

    def elements(self, span: Range) -> tuple[U64, U8]:
        """orders u64[n] and ids u8[n, 32] of a range, sorted."""
        _, _, rows = self.members(self.locate(RangeColumns.of(span)))
        orders, ids = self.columns_of(rows)
        if len(self.runs) > 1:
            sequence = element_sequence(orders, heads_of(ids))
            orders, ids = orders[sequence], ids[sequence]
        return orders, ids

    def summary(self, span: Range) -> tuple[bytes, int]:
        """(hash, count) of a range."""
        if span == (START, END):
            return self._summary_of_all()
        hashes, counts = self.summaries(self.locate(RangeColumns.of(span)))
        return hashes[0].tobytes(), int(counts[0])

    def _summary_of_all(self) -> tuple[bytes, int]:
        low, high = self._sums()
        count = len(self)
        return summary_hash(low & _WORD, high & _WORD, count), count

    def _sums(self) -> tuple[int, int]:
        low, high = self._tail_sums
        for run in self._runs:
            low += int(run.low[-1])
            high += int(run.high[-1])
        return low, high

    def total(self, added: Iterable[Columns] = (), removed: Iterable[Columns] = ()) -> Total:
        """All of the view, with some elements that it lacks and without some that it has."""
        count, sums = len(self), self._sums()
        for pieces, sign in ((added, 1), (removed, -1)):
            for columns in pieces:
                lanes = self._hasher.lanes(columns.orders, np.ascontiguousarray(columns.ids))
                low, high = (sign * int(lane.sum(dtype=np.uint64)) for lane in lanes)
                count, sums = count + sign * len(columns), (sums[0] + low, sums[1] + high)
        return Total(count, b"".join((each & _WORD).to_bytes(8, "little") for each in sums))

    # Elements that one session sets aside

    def apart(self, added: Columns, removed: Columns) -> View:
        """A view of its own that names `added`, which this one lacks, and not `removed`.

        Elements added have the row numbers from `ASIDE_ROW_FIRST` on. Costs a pass over the view.
        """
        self._settle_tail()
        view = copy.copy(self)
        view._set_apart(added, removed)  # noqa: SLF001 - a copy of ourselves
        return view

    def _set_apart(self, added: Columns, removed: Columns) -> None:
        self._tail = _NO_TAIL
        if len(removed):
            kept = (self._without(run, removed) for run in self._runs)
            self._runs = tuple(run for run in kept if len(run))
        if len(added):
            self._snapshot = self._snapshot.beside(added)
            sequence = element_sequence(added.orders, heads_of(added.ids))
            rows = (sequence + ASIDE_ROW_FIRST).astype(np.uint32)
            self._push(self._keyed(added.orders[sequence], rows))

    def _without(self, run: Run, removed: Columns) -> Run:
        places = run.lower_bounds(self._snapshot, removed.orders, heads_of(removed.ids))
        there = np.flatnonzero(run.holds_order(places, removed.orders))
        places = places[there]
        same = (self._snapshot.ids_of(run.rows_at(places)) == removed.ids[there]).all(axis=1)
        kept = np.ones(len(run), bool)
        kept[places[same]] = False
        rows = run.rows_between(0, len(run))[kept]
        low, high = (prefix_sums(np.diff(sums)[kept]) for sums in (run.low, run.high))
        return Run(run.orders[kept], rows, low, high)

    def short_ids(self, orders: U64, ids: U8) -> U8:
        """Short ids u8[n, 6] of any elements under this view's key."""
        low, _ = self._hasher.lanes(orders, np.ascontiguousarray(ids))
        return short_ids_of(low)


def _in_window(window: OrderWindow, orders: U64) -> Mask:
    lower, upper = window
    wanted = orders >= np.uint64(lower)
    return wanted if upper is None else wanted & (orders < np.uint64(upper))


# ---- the cache of views


CacheKey = tuple[bytes, frozenset[int] | None, OrderWindow]
_SelectionKey = tuple[frozenset[int], OrderWindow]
_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBounds:
    """Bounds of a `ViewCache`.

    `large_max` views of more than `small_elements_max` elements, of `large_bytes_max` bytes together;
    smaller views, and what small interests select, in bytes.
    """

    small_elements_max: int = SMALL_ELEMENTS_MAX
    large_max: int
    large_bytes_max: int
    small_bytes_max: int
    selections_bytes_max: int


class ViewCache:
    """A bounded cache of views; it only saves the responder from building them again.

    A few large views and many small ones have bounds of their own, so that the participants of one
    large group, or of many small ones, keep their views while two nodes reconcile everything. What a
    small interest selects is kept too: the views of all its sessions are built from it. Each part
    drops what was used longest ago; the view used last stays, however large it is. Not thread-safe:
    one event loop owns it.
    """

    def __init__(self, index: RangeIndex, bounds: CacheBounds) -> None:
        self._index = index
        self._small_max = bounds.small_elements_max
        self._large: _Recent[CacheKey, View] = _Recent(bounds.large_bytes_max, bounds.large_max)
        self._small: _Recent[CacheKey, View] = _Recent(bounds.small_bytes_max)
        self._selections: _Recent[_SelectionKey, Selection] = _Recent(bounds.selections_bytes_max)

    def __len__(self) -> int:
        return len(self._large) + len(self._small)

    def holds(self, key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> bool:
        """Whether `get` would be cheap (budgets of callers count the others)."""
        name = _cache_key(key, groups, window)
        return name in self._small or name in self._large

    def get(self, key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> View:
        """The view, up to date: cached and refreshed, or built."""
        name = _cache_key(key, groups, window)
        part = self._small if name in self._small else self._large
        view = part.pop(name)
        if view is None:
            view = View(self._index, key, name[1], window, self._selected(name[1], window))
        else:
            view.refresh()
        self._put(name, view)
        return view

    def put(
        self,
        key: SessionKey,
        groups: Collection[int] | None,
        window: OrderWindow,
        view: View,
    ) -> None:
        """Keep a view of this index that was built elsewhere: on another thread."""
        name = _cache_key(key, groups, window)
        for part in (self._small, self._large):
            part.pop(name)
        self._put(name, view)

    def _put(self, name: CacheKey, view: View) -> None:
        part = self._small if len(view) <= self._small_max else self._large
        part.put(name, view, _bytes_of(name, view))

    def _selected(self, groups: frozenset[int] | None, window: OrderWindow) -> Selection | None:
        """What a small interest selects: as it is known, or selected again if many rows came since."""
        if groups is None or self._index.postings.count(groups) > self._small_max:
            return None
        selection = self._selections.pop((groups, window))
        if selection is None or len(self._index) - selection.seen > SELECTION_BEHIND_MAX:
            selection = select(self._index, groups, window)
        size = SELECTED_ELEMENT_BYTES * len(selection) + VIEW_GROUP_BYTES * len(groups)
        self._selections.put((groups, window), selection, size)
        return selection


class _Recent(Generic[_K, _V]):
    """Values by key, bounded in bytes and number; the ones put in longest ago are dropped."""

    def __init__(self, bytes_max: int, count_max: int = sys.maxsize) -> None:
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._bytes = 0
        self._values: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: _K) -> bool:
        return key in self._values

    def pop(self, key: _K) -> _V | None:
        """Take a value out, to put it back as the newest."""
        value, size = self._values.pop(key, (None, 0))
        self._bytes -= size
        return value

    def put(self, key: _K, value: _V, size: int) -> None:
        """Keep a value of `size` bytes, and drop the oldest ones beyond the bounds, but not this one."""
        self._values[key] = value, size
        self._bytes += size
        while len(self._values) > 1 and (
            len(self._values) > self._count_max or self._bytes > self._bytes_max
        ):
            self._bytes -= self._values.popitem(last=False)[1][1]


def _bytes_of(name: CacheKey, view: View) -> int:
    groups = name[1] or ()
    return VIEW_BYTES + VIEW_ELEMENT_BYTES * len(view) + VIEW_GROUP_BYTES * len(groups)


def _cache_key(key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> CacheKey:
    return key.raw, None if groups is None else frozenset(groups), window
