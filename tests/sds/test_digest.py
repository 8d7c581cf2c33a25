"""Digests name what the author wrote, and nothing else."""

import dataclasses
import json
import struct
from dataclasses import fields
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.elements import order_of_lamport
from sdstore.sds.codec import decode, encode, from_json
from sdstore.sds.model import (
    LAMPORT_MAX,
    LAMPORT_MIN,
    Dialect,
    HistoryEntry,
    Message,
    MessageError,
    claim_id,
    entry_digest,
    entry_layout,
    frame_hash,
)
from tests.support.sds_strategies import messages
from tests.vectors import digest_vectors

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "vectors" / "digest.json"


def documented_layout(message: Message) -> bytes:
    """docs/identity.md once more, read by somebody else."""

    def lp(value: bytes) -> bytes:
        return len(value).to_bytes(4, "big") + value

    out = lp(message.message_id.encode()) + lp(message.channel_id.encode())
    out += lp(message.sender_id.encode())
    if message.lamport_timestamp is None:
        out += bytes(9)
    else:
        out += b"\x01" + struct.pack(">q", message.lamport_timestamp)
    out += len(message.causal_history).to_bytes(4, "big")
    for entry in message.causal_history:
        out += lp(entry.message_id.encode())
        out += lp(entry.retrieval_hint)
        out += lp(entry.sender_id.encode())
    return out + lp(message.content)


def test_the_documented_vectors_are_what_the_generator_writes() -> None:
    assert DOCUMENTED.read_text(encoding="utf-8") == digest_vectors.document()


def test_the_documented_vectors_follow_the_documented_layout() -> None:
    vectors = json.loads(DOCUMENTED.read_text(encoding="utf-8"))
    for vector in vectors["entries"]:
        message, dialect = decode(bytes.fromhex(vector["frame_hex"]))
        layout = documented_layout(message)
        assert dialect.label == vector["dialect"]
        assert layout.hex() == vector["layout_hex"]
        digest = blake3(layout, derive_key_context=vectors["entry_context"]).digest()
        assert digest.hex() == vector["digest"] == entry_digest(message).hex()
        assert frame_hash(bytes.fromhex(vector["frame_hex"])).hex() == vector["frame_hash"]
        assert from_json(vector["message"]) == message
    for vector in vectors["claims"]:
        digest, hint = bytes.fromhex(vector["digest"]), bytes.fromhex(vector["hint_hex"])
        expected = blake3(digest + hint, derive_key_context=vectors["claim_context"]).digest()
        assert expected.hex() == vector["claim_id"] == claim_id(digest, hint).hex()
    for vector in vectors["order_values"]:
        assert order_of_lamport(int(vector["lamport"])) == int(vector["order_value"])


def test_the_documented_refusals_are_refused_with_their_codes() -> None:
    vectors = json.loads(DOCUMENTED.read_text(encoding="utf-8"))
    assert len(vectors["refusals"]) > 100
    for vector in vectors["refusals"]:
        with pytest.raises(MessageError) as refused:
            decode(bytes.fromhex(vector["frame_hex"]))
        assert refused.value.code == vector["code"], vector["name"]


@given(messages())
@settings(deadline=None, max_examples=200)
def test_the_layout_is_the_documented_one(message: Message) -> None:
    assert entry_layout(message) == documented_layout(message)


@given(messages(), st.binary(max_size=20))
@settings(deadline=None, max_examples=100)
def test_bloom_filter_and_repair_request_do_not_enter(message: Message, bloom: bytes) -> None:
    rebroadcast = dataclasses.replace(
        message, bloom_filter=bloom, repair_request=(HistoryEntry("wanted"),)
    )
    assert entry_digest(rebroadcast) == entry_digest(message)


def test_the_same_message_in_every_dialect_is_the_same_entry() -> None:
    message = Message(
        "id", "chan", lamport_timestamp=7, causal_history=(HistoryEntry("before"),), content=b"x"
    )
    frames = {encode(message, dialect) for dialect in Dialect}
    assert len(frames) == 3  # chat_proto without a sender has the bytes of version 2
    assert {entry_digest(decode(frame)[0]) for frame in frames} == {entry_digest(message)}


@given(messages(), messages(), st.sets(st.sampled_from([each.name for each in fields(Message)])))
@settings(deadline=None, max_examples=200)
def test_different_entries_have_different_layouts(
    one: Message, other: Message, taken: set[str]
) -> None:
    """`mixed` differs from `one` in the fields taken from `other`, unless both have the same value."""
    mixed = dataclasses.replace(one, **{name: getattr(other, name) for name in taken})
    same = one == dataclasses.replace(
        mixed, bloom_filter=one.bloom_filter, repair_request=one.repair_request
    )
    assert (entry_layout(one) == entry_layout(mixed)) == same


@given(st.text("ab", max_size=4), st.text("ab", max_size=4), st.text("ab", max_size=4))
@settings(deadline=None, max_examples=200)
def test_moving_a_boundary_between_fields_gives_another_entry(a: str, b: str, c: str) -> None:
    """Length prefixes: "x"+"yz" and "xy"+"z" are different pairs."""
    joined = f"i{a}{b}{c}"
    seen = {
        entry_layout(Message(joined[:i], joined[i:j], joined[j:], 1))
        for i in range(1, len(joined) + 1)
        for j in range(i, len(joined) + 1)
    }
    pairs = len(joined) * (len(joined) + 1) // 2
    assert len(seen) == pairs


def test_no_timestamp_is_not_timestamp_0() -> None:
    unset = Message("id", "c", lamport_timestamp=None, content=b"x")
    zero = dataclasses.replace(unset, lamport_timestamp=0)
    assert entry_digest(unset) != entry_digest(zero)


@given(st.integers(LAMPORT_MIN, LAMPORT_MAX), st.integers(LAMPORT_MIN, LAMPORT_MAX))
@settings(deadline=None, max_examples=200)
def test_order_values_sort_as_timestamps_do_and_fit_64_bits(a: int, b: int) -> None:
    assert (a < b) == (order_of_lamport(a) < order_of_lamport(b))
    assert 0 <= order_of_lamport(a) < 2**64


def test_a_claim_differs_from_the_entry_and_from_other_hints() -> None:
    digest = entry_digest(Message("id", "c", lamport_timestamp=1))
    assert len({digest, claim_id(digest, b""), claim_id(digest, b"h"), claim_id(digest, b"i")}) == 4
