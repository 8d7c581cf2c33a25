"""The initiator's work list: which ranges it asks about, and how; and the progress, by its ranges.

**The first message** is skewed towards what is likely to be new. Two nodes that meet often differ at
the newest end, or among what one of them received since they last met. So the newest elements are
cut finely, in parts that grow by a factor; the stretches with recent arrivals get parts of their
own; and the older rest gets a few equal parts.

**After an answer** `choose` plans the cheapest way to name the differences. A range of m elements with
about r differences can be listed at once (6 m bytes). Or the initiator cuts it into b1 parts and
sends their summaries (which costs no round trip), the responder cuts the differing ones into b2
parts, and those that then differ are listed. The expected bytes of each choice follow from r, and the
last answer gives an estimate of r: how many parts of a split differ, and how far apart the counts of
both sides are. (Random differences drive the counts apart like a random walk, so the squares add up
to their number.) Wrong guesses cost bytes, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import numpy as np

from recon.elements import END, F64, I64, START, U8, WHOLE_RANGES, Mask, RangeColumns
from recon.index import Run, element_sequence
from recon.limits import PARTS_MAX, PHASE_NONE, SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from recon.responder import bounds_at
from recon.view import View


@dataclass(frozen=True, slots=True)
class Work:
    """Ranges to ask about: by list or by summary.

    Our summaries are of the moment when a range was put on the list: what comes later need not be
    found by this session. Those of lists are not used.
    """

    ranges: RangeColumns
    listed: Mask
    depths: I64  # splits above
    sizes: I64  # elements of the larger side, about
    counts: I64  # our summaries: counts i64[n], hashes u8[n, 6]
    hashes: U8

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, which: I64 | Mask | slice) -> Work:
        """Some of the ranges."""
        return Work(
            self.ranges.take(which),
            self.listed[which],
            self.depths[which],
            self.sizes[which],
            self.counts[which],
            self.hashes[which],
        )

    def columns(self) -> tuple[Mask, I64, I64, I64, U8]:
        """All but the ranges."""
        return self.listed, self.depths, self.sizes, self.counts, self.hashes

    @classmethod
    def concatenate(cls, pieces: Sequence[Work]) -> Work:
        """All of them, in ascending order."""
        pieces = [piece for piece in pieces if len(piece)] or list(pieces[:1])
        if len(pieces) == 1:
            return pieces[0]
        ranges = RangeColumns.concatenate([piece.ranges for piece in pieces])
        columns = zip(*(piece.columns() for piece in pieces), strict=True)
        joined = cls(ranges, *map(np.concatenate, columns))
        return joined.take(element_sequence(ranges.lower_orders, ranges.lower_heads))

    @classmethod
    @cache
    def none(cls) -> Work:
        """Nothing."""
        empty = np.empty(0, np.int64)
        no_hashes = np.empty((0, SUMMARY_HASH_BYTES), np.uint8)
        return cls(RangeColumns.of(), empty.astype(bool), empty, empty, empty, no_hashes)


def join_lists(work: Work, list_cap: int) -> Work:
    """Neighbouring ranges that will be listed become one: fewer bounds to send.

    A joined list stays below `list_cap` elements plus its last part.
    """
    if not len(work):
        return work
    joins = _joins(work)
    if not joins.any():
        return work
    starts = _group_starts(joins, work.sizes, list_cap)
    depths = np.maximum.reduceat(work.depths, starts)
    sizes, counts = (np.add.reduceat(column, starts) for column in (work.sizes, work.counts))
    ranges, listed = work.ranges.joined(starts), work.listed[starts]
    return Work(ranges, listed, depths, sizes, counts, work.hashes[starts])


def _joins(work: Work) -> Mask:
    """joins[i]: whether range i can merge with range i + 1: they touch, and both will be listed."""
    return work.ranges.touches_next() & work.listed[1:] & work.listed[:-1]


def join_ranges(ranges: RangeColumns, counts: I64, cap: int) -> tuple[RangeColumns, I64]:
    """Ranges that touch become one, of fewer than `cap` elements plus its last part."""
    starts = _group_starts(ranges.touches_next(), counts, cap)
    return ranges.joined(starts), np.add.reduceat(counts, starts)


def _group_starts(joins: Mask, sizes: I64, cap: int) -> I64:
    """The first range of each group. joins[i]: whether range i can merge with range i + 1."""
    begins = np.append(True, ~joins)
    before = sizes.cumsum() - sizes
    chain = begins.cumsum() - 1
    fill = (before - before[begins][chain]) // cap
    begins[1:] |= fill[1:] != fill[:-1]
    return begins.nonzero()[0]


# ---- progress: by elements, and as segments for a range bar


SEGMENTS_MAX = 512  # a bar is drawn a few hundred characters or pixels wide


class RangeState(Enum):
    """States of a range."""

    IN_SYNC = "in sync"
    SYNCING = "syncing"
    DONT_HAVE = "don't have"


_STATES = tuple(RangeState)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the bar: share of the elements, 0 to 1, and its state."""

    share: float
    state: RangeState


