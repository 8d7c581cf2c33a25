"""Rows by group, so that a view of one small channel costs what the channel costs.

Segments cover the rows in stretches, each sorted by group; neighbours of similar size are merged.
Rows younger than the last segment are scanned. Four bytes per element. The inserting thread extends
the segments, and replaces them as a whole; looking rows up changes nothing, so any thread may do it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from recon.columns import I64, U32, spread
from recon.store import Snapshot

SCAN_ROWS_MAX = 1 << 14  # rows without a segment: scanned in 0.1 ms
_MERGE_RATIO = (
    2  # stretches double: each row is moved a few times, a look-up searches a few segments
)
_ROW_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    stop: int
    groups: U32  # ascending, unique
    firsts: I64  # where each group's rows begin; one more at the end
    rows: U32  # ascending within each group

    def rows_of(self, wanted: U32) -> U32:
        places = np.searchsorted(self.groups, wanted)
        known = places < len(self.groups)
        known[known] = self.groups[places[known]] == wanted[known]
        places = places[known]
        counts = self.firsts[places + 1] - self.firsts[places]
        owner, within = spread(counts)
        rows: U32 = self.rows[self.firsts[places][owner] + within]
        return rows


class Postings:
    """Which rows belong to a group."""

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
