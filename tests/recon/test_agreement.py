"""Keys, nonces and interests: pure, canonical, strict."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.agreement import (
    Interest,
    SessionHeader,
    decode_interest,
    derive_session_key,
    initiator_nonce,
    interest_hash,
    is_own_nonce,
    nonce_is_fresh,
    responder_nonce,
)
from recon.elements import OrderWindow, order_of_lamport
from recon.errors import LocalProtocolError, RemoteProtocolError

NAMES = st.frozensets(st.text("ab/", max_size=4), max_size=4)
LAMPORTS = st.none() | st.integers(-(2**63), 2**63 - 1)
INTERESTS = st.builds(
    lambda everything, channels, prefixes, low, high: Interest.make(
        everything=everything,
        channels=channels,
        prefixes=prefixes,
        lamport_from=low,
        lamport_to=high,
    ),
    st.booleans(),
    NAMES,
    NAMES,
    LAMPORTS,
    LAMPORTS,
)
CHANNELS = [a + b + c for a in ("", "a", "b", "/") for b in ("", "a", "b") for c in ("", "/", "a")]


def test_every_part_of_a_header_changes_the_key() -> None:
    keys = {
        SessionHeader(i, r, interest).key().raw
        for i in (b"i" * 16, b"j" * 16)
        for r in (b"r" * 16, b"s" * 16)
        for interest in (b"", b"x")
    }
    assert len(keys) == 8
    with pytest.raises(LocalProtocolError):
        derive_session_key(b"short", b"r" * 16, b"h" * 16)


def test_a_request_names_the_interest_by_hash_or_in_full() -> None:
    header = SessionHeader(b"i" * 16, b"r" * 16, b"interest")
    assert header.message().interest_hash == interest_hash(b"interest")
    assert header.message(in_full=True).interest_bytes == b"interest"


def test_a_nonce_is_fresh_for_its_pair_in_its_epoch_and_the_next() -> None:
    secret, pair = b"s" * 32, b"alice"
    nonce = responder_nonce(secret, pair, 7)
    fresh = {epoch: nonce_is_fresh(nonce, secret, pair, epoch) for epoch in range(5, 11)}
    assert fresh == {5: False, 6: False, 7: True, 8: True, 9: False, 10: False}
    assert not nonce_is_fresh(nonce, secret, b"bob", 7)
    assert not nonce_is_fresh(nonce, b"t" * 32, pair, 7)
    assert nonce_is_fresh(responder_nonce(secret, pair, 0), secret, pair, 0)


@settings(deadline=None, max_examples=200)
@given(INTERESTS, INTERESTS)
def test_interests_have_one_encoding_and_intersect_as_sets_of_channels_do(
    one: Interest, two: Interest
) -> None:
    assert decode_interest(one.encode()) == one
    both = one.intersect(two)
    assert both == two.intersect(one)
    for channel in CHANNELS:
        assert both.matches(channel) == (one.matches(channel) and two.matches(channel))
    for lamport in (-(2**63), -1, 0, 5, 2**63 - 1):
        inside = [
            interest.window.lower <= order_of_lamport(lamport)
            and (interest.window.upper is None or order_of_lamport(lamport) < interest.window.upper)
            for interest in (one, two, both)
        ]
        assert inside[2] == (inside[0] and inside[1])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x12\x01b\x12\x01a",  # unsorted
        b"\x12\x01a\x12\x01a",  # twice
        b"\x08\x01\x12\x01a",  # a channel beside everything
        b"\x1a\x01a\x12\x02ab",  # covered by a prefix, fields disordered
        b"\x08\x00",  # a default written out
        b"\xff",
        b"\x12\x01\xff",  # not UTF-8
        b"\x3a\x01a",  # an unknown field
    ],
)
def test_other_encodings_of_an_interest_are_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_interest(raw)


def test_orders_of_lamport_timestamps_keep_their_sequence() -> None:
    lamports = [-(2**63), -1, 0, 1, 2**63 - 1]
    orders = [order_of_lamport(lamport) for lamport in lamports]
    assert orders == sorted(orders)
    assert (orders[0], orders[-1]) == (0, 2**64 - 1)
    assert Interest.make(everything=True, lamport_from=0).window == OrderWindow(2**63, None)
    assert Interest.make().is_empty
    assert Interest.make(everything=True, lamport_from=3, lamport_to=3).is_empty


def test_a_node_knows_the_nonces_of_its_own_sessions() -> None:
    nonce = initiator_nonce(b"s" * 32, b"fresh 8B")
    assert len(nonce) == 16
    assert is_own_nonce(nonce, b"s" * 32)
    assert not is_own_nonce(nonce, b"t" * 32)
    assert not is_own_nonce(bytes(16), b"s" * 32)
    assert not is_own_nonce(b"", b"s" * 32)
