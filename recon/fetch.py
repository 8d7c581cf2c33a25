"""What the initiator still has to fetch: needs turned into bounded fetch messages.

Short ids mean something only inside (view, range), so a fetch names both, and what arrives is
checked by recomputing: an element counts only if its range and short id were asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import numpy as np

from recon.codec import pack_ranges
from recon.columns import U8, U64, Mask, heads_of
from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.hashing import names_of_short_ids
from recon.limits import DEFAULT_LIMITS, Limits
from recon.ranges import END, Bound, Range, RangeColumns
from recon.varint import pack_counts
from recon.view import View, short_ids
from sdstore.wire.recon_pb2 import Fetch

Batch = list[Need]
_RESUME_BYTES = 16


class FetchQueue:
    """Needs waiting to be fetched, about in order. One batch per request; requests may overlap."""

    def __init__(self, view: View, limits: Limits = DEFAULT_LIMITS) -> None:
        self._view = view
        self._waiting: deque[Need] = deque()
        self._barren_left = limits.fetch_barren_max

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, need: Need) -> None:
        """Put a need at the end."""
        self._waiting.append(need)

    def next_batch(self, ids_max: int) -> Batch:
        """Needs for one request, about `ids_max` elements together; empty when nothing waits."""
        taken: list[Need] = []
        room = ids_max
        while self._waiting and room > 0:
            need, rest = _cut(self._waiting.popleft(), room)
            if rest is not None:
                self._waiting.appendleft(rest)
            room -= max(need.count, 1)
            taken.append(need)
        return self._without_overlaps(sorted(taken, key=lambda need: need.range))

    def _without_overlaps(self, needs: list[Need]) -> Batch:
        """Ranges of one message do not overlap; what does goes back to the front."""
        batch: Batch = []
        for need in needs:
            if batch and need.range.lower < batch[-1].range.upper:
                self._waiting.appendleft(need)
            else:
                batch.append(need)
        return batch

    def accept(self, batch: Batch, orders: U64, ids: U8) -> Mask:
        """Which of the arrived elements were asked for in `batch`: bool[n]."""
        if not len(orders):
            return np.zeros(0, dtype=bool)
        names = names_of_short_ids(short_ids(self._view, orders, ids)).tolist()
        keys = zip(orders.tolist(), heads_of(np.ascontiguousarray(ids)).tolist(), strict=True)
        lowers = [need.range.lower for need in batch]
        wanted = [_names(need) for need in batch]
        asked = np.zeros(len(orders), dtype=bool)
        for place, (key, name) in enumerate(zip(keys, names, strict=True)):
            at = bisect_right(lowers, key) - 1
            if at >= 0:
                upper, some = batch[at].range.upper, wanted[at]
                inside = key < upper or upper == END
                asked[place] = inside and (some is None or name in some)
        return asked

    def resume(self, batch: Batch, raw: bytes, accepted_count: int) -> None:
        """Put back what a truncated response did not reach (its `resume` field).

        `accepted_count`: how many of the elements that it brought `accept` took. A response that
        only moves its bound could do so for ever, so few of a session may bring none of them.
        """
        if len(raw) != _RESUME_BYTES:
            raise RemoteProtocolError("malformed", "a resume bound has 16 bytes")
        bound = Bound(int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:], "big"))
        self._barren_left -= not accepted_count
        if not batch or self._barren_left < 0 or bound <= batch[0].range.lower:
            raise RemoteProtocolError("no_progress", "truncated responses must bring something")
        rest = [need for need in batch if bound < need.range.upper or need.range.upper == END]
        for need in reversed(rest):
            span = Range(max(bound, need.range.lower), need.range.upper)
            self._waiting.appendleft(Need(span, need.short_ids, need.count))


def pack_fetch(batch: Batch) -> Fetch:
    """The fetch message of a batch."""
    runs, bounds = pack_ranges(RangeColumns.of(*(need.range for need in batch)))
    ids = [need.short_ids for need in batch]
    counts = [0 if rows is None else len(rows) for rows in ids]
    return Fetch(
        runs=runs,
        bounds=bounds,
        counts=pack_counts(np.array(counts, np.int64)),
        short_ids=b"".join(rows.tobytes() for rows in ids if rows is not None),
    )


def _cut(need: Need, room: int) -> tuple[Need, Need | None]:
    names = need.short_ids
    if names is None or len(names) <= room:
        return need, None
    return (
        Need(need.range, names[:room], room),
        Need(need.range, names[room:], len(names) - room),
    )


def _names(need: Need) -> frozenset[int] | None:
    if need.short_ids is None:
        return None
    return frozenset(names_of_short_ids(need.short_ids).tolist())
