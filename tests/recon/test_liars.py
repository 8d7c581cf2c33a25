"""Twelve ways to lie. Each session ends within its budget; nothing of ours is lost by a lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from recon.codec import COUNT, EQUAL, LIST, SPLIT, Parts, Reply, pack_reply, unpack_asks
from recon.elements import I64, RangeColumns
from recon.events import Busy, Expired, Fault, Have
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from recon.responder import choose_cuts, cuts_of_each, respond, summarise_parts, take_cuts
from recon.view import View
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, ReconRequest, ReconResponse
from tests.recon.test_sync import crowd
from tests.support.recon_talk import HEADER, NO_TOTAL, Outcome, converse, set_of, view_of

LIMITS = replace(DEFAULT_LIMITS, bytes_base=1 << 18, requests_max=300)
Liar = Callable[[View, ReconRequest, np.random.Generator], ReconResponse]
NO_PARTS = Parts(
    np.empty(0, np.int64),
    np.empty(0, np.uint64),
    np.empty(0, np.uint64),
    np.empty(0, np.int64),
    np.empty((0, 6), np.uint8),
)


def ranges_of(request: ReconRequest) -> RangeColumns:
    return unpack_asks(request.ranges, 1 << 16).ranges


def reply(request: ReconRequest, kinds: list[int], counts: I64, names: np.ndarray) -> ReconResponse:
    message = Reply(np.array(kinds, np.uint8), counts, NO_PARTS, names)
    ranges = ranges_of(request).take(slice(len(kinds)))
    answers = pack_reply(message, ranges, implied=True)
    return ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=answers)


def says_everything_is_equal(_: View, request: ReconRequest, __: object) -> ReconResponse:
    count = len(ranges_of(request))
    none = np.empty((0, 6), np.uint8)
    return reply(request, [EQUAL] * count, np.zeros(count, np.int64), none)


def offers_what_it_does_not_hold(
    _: View, request: ReconRequest, rng: np.random.Generator
) -> ReconResponse:
    count = len(ranges_of(request))
    names = rng.integers(0, 256, (count * 9, 6), dtype=np.uint8)
    return reply(request, [LIST] * count, np.full(count, 9, np.int64), names)


def repeats_one_short_id(_: View, request: ReconRequest, __: object) -> ReconResponse:
    count = len(ranges_of(request))
    names = np.full((count * 50, 6), 7, np.uint8)
    return reply(request, [LIST] * count, np.full(count, 50, np.int64), names)


def claims_to_hold_nothing(_: View, request: ReconRequest, __: object) -> ReconResponse:
    count = len(ranges_of(request))
    none = np.empty((0, 6), np.uint8)
    return reply(request, [LIST] * count, np.zeros(count, np.int64), none)


def claims_a_trillion(_: View, request: ReconRequest, __: object) -> ReconResponse:
    count = len(ranges_of(request))
    none = np.empty((0, 6), np.uint8)
    return reply(request, [COUNT] * count, np.full(count, 10**12, np.int64), none)


def always_splits(view: View, request: ReconRequest, rng: np.random.Generator) -> ReconResponse:
    """Cuts every range in two by inventing bounds, with random hashes."""
    ranges = ranges_of(request)
    middle = ranges.lower_orders + (ranges.upper_orders - ranges.lower_orders) // np.uint64(2)
    possible = (middle > ranges.lower_orders) & (middle < ranges.upper_orders)
    kinds = np.where(possible, SPLIT, LIST).astype(np.uint8)
    splits = int(possible.sum())
    parts = Parts(
        np.full(splits, 2),
        middle[possible],
        np.zeros(splits, np.uint64),
        np.full(2 * splits, 1 << 30),
        rng.integers(0, 256, (2 * splits, 6), dtype=np.uint8),
    )
    counts = np.where(possible, 1 << 31, 0)
    message = Reply(kinds, counts, parts, np.empty((0, 6), np.uint8))
    return ReconResponse(
        total=NO_TOTAL, version=PROTOCOL_VERSION, answers=pack_reply(message, ranges, implied=False)
    )


def splits_truly_with_false_hashes(
    view: View, request: ReconRequest, rng: np.random.Generator
) -> ReconResponse:
    asks = unpack_asks(request.ranges, 1 << 16)
    where = view.locate(asks.ranges)
    cuts = choose_cuts(view, where, 4, 64)
    possible = cuts_of_each(cuts, len(asks.ranges)) > 0
    kinds = np.where(possible, SPLIT, EQUAL).astype(np.uint8)
    parts = summarise_parts(
        view,
        asks.ranges.take(possible),
        where.take(possible),
        take_cuts(cuts, possible),
        exact=False,
    )
    parts = replace(parts, hashes=rng.integers(0, 256, parts.hashes.shape, dtype=np.uint8))
    counts = np.where(possible, view.counts(where), 0)
    message = Reply(kinds, counts, parts, np.empty((0, 6), np.uint8))
    return ReconResponse(
        total=NO_TOTAL,
        version=PROTOCOL_VERSION,
        answers=pack_reply(message, asks.ranges, implied=False),
    )


def answers_nothing(_: View, __: ReconRequest, ___: object) -> ReconResponse:
    return ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION)


def answers_more_than_was_asked(view: View, request: ReconRequest, _: object) -> ReconResponse:
    response = respond(view, request)
    response.answers.answered += 1
    return response


def answers_one_range_at_a_time(view: View, request: ReconRequest, _: object) -> ReconResponse:
    """Not a lie but misery: the budget of requests bounds it."""
    none = np.empty((0, 6), np.uint8)
    return reply(request, [LIST], np.zeros(1, np.int64), none)


def sends_noise(_: View, __: ReconRequest, rng: np.random.Generator) -> ReconResponse:
    noise = [rng.integers(0, 256, 40, dtype=np.uint8).tobytes() for _ in range(6)]
    kinds, counts, part_counts, bounds, hashes, short_ids = noise
    return ReconResponse(
        version=PROTOCOL_VERSION,
        answers=Answers(
            answered=1,
            kinds=kinds,
            counts=counts,
            part_counts=part_counts,
            bounds=bounds,
            hashes=hashes,
            short_ids=short_ids,
        ),
    )


def keeps_forgetting_the_interest(_: View, __: ReconRequest, ___: object) -> ReconResponse:
    return ReconResponse(status=recon_pb2.UNKNOWN_INTEREST)


LIARS: list[Liar] = [
    says_everything_is_equal,
    offers_what_it_does_not_hold,
    repeats_one_short_id,
    claims_to_hold_nothing,
    claims_a_trillion,
    always_splits,
    splits_truly_with_false_hashes,
    answers_nothing,
    answers_more_than_was_asked,
    answers_one_range_at_a_time,
    sends_noise,
    keeps_forgetting_the_interest,
]


def lied_to(liar: Liar, seed: int, count: int = 1500) -> tuple[Outcome, set[tuple[int, bytes]]]:
    rng = np.random.default_rng(seed)
    elements = crowd(seed, count, int(rng.choice([1, 100, 2**63])))
    ours, theirs = elements[int(rng.integers(0, 200)) :], elements[: int(rng.integers(1, count))]
    view = view_of(theirs)
    initiator = Initiator(view_of(ours), HEADER, limits=LIMITS, seed=seed)
    out = converse(initiator, lambda request: liar(view, request, rng), rounds_max=400)
    assert initiator.done
    return out, set(ours)


def check_end(out: Outcome, ours: set[tuple[int, bytes]]) -> None:
    """It ended in a known way, within its budget, and offers nothing but what we hold."""
    assert out.done or isinstance(out.events[-1], Fault | Busy | Expired)
    assert out.requests <= LIMITS.requests_max + 8
    assert out.bytes <= LIMITS.bytes_base + LIMITS.bytes_per_element * len(ours) + (1 << 20)
    for event in out.events:
        if isinstance(event, Have):
            assert set_of(event.orders, event.ids) <= ours


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_a_session_with_a_liar_ends_within_its_budget(liar: Liar) -> None:
    for seed in range(20):
        check_end(*lied_to(liar, seed))


@pytest.mark.parametrize(
    ("liar", "codes"),
    [
        (offers_what_it_does_not_hold, {None}),  # found out when nothing comes
        (always_splits, {"depth", "budget_bytes", "budget_requests", None}),
        (answers_nothing, {"no_progress"}),
        (answers_more_than_was_asked, {"no_progress", "malformed"}),
        (keeps_forgetting_the_interest, {"status"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_only_a_faulty_peer_does_is_a_fault(liar: Liar, codes: set[str | None]) -> None:
    for seed in range(5):
        out, _ = lied_to(liar, seed)
        assert out.fault in codes


def test_an_honest_million_like_session_stays_far_from_the_depth_limit() -> None:
    elements = crowd(1, 60_000, 2**63)
    mine, yours = view_of(elements[500:]), view_of(elements[:-500])
    for depth_max, fault in ((7, None), (1, "depth")):
        limits = replace(DEFAULT_LIMITS, depth_max=depth_max)
        out = converse(Initiator(mine, HEADER, limits=limits), lambda r: respond(yours, r))
        assert out.fault == fault
