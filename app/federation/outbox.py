"""Elements waiting to be sent, as columns: a disjoint million takes 40 MB here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from app.federation.inbound import Element, columns

Piece = tuple[NDArray[np.uint64], NDArray[np.uint8]]


class Outbox:
    """A queue of elements, orders u64[n] and IDs u8[n, 32], filled and emptied in pieces."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, orders: NDArray[np.uint64], ids: NDArray[np.uint8]) -> None:
        """Put elements at the end."""
        if len(ids):
            self._pieces.append((orders, ids))
            self._count += len(ids)

    def take(self, count_max: int) -> list[Element]:
        """The first elements, at most `count_max`."""
        taken: list[Element] = []
        while self._pieces and len(taken) < count_max:
            orders, ids = self._pieces.popleft()
            room = count_max - len(taken)
            if len(ids) > room:
                self._pieces.appendleft((orders[room:], ids[room:]))
            rows = zip(orders[:room].tolist(), ids[:room], strict=True)
            taken += [Element(order, row.tobytes()) for order, row in rows]
        self._count -= len(taken)
        return taken

    def put_back(self, elements: Iterable[Element]) -> None:
        """Put elements where they are taken next."""
        orders, ids = columns(elements)
        if len(ids):
            self._pieces.appendleft((orders, ids))
            self._count += len(ids)
