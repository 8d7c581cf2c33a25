"""The initiator's work list: ranges that wait, as columns, in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recon.columns import I64, Mask
from recon.ranges import RangeColumns


@dataclass(frozen=True, slots=True)
class Work:
    """Ranges to ask about: by list or by summary; splits above them; elements of the larger side."""

    ranges: RangeColumns
    listed: Mask
    depths: I64
    sizes: I64

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, which: I64 | Mask | slice) -> Work:
        """Some of it."""
        return Work(
            self.ranges.take(which), self.listed[which], self.depths[which], self.sizes[which]
        )

    @classmethod
    def concatenate(cls, pieces: Sequence[Work]) -> Work:
        """All of them, in ascending order."""
        pieces = [piece for piece in pieces if len(piece)] or list(pieces[:1])
        if len(pieces) == 1:
            return pieces[0]
        ranges = RangeColumns.concatenate([piece.ranges for piece in pieces])
        sequence = np.lexsort((ranges.lower_heads, ranges.lower_orders))
        joined = cls(
            ranges,
            np.concatenate([piece.listed for piece in pieces]),
            np.concatenate([piece.depths for piece in pieces]),
            np.concatenate([piece.sizes for piece in pieces]),
        )
        return joined.take(sequence)

    @classmethod
    def none(cls) -> Work:
        """Nothing."""
        empty = np.empty(0, np.int64)
        return cls(RangeColumns.of(), empty.astype(bool), empty, empty)


def join_lists(work: Work, list_cap: int) -> Work:
    """Neighbouring ranges that will be listed become one: fewer bounds to send.

    A joined list stays below `list_cap` elements plus its last part.
    """
    if not len(work):
        return work
    joins = np.zeros(len(work), bool)
    joins[1:] = work.ranges.touches_next() & work.listed[1:] & work.listed[:-1]
    starts = np.flatnonzero(~joins)
    chain = np.cumsum(~joins) - 1
    before = np.cumsum(work.sizes) - work.sizes
    fill = (before - before[starts][chain]) // list_cap
    joins[1:] &= fill[1:] == fill[:-1]
    starts = np.flatnonzero(~joins)
    lasts = np.append(starts[1:], len(work)) - 1
    lower, upper = work.ranges.take(starts), work.ranges.take(lasts)
    ranges = RangeColumns(
        lower.lower_orders, lower.lower_heads, upper.upper_orders, upper.upper_heads
    )
    depths = np.maximum.reduceat(work.depths, starts)
    return Work(ranges, work.listed[starts], depths, np.add.reduceat(work.sizes, starts))
