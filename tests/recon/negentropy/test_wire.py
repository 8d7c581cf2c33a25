"""The wire format: numbers and bounds written out by hand, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recon.errors import RemoteProtocolError
from recon.negentropy.wire import (
    END,
    FINGERPRINT,
    ID_LIST,
    INFINITY,
    SKIP,
    Bound,
    MessageWriter,
    Range,
    encode_varint,
    read_ranges,
    read_varint,
)

ID = bytes(range(32))
HASH = bytes(range(100, 116))


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8100"),
        (300, "822c"),
        (2**32, "9080808000"),
        (2**64 - 1, "81ffffffffffffffff7f"),
    ],
)
def test_varints_are_base_128_with_the_most_significant_digit_first(
    value: int, encoded: str
) -> None:
    assert encode_varint(value).hex() == encoded
    assert read_varint(bytes.fromhex(encoded), 0) == (value, len(encoded) // 2)


def test_a_message_is_written_as_the_format_says() -> None:
    writer = MessageWriter()
    writer.skip(Bound(5, b""))
    writer.fingerprints([(Bound(5, b"\xab"), HASH), (Bound(300, b""), HASH)])
    writer.id_list(END, ID)
    assert writer.to_bytes().hex() == (
        "61"
        "06 00 00"  # up to timestamp 5: 1 + 5, no prefix, skip
        "01 01 ab 01"
        + HASH.hex()  # same timestamp: 1 + 0, one byte of an ID
        + "8228 00 01"
        + HASH.hex()  # 1 + 295
        + "00 00 02 01"
        + ID.hex()  # infinity, one ID
    ).replace(" ", "")


bounds = st.builds(Bound, st.integers(0, INFINITY - 1), st.binary(max_size=32)) | st.just(END)
payloads = st.one_of(
    st.just((SKIP, b"")),
    st.tuples(st.just(FINGERPRINT), st.binary(min_size=16, max_size=16)),
    st.tuples(st.just(ID_LIST), st.integers(0, 3).map(lambda count: ID * count)),
)


@given(st.lists(st.tuples(bounds, payloads)))
def test_what_was_written_is_read_back(drawn: list[tuple[Bound, tuple[int, bytes]]]) -> None:
    drawn.sort(key=lambda item: (item[0].timestamp, item[0].padded()))
    ranges = [Range(upper, *payload) for upper, payload in drawn]
    writer = MessageWriter()
    for upper, mode, payload in ranges:
        if mode == SKIP:
            writer.skip(upper)
        elif mode == FINGERPRINT:
            writer.fingerprints([(upper, payload)])
        else:
            writer.id_list(upper, payload)
    assert list(read_ranges(writer.to_bytes())) == ranges


@pytest.mark.parametrize(
    ("ranges", "complaint"),
    [
        ("01", "ends inside"),
        ("0100", "ends inside"),
        ("0002abcd", "ends inside"),
        ("000001" + "00" * 15, "ends inside"),
        ("00000202" + "00" * 63, "ends inside"),
        ("000002" + "81" + "ff" * 8 + "7f", "ends inside"),
        ("0021" + "00" * 33 + "00", "prefix of 33 bytes"),
        ("000003", "unknown range mode 3"),
        ("80010000", "zero digit"),
        ("83" + "ff" * 8 + "7f0000", "exceeds 64 bits"),
        ("ff" * 11, "exceeds 64 bits"),
        ("81ffffffffffffffff7f0000020000", "timestamp exceeds"),
        ("000000010000", "timestamp exceeds"),
        ("0501bb000101aa00", "backwards"),
        ("0502bb01000101bb00", "backwards"),
    ],
)
def test_what_is_not_of_the_format_is_the_remote_side_s_fault(ranges: str, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint) as caught:
        list(read_ranges(bytes.fromhex("61" + ranges)))
    assert caught.value.code == "negentropy_malformed"


def test_two_bounds_at_one_place_are_in_order() -> None:
    """A full frame may end at a whole ID whose shortened bound follows."""
    message = bytes.fromhex("610502bb00000101bb00000000000000")
    assert [found.upper.timestamp for found in read_ranges(message)] == [4, 4, INFINITY, INFINITY]
