"""Cuts of ranges into parts of equal count.

With one run in the view the parts are exactly equal, so their counts follow from the total and need
not be sent. With several runs, or where a cut would fall between elements that no bound separates,
cuts follow the longest run, and counts are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recon.codec import (
    Parts,
    part_edges,
    part_sizes,
    tile,
)
from recon.elements import I64, U64, Mask, RangeColumns, bit_lengths, laid
from recon.store import Run
from recon.view import Places, View


@dataclass(frozen=True, slots=True)
class Cuts:
    """Inner edges of splits, laid end to end: owner i64[c], bounds u64[c], and places if equal."""

    owner: I64
    orders: U64
    heads: U64
    places: I64 | None


def choose_cuts(view: View, where: Places, parts: I64 | int, phase: int) -> Cuts:
    """Cuts of the ranges at `where` into (at most) `parts` parts each.

    A range gets fewer cuts, or none, where no bound separates its elements.
    """
    runs = view.runs
    if len(runs) == 1:
        return _cut_run(view, runs[0], where.starts[0], where.stops[0], parts, phase)
    sizes = np.stack([stop - start for start, stop in zip(where.starts, where.stops, strict=True)])
    longest = sizes.argmax(axis=0)
    pieces = []
    for number, run in enumerate(runs):
        mine = np.flatnonzero(longest == number)
        some = parts if isinstance(parts, int) else parts[mine]
        start, stop = where.starts[number][mine], where.stops[number][mine]
        cuts = _cut_run(view, run, start, stop, some, phase)
        pieces.append(replace(cuts, owner=mine[cuts.owner], places=None))
    owner = np.concatenate([piece.owner for piece in pieces])
    sequence = np.argsort(owner, kind="stable")
    orders = np.concatenate([piece.orders for piece in pieces])[sequence]
    heads = np.concatenate([piece.heads for piece in pieces])[sequence]
    return Cuts(owner[sequence], orders, heads, None)


def _cut_run(view: View, run: Run, start: I64, stop: I64, parts: I64 | int, phase: int) -> Cuts:
    counts = stop - start
    sizes = np.maximum(part_sizes(counts, parts), 1)
    owner, edges = part_edges(counts, sizes, phase)
    places = start[owner] + edges
    orders, heads, possible = bounds_at(view, run, places)
    if possible is None:
        return Cuts(owner, orders, heads, places)
    return Cuts(owner[possible], orders[possible], heads[possible], None)


def bounds_at(view: View, run: Run, places: I64) -> tuple[U64, U64, Mask | None]:
    """Bounds that part each place of a run from the one before: orders, heads, and which exist.

    The last is None when all do; two elements that agree in order and head cannot be parted.
    """
    below, at = run.orders[places - 1], run.orders[places]
    orders, heads = at.copy(), np.zeros(len(at), np.uint64)
    tied = below == at
    orders[~tied] = between(below[~tied], at[~tied])
    if not tied.any():
        return orders, heads, None
    heads_below = view.heads_of_places(run, places[tied] - 1)
    heads_at = view.heads_of_places(run, places[tied])
    parted = heads_below < heads_at
    rounded = np.zeros(len(parted), np.uint64)
    rounded[parted] = between_heads(heads_below[parted], heads_at[parted])
    heads[tied] = rounded
    if parted.all():
        return orders, heads, None
    possible = np.ones(len(at), bool)
    possible[tied] = parted
    return orders, heads, possible


def cuts_of_each(cuts: Cuts, count: int) -> I64:
    """Number of cuts of each of `count` ranges."""
    return np.bincount(cuts.owner, minlength=count)


def summarise_parts(
    view: View, ranges: RangeColumns, where: Places, cuts: Cuts, *, exact: bool
) -> Parts:
    """The parts of ranges that all have at least one cut, with their summaries."""
    sizes = cuts_of_each(cuts, len(ranges)) + 1
    empty = np.empty(0, np.int64)
    parts = Parts(sizes, cuts.orders, cuts.heads, empty, np.empty((0, 6), np.uint8))
    if cuts.places is not None and exact:
        places = _places_between(where, sizes, cuts.places)
    else:
        places = view.locate(tile(ranges, parts)[1])
    hashes, counts = view.summaries(places)
    return replace(parts, counts=counts, hashes=hashes)


def _places_between(where: Places, sizes: I64, cuts: I64) -> Places:
    ends = sizes.cumsum()
    starts = laid(where.starts[0], ends - sizes, cuts)
    return Places((starts,), (laid(where.stops[0], ends - 1, cuts),))


def take_cuts(cuts: Cuts, wanted: Mask) -> Cuts:
    """Cuts of some of the ranges, owners renumbered."""
    mine = wanted[cuts.owner]
    number = np.cumsum(wanted) - 1
    places = None if cuts.places is None else cuts.places[mine]
    return Cuts(number[cuts.owner[mine]], cuts.orders[mine], cuts.heads[mine], places)


def between(below: U64, at: U64) -> U64:
    """The roundest numbers above `below` and not above `at` (where below < at), u64[n]."""
    differing = (bit_lengths(below ^ at) - 1).astype(np.uint64)
    return (at >> differing) << differing


def between_heads(below: U64, at: U64) -> U64:
    """The roundest heads above `below` and not above `at`, in whole bytes, u64[n]."""
    differing = bit_lengths(below ^ at) - 1
    cleared = (differing // 8 * 8).astype(np.uint64)
    return (at >> cleared) << cleared
