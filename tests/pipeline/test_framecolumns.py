"""Columns that are taken out of many frames at once are those that decoding each one gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import columns
from pipeline.columns import told
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Dialect, HistoryEntry, Message, MessageError
from tests.support.sds_strategies import messages

encoded = st.one_of(
    [messages(dialect).map(lambda m, d=dialect: encode(m, d)) for dialect in Dialect]  # type: ignore[misc]
)


def varint(number: int, padding: int = 0) -> bytes:
    """`number` as a varint, in `padding` more bytes than it needs."""
    digits = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    digits += [0] * padding
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def field(number: int, value: bytes | int, padding: int) -> bytes:
    """A field of bytes, or of an integer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value, padding)
    return varint(number << 3 | 2) + varint(len(value), padding) + value


paddings = st.sampled_from([0, 0, 0, 0, 1, 2])
short = st.sampled_from([b"", b"a", b"sender", "ä".encode(), b"i" * 127, b"i" * 128, b"\xff"])
elements = st.lists(
    st.builds(field, st.sampled_from([1, 1, 1, 2, 3, 4]), short, paddings), max_size=4
).map(b"".join)
parts = st.one_of(
    st.builds(field, st.sampled_from([1, 2, 3, 7, 12, 20, 21]), short, paddings),
    st.builds(field, st.sampled_from([11, 11, 13]), elements, paddings),
    st.builds(
        field, st.sampled_from([10, 10, 21]), st.sampled_from([1, 127, 128, 2**40]), paddings
    ),
)
whole = [field(2, b"id", 0), field(10, 7, 0), field(20, b"content", 0)]
composed = st.lists(parts, max_size=6).flatmap(lambda more: st.permutations([*whole, *more]))


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A frame in which a few bytes are others."""
    frame = bytearray(draw(encoded))
    for _ in range(draw(st.integers(1, 3))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame)


def is_message(frame: bytes) -> bool:
    try:
        decode(frame)
    except MessageError:
        return False
    return True


frames = st.one_of(encoded, composed.map(b"".join), changed()).filter(is_message)


@given(st.lists(st.none() | frames, max_size=20))
@settings(deadline=None, max_examples=120)
def test_the_columns_are_those_that_decoding_gives(found: list[bytes | None]) -> None:
    dialects = [1 if frame is None else int(decode(frame)[1]) for frame in found]
    expected = columns._told_by_decoding(found)
    for column, wanted in zip(told(found, dialects), expected, strict=True):
        column.validate(full=True)
        assert column.equals(wanted)


@given(st.lists(st.none() | messages(Dialect.V2).map(encode), min_size=1, max_size=20))
@settings(deadline=None)
def test_what_this_package_writes_is_plain(found: list[bytes | None]) -> None:
    is_plain, _ = columns._told_plainly(found, [Dialect.V2] * len(found))
    assert is_plain.all()


def test_a_long_history_is_taken_apart_entry_by_entry() -> None:
    history = tuple(HistoryEntry(f"{n}" * 30, b"h" * n, "s" * (n % 3)) for n in range(1, 201))
    message = Message("id", "channel", "me", 1, history, b"b" * 18_000, content=b"c" * 70_000)
    frame = encode(message)
    sender, sizes, contents, histories = told([frame] * 3, [Dialect.V2] * 3)
    assert (sender.to_pylist(), sizes.to_pylist()) == (["me"] * 3, [70_000] * 3)
    assert contents.to_pylist() == [message.content] * 3
    assert [
        [
            HistoryEntry(each["message_id"], each["retrieval_hint"], each["sender_id"])
            for each in its
        ]
        for its in histories.to_pylist()
    ] == [list(history)] * 3
