"""The most expensive request of each kind, for the responder: `python -m bench.requests [--quick]`.

CPU milliseconds, the best of three, of a node's default limits with a warm view; orders all
different, and all the same, where every bound has to be looked for among ids.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from app.server.limits import DEFAULT_LIMITS as NODE_LIMITS
from bench.table import publish
from recon.agreement import Interest, SessionKey, decode_interest
from recon.codec import Asks, pack_asks, pack_counts, pack_ranges
from recon.elements import ALL_ORDERS, I64, U64, RangeColumns
from recon.fetch import Found, read_fetch, resolve
from recon.index import RangeIndex
from recon.limits import (
    DEFAULT_LIMITS,
    INTEREST_NAMES_MAX,
    LIST_COUNT_MAX,
    ORDER_END,
    PARTS_MAX,
    PHASE_NONE,
    PROTOCOL_VERSION,
)
from recon.responder import bounds_at, respond
from recon.view import View
from sdstore.wire.recon_pb2 import Fetch, ReconRequest

LIMITS = replace(DEFAULT_LIMITS, response_bytes_max=NODE_LIMITS.recon_answer_bytes_max)
MOST = LIMITS.ranges_max
KEY = SessionKey(bytes(16))
SPLIT_BYTES = 3 + 8 * PARTS_MAX  # of an answer: kind, count, and of each part hash and bound
Work = Callable[[], object]


def index_of(orders: U64) -> RangeIndex:
    """Elements with random ids."""
    ids = np.random.default_rng(2).integers(0, 256, (len(orders), 32), dtype=np.uint8)
    index = RangeIndex()
    index.insert(orders, ids, np.zeros(len(orders), np.uint32))
    return index


def random_orders(count: int) -> U64:
    """All different."""
    return np.random.default_rng(1).integers(0, 2**63, count, dtype=np.uint64)


def paired_orders(count: int) -> U64:
    """Odd numbers and their successors: between the two there is one bound, which is not round."""
    odd = random_orders(count // 2) | np.uint64(1)
    return np.concatenate((odd, odd + np.uint64(1)))


def ranges_of(view: View, count: int) -> RangeColumns:
    """So many ranges of equal size, neighbours."""
    return ranges_between(view, np.linspace(1, len(view) - 1, count - 1).astype(np.int64))


def ranges_between(view: View, places: I64) -> RangeColumns:
    """Neighbouring ranges that tile the view, cut at places."""
    orders, heads, _ = bounds_at(view, view.consolidate(), places)
    ends = np.zeros(1, np.uint64), np.full(1, ORDER_END, np.uint64)
    return RangeColumns.tiling(
        np.concatenate((ends[0], orders, ends[1])), np.concatenate((ends[0], heads, ends[1]))
    )


def compared(view: View, count: int, list_max: int, *, listed: bool = False) -> ReconRequest:
    """Ranges whose summaries differ from ours, or that are requested as lists."""
    ranges = ranges_of(view, count)
    counts = np.full(count, 0 if listed else 1)
    asks = Asks(ranges, np.full(count, listed), counts, np.zeros((count, 6), np.uint8))
    return ReconRequest(version=PROTOCOL_VERSION, ranges=pack_asks(asks, PARTS_MAX, list_max, 30))


def fetched(view: View, count: int, names_count: int) -> Fetch:
    """Ranges with short ids that no element has, or (0) whole ones."""
    runs, bounds = pack_ranges(ranges_of(view, count))
    counts = np.full(count, names_count)
    names = os.urandom(6 * count * names_count)
    return Fetch(runs=runs, bounds=bounds, counts=pack_counts(counts), short_ids=names)


def requests_to(view: View) -> dict[str, Work]:
    """Name of each kind of request, and answering it."""
    asked = {
        f"summaries, {MOST:,} ranges, cut into {PARTS_MAX}": compared(view, MOST, 0),
        f"summaries, 4,096 ranges, cut into {PARTS_MAX}": compared(view, 4096, 0),
        f"summaries, {MOST:,} ranges, listed": compared(view, MOST, LIST_COUNT_MAX),
        f"lists, {MOST:,} ranges": compared(view, MOST, 0, listed=True),
        "lists of the greatest length": compared(
            view, max(len(view) // LIST_COUNT_MAX, 2), 0, listed=True
        ),
    }
    named = {
        f"fetch, {MOST:,} ranges, one short id each": fetched(view, MOST, 1),
        "fetch, 2 ranges, 32,768 short ids each": fetched(view, 2, MOST // 2),
        f"fetch, {MOST:,} whole ranges": fetched(view, MOST, 0),
        "fetch of everything": fetched(view, 2, 0),
    }
    works: dict[str, Work] = {
        name: partial(respond, view, each, LIMITS) for name, each in asked.items()
    }
    return works | {name: partial(_resolved, view, each) for name, each in named.items()}


def _resolved(view: View, fetch: Fetch) -> Found:
    return resolve(view, read_fetch(fetch, LIMITS), LIMITS)


def dear_before_equal_ms(orders: U64) -> float:
    """Splits that are expected to fill a response, cut inside of pairs, and equal ranges after."""
    view = View(index_of(orders), KEY)
    size, answered = 2 * PARTS_MAX + 2, LIMITS.ranges_answered_max
    dear = min((LIMITS.response_bytes_max - answered) // SPLIT_BYTES, len(view) // size // 2)
    equal = np.linspace(dear * size, len(view) - 1, answered - dear).astype(np.int64)
    ranges = ranges_between(view, np.append(np.arange(1, dear) * size + 1, equal))
    hashes, counts = view.summaries(view.locate(ranges))
    hashes[:dear] ^= 1
    asks = Asks(ranges, np.zeros(len(ranges), bool), counts, hashes)
    request = ReconRequest(
        version=PROTOCOL_VERSION, ranges=pack_asks(asks, PARTS_MAX, 0, PHASE_NONE)
    )
    return cpu_ms(lambda: respond(view, request, LIMITS))


def interest_ms() -> float:
    """Reading the largest interest, and cutting it to one of the same size."""
    names = [f"{kind}{n:06}" for n in range(INTEREST_NAMES_MAX // 2) for kind in "cp"]
    theirs = Interest.make(channels=frozenset(names[::2]), prefixes=frozenset(names[1::2]))
    raw = theirs.encode()
    return cpu_ms(lambda: decode_interest(raw).intersect(theirs))


def cpu_ms(work: Work) -> float:
    """CPU milliseconds of a call, the best of three."""
    times = []
    for _ in range(3):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return min(times) * 1e3


def main() -> None:
    """Measure and show."""
    count = 10**5 if "--quick" in sys.argv else 10**6
    columns: dict[str, dict[str, float]] = {}
    same = np.zeros(count, np.uint64)
    for name, orders, paired in (
        ("orders differ, ms", random_orders(count), paired_orders(count)),
        ("orders agree, ms", same, same),
    ):
        build = partial(index_of(orders).view, KEY, None, ALL_ORDERS)
        columns[name] = {kind: cpu_ms(work) for kind, work in requests_to(build()).items()}
        columns[name]["summaries, dear ones before equal ones"] = dear_before_equal_ms(paired)
        columns[name]["first message: a new view"] = cpu_ms(build)
        columns[name][f"interest of {INTEREST_NAMES_MAX:,} names"] = interest_ms()
    kinds = next(iter(columns.values()))
    rows = [{"request": k} | {name: times[k] for name, times in columns.items()} for k in kinds]
    publish("requests", f"The most expensive requests, {count:,} elements", rows)


if __name__ == "__main__":
    main()
