"""The initiator's work list: ranges that wait, as columns, in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recon.columns import I64, U8, Mask
from recon.limits import SUMMARY_HASH_BYTES
from recon.ranges import RangeColumns
from recon.runs import element_sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Ranges to ask about: by list or by summary.

    Our summaries are of the moment when a range was put on the list: what comes later need not be
    found by this session. Those of lists are not used.
    """

    ranges: RangeColumns
    listed: Mask
    depths: I64  # splits above
    sizes: I64  # elements of the larger side, about
    counts: I64  # our summaries: counts i64[n], hashes u8[n, 6]
    hashes: U8

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, which: I64 | Mask | slice) -> Work:
        """Some of it."""
        return Work(
            self.ranges.take(which),
            self.listed[which],
            self.depths[which],
            self.sizes[which],
            self.counts[which],
            self.hashes[which],
        )

    def columns(self) -> tuple[Mask, I64, I64, I64, U8]:
        """All but the ranges."""
        return self.listed, self.depths, self.sizes, self.counts, self.hashes

    @classmethod
    def concatenate(cls, pieces: Sequence[Work]) -> Work:
        """All of them, in ascending order."""
        pieces = [piece for piece in pieces if len(piece)] or list(pieces[:1])
        if len(pieces) == 1:
            return pieces[0]
        ranges = RangeColumns.concatenate([piece.ranges for piece in pieces])
        columns = zip(*(piece.columns() for piece in pieces), strict=True)
        joined = cls(ranges, *map(np.concatenate, columns))
        return joined.take(element_sequence(ranges.lower_orders, ranges.lower_heads))

    @classmethod
    def none(cls) -> Work:
        """Nothing."""
        empty = np.empty(0, np.int64)
        no_hashes = np.empty((0, SUMMARY_HASH_BYTES), np.uint8)
        return cls(RangeColumns.of(), empty.astype(bool), empty, empty, empty, no_hashes)


def join_lists(work: Work, list_cap: int) -> Work:
    """Neighbouring ranges that will be listed become one: fewer bounds to send.

    A joined list stays below `list_cap` elements plus its last part.
    """
    if not len(work):
        return work
    joins = work.ranges.touches_next() & work.listed[1:] & work.listed[:-1]
    if not joins.any():
        return work
    starts = _group_starts(joins, work.sizes, list_cap)
    depths = np.maximum.reduceat(work.depths, starts)
    sizes, counts = (np.add.reduceat(column, starts) for column in (work.sizes, work.counts))
    ranges, listed = work.ranges.joined(starts), work.listed[starts]
    return Work(ranges, listed, depths, sizes, counts, work.hashes[starts])


def join_ranges(ranges: RangeColumns, counts: I64, cap: int) -> tuple[RangeColumns, I64]:
    """Ranges that touch become one, of fewer than `cap` elements plus its last part."""
    starts = _group_starts(ranges.touches_next(), counts, cap)
    return ranges.joined(starts), np.add.reduceat(counts, starts)


def _group_starts(joins: Mask, sizes: I64, cap: int) -> I64:
    """The first of each group, where `joins`, bool[n - 1], tells who may join the next."""
    begins = np.append(True, ~joins)
    before = sizes.cumsum() - sizes
    chain = begins.cumsum() - 1
    fill = (before - before[begins][chain]) // cap
    begins[1:] |= fill[1:] != fill[:-1]
    return begins.nonzero()[0]
