"""Arbitrary, damaged and greedy messages end in one error, within time and memory."""

import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.errors import RemoteProtocolError
from recon.negentropy import Negentropy
from tests.support.negentropy import records_of

FRAME_BYTES = 4096

random = Random(1)
RECORDS = records_of([(random.randrange(500), random.randbytes(32)) for _ in range(1000)])
GENUINE = [
    Negentropy(RECORDS).initiate(),
    Negentropy(RECORDS).respond(b"\x61\0\0\1" + b"?" * 16),
    Negentropy(RECORDS, FRAME_BYTES).respond(b"\x61\0\0\2\0"),
]


def both_sides_survive(message: bytes) -> None:
    near, far = Negentropy(RECORDS, FRAME_BYTES), Negentropy(RECORDS, FRAME_BYTES)
    for answer in (lambda: near.reconcile(message).message, lambda: far.respond(message)):
        try:
            following = answer()
        except RemoteProtocolError:
            continue
        assert len(following or b"") <= FRAME_BYTES


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=500)
def test_arbitrary_bytes_are_answered_or_refused(message: bytes) -> None:
    both_sides_survive(message)
    both_sides_survive(b"\x61" + message)


@given(st.sampled_from(GENUINE), st.data())
@settings(deadline=None, max_examples=500)
def test_damaged_messages_are_answered_or_refused(genuine: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(genuine)))
    cut = data.draw(st.integers(0, 40))
    filling = data.draw(st.binary(max_size=40))
    both_sides_survive(genuine[:at] + filling + genuine[at + cut :])


@pytest.mark.parametrize(
    "count", ["8080", "ffffffffffffffff7f", "81ffffffffffffffff7f", "8fffffff7f", "7f"]
)
def test_an_announced_count_allocates_nothing(count: str) -> None:
    message = b"\x61\0\0\2" + bytes.fromhex(count) + b"?" * 64
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            Negentropy(RECORDS).respond(message)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_message_of_nothing_but_ranges_costs_memory_for_a_batch_only() -> None:
    message = b"\x61" + b"\1\0\0" * 100_000
    far = Negentropy(RECORDS, FRAME_BYTES)
    tracemalloc.start()
    try:
        assert far.respond(message) == b"\x61"
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_a_server_with_a_frame_limit_never_sends_more_than_a_frame_for_a_short_question() -> None:
    assert len(Negentropy(RECORDS, FRAME_BYTES).respond(b"\x61\0\0\2\0")) <= FRAME_BYTES
    many_lists = b"\x61" + b"".join(b"\2\0\2\0" for _ in range(500))
    assert len(Negentropy(RECORDS, FRAME_BYTES).respond(many_lists)) <= FRAME_BYTES


def test_a_message_has_a_bounded_number_of_ranges() -> None:
    server = Negentropy(RECORDS, FRAME_BYTES, ranges_max=1000)
    assert server.respond(b"\x61" + b"\1\0\0" * 1000) == b"\x61"
    with pytest.raises(RemoteProtocolError, match="negentropy_too_large"):
        server.respond(b"\x61" + b"\1\0\0" * 1001)
