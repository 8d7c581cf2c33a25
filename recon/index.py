"""The range index: insertion without duplicates, sorted runs, views, rows by group.

The index holds columns and their order, no sums: summaries belong to a session's view (`recon.view`).

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

from recon.elements import I64, U8, U32, U64, Mask, heads_of, spread
from recon.errors import LocalProtocolError
from recon.limits import ID_BYTES
from recon.store import NO_SUMS, Columns, ElementStore, Run, Snapshot, element_sequence, push_run

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
        snapshot, runs = self.state
        held = np.zeros(len(orders), bool)
        for run in runs:
            places = run.lower_bounds(snapshot, orders, heads)
            left = np.flatnonzero(run.holds_order(places, orders))
            while len(left):
                stored = snapshot.take(run.rows_at(places[left]))
                is_tied = stored.orders == orders[left]
                is_same = is_tied & (stored.ids == ids[left]).all(axis=1)
                held[left[is_same]] = True
                # Elements that agree in order and head are neighbours in any sequence: look further.
                more = is_tied & ~is_same & (heads_of(stored.ids) == heads[left])
                left = left[more & (places[left] + 1 < len(run))]
                places[left] += 1
        return held


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
