"""Bytes and IDs against the Go implementation's, in both numberings."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdstore.mvds import (
    LocalProtocolError,
    Message,
    Numbering,
    Payload,
    RemoteProtocolError,
    decode,
    encode,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "mvds_go.json").read_text())
IDS = st.lists(st.binary(max_size=40), max_size=5).map(tuple)
MESSAGES = st.builds(
    Message, st.binary(max_size=40), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=200)
)
PAYLOADS = st.builds(Payload, IDS, IDS, IDS, st.lists(MESSAGES, max_size=4).map(tuple))


def message_of(vector: dict[str, str]) -> Message:
    group_id, body = bytes.fromhex(vector["group_id_hex"]), bytes.fromhex(vector["body_hex"])
    return Message(group_id, int(vector["timestamp"]), body)


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_message_ids_are_those_of_the_go_implementation(vector: dict[str, str]) -> None:
    assert message_of(vector).message_id.hex() == vector["message_id_hex"]


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_a_message_in_go_numbering_has_the_bytes_of_the_go_implementation(
    vector: dict[str, str],
) -> None:
    raw = encode(Payload(messages=(message_of(vector),)), Numbering.GO)
    # field 4 of the payload, its length, the message
    assert raw[2 if len(raw) < 130 else 3 :].hex() == vector["go_wire_hex"]


def test_a_payload_of_the_go_implementation_is_read_and_written_byte_for_byte() -> None:
    raw = bytes.fromhex(VECTORS["payload_go_wire_hex"])
    by_name = {vector["name"]: message_of(vector) for vector in VECTORS["messages"]}
    expected = Payload(
        acks=(bytes.fromhex("010203"),),
        offers=(bytes.fromhex("04"), bytes.fromhex("0506")),
        requests=(bytes.fromhex("07"),),
        messages=(by_name["plain"], by_name["unicode"]),
    )
    assert decode(raw) == expected
    assert encode(expected, Numbering.GO) == raw


def test_the_specification_numbers_fields_from_5001_and_6001() -> None:
    raw = encode(Payload(acks=(b"a",), messages=(Message(b"g", 1, b"b"),)))
    # tag = field << 3 | wire type as a varint: 5001 -> ca b8 02, 5004 -> e2 b8 02, 6001 -> 8a f7 02
    assert raw.hex() == "cab8020161" + "e2b802" + "0e" + "8af7020167" + "90f70201" + "9af7020162"


@given(PAYLOADS, st.sampled_from(Numbering))
def test_what_is_written_in_either_numbering_is_read_back(
    payload: Payload, numbering: Numbering
) -> None:
    assert decode(encode(payload, numbering)) == payload


@given(st.binary(max_size=200))
def test_any_bytes_are_a_payload_or_a_protocol_error(raw: bytes) -> None:
    with suppress(RemoteProtocolError):
        assert isinstance(decode(raw), Payload)


@given(PAYLOADS)
def test_a_message_never_takes_more_room_than_is_counted_for_it(payload: Payload) -> None:
    for message in payload.messages:
        assert len(encode(Payload(messages=(message,)))) <= message.field_bytes


def test_a_timestamp_beyond_64_bits_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="64-bit integer"):
        Message(b"g", 2**63, b"")
