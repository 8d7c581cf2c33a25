"""The cost of one answer for the initiator is bounded for any claims in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from recon.codec import SPLIT, pack_bounds, pack_counts, pack_pairs_of_bits, pack_varints
from recon.elements import RangeColumns
from recon.events import Expired, Fault, Need
from recon.initiator import Initiator
from recon.learning import Asked, Learning
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from recon.view import View
from recon.worklist import Work
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, ReconResponse
from tests.support.recon_talk import HEADER, NO_TOTAL, view_of

SPLITS, PARTS = 1000, 64
WIDTH = np.uint64(1 << 32)  # of a part


def needs_after_splits(view: View, count_each: int) -> list[Need]:
    """The needs after neighbouring ranges were split into parts of so many elements each."""
    edges = np.arange(SPLITS + 1, dtype=np.uint64) * (WIDTH * np.uint64(PARTS))
    ranges = RangeColumns.tiling(edges, np.zeros_like(edges))
    zeros, parts = np.zeros(SPLITS, np.int64), SPLITS * PARTS
    no_hashes = np.zeros((SPLITS, 6), np.uint8)
    work = Work(ranges, zeros.astype(bool), zeros, zeros, zeros, no_hashes)
    cuts = parts - SPLITS
    answers = Answers(
        answered=SPLITS,
        kinds=pack_pairs_of_bits(np.full(SPLITS, SPLIT, np.uint8)),
        counts=pack_counts(np.full(SPLITS, PARTS * count_each)),
        part_counts=pack_varints(np.full(SPLITS, PARTS, np.uint64))
        + pack_counts(np.full(parts, count_each)),
        bounds=pack_bounds(np.full(cuts, WIDTH), np.zeros(cuts, np.uint64)),
        hashes=b"h" * 6 * parts,
    )
    learned = Learning(view, Asked(work, PARTS, 64), 64, 2048).from_answers(answers, 64)
    return [event for event in learned.events if isinstance(event, Need)]


@pytest.mark.parametrize(("count_each", "needs_max"), [(2, 8), (10**9, 1025)])
def test_parts_that_we_lack_are_few_needs_whatever_they_claim(
    count_each: int, needs_max: int
) -> None:
    needs = needs_after_splits(view_of([]), count_each)
    assert len(needs) <= needs_max
    assert sum(need.count for need in needs) == SPLITS * PARTS * count_each
    for one, other in pairwise(needs):
        assert one.range.upper == other.range.lower


def test_needs_do_not_join_across_what_we_hold() -> None:
    ours = 5 << 32, b"e" * 32
    needs = needs_after_splits(view_of([ours]), 2)
    assert not any(need.range.contains(*ours) for need in needs)
    assert (needs[0].range.upper.order, needs[1].range.lower.order) == (5 << 32, 6 << 32)


def test_an_answer_beyond_the_budget_is_not_read() -> None:
    limits = replace(DEFAULT_LIMITS, bytes_base=0, bytes_per_element=0)
    initiator = Initiator(view_of([]), HEADER, limits=limits)
    flying = initiator.next_request()
    assert flying is not None
    garbage = Answers(answered=7)
    (fault,) = initiator.receive(
        flying.request_id, ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=garbage)
    )
    assert isinstance(fault, Fault)
    assert fault.error.code == "budget_bytes"


def test_what_was_in_flight_when_a_session_ended_tells_nothing() -> None:
    elements = [(order, bytes([order]) * 32) for order in range(200)]
    initiator = Initiator(view_of(elements), HEADER, limits=replace(DEFAULT_LIMITS, ranges_max=1))
    first, second = initiator.next_request(), initiator.next_request()
    assert first is not None
    assert second is not None
    expired = ReconResponse(status=recon_pb2.NONCE_EXPIRED, responder_nonce=b"n" * 16)
    assert [type(e) for e in initiator.receive(first.request_id, expired)] == [Expired]
    empty_list = Answers(answered=1, kinds=b"\x02", counts=b"\0")
    late = ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=empty_list)
    assert initiator.receive(second.request_id, late) == []
    assert initiator.next_request() is None
