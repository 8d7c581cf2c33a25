"""The responder's side of a fetch: which elements were named, and how many of them one answer brings.

A short id can only be found by looking at every element of its range, so what one request makes us
look at is bounded; an answer that was cut says where to go on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recon.codec import column, finished, table, unpack_ranges
from recon.columns import I64, U8, U64, Mask, heads_of
from recon.errors import RemoteProtocolError
from recon.hashing import names_of, names_of_short_ids
from recon.limits import DEFAULT_LIMITS, SHORT_ID_BYTES, Limits
from recon.matching import RANGE_SHIFT, contains
from recon.ranges import Bound, Range, RangeColumns
from recon.runs import element_sequence
from recon.varint import unpack_counts
from recon.view import Places, View
from sdstore.wire.recon_pb2 import Fetch

_CLOSE = 16  # a cut within 1/16 of what may be looked at is close enough


class Wanted(NamedTuple):
    """A fetch: m ranges, the number of short ids in each i64[m] (0: all of it), and those u8[n, 6]."""

    ranges: RangeColumns
    counts: I64
    short_ids: U8


class Found(NamedTuple):
    """Elements, ascending: orders u64[n] and ids u8[n, 32]; where to go on, None at the end."""

    orders: U64
    ids: U8
    resume: Bound | None


def read_fetch(fetch: Fetch, limits: Limits = DEFAULT_LIMITS) -> Wanted:
    """What a request wants to fetch. Raises `RemoteProtocolError`."""
    ranges = unpack_ranges(fetch.runs, fetch.bounds, limits.ranges_max)
    raw = column(fetch.counts)
    counts, taken = unpack_counts(raw, len(ranges))
    finished(raw, taken)
    total = int(counts.sum())
    if total > limits.fetch_ids_max:
        raise RemoteProtocolError("malformed", f"{total} short ids in one fetch")
    return Wanted(ranges, counts, table(fetch.short_ids, SHORT_ID_BYTES, total))


def resolve(view: View, wanted: Wanted, limits: Limits = DEFAULT_LIMITS) -> Found:
    """The elements of a fetch, as far as `limits` let one request look."""
    if not len(wanted.ranges):
        return Found(np.empty(0, np.uint64), np.empty((0, 32), np.uint8), None)
    where, resume = _within_limits(view, wanted, limits)
    owner, lanes, rows = view.members(where)
    orders, ids = view.columns_of(rows[_asked_for(wanted, owner, lanes)])
    sequence = element_sequence(orders, heads_of(ids))
    return Found(orders[sequence], ids[sequence], resume)


def _within_limits(view: View, wanted: Wanted, limits: Limits) -> tuple[Places, Bound | None]:
    """Where the ranges lie that may be looked at, and where to go on if those are not all."""
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

    The range has more of them, in several runs: the bound is searched in all at once.
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
    """Which elements bear one of the short ids of their range, or lie in one that is wanted whole."""
    ranges = np.arange(len(wanted.ranges), dtype=np.uint64) << RANGE_SHIFT
    names = np.repeat(ranges, wanted.counts) | names_of_short_ids(wanted.short_ids)
    asked = contains(np.sort(names), ranges[owner] | names_of(lanes))
    asked |= wanted.counts[owner] == 0
    return asked
