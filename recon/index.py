"""The set of elements, and views of it.

Thread rule: one thread inserts (`insert`), any thread may call `len` and take or refresh views.
A batch becomes visible as a whole, by one reference assignment; a view belongs to the thread that
uses it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from recon.errors import LocalProtocolError
from recon.limits import ID_BYTES
from recon.ranges import OrderWindow
from recon.session import SessionKey
from recon.view import View

Element = tuple[int, bytes]


class RangeIndex:
    """Elements (order, id) with the caller's group number, grow-only."""

    def __init__(self) -> None:
        self._known: set[Element] = set()
        self._log: list[tuple[Element, int]] = []

    def __len__(self) -> int:
        return len(self._log)

    @property
    def log(self) -> list[tuple[Element, int]]:
        """Elements with their groups, in order of insertion."""
        return self._log

    def insert(
        self, orders: NDArray[np.uint64], ids: NDArray[np.uint8], groups: NDArray[np.uint32]
    ) -> int:
        """Add elements: orders u64[n], ids u8[n, 32], groups u32[n]. Returns how many were new."""
        if ids.shape != (len(orders), ID_BYTES) or len(groups) != len(orders):
            raise LocalProtocolError("orders [n], ids [n, 32] and groups [n] go together")
        before = len(self._log)
        for order, raw, group in zip(orders.tolist(), ids, groups.tolist(), strict=True):
            element = (order, raw.tobytes())
            if element not in self._known:
                self._known.add(element)
                self._log.append((element, group))
        return len(self._log) - before

    def view(self, key: SessionKey, groups: Collection[int] | None, window: OrderWindow) -> View:
        """The elements of `groups` (None: all) in `window`, hashed under `key`; grows with the set."""
        wanted = None if groups is None else frozenset(groups)
        return View(self, key, wanted, window)


def position(elements: list[Element], order: int, head: int) -> int:
    """Where the first element at or above the bound stands."""
    return bisect_left(elements, (order, head.to_bytes(8, "big")))
