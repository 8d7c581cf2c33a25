"""Delimited streams: whole ones come through, damage costs what is damaged."""

from __future__ import annotations

import io
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from app.cli.files import (
    LINE_BYTES_MAX,
    BadItem,
    DelimitedReader,
    FileFormat,
    MessageFile,
    delimited,
)
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry
from tests.support.federation import message

FRAME_BYTES_MAX = DEFAULT_LIMITS.frame_bytes_max


def frame(number: int, size: int = 200) -> bytes:
    """A realistic frame."""
    history = (HistoryEntry(f"{number - 1:064x}", bytes(32), "somebody"),)
    content = random.Random(number).randbytes(size)
    return encode(message(number, "channel", causal_history=history, content=content))


def read(raw: bytes) -> list[bytes | BadItem]:
    return list(DelimitedReader(io.BufferedReader(io.BytesIO(raw)), FRAME_BYTES_MAX))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 70_000), max_size=12))
def test_what_was_written_is_read(sizes: list[int]) -> None:
    frames = [frame(number, size + 1) for number, size in enumerate(sizes)]
    assert read(b"".join(map(delimited, frames))) == frames


def test_a_damaged_frame_costs_itself_wherever_it_stands() -> None:
    frames = [frame(number) for number in range(9)]
    for place in range(9):
        records = [delimited(each) for each in frames]
        records[place] = delimited(b"\xff" * len(frames[place]))
        found = read(b"".join(records))
        assert [each for each in found if not isinstance(each, BadItem)] == [
            each for number, each in enumerate(frames) if number != place
        ]
        assert found[place] == BadItem("malformed_frame", "the frame is not a protobuf message")


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_length_costs_its_own_record_at_most(data: st.DataObject) -> None:
    frames = [frame(number) for number in range(8)]
    place = data.draw(st.integers(0, 7))
    records = [delimited(each) for each in frames]
    wrong = data.draw(st.binary(min_size=1, max_size=5))
    records[place] = wrong + records[place][2:]
    found = read(b"".join(records))
    whole = [each for each in found if not isinstance(each, BadItem)]
    rest = [each for number, each in enumerate(frames) if number != place]
    assert [each for each in whole if each in rest] == rest


LINE = b'{"message": {"message_id": "m", "lamport_timestamp": "1", "content": "eA=="}}\n'


def test_a_line_that_is_too_long_costs_itself() -> None:
    stream = io.BufferedReader(io.BytesIO(LINE + b" " * (2 * LINE_BYTES_MAX + 1) + LINE * 2))
    messages = MessageFile(stream, FileFormat.NDJSON, FRAME_BYTES_MAX)
    first, too_long, last = messages
    assert isinstance(first, Publication)
    assert too_long == BadItem(
        "frame_too_large", f"the line is longer than {LINE_BYTES_MAX:,} bytes"
    )
    assert isinstance(last, Publication)
    assert messages.position == stream.tell()