@dataclass(frozen=True, slots=True)
class Progress:
    """Elements of the larger side per state, and the bar."""

    elements: dict[RangeState, int]
    segments: tuple[Segment, ...]


class Stretch(NamedTuple):
    """Ranges with their element counts i64[n] and one state."""

    ranges: RangeColumns
    counts: I64
    state: RangeState


def measure(stretches: Iterable[Stretch]) -> Progress:
    """Progress over disjoint ranges, in any order."""
    pieces = [stretch for stretch in stretches if len(stretch.counts)]
    if not pieces:
        return Progress(dict.fromkeys(_STATES, 0), ())
    ranges = RangeColumns.concatenate([piece.ranges for piece in pieces])
    counts = np.concatenate([piece.counts for piece in pieces])
    lengths = [len(piece.counts) for piece in pieces]
    states = np.repeat([_STATES.index(piece.state) for piece in pieces], lengths)
    elements = np.bincount(states, counts, minlength=len(_STATES))
    sequence = np.lexsort((ranges.lower_heads, ranges.lower_orders))
    return Progress(
        {state: int(elements[place]) for place, state in enumerate(_STATES)},
        _segments(counts[sequence], states[sequence]),
    )


def _segments(counts: I64, states: I64) -> tuple[Segment, ...]:
    """Neighbours in one state join; if there are too many, the narrowest join their neighbours."""
    ends = np.cumsum(counts)
    total = max(int(ends[-1]), 1)
    lasts = np.flatnonzero(np.append(states[1:] != states[:-1], True))
    if len(lasts) > SEGMENTS_MAX:
        grid = np.linspace(0, total, SEGMENTS_MAX + 1)[1:]
        lasts = np.unique(np.minimum(np.searchsorted(ends, grid), len(ends) - 1))
    shares = np.diff(ends[lasts], prepend=0) / total
    return tuple(
        Segment(float(share), _STATES[state])
        for share, state in zip(shares, states[lasts].tolist(), strict=True)
    )


# ---- the first message


NEWEST_COUNT = 12  # the newest part: a list of about that length fits the first answer
GROWTH = 8  # each older part is so many times larger
OLD_PARTS = 9  # equal parts of what is older than that
RECENT_CLUSTERS_MAX = 4  # stretches of recent arrivals with cuts of their own
UNTIE_STEPS = 4  # most ties are pairs
RECENT_SHARE = 4  # recent arrivals that make up more than 1/4 of the set are not recent


def opening_work(view: View, phase: int, recent: int, uncut_max: int = 0) -> Work:
    """Ranges of the first message; they tile the whole space. The view becomes one run.

    A view of at most `uncut_max` elements is one range.
    """
    run = view.consolidate()
    ranges = WHOLE_RANGES if len(view) <= uncut_max else _cut_newest(view, run, phase, recent)
    hashes, counts = view.summaries(view.locate(ranges))
    zeros = np.zeros(len(ranges), np.int64)
    return Work(ranges, zeros.astype(bool), zeros, counts, counts, hashes)


def _cut_newest(view: View, run: Run, phase: int, recent: int) -> RangeColumns:
    places = _untied(run, np.concatenate((_skewed(len(run), phase), _recent(view, recent))))
    places = np.unique(places[(places > 0) & (places < len(run))])
    orders, heads, possible = bounds_at(view, run, places)
    if possible is not None:
        orders, heads = orders[possible], heads[possible]
    edges = (
        np.concatenate(([np.uint64(low)], inner, [np.uint64(high)]))
        for low, inner, high in zip(START, (orders, heads), END, strict=True)
    )
    return RangeColumns.tiling(*edges)


def _untied(run: Run, places: I64) -> I64:
    """Places moved past ties where a few steps suffice: such cuts need no bytes of an id."""
    places = np.clip(places, 1, max(len(run) - 1, 1))
    for _ in range(UNTIE_STEPS if len(run) > 1 else 0):
        tied = run.orders[places - 1] == run.orders[places]
        places = np.minimum(places + tied, len(run) - 1)
    return places


def _skewed(count: int, phase: int) -> I64:
    ages = []
    age = NEWEST_COUNT
    while age * GROWTH <= count:
        ages.append(age)
        age *= GROWTH
    oldest = count - (ages[-1] if ages else 0)
    steps = np.arange(1, OLD_PARTS) * 256 + phase - PHASE_NONE
    return np.concatenate((oldest * steps // (256 * OLD_PARTS), count - np.array(ages, np.int64)))


def _recent(view: View, recent: int) -> I64:
    if not 0 < recent * RECENT_SHARE <= len(view):
        return np.empty(0, np.int64)
    places = view.places_of_newest_rows(recent)
    gaps = np.diff(places)
    widest = np.sort(np.argsort(gaps)[-(RECENT_CLUSTERS_MAX - 1) :])
    firsts = np.concatenate((places[:1], places[widest + 1]))
    lasts = np.concatenate((places[widest], places[-1:]))
    return np.concatenate((firsts, lasts + 1))


# ---- the plan


_ASK_BYTES = 8.5  # a summary in a request: hash, bound, count
_PART_BYTES = 7.5  # a part in an answer: hash, bound
_LIST_BYTES = 4.0  # asking for a list, and its count
_PATIENCE = 1.25  # a list can cost this many times as much as splitting: it saves a round trip
_OWN_PARTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, PARTS_MAX], dtype=np.float64)
_PEER_PARTS = np.array([4, 6, 8, 12, 16, 24, 32], dtype=np.float64)
_SPARSE_PARTS = 2  # so few differing parts of a split may be a cluster: assume one difference each
SMALL_COUNT = 16  # always listed


