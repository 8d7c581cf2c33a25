"""The first message of a session: skewed towards what is likely to be new.

Differences between nodes that meet often lie at the newest end, or among what one of them received
since they last met. So the newest elements are cut finely, in parts that grow by a factor, the
stretches where recent arrivals lie get parts of their own, and the old rest a few equal ones.
"""

from __future__ import annotations

import numpy as np

from recon.columns import I64
from recon.cuts import bounds_at
from recon.limits import PHASE_NONE
from recon.ranges import END, START, RangeColumns
from recon.runs import Run
from recon.view import Places, View
from recon.worklist import Work

NEWEST_COUNT = 12  # the newest part: a list of about that length fits the first answer
GROWTH = 8  # each older part is so many times larger
OLD_PARTS = 9  # equal parts of what is older than that
RECENT_CLUSTERS_MAX = 4  # stretches of recent arrivals with cuts of their own
UNTIE_STEPS = 4  # most ties are pairs
RECENT_SHARE = 4  # recent arrivals that make up more than 1/4 of the set are not recent


def opening_work(view: View, phase: int, recent: int) -> Work:
    """Ranges of the first message; they tile the whole space. The view becomes one run."""
    run = view.consolidate()
    places = _untied(run, np.concatenate((_skewed(len(run), phase), _recent(view, recent))))
    places = np.unique(places[(places > 0) & (places < len(run))])
    orders, heads, possible = bounds_at(view, run, places)
    if possible is not None:
        places, orders, heads = places[possible], orders[possible], heads[possible]
    edges = (
        np.concatenate(([np.uint64(low)], inner, [np.uint64(high)]))
        for low, inner, high in zip(START, (orders, heads), END, strict=True)
    )
    ends = np.append(places, len(run))
    hashes, counts = view.summaries(Places((np.append(0, places),), (ends,)))
    zeros = np.zeros(len(ends), np.int64)
    ranges = RangeColumns.tiling(*edges)
    return Work(ranges, zeros.astype(bool), zeros, counts, counts, hashes)


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
