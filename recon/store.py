"""Where elements live: append-only columns in order of arrival. A row number never changes.

The first rows may be a base segment that somebody else owns (a memory-mapped checkpoint, or the
sorted columns of a bulk load); what arrives later goes to a growing tail. Published rows are never
written again, so a reader with an older snapshot stays right without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.columns import U8, U32, U64, Mask
from recon.limits import ASIDE_ROW_FIRST, ID_BYTES

_TAIL_ROWS_MIN = 1024  # the first tail; it doubles from there


@dataclass(frozen=True, slots=True)
class Columns:
    """orders u64[n], ids u8[n, 32], groups u32[n]."""

    orders: U64
    ids: U8
    groups: U32

    def __len__(self) -> int:
        return len(self.orders)

    def take(self, rows: slice | U32 | Mask) -> Columns:
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
    """The store at one moment: `size` rows, the first `len(base)` of them in the base.

    `aside`: elements that only one session's view has, numbered from `ASIDE_ROW_FIRST`.
    """

    base: Columns
    tail: Columns
    size: int
    aside: Columns | None = None

    def beside(self, aside: Columns | None) -> Snapshot:
        """The same store with other elements set beside it."""
        return self if aside is None else Snapshot(self.base, self.tail, self.size, aside)

    def take(self, rows: U32) -> Columns:
        """Rows by number, in the given order."""
        split = len(self.base)
        if len(rows) == 0 or (highest := int(rows.max())) < split:
            return self.base.take(rows)
        if self.aside is not None and highest >= ASIDE_ROW_FIRST:
            return self._take_with_aside(rows, self.aside)
        if split == 0 or int(rows.min()) >= split:
            return self.tail.take(rows - np.uint32(split) if split else rows)
        in_base = rows < split
        out = empty_columns(len(rows))
        out.put(in_base, self.base.take(rows[in_base]))
        out.put(~in_base, self.tail.take(rows[~in_base] - np.uint32(split)))
        return out

    def _take_with_aside(self, rows: U32, aside: Columns) -> Columns:
        is_aside = rows >= ASIDE_ROW_FIRST
        out = empty_columns(len(rows))
        out.put(is_aside, aside.take(rows[is_aside] - np.uint32(ASIDE_ROW_FIRST)))
        out.put(~is_aside, self.take(rows[~is_aside]))
        return out

    def ids_of(self, rows: U32) -> U8:
        """Ids u8[n, 32] of rows."""
        if self.aside is not None:
            return self.take(rows).ids
        if len(self.base) == 0:
            return self.tail.ids[rows]
        if len(self.base) == self.size:
            return self.base.ids[rows]
        return self.take(rows).ids

    def id_bytes(self, row: int) -> bytes:
        """The id of one row."""
        split = len(self.base)
        raw: bytes = (self.base.ids[row] if row < split else self.tail.ids[row - split]).tobytes()
        return raw

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
        self.snapshot = Snapshot(base, empty_columns(_TAIL_ROWS_MIN), len(base))

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