@dataclass(frozen=True, slots=True)
class Plan:
    """Per range: list it, or cut it into `own_parts`; for the request: parts of the responder."""

    listed: Mask
    own_parts: I64
    peer_parts: int


def differences(owner: I64, sizes: I64, ours: I64, theirs: I64, differs: Mask) -> F64:
    """Estimated differences in each differing part, f64[k].

    `owner`: the split of each part; `sizes`: parts of each split; counts of both sides per part.
    """
    splits = len(sizes)
    differing = np.bincount(owner[differs], minlength=splits).astype(np.float64)
    parts = sizes.astype(np.float64)
    hit = np.minimum(differing, parts - 0.5) / parts
    by_hits = -parts * np.log1p(-hit)
    apart = (theirs - ours).astype(np.float64)
    drift = np.bincount(owner, apart, minlength=splits)
    residual = np.where(differs, apart - (drift / np.maximum(differing, 1.0))[owner], 0.0)
    by_counts = np.maximum(np.bincount(owner, residual**2, minlength=splits), np.abs(drift))
    total = np.where(differing > _SPARSE_PARTS, np.maximum(by_hits, by_counts), by_hits)
    return np.maximum(total / np.maximum(differing, 1.0), 1.0)[owner[differs]]


def choose(sizes: I64, expected: F64) -> Plan:
    """Plan for ranges of `sizes` elements with `expected` differences each."""
    large = sizes > SMALL_COUNT
    listed = ~large
    own_parts = np.ones(len(sizes), np.int64)
    if not large.any():
        return Plan(listed, own_parts, SMALL_COUNT)
    kinds, which, weights = _kinds_of(sizes[large], expected[large])
    costs = _costs(*kinds)
    best_own = costs.min(axis=1)
    peer = int((best_own * weights[:, None]).sum(axis=0).argmin())
    own = costs[:, :, peer].argmin(axis=1)
    cheapest = best_own[:, peer]
    to_list = SHORT_ID_BYTES * kinds[0] + _LIST_BYTES <= cheapest * _PATIENCE
    listed[large] = to_list[which]
    own_parts[large] = _OWN_PARTS[own][which].astype(np.int64)
    return Plan(listed, own_parts, int(_PEER_PARTS[peer]))


def _kinds_of(sizes: I64, expected: F64) -> tuple[tuple[F64, F64], I64, F64]:
    """Similar ranges (within a factor of 1.4) are planned together."""
    step = 2.0
    size_class = np.round(np.log2(sizes) * step).astype(np.int64)
    expected_class = np.round(np.log2(expected) * step).astype(np.int64)
    keys, which, weights = np.unique(
        (size_class << 8) | np.minimum(expected_class, 255), return_inverse=True, return_counts=True
    )
    kinds = (2.0 ** ((keys >> 8) / step), 2.0 ** ((keys & 255) / step))
    return kinds, which, weights.astype(np.float64)


def _costs(sizes: F64, expected: F64) -> F64:
    """Expected bytes, f64[kinds, own parts, peer parts]."""
    size, differing = sizes[:, None, None], expected[:, None, None]
    own, wanted = _OWN_PARTS[None, :, None], _PEER_PARTS[None, None, :]
    part = size / own
    peer = np.clip(np.minimum(wanted, part / 2), 1, None)  # a split's parts hold two or more
    asked = _hit(differing, own)
    leaves = _hit(differing, own * peer)
    split = asked * _PART_BYTES * peer + leaves * (_LIST_BYTES + SHORT_ID_BYTES * part / peer)
    answer = np.where(part <= SMALL_COUNT, asked * SHORT_ID_BYTES * part, split)
    # Leaves far above a list's size need another round: count its summaries once more.
    again = leaves * 2 * _PART_BYTES * np.log2(np.maximum(part / peer / (2 * SMALL_COUNT), 1.0))
    return np.asarray(_ASK_BYTES * own + answer + np.where(part <= SMALL_COUNT, 0.0, again))


def _hit(balls: F64, boxes: F64) -> F64:
    """Expected number of boxes that are hit, at least one."""
    return np.maximum(-boxes * np.expm1(-balls / boxes), 1.0)
