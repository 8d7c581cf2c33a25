"""Rows by group, so that a view of one small channel costs what the channel costs.

Segments cover the rows in stretches, each sorted by group; neighbours of similar size are merged.
Rows younger than the last segment are scanned. Four bytes per element. Used by the reading thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from recon.columns import I64, U32, spread
from recon.runs import MERGE_RATIO
from recon.store import Snapshot

SCAN_ROWS_MAX = 1 << 14  # rows without a segment: scanned in 0.1 ms
_ROW_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    stop: int
    groups: U32  # ascending, unique
    firsts: I64  # where each group's rows begin; one more at the end
    rows: U32

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
        self._segments: list[_Segment] = []

    def rows_of(self, snapshot: Snapshot, groups: Collection[int], stop: int) -> U32:
        """Rows below `stop` of the groups, in no order."""
        self._extend(snapshot, stop)
        wanted = np.unique(np.fromiter(groups, dtype=np.uint32, count=len(groups)))
        covered = self._covered()
        pieces = [segment.rows_of(wanted) for segment in self._segments]
        if covered < stop:
            young = np.flatnonzero(np.isin(snapshot.slice(covered, stop).groups, wanted))
            pieces.append((young + covered).astype(np.uint32))
        rows = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        return rows[rows < stop] if covered > stop else rows

    def _covered(self) -> int:
        return self._segments[-1].stop if self._segments else 0

    def _extend(self, snapshot: Snapshot, stop: int) -> None:
        start = self._covered()
        if stop - start <= SCAN_ROWS_MAX:
            return
        while self._segments and self._segments[-1].stop - self._segments[-1].start < (
            MERGE_RATIO * (stop - start)
        ):
            start = self._segments.pop().start
        self._segments.append(_segment(snapshot, start, stop))


def _segment(snapshot: Snapshot, start: int, stop: int) -> _Segment:
    groups = snapshot.slice(start, stop).groups
    packed = (groups.astype(np.uint64) << _ROW_BITS) | np.arange(start, stop, dtype=np.uint64)
    packed.sort()
    ordered = (packed >> _ROW_BITS).astype(np.uint32)
    unique, firsts = np.unique(ordered, return_index=True)
    return _Segment(start, stop, unique, np.append(firsts, len(ordered)), packed.astype(np.uint32))
