"""The responder's rules, and the initiator's checks of them, one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from recon.codec import (
    COUNT,
    EQUAL,
    LIST,
    SPLIT,
    Asks,
    pack_asks,
    pack_varints,
    unpack_asks,
    unpack_reply,
)
from recon.elements import END, START, WHOLE, Bound, Range, RangeColumns
from recon.errors import RemoteProtocolError
from recon.events import Fault, Have, Need
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from recon.responder import respond
from recon.view import View
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, Ranges, ReconRequest, ReconResponse
from tests.recon.test_sync import crowd
from tests.support.recon_talk import HEADER, NO_TOTAL, converse, honest, set_of, view_of

ELEMENTS = sorted(crowd(1, 600, 2**40))
VIEW = view_of(ELEMENTS)


def request_of(ranges: RangeColumns, view: View, *, listed: bool = False) -> ReconRequest:
    hashes, counts = view.summaries(view.locate(ranges))
    asks = Asks(ranges, np.full(len(ranges), listed), counts, hashes)
    message = pack_asks(asks, parts=4, list_max=16, phase=64)
    return ReconRequest(version=PROTOCOL_VERSION, ranges=message)


def kinds_of(request: ReconRequest, view: View = VIEW) -> list[int]:
    asks = unpack_asks(request.ranges, 1000)
    answers = respond(view, request).answers
    return unpack_reply(answers, asks.ranges, 4, 64)[0].kinds.tolist()


def test_equal_hashes_with_other_counts_are_not_equal() -> None:
    request = request_of(RangeColumns.of(WHOLE), VIEW)
    assert kinds_of(request) == [EQUAL]
    asks = unpack_asks(request.ranges, 10)
    wrong = replace(asks, counts=asks.counts + 1)
    request.ranges.CopyFrom(pack_asks(wrong, parts=4, list_max=16, phase=64))
    assert kinds_of(request) == [SPLIT]


def test_who_holds_nothing_is_told_the_count_and_nothing_else() -> None:
    request = request_of(RangeColumns.of(WHOLE), view_of([]))
    response = respond(VIEW, request)
    assert kinds_of(request) == [COUNT]
    assert response.ByteSize() < 16


def test_a_list_is_given_when_asked_for_and_a_split_when_it_would_not_fit() -> None:
    request = request_of(RangeColumns.of(WHOLE), VIEW, listed=True)
    assert kinds_of(request) == [LIST]
    big = view_of(crowd(2, 5000, 2**40))
    assert kinds_of(request, big) == [SPLIT]


def test_what_came_to_us_after_we_said_nothing_is_still_sent_when_they_hold_nothing() -> None:
    view = view_of([])
    initiator = Initiator(view, HEADER)
    request = initiator.next_request()
    assert request is not None
    full = Initiator(VIEW, HEADER)
    flying = full.next_request()
    assert flying is not None
    count = len(unpack_asks(flying.message.ranges, 100).ranges)
    zeros = b"\0" * count
    answers = Answers(answered=count, kinds=b"\xff" * (count // 4 + 1), counts=zeros)
    answers.kinds = bytes([255] * (count // 4) + [255 >> (8 - 2 * (count % 4))] * bool(count % 4))
    events = full.receive(
        flying.request_id, ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=answers)
    )
    have = set().union(*(set_of(e.orders, e.ids) for e in events if isinstance(e, Have)))
    assert have == set(ELEMENTS)
    assert full.done


def test_overlapping_inverted_and_empty_ranges_are_refused() -> None:
    a, b, c = (Bound(ELEMENTS[place][0]) for place in (10, 20, 30))
    for ranges in (
        [Range(a, c), Range(b, c)],
        [Range(c, a)],
        [Range(a, a)],
        [Range(b, c), Range(a, b)],
        [Range(a, b), Range(a, b)],
    ):
        request = request_of(RangeColumns.of(WHOLE), VIEW)
        columns = RangeColumns.of(*ranges)
        zeros = np.zeros(len(ranges), np.int64)
        asks = Asks(columns, zeros.astype(bool), zeros, np.zeros((len(ranges), 6), np.uint8))
        request.ranges.CopyFrom(pack_asks(asks, parts=4, list_max=16, phase=64))
        with pytest.raises(RemoteProtocolError):
            respond(VIEW, request)


def test_columns_have_no_bytes_to_spare() -> None:
    for field in ("runs", "bounds", "counts", "hashes"):
        request = request_of(RangeColumns.of(WHOLE), VIEW)
        setattr(request.ranges, field, getattr(request.ranges, field) + b"\0")
        with pytest.raises(RemoteProtocolError):
            respond(VIEW, request)


def test_too_many_ranges_too_small_frames_and_other_versions_are_refused() -> None:
    cuts = [START, *(Bound(order) for order, _ in ELEMENTS[1:9]), END]
    ranges = RangeColumns.of(*(Range(*pair) for pair in pairwise(cuts)))
    request = request_of(ranges, VIEW)
    assert kinds_of(request) == [EQUAL] * 9
    with pytest.raises(RemoteProtocolError):
        respond(VIEW, request, replace(DEFAULT_LIMITS, ranges_max=8))
    request.response_bytes_max = 4095
    with pytest.raises(RemoteProtocolError):
        respond(VIEW, request)
    request.version = 1
    response = respond(VIEW, request)
    assert (response.status, response.version) == (recon_pb2.UNSUPPORTED_VERSION, PROTOCOL_VERSION)


def split(sizes: list[int], counts: list[int], total: int, cuts: bytes | None = None) -> list[str]:
    """How the initiator takes a split of one whole range; the codes of its faults."""
    initiator = Initiator(view_of([]), HEADER)
    request = initiator.next_request()
    assert request is not None
    steps = np.diff(np.array([0, *counts]))
    zigzag = np.where(steps < 0, -2 * steps - 1, 2 * steps).astype(np.uint64)
    parts = sum(sizes)
    good = b"\x00" + bytes([5] * (parts - len(sizes))) + b"\x00"
    answers = Answers(
        answered=1,
        kinds=bytes([SPLIT]),
        counts=pack_varints(np.array([2 * total], np.uint64)),
        part_counts=pack_varints(np.array(sizes, np.uint64)) + pack_varints(zigzag),
        bounds=good if cuts is None else cuts,
        hashes=b"h" * 6 * parts,
    )
    events = initiator.receive(
        request.request_id, ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=answers)
    )
    return [event.error.code for event in events if isinstance(event, Fault)]


def test_a_split_tiles_its_range_in_two_or_more_parts_that_hold_something() -> None:
    assert split([3], [1, 2, 3], 6) == []
    assert split([3], [1, 2, 3], 7) == ["split"]
    assert split([3], [0, 3, 3], 6) == ["split"]
    assert split([1], [6], 6, b"") == ["split"]
    assert split([65], [1] * 65, 65) == ["split"]
    assert split([3], [1, 2, 3], 6, b"\x00\x05\x00\x00") == ["split"]
    assert split([3], [1, 2, 3], 6, b"\x00\x00\x05\x00") == ["split"]
    assert split([3], [1, 2, 3], 6, b"\x00\x05\x05\x00\x00") == ["malformed"]


def test_repeated_short_ids_are_needed_once() -> None:
    initiator = Initiator(view_of(ELEMENTS[:5]), HEADER)
    request = initiator.next_request()
    assert request is not None
    count = len(unpack_asks(request.message.ranges, 100).ranges)
    names = np.concatenate([VIEW.short_ids(*VIEW.elements(WHOLE))[100:101]] * 3)
    response = ReconResponse(
        version=PROTOCOL_VERSION,
        total=NO_TOTAL,
        answers=Answers(answered=1, kinds=bytes([LIST]), counts=b"\x06", short_ids=names.tobytes()),
    )
    events = initiator.receive(request.request_id, response)
    assert count > 1
    assert [event.count for event in events if isinstance(event, Need)] == [1]


def test_an_empty_request_gets_an_empty_answer() -> None:
    assert respond(VIEW, ReconRequest(version=PROTOCOL_VERSION)).answers.answered == 0
    assert (
        respond(VIEW, ReconRequest(version=PROTOCOL_VERSION, ranges=Ranges())).answers.answered == 0
    )


def test_a_prefix_of_very_many_ranges_is_answered_and_the_rest_asked_again() -> None:
    limits = replace(DEFAULT_LIMITS, ranges_answered_max=3)
    theirs = [*crowd(5, 300, 2**40), *ELEMENTS[:300]]
    answer = honest(view_of(theirs), limits)
    request = Initiator(VIEW, HEADER).next_request()
    assert request is not None
    assert answer(request.message).answers.answered == 3
    outcome = converse(Initiator(VIEW, HEADER), answer)
    assert outcome.done
    needed = sum(each.count for each in outcome.events if isinstance(each, Need))
    assert needed == len(set(theirs) - set(ELEMENTS))
