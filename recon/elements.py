"""Elements, bounds and ranges, and columns of them.

An element is (order, id): an unsigned 64-bit order value and 32 bytes. A bound is (order, head);
the head is the first 8 bytes of an id as a big-endian number. An element is at or above a bound if
its order and head are. Eight bytes are enough because ids are digests; no bound separates elements
that agree in order and head. The highest bound means "no upper end": every element is below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from recon.limits import ORDER_END

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]
Column = TypeVar("Column", U64, U32, I64)


def heads_of(ids: U8) -> U64:
    """The first 8 bytes of ids u8[n, 32] as big-endian numbers, u64[n]."""
    return ids.view(">u8")[:, 0].astype(np.uint64)


def bit_lengths(values: U64) -> I64:
    """Bits needed to write each number; 0 for 0."""
    # Clearing every bit below a set one keeps the float conversion from rounding up a power of two.
    exact = (values & ~(values >> np.uint64(1))).astype(np.float64)
    return np.frexp(exact)[1].astype(np.int64)


def steps_of(values: Column) -> Column:
    """The difference of each number to the one before (the first: to 0)."""
    steps = values.copy()
    steps[1:] -= values[:-1]
    return steps


def laid(outer: Column, at: I64, inner: Column) -> Column:
    """A new column: `outer` at the places `at`, ascending, and `inner` in order everywhere else."""
    out = np.empty(len(outer) + len(inner), outer.dtype)
    rest = np.ones(len(out), bool)
    rest[at] = False
    out[at] = outer
    out[rest] = inner
    return out


def spread(counts: I64) -> tuple[I64, I64]:
    """For groups of the given sizes laid end to end: each slot's group, and place in its group."""
    owner = np.arange(len(counts)).repeat(counts)
    starts = counts.cumsum() - counts
    return owner, np.arange(len(owner)) - starts[owner]


class Bound(NamedTuple):
    """A cut of the element space."""

    order: int
    head: int = 0


START = Bound(0, 0)
END = Bound(ORDER_END, ORDER_END)


class Range(NamedTuple):
    """All elements at or above `lower` and below `upper`."""

    lower: Bound
    upper: Bound

    def contains(self, order: int, element_id: bytes) -> bool:
        """Whether the range holds the element."""
        key = (order, int.from_bytes(element_id[:8], "big"))
        return self.lower <= key and (key < self.upper or self.upper == END)


WHOLE = Range(START, END)


@dataclass(frozen=True, slots=True)
class RangeColumns:
    """Many ranges as columns, all u64[n]: bounds of the lower and of the upper ends."""

    lower_orders: U64
    lower_heads: U64
    upper_orders: U64
    upper_heads: U64

    def __len__(self) -> int:
        return len(self.lower_orders)

    def __getitem__(self, place: int) -> Range:
        lower, upper = (
            Bound(int(orders[place]), int(heads[place]))
            for orders, heads in (
                (self.lower_orders, self.lower_heads),
                (self.upper_orders, self.upper_heads),
            )
        )
        return Range(lower, upper)

    def __iter__(self) -> Iterator[Range]:
        for low, low_head, high, high_head in zip(
            *(column.tolist() for column in self.columns()), strict=True
        ):
            yield Range(Bound(low, low_head), Bound(high, high_head))

    def take(self, places: I64 | Mask | slice) -> RangeColumns:
        """Some of the ranges."""
        return RangeColumns(
            self.lower_orders[places],
            self.lower_heads[places],
            self.upper_orders[places],
            self.upper_heads[places],
        )

    @property
    def is_whole(self) -> bool:
        """Whether these are one range, of everything."""
        return len(self) == 1 and self[0] == WHOLE

    def columns(self) -> tuple[U64, U64, U64, U64]:
        """The four columns."""
        return self.lower_orders, self.lower_heads, self.upper_orders, self.upper_heads

    @classmethod
    def of(cls, *ranges: Range) -> RangeColumns:
        """Columns of single ranges."""
        rows = np.array([(*lower, *upper) for lower, upper in ranges], dtype=np.uint64)
        return cls(*rows.reshape(-1, 4).T)

    @classmethod
    def concatenate(cls, pieces: Sequence[RangeColumns]) -> RangeColumns:
        """One after the other."""
        return cls(*map(np.concatenate, zip(*(p.columns() for p in pieces), strict=True)))

    @classmethod
    def tiling(cls, orders: U64, heads: U64) -> RangeColumns:
        """Neighbouring ranges between n + 1 edges."""
        return cls(orders[:-1], heads[:-1], orders[1:], heads[1:])

    def touches_next(self) -> Mask:
        """bool[n - 1]: whether a range ends where the next one begins."""
        touches: Mask = self.upper_orders[:-1] == self.lower_orders[1:]
        touches &= self.upper_heads[:-1] == self.lower_heads[1:]
        return touches

    def joined(self, starts: I64) -> RangeColumns:
        """One range for each group of neighbours; `starts`, ascending: the first of each."""
        lasts = np.append(starts[1:], len(self)) - 1
        return RangeColumns(
            self.lower_orders[starts],
            self.lower_heads[starts],
            self.upper_orders[lasts],
            self.upper_heads[lasts],
        )


WHOLE_RANGES = RangeColumns.of(WHOLE)
for _column in WHOLE_RANGES.columns():
    _column.flags.writeable = False  # all share it


class OrderWindow(NamedTuple):
    """Order values [lower, upper); `upper` None is open."""

    lower: int = 0
    upper: int | None = None

    def holds(self, order: int) -> bool:
        """Whether the window holds an order value."""
        return self.lower <= order and (self.upper is None or order < self.upper)


ALL_ORDERS = OrderWindow()


def order_of_lamport(lamport: int) -> int:
    """The order value of a signed 64-bit Lamport timestamp; it sorts the same way."""
    return lamport + (1 << 63)


def bound_bytes(bound: Bound) -> bytes:
    """16 bytes, order and head, big-endian (the `resume` field of a response)."""
    return bound.order.to_bytes(8, "big") + bound.head.to_bytes(8, "big")
