"""Reconciliation, measured: `python -m bench.recon [--quick]`.

Bytes are of whole messages both ways, nonces and keys included; milliseconds are of both sides
together, the best of several sessions, also as CPU time (all is one thread) and relative to
`np.sort` of as many 64-bit integers in the same run, because machines differ. Bound: the theoretical
minimum of any protocol (log2 of the number of possible differences, both ways). Results:
bench/results/recon*.csv and .png.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench import recon_scenarios as sets
from bench.recon_plots import plot_curves
from bench.recon_scenarios import Lacking, Universe
from bench.recon_session import HEADER, Measured, session
from bench.table import publish
from recon.index import RangeIndex
from recon.initiator import Options
from recon.limits import DEFAULT_LIMITS, Limits
from recon.view import View

FRAMES_60K = replace(DEFAULT_LIMITS, request_bytes_max=60_000, response_bytes_max=60_000)
Views = tuple[View, View]
Row = dict[str, str | int | float]


@dataclass(frozen=True)
class Target:
    """A row of the table, with its required and its desired figures."""

    name: str
    universe: Callable[[int], Universe]
    lacking: Lacking
    bytes_must: float
    bytes_reach: float
    trips_max: int
    ms_max: float
    differences: int = 0
    repeats: int = 5


TARGETS = (
    Target("in sync", sets.plain, sets.uniform(0), 360, 280, 1, 1.0, 0, 40),
    Target("d = 1 anywhere", sets.plain, sets.uniform(1), 1100, 900, 3, 3.0, 1, 40),
    Target("d = 1,000 uniform", sets.plain, sets.uniform(1000), 295e3, 225e3, 3, 27, 1000),
    Target("d = 10,000 uniform", sets.plain, sets.uniform(10_000), 1.55e6, 1.25e6, 3, 120, 10_000),
    Target("d = 10 newest", sets.plain, sets.newest(10), 460, 320, 1, 1.2, 0, 40),
    Target("d = 1,000 newest", sets.plain, sets.newest(1000), 5200, 4000, 2, 3, 0, 20),
    Target("d = 10,000 newest", sets.plain, sets.newest(10_000), 46e3, 35e3, 3, 7, 0, 20),
    Target("newest 10 of 1,000 channels", sets.channels, sets.newest(10_000), 50e3, 40e3, 3, 9),
    # These two within 1.5 times the plain row.
    Target("d = 1,000, s, ms and ns clocks", sets.mixed_clocks, sets.uniform(1000), 1.5 * 225e3, 1.5 * 225e3, 3, math.inf, 1000),
    Target("d = 1,000 beside far-future clocks", sets.with_far_future, sets.uniform(1000), 1.5 * 225e3, 1.5 * 225e3, 3, math.inf, 1000),
    Target("disjoint", sets.twice, sets.disjoint, 8.5e6, 7.2e6, 4, 750, repeats=2),
    Target("ten times as many, d = 1,000 uniform", sets.ten_times, sets.uniform(1000), 550e3, 550e3, 4, 60, 1000),
)  # fmt: skip
FRAMED_BYTES_MAX, FRAMED_MS_MAX = 1.05, 2.0  # in frames of 60 kB, times the unlimited ones


def views_of(universe: Universe, lacking: Lacking, seed: int = 1) -> Views:
    """Warm views of both sides."""
    ours, theirs = lacking(len(universe), np.random.default_rng(seed))
    first, second = (
        View(universe.index_without(places), HEADER.key()) for places in (ours, theirs)
    )
    return first, second


def best_of(
    views: Views, repeats: int, limits: Limits = DEFAULT_LIMITS, options: Options | None = None
) -> Measured:
    """Mean bytes, most round trips, and the best time of several sessions."""
    runs = [session(*views, seed=s, limits=limits, options=options) for s in range(repeats)]
    mean = sum(run.bytes for run in runs) // repeats
    up = sum(run.bytes_up for run in runs) // repeats
    trips = max(run.round_trips for run in runs)
    return replace(
        runs[0],
        bytes_up=up,
        bytes_down=mean - up,
        round_trips=trips,
        ms=min(run.ms for run in runs),
        cpu_ms=min(run.cpu_ms for run in runs),
    )


def sort_ms(count: int) -> float:
    """`np.sort` of `count` 64-bit integers, the best of 5."""
    values = np.random.default_rng(0).integers(0, 2**63, count, dtype=np.uint64)
    return min(timed(lambda: np.sort(values)) for _ in range(5))


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e3


def bound_bytes(count: int, differences: int) -> float:
    """The counting bound: each side must learn which of its keys the other lacks."""
    half = differences / 2
    if not differences:
        return 0.0
    choices = math.lgamma(count + 1) - math.lgamma(half + 1) - math.lgamma(count - half + 1)
    return 2 * choices / math.log(2) / 8


def target_rows(count: int, unit_ms: float) -> list[Row]:
    """The table of targets, unlimited and in frames of 60 kB."""
    rows: list[Row] = []
    for target in TARGETS:
        universe = target.universe(count)
        views = views_of(universe, target.lacking)
        run, framed = (
            best_of(views, target.repeats, some) for some in (DEFAULT_LIMITS, FRAMES_60K)
        )
        rows.append(_row(target, len(universe), run, framed, unit_ms))
    return rows


def _row(target: Target, count: int, run: Measured, framed: Measured, unit_ms: float) -> Row:
    framed_bytes, framed_ms = framed.bytes / run.bytes, framed.ms / run.ms
    missed = {
        "bytes": run.bytes > target.bytes_must,
        "trips": run.round_trips > target.trips_max,
        "ms": run.ms > target.ms_max,
        "60 kB": framed_bytes > FRAMED_BYTES_MAX or framed_ms > FRAMED_MS_MAX,
        "reach": run.bytes > target.bytes_reach,
    }
    return {
        "scenario": target.name,
        "bytes": run.bytes,
        "must": int(target.bytes_must),
        "reach": int(target.bytes_reach),
        "bound": int(bound_bytes(count, target.differences)),
        "trips": run.round_trips,
        "trips must": target.trips_max,
        "ms": round(run.ms, 2),
        "ms must": target.ms_max,
        "cpu ms": round(run.cpu_ms, 2),
        "x sort": round(run.ms / unit_ms, 3),
        "60 kB: bytes x": round(framed_bytes, 3),
        "60 kB: ms x": round(framed_ms, 2),
        "60 kB: cpu x": round(framed.cpu_ms / run.cpu_ms, 2),
        "missed": ", ".join(name for name, is_missed in missed.items() if is_missed) or "nothing",
    }


def cost_rows(count: int, unit_ms: float) -> list[Row]:
    """Building, inserting, memory."""
    everything = sets.plain(count)
    groups = np.zeros(count, np.uint32)
    columns = (everything.orders, everything.ids, groups)
    base_ms = min(timed(lambda: RangeIndex.from_sorted(*columns)) for _ in range(5))
    index = RangeIndex.from_sorted(*columns)
    build = lambda: View(index, HEADER.key())  # noqa: E731
    view_ms = min(timed(build) for _ in range(5))
    per_million = 1e6 / count
    run = build().runs[0]
    bytes_each = (run.low.nbytes + run.high.nbytes + run.orders.nbytes) / count
    base_each = sum(column.nbytes for column in columns) / count
    rows = [
        ("base from sorted columns, ms per 10^6", base_ms * per_million, 15),
        ("keyed view, ms per 10^6", view_ms * per_million, 25),
        ("insert newest in batches of 10,000, us", _insert_us(everything, newest=True), 0.6),
        ("insert anywhere in batches of 10,000, us", _insert_us(everything, newest=False), 0.6),
        ("insert one and ask, us", _trickle_us(everything), 25),
        ("base, bytes per element", base_each, 60),
        ("view, bytes per element", bytes_each + 4, 50),
    ]
    return [
        {
            "cost": name,
            "value": round(value, 2),
            "must": most,
            "missed": "yes" if value > most else "no",
            "np.sort ms": round(unit_ms, 1),
        }
        for name, value, most in rows
    ]


def _insert_us(everything: Universe, *, newest: bool) -> float:
    count, batch = len(everything), 10_000
    places = np.arange(count) if newest else np.random.default_rng(2).permutation(count)
    index, groups = RangeIndex(), np.zeros(batch, np.uint32)
    orders, ids = everything.orders[places], everything.ids[places]

    def fill() -> None:
        for start in range(0, count - batch + 1, batch):
            some = slice(start, start + batch)
            index.insert(orders[some], ids[some], groups)

    return timed(fill) * 1e3 / count


def _trickle_us(everything: Universe, count: int = 5000) -> float:
    index = everything.index_without(np.arange(0))
    view = View(index, HEADER.key())
    more = sets.universe_of(
        np.random.default_rng(3).integers(0, len(everything), count).astype(np.uint64),
        np.random.default_rng(4),
    )
    groups = np.zeros(1, np.uint32)

    def trickle() -> None:
        for place in range(count):
            one = slice(place, place + 1)
            index.insert(more.orders[one], more.ids[one], groups)
            view.refresh()
            view.total()

    return timed(trickle) * 1e3 / count


def curve_rows(counts: list[int], differences: list[int], count: int) -> list[Row]:
    """Over sizes at fixed d, over d at a fixed size, and bytes against rounds over settings."""
    rows: list[Row] = []
    for size in counts:
        views = views_of(sets.plain(size), sets.uniform(1000))
        rows.append(_curve("size", size, best_of(views, 3)))
    everything = sets.plain(count)
    for different in differences:
        views = views_of(everything, sets.uniform(different))
        rows.append(_curve("differences", different, best_of(views, 3)))
    views = views_of(everything, sets.uniform(1000))
    for parts in (4, 8, 16, 32, 64):
        run = best_of(views, 2, options=Options(parts=parts, list_max=parts))
        rows.append(_curve("parts", parts, run))
    return rows


def _curve(kind: str, value: int, run: Measured) -> Row:
    return {
        "over": kind,
        "value": value,
        "bytes": run.bytes,
        "trips": run.round_trips,
        "ms": round(run.ms, 2),
    }


def main() -> int:
    """Measure, print, write CSV and PNG."""
    quick = "--quick" in sys.argv
    count = 10**5 if quick else 10**6
    unit_ms = sort_ms(count)
    publish("recon", f"Reconciliation of {count:,} elements", target_rows(count, unit_ms))
    publish("recon_costs", "Building, inserting, memory", cost_rows(count, unit_ms))
    sizes = [10**4, 10**5] if quick else [10**4, 10**5, 10**6, 10**7]
    differences = [1, 10, 100, 1000, 10_000] + ([] if quick else [100_000])
    curves = curve_rows(sizes, differences, count)
    publish("recon_curves", "Bytes, round trips and ms (d = 1,000 where not said)", curves)
    plot_curves(curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
