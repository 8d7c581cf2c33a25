"""Bounds and ranges: the coordinates of the element space.

An element is (order, id): an unsigned 64-bit order value and 32 bytes. A bound is (order, head),
where head is the first 8 bytes of an id as a big-endian number: an element lies at or above a bound
when (order, first 8 bytes of its id) >= (order, head). Eight bytes are enough because ids are
digests; elements that agree in order and head are never separated. The highest bound means "no
upper end": no element lies at or above it.
"""

from __future__ import annotations

from typing import NamedTuple

from recon.limits import ORDER_END


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
        """Whether the element lies in this range."""
        key = (order, int.from_bytes(element_id[:8], "big"))
        return self.lower <= key and (key < self.upper or self.upper == END)


WHOLE = Range(START, END)


class OrderWindow(NamedTuple):
    """Order values [lower, upper); `upper` None is open."""

    lower: int = 0
    upper: int | None = None


ALL_ORDERS = OrderWindow()


def order_of_lamport(lamport: int) -> int:
    """Order value of a signed 64-bit Lamport timestamp: negative ones sort first."""
    return lamport + (1 << 63)


def lamport_of_order(order: int) -> int:
    """The inverse of `order_of_lamport`."""
    return order - (1 << 63)


def bound_bytes(bound: Bound) -> bytes:
    """16 bytes, order and head, big-endian (the `resume` field of a response)."""
    return bound.order.to_bytes(8, "big") + bound.head.to_bytes(8, "big")
