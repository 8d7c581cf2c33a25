"""Counts and sums of the elements of each group, followed row by row as the index grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recon.index import RangeIndex

_ROWS_AT_ONCE = 1 << 16  # 2 MiB of IDs
_LANES = 4  # 64-bit words of an ID


class GroupSums:
    """For each group of an index the number of its elements, and the sum of their IDs."""

    def __init__(self, index: RangeIndex) -> None:
        self._index = index
        self._seen_count = 0
        self._counts = np.zeros(0, np.int64)
        self._sums = np.zeros((_LANES, 0), np.uint64)

    def count(self, groups: frozenset[int] | None) -> int:
        """Elements in some groups; None: in all."""
        self.follow()
        return int(self._counts[self._places(groups)].sum())

    def sums(self, groups: frozenset[int] | None) -> NDArray[np.uint64]:
        """The IDs of some groups (None: of all) added up, each 64-bit word for itself: u64[4]."""
        self.follow()
        sums: NDArray[np.uint64] = self._sums[:, self._places(groups)].sum(axis=1)
        return sums

    def _places(self, groups: frozenset[int] | None) -> slice | NDArray[np.int64]:
        if groups is None:
            return slice(None)
        places = np.fromiter(groups, np.int64, len(groups))
        return places[places < len(self._counts)]

    def follow(self) -> None:
        """Take in the rows that came since the last call."""
        snapshot = self._index.state.snapshot
        while self._seen_count < snapshot.size:
            stop = min(self._seen_count + _ROWS_AT_ONCE, snapshot.size)
            rows = snapshot.slice(self._seen_count, stop)
            self._make_room(int(rows.groups.max()) + 1)
            np.add.at(self._counts, rows.groups, 1)
            words = np.ascontiguousarray(rows.ids).view("<u8")
            for lane in range(_LANES):
                np.add.at(self._sums[lane], rows.groups, words[:, lane])
            self._seen_count = stop

    def _make_room(self, groups_count: int) -> None:
        missing = groups_count - len(self._counts)
        if missing > 0:
            grown = missing + len(self._counts)
            self._counts = np.pad(self._counts, (0, grown))
            self._sums = np.pad(self._sums, ((0, 0), (0, grown)))
