"""A view: one interest's elements under one session key."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import blake3
import numpy as np
from numpy.typing import NDArray

from recon.limits import SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from recon.ranges import END, Bound, OrderWindow, Range
from recon.session import SessionKey

if TYPE_CHECKING:
    from recon.index import RangeIndex

Element = tuple[int, bytes]


class View:
    """Sorted elements with summaries of ranges. Call `refresh` to take in what was inserted."""

    def __init__(
        self,
        index: RangeIndex,
        key: SessionKey,
        groups: frozenset[int] | None,
        window: OrderWindow,
    ) -> None:
        self._index = index
        self._key = key.raw * 2
        self._groups = groups
        self._window = window
        self._seen = 0
        self._elements: list[Element] = []
        self.refresh()

    def __len__(self) -> int:
        return len(self._elements)

    def refresh(self) -> int:
        """Take in what was inserted since the last call; returns how many elements came."""
        news = self._index.log[self._seen :]
        before = len(self._elements)
        self._seen += len(news)
        for element, group in news:
            if self._wants(element[0], group):
                insort(self._elements, element)
        return len(self._elements) - before

    def _wants(self, order: int, group: int) -> bool:
        lower, upper = self._window
        in_window = lower <= order and (upper is None or order < upper)
        return in_window and (self._groups is None or group in self._groups)

    def elements(self, span: Range) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """orders u64[n] and ids u8[n, 32] of a range, sorted."""
        return columns(self.slice(span))

    def slice(self, span: Range) -> list[Element]:
        """The elements of a range."""
        return self._elements[self._position(span.lower) : self._position(span.upper)]

    def _position(self, bound: Bound) -> int:
        if bound == END:
            return len(self._elements)
        return bisect_left(self._elements, (bound.order, bound.head.to_bytes(8, "big")))

    def summary(self, span: Range) -> tuple[bytes, int]:
        """(hash, count) of a range."""
        elements = self.slice(span)
        raw = b"".join(order.to_bytes(8, "big") + raw_id for order, raw_id in elements)
        return blake3.blake3(raw, key=self._key).digest(length=SUMMARY_HASH_BYTES), len(elements)

    def short_id(self, element: Element) -> bytes:
        """The short id of one element in this session."""
        raw = element[0].to_bytes(8, "big") + element[1]
        return blake3.blake3(b"id" + raw, key=self._key).digest(length=SHORT_ID_BYTES)


def columns(elements: list[Element]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Elements as columns."""
    orders = np.array([order for order, _ in elements], dtype=np.uint64)
    ids = np.frombuffer(b"".join(raw for _, raw in elements), dtype=np.uint8)
    return orders, ids.reshape(-1, 32)


def short_ids(view: View, orders: NDArray[np.uint64], ids: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Short ids u8[n, 6] of any elements under the view's key (to check what arrived)."""
    pairs = zip(orders.tolist(), ids, strict=True)
    raw = b"".join(view.short_id((order, row.tobytes())) for order, row in pairs)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, SHORT_ID_BYTES)
