"""Any frame comes back byte for byte, and what is damaged is refused or proved wrong by its hash."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from math import log2
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdstore.sds.codec import MessageError, decode, encode
from sdstore.sds.framecodec import (
    FILTER_BYTES_MAX,
    FILTER_BYTES_MIN,
    REFERENCES_MAX,
    References,
    Split,
    difference,
    join,
    read_difference,
    split,
)
from sdstore.sds.model import Dialect, HistoryEntry, Message, entry_digest

VECTORS = Path(__file__).parents[1] / "vectors"


def frame_of(bloom_filter: bytes, dialect: Dialect = Dialect.V2, content: bytes = b"text") -> bytes:
    message = Message(
        "an id",
        "a channel",
        "" if dialect is Dialect.V1 else "a sender",
        7,
        (HistoryEntry("a cause"),),
        bloom_filter,
        (),
        content,
    )
    return encode(message, dialect)


def whole(parts: Split) -> bytes:
    return join(parts.rest, parts.bloom_filter, parts.place, is_nim=parts.is_nim)


def changed(bloom_filter: bytes, drawn: random.Random, count: int) -> bytes:
    bits = bytearray(bloom_filter)
    for bit in drawn.sample(range(8 * len(bits)), count):
        bits[bit >> 3] ^= 1 << (bit & 7)
    return bytes(bits)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("size", [FILTER_BYTES_MIN, 18_752, FILTER_BYTES_MAX])
def test_a_frame_of_any_dialect_is_split_into_its_message_and_its_filter(
    dialect: Dialect, size: int
) -> None:
    bloom_filter = random.Random(size).randbytes(size)
    # The filter's own bytes also stand in the content: nothing is searched for.
    frame = frame_of(bloom_filter, dialect, content=b"\x62" + bloom_filter)
    parts = split(frame)
    assert parts is not None
    assert (parts.bloom_filter, parts.is_nim) == (bloom_filter, dialect is Dialect.NIM)
    assert whole(parts) == frame
    message, found = decode(parts.rest)
    assert (message.bloom_filter, found) == (b"", dialect)
    assert entry_digest(message) == entry_digest(decode(frame)[0])


@pytest.mark.parametrize("size", [0, FILTER_BYTES_MIN - 1, FILTER_BYTES_MAX + 1])
@pytest.mark.parametrize("dialect", [Dialect.V2, Dialect.NIM])
def test_small_empty_and_huge_filters_stay_in_their_frames(dialect: Dialect, size: int) -> None:
    assert split(frame_of(bytes(size), dialect, content=bytes(2_000))) is None


HEAD, FILTER = b"\x12\x02id\x50\x07", bytes(range(256)) * 8


@settings(max_examples=300)
@given(data=st.data(), dialect=st.sampled_from(Dialect))
def test_any_bytes_stay_whole_or_come_back(data: st.DataObject, dialect: Dialect) -> None:
    drawn = random.Random(data.draw(st.integers(0, 2**32)))
    frame = bytearray(frame_of(drawn.randbytes(FILTER_BYTES_MIN), dialect))
    for _ in range(data.draw(st.integers(0, 3))):
        at = drawn.randrange(len(frame)) if drawn.random() < 0.5 else drawn.randrange(40)
        match drawn.randrange(3):
            case 0:
                frame[at] ^= 1 << drawn.randrange(8)
            case 1:
                del frame[at]
            case _:
                frame.insert(at, drawn.randrange(256))
    frame = bytes(frame)
    parts = split(frame)
    if parts is not None:
        assert whole(parts) == frame
        reference = drawn.randbytes(len(parts.bloom_filter))
        written = difference(parts, reference) + b"behind it"
        found = read_difference(written)
        assert written[found.end :] == b"behind it"
        assert found.applied(parts.rest, reference) == frame
        with suppress(MessageError):
            message, _ = decode(frame)
            assert entry_digest(decode(parts.rest)[0]) == entry_digest(message)


@pytest.mark.parametrize("size", [FILTER_BYTES_MIN, 18_752, FILTER_BYTES_MAX])
@pytest.mark.parametrize("share", [0, 1e-5, 1e-4, 1e-3, 0.006, 0.05, 0.5, 1])
def test_differences_of_any_density_come_back_near_their_entropy(size: int, share: float) -> None:
    drawn = random.Random(f"{size} {share}")
    reference = drawn.randbytes(size)
    count = int(8 * size * share)
    bloom_filter = changed(reference, drawn, count)
    parts = Split(b"rest", bloom_filter, 2, False)
    written = difference(parts, reference)
    assert read_difference(written).applied(b"rest", reference) == whole(parts)
    if 1e-4 <= share < 0.4:
        entropy = -share * log2(share) - (1 - share) * log2(1 - share)
        assert len(written) < 20 + 1.08 * size * entropy


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_a_damaged_difference_is_refused_or_gives_another_frame(seed: int) -> None:
    drawn = random.Random(seed)
    reference = drawn.randbytes(FILTER_BYTES_MIN)
    bloom_filter = changed(reference, drawn, drawn.randrange(200))
    parts = Split(drawn.randbytes(50), bloom_filter, drawn.randrange(50), False)
    written = bytearray(difference(parts, reference) + parts.rest)
    if drawn.random() < 0.3:
        del written[drawn.randrange(len(written)) :]
    else:
        written[drawn.randrange(len(written))] ^= 1 << drawn.randrange(8)
    with suppress(ValueError):
        found = read_difference(bytes(written))
        assert len(found.applied(bytes(written[found.end :]), reference)) <= 2_000


def recorded_frames() -> list[bytes]:
    messages = json.loads((VECTORS / "js_waku_messages.json").read_text())["vectors"]
    talks = json.loads((VECTORS / "js_waku_two_participants.json").read_text())["scenarios"]
    frames = [each["hex"] for each in messages if "hex" in each]
    frames += [frame for talk in talks for frame in talk["frames"].values()]
    return [bytes.fromhex(each) for each in frames]


def test_recorded_frames_of_js_waku_come_back() -> None:
    frames = recorded_frames()
    parted = [(frame, parts) for frame in frames if (parts := split(frame)) is not None]
    assert len(parted) > 10
    references, stored = References(), dict[int, bytes]()
    for number, (frame, parts) in enumerate(parted):
        assert whole(parts) == frame
        found = references.difference(parts)
        if found is None:
            stored[number] = parts.bloom_filter
            references.add(number, parts.bloom_filter)
            continue
        assert read_difference(found[1]).applied(parts.rest, stored[found[0]]) == frame
    assert len(stored) < len(parted) / 4


def test_no_more_than_the_newest_references_are_remembered() -> None:
    drawn = random.Random(1)
    references = References()
    for number in range(REFERENCES_MAX + 5):
        references.add(number, drawn.randbytes(FILTER_BYTES_MIN))
    assert references.numbers == frozenset(range(5, REFERENCES_MAX + 5))
