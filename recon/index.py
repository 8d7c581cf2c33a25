"""The range index: insertion without duplicates, sorted runs, views, rows by group.

The index holds columns and their order, no sums: summaries belong to a session's view. Small inserts
wait in a set until there are enough of them for a run, so a single insert costs microseconds.

Threads: one thread inserts. Any thread may call `len`, look up rows and make views; a view belongs
to the thread that uses it. Readers change nothing here: all that they see hangs on one reference
(`state`, and the segments of `postings`), which the inserting thread replaces as a whole. So a batch
becomes visible as a whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recon.elements import I64, U8, U32, U64, Mask, OrderWindow, heads_of, spread
from recon.errors import LocalProtocolError
from recon.limits import ID_BYTES
from recon.session import SessionKey
from recon.store import NO_SUMS, Columns, ElementStore, Run, Snapshot, element_sequence, push_run
from recon.view import View

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


TIES_WALKED_MAX = 16  # elements of one order compared one by one; more are searched
PENDING_MAX = 256  # elements that wait unsorted; a run of fewer costs more than it saves

_DTYPES = np.dtype(np.uint64), np.dtype(np.uint8), np.dtype(np.uint32)


class IndexState(NamedTuple):
    """The state that readers see: the columns, and runs over the rows below `sorted_count`."""

    snapshot: Snapshot
    runs: tuple[Run, ...]
    sorted_count: int


class RangeIndex:
    """Elements (order, id) with the caller's group number, grow-only."""

    def __init__(self) -> None:
        self._start(None, ())

    def _start(self, base: Columns | None, runs: tuple[Run, ...]) -> None:
        self._store = ElementStore(base)
        self._pending: set[tuple[int, bytes]] = set()
        self.postings = Postings()
        self.state = IndexState(self._store.snapshot, runs, self._store.snapshot.size)
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

    def view(self, key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> View:
        """The elements of `groups` (None: all) in `window`, hashed under `key`; grows with the set."""
        return View(self, key, None if groups is None else frozenset(groups), window)

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
        if len(orders) + len(self._pending) <= PENDING_MAX:
            count = self._insert_few(orders, ids, groups)
        else:
            self._sort_pending()
            count = self._insert_many(orders, np.ascontiguousarray(ids), groups)
        self.postings.extend(self._store.snapshot)
        return count

    def _insert_few(self, orders: U64, ids: U8, groups: U32) -> int:
        new = []
        for place, order in enumerate(orders.tolist()):
            element = (order, ids[place].tobytes())
            if element not in self._pending and not self._in_runs(*element):
                self._pending.add(element)
                new.append(place)
        if len(new) == len(orders):
            self._store.append(Columns(orders, ids, groups))
        elif new:
            self._store.append(Columns(orders[new], ids[new], groups[new]))
        self.state = IndexState(self._store.snapshot, *self.state[1:])
        return len(new)

    def _in_runs(self, order: int, element_id: bytes) -> bool:
        wanted = np.uint64(order)
        for run in self.state.runs:
            place = int(run.orders.searchsorted(wanted))
            if place == len(run) or run.orders[place] != wanted:
                continue
            ties = run.orders[place : place + TIES_WALKED_MAX].tolist().count(order)
            if ties == TIES_WALKED_MAX:
                raw = np.frombuffer(element_id, dtype=np.uint8).reshape(1, ID_BYTES)
                tied, head = np.array([wanted]), heads_of(raw)
                at = run.lower_bounds(self.state.snapshot, tied, head)
                if self._stored(run, at, tied, raw, head)[0]:
                    return True
            rows = run.rows_between(place, place + ties).tolist()
            if any(self.state.snapshot.id_bytes(row) == element_id for row in rows):
                return True
        return False

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements, orders u64[n] and ids u8[n, 32], are in the index: bool[n]."""
        elements = zip(orders.tolist(), map(bytes, ids), strict=True)
        found = np.array([each in self._pending for each in elements], dtype=bool)
        if found.all():  # true for most elements that came lately, and for no elements
            return found
        heads = heads_of(np.ascontiguousarray(ids))
        for run in self.state.runs:
            places = run.lower_bounds(self.state.snapshot, orders, heads)
            found |= self._stored(run, places, orders, ids, heads)
        return found

    def _insert_many(self, orders: U64, ids: U8, groups: U32) -> int:
        heads = heads_of(ids)
        sequence = element_sequence(orders, heads)
        orders, ids, groups = orders[sequence], ids[sequence], groups[sequence]
        heads = heads[sequence]
        new = ~_repeats(orders, heads, ids)
        in_youngest = None
        for run in self.state.runs:  # the youngest comes last
            places = run.lower_bounds(self._store.snapshot, orders, heads)
            new &= ~self._stored(run, places, orders, ids, heads)
            in_youngest = places
        if not new.all():
            orders, ids, groups = orders[new], ids[new], groups[new]
            in_youngest = None if in_youngest is None else in_youngest[new]
        if len(orders):
            first = self._store.append(Columns(orders, ids, groups))
            rows = np.arange(first, first + len(orders), dtype=np.uint32)
            self._add_run(orders, rows, in_youngest)
        return len(orders)

    def _stored(self, run: Run, places: I64, orders: U64, ids: U8, heads: U64) -> Mask:
        """Which elements a run holds, given their lower bounds there, bool[n]."""
        found: Mask = self._rows_in(run, places, orders, ids, heads) >= 0
        return found

    def _rows_in(self, run: Run, places: I64, orders: U64, ids: U8, heads: U64) -> I64:
        """The rows of elements in a run, given their lower bounds there: i64[n], -1 if it lacks one."""
        snapshot = self._store.snapshot
        places = places.copy()
        found = np.full(len(orders), -1, dtype=np.int64)
        candidates = np.flatnonzero(run.holds_order(places, orders))
        while len(candidates):
            rows = run.rows_at(places[candidates])
            stored = snapshot.take(rows)
            is_same = (stored.ids == ids[candidates]).all(axis=1)
            is_same &= stored.orders == orders[candidates]
            found[candidates[is_same]] = rows[is_same]
            # Elements that agree in order and head are neighbours in any sequence: look further.
            more = (stored.orders == orders[candidates]) & ~is_same
            more &= heads_of(stored.ids) == heads[candidates]
            more &= places[candidates] + 1 < len(run)
            candidates = candidates[more]
            places[candidates] += 1
        return found

    def _sort_pending(self) -> None:
        snapshot, _, start = self.state
        if start == snapshot.size:
            return
        news = snapshot.slice(start, snapshot.size)
        sequence = element_sequence(news.orders, heads_of(news.ids))
        self._pending = set()
        self._add_run(news.orders[sequence], (sequence + start).astype(np.uint32))

    def _add_run(self, orders: U64, rows: U32, in_youngest: I64 | None = None) -> None:
        snapshot = self._store.snapshot
        run = Run(orders, rows, NO_SUMS, NO_SUMS)
        runs = push_run(snapshot, self.state.runs, run, in_youngest, summed=False)
        self.state = IndexState(snapshot, runs, snapshot.size)


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
