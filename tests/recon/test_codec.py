"""Columns survive the wire; anything else on the wire is the peer's fault, cheaply."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.codec import (
    SPLIT,
    implied_counts,
    pack_bounds,
    pack_counts,
    pack_pairs_of_bits,
    pack_ranges,
    pack_varints,
    part_sizes,
    unpack_reply,
)
from recon.elements import START, Bound, Range, RangeColumns
from recon.errors import RemoteProtocolError
from recon.fetch import read_fetch
from recon.initiator import Initiator
from recon.limits import PROTOCOL_VERSION
from recon.responder import between, between_heads, respond
from sdstore.wire.recon_pb2 import Answers, Fetch, Ranges, ReconRequest, ReconResponse
from tests.recon.test_sync import crowd
from tests.support.recon_talk import HEADER, view_of

WORDS = st.integers(0, 2**64 - 1) | st.integers(0, 300)


@settings(deadline=None, max_examples=200)
@given(WORDS, WORDS)
def test_a_bound_between_two_values_parts_them(a: int, b: int) -> None:
    if a == b:
        return
    low, high = (np.array([word], np.uint64) for word in sorted((a, b)))
    cut = between(low, high)
    assert low < cut <= high
    head = between_heads(low, high)
    assert low < head <= high


@settings(deadline=None, max_examples=100)
@given(st.integers(4, 10**6), st.integers(2, 64), st.integers(0, 128))
def test_implied_counts_are_positive_and_add_up(count: int, parts: int, phase: int) -> None:
    counts = np.array([count, 4, count + 1], np.int64)
    sizes = part_sizes(counts, parts)
    implied = implied_counts(counts, sizes, phase)
    assert (implied >= 1).all()
    assert np.add.reduceat(implied, np.cumsum(sizes) - sizes).tolist() == counts.tolist()


def test_the_phase_shifts_cuts_by_up_to_a_quarter_of_a_part() -> None:
    count, sizes = np.array([100]), np.array([2])
    shares = {phase: implied_counts(count, sizes, phase).tolist() for phase in (0, 64, 128)}
    assert shares == {0: [37, 63], 64: [50, 50], 128: [62, 38]}


def requests() -> list[bytes]:
    """All requests of a session with ties and lists."""
    mine, yours = view_of(crowd(1, 3000, 900)[100:]), view_of(crowd(1, 3000, 900)[:2900])
    initiator, raws = Initiator(mine, HEADER), []
    while (request := initiator.next_request()) is not None:
        raws.append(request.message.SerializeToString())
        initiator.receive(request.request_id, respond(yours, request.message))
    return raws


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_request_is_answered_or_refused_never_worse(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(REQUESTS)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = ReconRequest.FromString(bytes(raw))
    except DecodeError:
        return
    with suppress(RemoteProtocolError):
        assert respond(VIEW, message).ByteSize() < 1 << 20
        read_fetch(message.fetch)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_answer_ends_in_events_or_a_fault_never_worse(data: st.DataObject) -> None:
    initiator = Initiator(view_of(crowd(1, 1000, 300)), HEADER)
    for _ in range(2):
        request = initiator.next_request()
        if request is None:
            return
        raw = bytearray(respond(VIEW, request.message).SerializeToString())
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        try:
            response = ReconResponse.FromString(bytes(raw))
        except DecodeError:
            return
        initiator.receive(request.request_id, response)


REQUESTS = requests()
VIEW = view_of(crowd(2, 3000, 900))


def test_the_start_is_a_flag_and_no_bound() -> None:
    for upper in (Bound(0, 7), Bound(9, 0), Bound(9, 7)):
        _, from_start = pack_ranges(RangeColumns.of(Range(START, upper)))
        _, from_later = pack_ranges(RangeColumns.of(Range(Bound(0, 3), upper)))
        assert from_start == pack_bounds(
            np.array([upper.order], np.uint64), np.array([upper.head], np.uint64)
        )
        assert len(from_later) > len(from_start)


@pytest.mark.parametrize(
    "change",
    [
        {"runs": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"},
        {"runs": b"\xff" * 11},
        {"bounds": b"\x00" * 100},
        {"counts": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"},
        {"hashes": b""},
        {"asks": b"\xff" * 10},
        {"parts": 1},
        {"parts": 65},
        {"phase": 129},
    ],
)
def test_absurd_columns_are_refused_without_a_large_allocation(change: dict[str, object]) -> None:
    message = ReconRequest.FromString(REQUESTS[0])
    for name, value in change.items():
        setattr(message.ranges, name, value)
    with pytest.raises(RemoteProtocolError), allocating_at_most(1 << 20):
        respond(VIEW, message)


def test_a_megabyte_of_runs_is_refused_before_it_is_read() -> None:
    runs = b"\x84" + b"\x01" * (1 << 20)
    request = ReconRequest(
        version=PROTOCOL_VERSION, ranges=Ranges(parts=2, runs=runs, bounds=b"\0")
    )
    for refuse in (
        lambda: respond(VIEW, request),
        lambda: read_fetch(Fetch(runs=runs, bounds=b"\0")),
    ):
        with (
            pytest.raises(RemoteProtocolError, match="too_many_ranges"),
            allocating_at_most(3 << 20),
        ):
            refuse()


def test_counts_of_an_answer_make_nothing_that_its_hashes_do_not_bear_out() -> None:
    count = 1 << 16
    ranges = RangeColumns.tiling(
        *(np.arange(count + 1, dtype=np.uint64) * np.uint64(s) for s in (9, 0))
    )
    answers = Answers(
        answered=count,
        kinds=pack_pairs_of_bits(np.full(count, SPLIT, np.uint8)),
        counts=pack_counts(np.full(count, 128)),
    )
    told = Answers()
    told.CopyFrom(answers)
    told.part_counts = pack_varints(np.full(count, 64, np.uint64))
    for each in (answers, told):
        with pytest.raises(RemoteProtocolError, match="malformed"), allocating_at_most(8 << 20):
            unpack_reply(each, ranges, 64, 64)


@contextmanager
def allocating_at_most(bytes_max: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < bytes_max
