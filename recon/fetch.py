"""Both sides of a fetch: the initiator's queue of needs, and the elements that a responder brings.

A short id means something only inside (view, range), so a fetch names ranges and short ids. The
initiator checks what arrives by computing it again: it takes an element only if it is in
a range that was asked for and, where short ids were given, has one of them.

The responder can find a short id only by looking at every element of its range. So what one request
can make it look at is bounded, and an answer that was cut says where to go on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from recon.codec import (
    column,
    finished,
    pack_counts,
    pack_ranges,
    table,
    unpack_counts,
    unpack_ranges,
)
from recon.elements import END, I64, U8, U64, Bound, Mask, Range, RangeColumns, heads_of
from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.hashing import contains, names_in_ranges, names_of, names_of_short_ids
from recon.index import element_sequence
from recon.limits import DEFAULT_LIMITS, SHORT_ID_BYTES, Limits
from recon.view import Places, View
from sdstore.wire.recon_pb2 import Fetch

Batch = list[Need]
_RESUME_BYTES = 16
_NOWHERE = -1
_CLOSE = 16  # a cut within 1/16 of the scan limit is close enough


class FetchQueue:
    """Needs that wait to be fetched, about in order. One batch per request; requests may overlap."""

    def __init__(self, view: View, limits: Limits = DEFAULT_LIMITS) -> None:
        self._view = view
        self._waiting: deque[Need] = deque()
        self._barren_left = limits.fetch_barren_max
        self._owed_names: set[int] = set()
        self._owed_count = 0  # of whole ranges, whose elements have no names

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
        """Ranges of one message do not overlap; the others go back to the front."""
        batch: Batch = []
        for need in needs:
            if batch and need.range.lower < batch[-1].range.upper:
                self._waiting.appendleft(need)
            else:
                batch.append(need)
        return batch

    @property
    def unserved_count(self) -> int:
        """Elements that the peer named or counted and did not bring when they were fetched."""
        return len(self._owed_names) + self._owed_count

    def accept(self, batch: Batch, orders: U64, ids: U8, resume: bytes | None = None) -> Mask:
        """Which of the arrived elements, as they came, were asked for in `batch`: bool[n].

        `resume`: where an answer that was cut goes on. Raises `RemoteProtocolError` unless each
        element comes once, ascending, and below that bound. Otherwise a peer could serve a fetch
        for ever.
        """
        heads = heads_of(np.ascontiguousarray(ids))
        is_same_order = orders[1:] == orders[:-1]
        if (orders[1:] < orders[:-1]).any() or (heads[1:] < heads[:-1])[is_same_order].any():
            raise RemoteProtocolError("malformed", "the elements of an answer must ascend")
        has_equal_keys = (is_same_order & (heads[1:] == heads[:-1])).any()
        if has_equal_keys and _has_repeats(orders, ids):
            raise RemoteProtocolError("malformed", "an element came twice in one answer")
        if resume is not None and len(ids):
            last = Bound(int(orders[-1]), int(heads[-1]))
            if last > _bound_of(resume):
                raise RemoteProtocolError("no_progress", "an element is above the resume bound")
        return np.array([at >= 0 for at, _ in self._places(batch, orders, ids)], dtype=bool)

    def settle(
        self,
        batch: Batch,
        orders: U64,
        ids: U8,
        resume: bytes | None = None,
        inside: Sequence[Sequence[bytes]] = (),
    ) -> None:
        """Remove the elements that an answer to `batch` brought, in any order; queue the rest again.

        `inside[i]`: the IDs of the claims inside element i, which it brought, too.
        """
        left, is_barren = self._left(batch, orders, ids, inside)
        bound = END
        if resume is not None:
            bound = _bound_of(resume)
            self._count_barren(is_barren=is_barren)
            if not batch or bound <= batch[0].range.lower:
                raise RemoteProtocolError("no_progress", "the resume bound of a fetch must advance")
        for need in reversed(left):
            upper = need.range.upper
            if resume is not None and (bound < upper or upper == END):
                span = Range(max(bound, need.range.lower), upper)
                self._waiting.appendleft(replace(need, range=span))
            elif need.short_ids is None:
                self._owed_count += need.count
            else:
                self._owed_names |= set(names_of_short_ids(need.short_ids).tolist())

    def _count_barren(self, *, is_barren: bool) -> None:
        """Bound the cut answers of a session that bring nothing: they could move their bound for ever."""
        self._barren_left -= is_barren
        if self._barren_left < 0:
            raise RemoteProtocolError("no_progress", "too many cut answers brought nothing")

    def _left(
        self, batch: Batch, orders: U64, ids: U8, inside: Sequence[Sequence[bytes]]
    ) -> tuple[Batch, bool]:
        """The part of a batch that was not brought, and whether nothing was."""
        if any(inside):
            orders = np.concatenate((orders, orders.repeat(list(map(len, inside)))))
            claim_ids = np.frombuffer(b"".join(chain.from_iterable(inside)), np.uint8)
            ids = np.concatenate((ids, claim_ids.reshape(-1, ids.shape[1])))
        brought: defaultdict[int, set[int]] = defaultdict(set)
        for at, name in self._places(batch, orders, ids):
            brought[at].add(name)
        brought.pop(_NOWHERE, None)
        left = (_without(need, brought[at]) for at, need in enumerate(batch))
        return [need for need in left if need is not None], not any(brought.values())

    def _places(self, batch: Batch, orders: U64, ids: U8) -> Iterator[tuple[int, int]]:
        """For each element: the place in the batch of the need that asks for it, and its name there."""
        if not len(orders):
            return
        if len(batch) == 1 and batch[0].short_ids is None:
            yield from _in_whole_range(batch[0].range, orders, ids)
            return
        names = names_of_short_ids(self._view.short_ids(orders, ids)).tolist()
        keys = zip(orders.tolist(), heads_of(np.ascontiguousarray(ids)).tolist(), strict=True)
        lowers = [need.range.lower for need in batch]
        wanted = [_names(need) for need in batch]
        for key, name in zip(keys, names, strict=True):
            at = bisect_right(lowers, key) - 1
            if at >= 0 and not _is_wanted(batch[at].range.upper, wanted[at], key, name):
                at = _NOWHERE
            yield at, name


def _has_repeats(orders: U64, ids: U8) -> bool:
    return len(set(zip(orders.tolist(), map(bytes, ids), strict=True))) < len(ids)


def _in_whole_range(span: Range, orders: U64, ids: U8) -> Iterator[tuple[int, int]]:
    """`FetchQueue._places` for one need without short ids: any name that differs will do."""
    heads = heads_of(np.ascontiguousarray(ids))
    lower, upper = span
    is_inside = (orders > lower.order) | ((orders == lower.order) & (heads >= lower.head))
    if upper != END:
        is_inside &= (orders < upper.order) | ((orders == upper.order) & (heads < upper.head))
    return zip(np.where(is_inside, 0, _NOWHERE).tolist(), heads.tolist(), strict=True)


def _is_wanted(upper: Bound, names: frozenset[int] | None, key: tuple[int, int], name: int) -> bool:
    """Whether a need asks for an element: it is below `upper` and has one of the names, if any."""
    return (key < upper or upper == END) and (names is None or name in names)


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
    """A need of at most `room` short ids, and the rest of it."""
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


def _without(need: Need, brought: set[int]) -> Need | None:
    """The rest of a need; a whole range always has one, because it may hold new elements."""
    if need.short_ids is None:
        return replace(need, count=max(need.count - len(brought), 0))
    if not brought:
        return need
    missing = [name not in brought for name in names_of_short_ids(need.short_ids).tolist()]
    rows = need.short_ids[missing]
    return replace(need, short_ids=rows, count=len(rows)) if len(rows) else None


def _bound_of(resume: bytes) -> Bound:
    if len(resume) != _RESUME_BYTES:
        raise RemoteProtocolError(
            "malformed", f"a resume bound of {len(resume)} bytes; it has {_RESUME_BYTES}"
        )
    return Bound(int.from_bytes(resume[:8], "big"), int.from_bytes(resume[8:], "big"))


# ---- the responder's side


class Wanted(NamedTuple):
    """A fetch: m ranges, the number of short ids in each i64[m] (0: all of it), and those u8[n, 6]."""

    ranges: RangeColumns
    counts: I64
    short_ids: U8


NOTHING_WANTED = Wanted(
    RangeColumns.of(), np.empty(0, np.int64), np.empty((0, SHORT_ID_BYTES), np.uint8)
)


class Found(NamedTuple):
    """Elements, ascending: orders u64[n] and ids u8[n, 32]; where to go on, None at the end."""

    orders: U64
    ids: U8
    resume: Bound | None


NOTHING_FOUND = Found(np.empty(0, np.uint64), np.empty((0, 32), np.uint8), None)


def read_fetch(fetch: Fetch, limits: Limits = DEFAULT_LIMITS) -> Wanted:
    """The ranges and short ids of a request. Raises `RemoteProtocolError`."""
    ranges = unpack_ranges(fetch.runs, fetch.bounds, limits.ranges_max)
    raw = column(fetch.counts)
    counts, taken = unpack_counts(raw, len(ranges))
    finished(raw, taken)
    total = int(counts.sum())
    if total > limits.fetch_ids_max:
        raise RemoteProtocolError(
            "malformed", f"{total} short ids in one fetch; at most {limits.fetch_ids_max}"
        )
    return Wanted(ranges, counts, table(fetch.short_ids, SHORT_ID_BYTES, total))


def resolve(view: View, wanted: Wanted, limits: Limits = DEFAULT_LIMITS) -> Found:
    """The elements of a fetch, as far as `limits` let one request look."""
    if not len(wanted.ranges):
        return NOTHING_FOUND
    where, resume = _within_limits(view, wanted, limits)
    owner, lanes, numbers = view.members(where)
    orders, ids = view.columns_of(numbers[_asked_for(wanted, owner, lanes)])
    sequence = element_sequence(orders, heads_of(ids))
    return Found(orders[sequence], ids[sequence], resume)


def _within_limits(view: View, wanted: Wanted, limits: Limits) -> tuple[Places, Bound | None]:
    """The places of the ranges to look at, and where to go on if those are not all."""
    where = view.locate(wanted.ranges.take(slice(limits.ranges_answered_max)))
    counts = view.counts(where)
    # All elements of a whole range are brought, which costs more than looking at them.
    dearer = limits.fetch_scan_max // limits.fetch_elements_max
    costs = np.where(wanted.counts[: len(counts)], 1, dearer)
    spent = np.cumsum(counts * costs)
    reached = int(np.searchsorted(spent, limits.fetch_scan_max, side="right"))
    if reached == len(wanted.ranges):
        return where, None
    if reached:
        return where.take(slice(reached)), wanted.ranges[reached].lower
    span = wanted.ranges[0]
    upper = _bound_after(view, span, where, limits.fetch_scan_max // int(costs[0]))
    beginning = Range(span.lower, upper)
    return view.locate(RangeColumns.of(beginning)), upper


def _bound_after(view: View, span: Range, where: Places, count: int) -> Bound:
    """A bound below which a range has at most `count` elements, and nearly so many; at least one.

    The range has more of them, in several runs. The search halves the widest stretch of any run, and
    counts in all runs.
    """
    lows, highs = ([int(place[0]) for place in places] for places in (where.starts, where.stops))
    best = least = None
    while any(low < high for low, high in zip(lows, highs, strict=True)):
        widest = max(range(len(lows)), key=lambda n: highs[n] - lows[n])
        middle = (lows[widest] + highs[widest]) // 2
        run = view.runs[widest]
        bound = Bound(
            int(run.orders[middle]), int(view.heads_of_places(run, np.array([middle]))[0])
        )
        below = view.locate(RangeColumns.of(Range(span.lower, bound)))
        stops = [int(stop[0]) for stop in below.stops]
        total = int(view.counts(below)[0])
        if total > count:
            least = bound
            highs = [min(pair) for pair in zip(highs, stops, strict=True)]
            highs[widest] = min(highs[widest], middle)
            continue
        if total:
            best = bound
        if total > count - count // _CLOSE:
            break
        lows = [max(pair) for pair in zip(lows, stops, strict=True)]
        lows[widest] = max(lows[widest], middle + 1)
    return best or least or span.upper


def _asked_for(wanted: Wanted, owner: I64, lanes: U64) -> Mask:
    """Which elements have a short id that was asked for in their range, or are in a whole range."""
    named = np.arange(len(wanted.ranges)).repeat(wanted.counts)
    names = names_in_ranges(named, names_of_short_ids(wanted.short_ids))
    asked = contains(np.sort(names), names_in_ranges(owner, names_of(lanes)))
    asked |= wanted.counts[owner] == 0
    return asked
