"""A view: the elements of one interest, hashed under one session key, with prefix sums.

A range's summary costs two searches and a subtraction per run. A view shares only the columns of the
index with other sessions. `refresh` takes in what was inserted since. Elements that one session sets aside
are a run of its view.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from recon.agreement import SessionKey
from recon.elements import (
    ALL_ORDERS,
    I64,
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
from recon.errors import LocalProtocolError
from recon.hashing import ElementHasher, Total, short_ids_of, summary_hashes
from recon.index import (
    EMPTY_RUN,
    Columns,
    RangeIndex,
    Run,
    element_sequence,
    merge_runs,
    prefix_sums,
    push_run,
)
from recon.limits import ID_BYTES, VIEW_BYTES, VIEW_ELEMENT_BYTES, VIEW_GROUP_BYTES

_BUILD_CHUNK = 1 << 14  # elements gathered at a time: 512 KiB of ids
_WORD = (1 << 64) - 1
_NO_COUNT, _NO_SUM = np.zeros((), np.int64), np.zeros((), np.uint64)  # of a view without runs
WIDE_SHARE = 8  # an interest in more than 1/8 of the rows is filtered by a scan, not by postings


@dataclass(frozen=True, slots=True)
class Places:
    """The places of m ranges: for each run, first places i64[m] and end places i64[m]."""

    starts: tuple[I64, ...]
    stops: tuple[I64, ...]

    def take(self, which: I64 | Mask | slice) -> Places:
        """Some of the ranges."""
        return Places(tuple(s[which] for s in self.starts), tuple(s[which] for s in self.stops))


class View:
    """The elements of `groups` (None: all) in `window`, hashed under a session key.

    `without`: bool[n], rows of the index that do not count. Belongs to one thread.
    """

    def __init__(
        self,
        index: RangeIndex,
        key: SessionKey,
        groups: Collection[int] | None = None,
        window: OrderWindow = ALL_ORDERS,
        without: Mask | None = None,
    ) -> None:
        self._index = index
        self._without = None if without is None or not without.any() else without
        self._hasher = ElementHasher(key)
        self._wanted = None if groups is None else np.array(sorted(groups), dtype=np.uint32)
        self._window = window
        self._added: Run | None = None
        state = index.state
        self._snapshot = state.snapshot
        chosen = (
            map(self._chosen, state.runs)
            if groups is None or not self._is_narrow(groups)
            else [self._of_groups(groups)]
        )
        self._runs = tuple(self._keyed(*each) for each in chosen if len(each[0]))

    def under(self, key: SessionKey) -> View:
        """The same elements under another key: only hashed, not chosen and sorted again."""
        self._check_whole()
        view = copy.copy(self)
        view._rekey(key)  # noqa: SLF001 - a copy of ourselves
        return view

    def _rekey(self, key: SessionKey) -> None:
        self._hasher = ElementHasher(key)
        self._runs = tuple(self._keyed(run.orders, run.rows) for run in self._runs)

    def _check_whole(self) -> None:
        if self._added is not None:
            raise LocalProtocolError("a corrected view stays as it is")

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The sorted runs; in a corrected view the last one has what was added, if anything was."""
        runs = (*self._runs, self._added) if self._added else self._runs
        return runs or (EMPTY_RUN,)

    @property
    def bytes_kept(self) -> int:
        """Memory that the view holds, about."""
        groups_count = 0 if self._wanted is None else len(self._wanted)
        return VIEW_BYTES + VIEW_ELEMENT_BYTES * len(self) + VIEW_GROUP_BYTES * groups_count

    # Building and growing

    def _is_narrow(self, groups: Collection[int]) -> bool:
        return self._index.postings.count(groups) * WIDE_SHARE < self._snapshot.size

    def _of_groups(self, groups: Collection[int]) -> tuple[U64, U32]:
        rows = self._index.postings.rows_of(self._snapshot, groups, self._snapshot.size)
        rows = rows[self._count(rows)]
        columns = self._snapshot.take(rows)
        wanted = np.flatnonzero(_in_window(self._window, columns.orders))
        orders = columns.orders[wanted]
        sequence = element_sequence(orders, heads_of(columns.ids[wanted]))
        return orders[sequence], rows[wanted[sequence]]

    def _chosen(self, run: Run) -> tuple[U64, U32 | None]:
        lower, upper = self._window
        start = int(np.searchsorted(run.orders, np.uint64(lower)))
        stop = len(run) if upper is None else int(np.searchsorted(run.orders, np.uint64(upper)))
        orders = run.orders[start:stop]
        if self._wanted is None and self._without is None:
            whole = run.rows is None and start == 0
            return orders, None if whole else run.rows_between(start, stop)
        rows = run.rows_between(start, stop)
        mine = self._count(rows)
        if self._wanted is not None:
            mine &= np.isin(self._snapshot.take(rows).groups, self._wanted)
        return orders[mine], rows[mine]

    def _count(self, rows: U32) -> Mask:
        """Which of these rows count; rows that came after `without` was made do."""
        if self._without is None:
            return np.ones(len(rows), bool)
        size = len(self._without)
        counts: Mask = (rows >= size) | ~self._without[np.minimum(rows, size - 1)]
        return counts

    def _keyed(self, orders: U64, rows: U32 | None) -> Run:
        """A run with its sums: one pass over the ids, in element order."""
        count = len(orders)
        low, high = np.empty(count + 1, np.uint64), np.empty(count + 1, np.uint64)
        low[0] = high[0] = 0
        for start in range(0, count, _BUILD_CHUNK):
            stop = min(start + _BUILD_CHUNK, count)
            if rows is None:
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
        self._check_whole()
        seen, self._snapshot = self._snapshot.size, self._index.state.snapshot
        if seen == self._snapshot.size:
            return 0
        news = self._snapshot.slice(seen, self._snapshot.size)
        rows = np.arange(seen, self._snapshot.size, dtype=np.uint32)
        if self._wanted is not None or self._window != ALL_ORDERS:
            mine = _in_window(self._window, news.orders)
            if self._wanted is not None:
                mine &= np.isin(news.groups, self._wanted)
            news, rows = news.take(mine), rows[mine]
        sequence = element_sequence(news.orders, heads_of(news.ids))
        run = self._keyed(news.orders[sequence], rows[sequence])
        self._runs = push_run(self._snapshot, self._runs, run, summed=True)
        return len(rows)

    def consolidate(self) -> Run:
        """Merge all runs of the index into one, so that every later question costs least; returns it."""
        runs = self._runs or (EMPTY_RUN,)
        while len(runs) > 1:
            runs = (*runs[:-2], merge_runs(self._snapshot, *runs[-2:], summed=True))
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

    def members(self, places: Places) -> tuple[I64, U64, I64]:
        """Elements of the ranges: owner range i64[k] ascending, hash lane u64[k], number i64[k].

        An element's number counts the elements of the view, run after run (`columns_of`).
        """
        owners, lanes, numbers = [], [], []
        first = 0
        for run, start, stop in zip(self.runs, places.starts, places.stops, strict=True):
            owner, within = spread(stop - start)
            at = start[owner] + within
            owners.append(owner)
            lanes.append(run.low[at + 1] - run.low[at])
            numbers.append(at + first)
            first += len(run)
        if len(owners) == 1:
            return owners[0], lanes[0], numbers[0]
        owner = np.concatenate(owners)
        sequence = np.argsort(owner, kind="stable")
        return owner[sequence], np.concatenate(lanes)[sequence], np.concatenate(numbers)[sequence]

    def columns_of(self, numbers: I64) -> tuple[U64, U8]:
        """orders u64[n] and ids u8[n, 32] of elements by number, as `members` gives them."""
        runs, snapshot = self.runs, self._snapshot
        if len(runs) == 1:
            return runs[0].orders[numbers], runs[0].ids_at(snapshot, numbers)
        orders, ids = (
            np.empty(len(numbers), np.uint64),
            np.empty((len(numbers), ID_BYTES), np.uint8),
        )
        first = 0
        for run in runs:
            mine = np.flatnonzero((numbers >= first) & (numbers < first + len(run)))
            at = numbers[mine] - first
            orders[mine], ids[mine] = run.orders[at], run.ids_at(snapshot, at)
            first += len(run)
        return orders, ids

    def are_added(self, numbers: I64) -> Mask:
        """Which of these elements only this corrected view has, bool[n]."""
        added: Mask = numbers >= len(self) - len(self._added or ())
        return added

    def places_of_newest_rows(self, count: int) -> I64:
        """Places, in the one run of a consolidated view, of what was inserted last."""
        run = self.consolidate()
        oldest = self._snapshot.size - count
        if run.rows is None:
            return np.arange(max(oldest, 0), len(run))
        return np.flatnonzero(run.rows >= oldest)

    def heads_of_places(self, run: Run, places: I64) -> U64:
        """Heads of elements of one run."""
        return run.heads_at(self._snapshot, places)

    # Questions about one range

    def elements(self, span: Range) -> tuple[U64, U8]:
        """orders u64[n] and ids u8[n, 32] of a range, sorted."""
        _, _, numbers = self.members(self.locate(RangeColumns.of(span)))
        orders, ids = self.columns_of(numbers)
        if len(self.runs) > 1:
            sequence = element_sequence(orders, heads_of(ids))
            orders, ids = orders[sequence], ids[sequence]
        return orders, ids

    # The whole view

    def total(self, added: Iterable[Columns] = (), removed: Iterable[Columns] = ()) -> Total:
        """All of the view, with some elements that it lacks and without some that it has."""
        count = len(self)
        sums = (
            sum(int(run.low[-1]) for run in self.runs),
            sum(int(run.high[-1]) for run in self.runs),
        )
        for pieces, sign in ((added, 1), (removed, -1)):
            for columns in pieces:
                lanes = self._hasher.lanes(columns.orders, np.ascontiguousarray(columns.ids))
                low, high = (sign * int(lane.sum(dtype=np.uint64)) for lane in lanes)
                count, sums = count + sign * len(columns), (sums[0] + low, sums[1] + high)
        return Total(count, b"".join((each & _WORD).to_bytes(8, "little") for each in sums))

    # The same set, but for some elements

    def corrected(self, added: Columns, removed: Columns) -> View:
        """This view as of now, with `added`, which it lacks, and without `removed`.

        It is for one session: it cannot grow or get another key. Costs a pass over this view.
        """
        runs = self._runs
        if len(removed):
            runs = tuple(run for each in runs if len(run := self._keeping(each, removed)))
        some = added.take(element_sequence(added.orders, heads_of(added.ids)))
        low, high = self._hasher.lanes(some.orders, some.ids)
        view = copy.copy(self)
        view._runs = runs  # noqa: SLF001 - a copy of ourselves
        view._added = Run(  # noqa: SLF001
            some.orders, None, prefix_sums(low), prefix_sums(high), some.ids
        )
        return view

    def _keeping(self, run: Run, removed: Columns) -> Run:
        places = run.lower_bounds(self._snapshot, removed.orders, heads_of(removed.ids))
        there = np.flatnonzero(run.holds_order(places, removed.orders))
        places = places[there]
        same = (run.ids_at(self._snapshot, places) == removed.ids[there]).all(axis=1)
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


class ViewCache:
    """Views by name, bounded in bytes; it only saves work.

    The views used longest ago are dropped. The one used last stays, however large it is. Not thread-safe: one
    event loop owns it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[Hashable, tuple[View, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._kept

    def find(self, name: Hashable) -> View | None:
        """The view, up to date."""
        if name not in self._kept:
            return None
        view, _, beside_bytes = self._kept[name]
        view.refresh()
        self.keep(name, view, beside_bytes)
        return view

    def keep(self, name: Hashable, view: View, beside_bytes: int = 0) -> None:
        """Keep a view as the one that was used last. `beside_bytes`: memory that only it refers to."""
        if name in self._kept:
            self._bytes -= self._kept.pop(name)[1]
        size = view.bytes_kept + beside_bytes
        self._kept[name] = view, size, beside_bytes
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1]
