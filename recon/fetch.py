"""What the initiator still has to fetch: needs turned into bounded fetch messages.

Short ids mean something only inside (view, range), so a fetch names both, and what arrives is
checked by recomputing: an element counts only if its range and short id were asked for.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from recon.codec import pack_counts, pack_ranges
from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.ranges import END, Bound, Range
from recon.view import View, short_ids
from sdstore.wire.recon_pb2 import Fetch

Batch = list[Need]


class FetchQueue:
    """Needs waiting to be fetched, in order. One batch per request; requests may overlap."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._waiting: deque[Need] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, need: Need) -> None:
        """Put a need at the end."""
        self._waiting.append(need)

    def next_batch(self, ids_max: int) -> Batch:
        """Needs for one request, about `ids_max` elements together; empty when nothing waits."""
        batch: list[Need] = []
        room = ids_max
        while self._waiting and room > 0:
            need = self._waiting.popleft()
            if need.short_ids is not None and len(need.short_ids) > room:
                rest = Need(need.range, need.short_ids[room:], need.count - room)
                self._waiting.appendleft(rest)
                need = Need(need.range, need.short_ids[:room], room)
            room -= max(need.count, 1)
            batch.append(need)
            if self._waiting and self._waiting[0].range.lower < need.range.upper:
                break  # ranges of one message do not overlap
        return batch

    def accept(
        self, batch: Batch, orders: NDArray[np.uint64], ids: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Which of the arrived elements were asked for in `batch`: bool[n]."""
        shorts = short_ids(self._view, orders, ids)
        rows = zip(orders.tolist(), ids, shorts, strict=True)
        return np.array(
            [_asked(batch, order, raw.tobytes(), short) for order, raw, short in rows], dtype=bool
        )

    def resume(self, batch: Batch, raw: bytes) -> None:
        """Put back what a truncated response did not reach (its `resume` field)."""
        if len(raw) != 16:
            raise RemoteProtocolError("malformed", "a resume bound has 16 bytes")
        bound = Bound(int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:], "big"))
        if not batch or bound <= batch[0].range.lower:
            raise RemoteProtocolError("no_progress", "a truncated response must bring something")
        rest = [need for need in batch if bound < need.range.upper or need.range.upper == END]
        for need in reversed(rest):
            span = Range(max(bound, need.range.lower), need.range.upper)
            self._waiting.appendleft(Need(span, need.short_ids, need.count))


def pack_fetch(batch: Batch) -> Fetch:
    """The fetch message of a batch."""
    ids = [need.short_ids for need in batch]
    return Fetch(
        bounds=pack_ranges([need.range for need in batch]),
        counts=pack_counts([0 if rows is None else len(rows) for rows in ids]),
        short_ids=b"".join(rows.tobytes() for rows in ids if rows is not None),
    )


def _asked(batch: Batch, order: int, raw_id: bytes, short: NDArray[np.uint8]) -> bool:
    for need in batch:
        if need.range.contains(order, raw_id):
            return need.short_ids is None or bool((need.short_ids == short).all(axis=1).any())
    return False
