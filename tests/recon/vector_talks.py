"""Requests and responses of the vectors: whole sessions, single requests, fetches, the root."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from recon.codec import Asks, pack_asks
from recon.elements import END, START, Bound, Range, RangeColumns
from recon.events import Have, Need
from recon.fetch import FetchQueue, pack_fetch, read_fetch, resolve
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PHASE_MAX, PHASE_NONE, PROTOCOL_VERSION
from recon.responder import respond
from recon.view import View
from sdstore.wire.recon_pb2 import Fetch, ReconRequest
from tests.recon.vector_sets import HEADER, Side, side, universe_of, view_of
from tests.support.recon_talk import Element, columns_of, set_of

Talk = dict[str, Any]
FEW = side("many", 60)
NOTHING = side("many", 0)
SEED = 1
POLICY = 7


def _said(request: ReconRequest, theirs: View) -> dict[str, str]:
    response = respond(theirs, request)
    return {
        "request": request.SerializeToString().hex(),
        "response": response.SerializeToString().hex(),
    }


def _session(name: str, mine: Side, yours: Side, response_bytes_max: int = 1 << 20) -> Talk:
    """All messages of a session, and what it finds, by number."""
    theirs, said = view_of(yours), []
    initiator = initiator_of(mine, response_bytes_max)
    have: set[tuple[int, bytes]] = set()
    needs = []
    while (request := initiator.next_request()) is not None:
        said.append(_said(request.message, theirs))
        for event in initiator.receive(request.request_id, respond(theirs, request.message)):
            if isinstance(event, Have):
                have |= set_of(event.orders, event.ids)
            if isinstance(event, Need):
                needs.append(event)
    need = {e for each in needs for e in _found(theirs, pack_fetch([each]))}
    numbers = {each: n for n, each in enumerate(universe_of(mine["universe"]))}
    return {
        "name": name,
        "initiator": mine,
        "responder": yours,
        "exchanges": said,
        "have": sorted(numbers[each] for each in have),
        "need": sorted(numbers[each] for each in need),
    }


def initiator_of(mine: Side, response_bytes_max: int) -> Initiator:
    """The initiator of a session of the vectors."""
    limits = replace(DEFAULT_LIMITS, response_bytes_max=response_bytes_max)
    return Initiator(view_of(mine), HEADER, limits=limits, seed=SEED)


def request_about(
    mine: Side,
    ranges: RangeColumns,
    listed: list[bool],
    *,
    parts: int = 4,
    list_max: int = 8,
    phase: int = PHASE_NONE,
    response_bytes_max: int = 0,
) -> ReconRequest:
    """A request made by hand."""
    view = view_of(mine)
    hashes, counts = view.summaries(view.locate(ranges))
    return ReconRequest(
        version=PROTOCOL_VERSION,
        session=HEADER.message(),
        ranges=pack_asks(Asks(ranges, np.array(listed), counts, hashes), parts, list_max, phase),
        response_bytes_max=response_bytes_max,
    )


def _single(name: str, mine: Side, yours: Side, request: ReconRequest) -> Talk:
    theirs = view_of(yours)
    return {
        "name": name,
        "initiator": mine,
        "responder": yours,
        "exchanges": [_said(request, theirs)],
    }


def two_runs() -> RangeColumns:
    """Ranges with gaps between them: two neighbours, one that a tie bounds, one to the end."""
    orders = [1 << 63, (1 << 63) + 5000, (1 << 63) + 9000]
    tied = Bound((1 << 63) + 12_000, 0x8000 << 48)
    return RangeColumns.of(
        Range(Bound(orders[0]), Bound(orders[1])),
        Range(Bound(orders[1]), Bound(orders[2])),
        Range(tied, Bound((1 << 63) + 15_000)),
        Range(Bound((1 << 63) + 17_000), END),
    )


def _quarters() -> RangeColumns:
    """300 elements each."""
    edges = [(1 << 63) + n * 100_000 for n in range(5)]
    return RangeColumns.of(*(Range(Bound(low), Bound(high)) for low, high in pairwise(edges)))


def talks() -> list[Talk]:
    """Sessions to their end, then single requests."""
    many, lacking = side("many", 1200), side("many", 1200, range(777, 1200, 100))
    other = side("many", 1200, range(123, 1200, 300))
    whole = RangeColumns.of(Range(START, END))
    twins, fewer = side("twins", 24), side("twins", 24, (3, 4, 5, 20))
    return [
        _session("both lack a few", lacking, other),
        _session("frames of 4,096 bytes", side("many", 1200, range(0, 1200, 2)), many, 4096),
        _session("equal", FEW, FEW),
        _session("the initiator holds nothing", NOTHING, FEW),
        _session("the responder holds nothing", FEW, NOTHING),
        _session("some elements cannot be separated", fewer, twins),
        _single(
            "two runs, cuts as early as possible",
            FEW,
            other,
            request_about(FEW, two_runs(), [False, True, False, False], phase=0),
        ),
        _single(
            "two runs, cuts as late as possible",
            FEW,
            other,
            request_about(FEW, two_runs(), [True, False, False, True], phase=PHASE_MAX),
        ),
        _single(
            "a list that does not fit becomes a split",
            many,
            other,
            request_about(many, whole, [True], response_bytes_max=4096),
        ),
        _single(
            "the first lists fill the frame",
            many,
            other,
            request_about(many, _quarters(), [True] * 4, response_bytes_max=4096),
        ),
        _single(
            "a range that cannot be split is listed at any length",
            side("alike", 1),
            side("alike", 800),
            request_about(side("alike", 1), whole, [False], response_bytes_max=4096),
        ),
        _single("the total alone, which ends a session", lacking, other, _closing()),
    ]


def _closing() -> ReconRequest:
    request = ReconRequest(version=PROTOCOL_VERSION, total=True)
    request.session.CopyFrom(HEADER.message())
    return request


def _found(theirs: View, fetch: Fetch) -> list[Element]:
    orders, ids, _ = resolve(theirs, read_fetch(fetch))
    return list(zip(orders.tolist(), map(bytes, ids), strict=True))


def fetches() -> list[Talk]:
    """The elements that fetches bring, by number, in the order in which they are sent."""
    theirs = side("many", 100)
    numbers = {each: n for n, each in enumerate(universe_of("many"))}
    rows = []
    for name, needs in (
        ("a whole range, and named elements of another one", _needs([20, 21, 25])),
        ("one that is there, one that is not", _needs([98, 101])),
    ):
        queue = FetchQueue(view_of(FEW))
        for need in needs:
            queue.add(need)
        fetch = pack_fetch(queue.next_batch(1000))
        rows.append(
            {
                "name": name,
                "responder": theirs,
                "request": ReconRequest(
                    version=PROTOCOL_VERSION, session=HEADER.message(), fetch=fetch
                )
                .SerializeToString()
                .hex(),
                "found": [numbers[each] for each in _found(view_of(theirs), fetch)],
            }
        )
    return rows


def _needs(named: list[int]) -> list[Need]:
    """The first six elements whole, and some by their short ids."""
    view, everything = view_of(FEW), universe_of("many")
    short_ids = view.short_ids(*columns_of(everything[n] for n in named))
    first, rest = Bound((1 << 63) + 2000), Bound((1 << 63) + 5000)
    return [
        Need(Range(START, first), None, 6),
        Need(Range(rest, END), short_ids, len(named)),
    ]
