"""Elements waiting to be sent, as columns: a disjoint million takes 32 MB here."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from recon.limits import ID_BYTES


class Outbox:
    """A queue of element IDs u8[n, 32] that is filled and emptied in pieces of any size."""

    def __init__(self) -> None:
        self._pieces: deque[NDArray[np.uint8]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ids: NDArray[np.uint8]) -> None:
        """Put IDs at the end."""
        if len(ids):
            self._pieces.append(ids)
            self._count += len(ids)

    def take(self, count_max: int) -> list[bytes]:
        """The first IDs, at most `count_max`."""
        taken: list[bytes] = []
        while self._pieces and len(taken) < count_max:
            piece = self._pieces.popleft()
            room = count_max - len(taken)
            if len(piece) > room:
                self._pieces.appendleft(piece[room:])
            taken += [row.tobytes() for row in piece[:room]]
        self._count -= len(taken)
        return taken

    def put_back(self, ids: list[bytes]) -> None:
        """Put IDs where they are taken next."""
        if ids:
            self._pieces.appendleft(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES))
            self._count += len(ids)
