"""Reading a delimited stream that may be damaged: what is whole is found, what is not is told.

A stream of lengths and frames has no marks to find its way back by. A frame that does not decode may
be damaged itself, or the length before it may be: then everything behind it is read askew. So where a
frame is bad, the reader looks whether frames follow in step; if not, it searches for the next place
where they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sdstore.sds.codec import MessageError, decode

if TYPE_CHECKING:
    from app.cli.frames import Stream

READ_BYTES = 1 << 16
STEPS_LOOKED_AT = 4  # records ahead: one more damaged one among them is no reason to be lost
_BEGINNINGS = (b"\x0a", b"\x12")
_VARINT_BYTES_MAX = 5  # lengths stay far below 2^35


@dataclass(frozen=True, slots=True)
class BadItem:
    """Something in a file that is no message; `code` as in problem documents."""

    code: str
    detail: str


class _Record(NamedTuple):
    start: int
    end: int


def delimited(frame: bytes) -> bytes:
    """A frame with its length before it."""
    length, prefix = len(frame), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + frame


class DelimitedReader:
    """Frames of a stream in order, with a BadItem for each that is damaged.

    `position` is the byte of the stream behind the last item that was given.
    """

    def __init__(self, stream: Stream, frame_bytes_max: int) -> None:
        self.position = 0
        self._stream = stream
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def __iter__(self) -> Iterator[bytes | BadItem]:
        while self._has(1):
            item, end = self._first()
            self.position += end
            del self._buffer[:end]
            yield item

    def _first(self) -> tuple[bytes | BadItem, int]:
        """The first item of the buffer, and where it ends."""
        record = self._record(0)
        if record is None:
            return self._askew()
        frame = bytes(self._buffer[record.start : record.end])
        fault = fault_of(frame)
        if fault is None:
            return frame, record.end
        return (fault, record.end) if self._in_step(record.end) else self._askew()

    def _askew(self) -> tuple[BadItem, int]:
        """What is no record, up to the next one; without one, all the rest."""
        for at in range(1, self._frame_bytes_max + _VARINT_BYTES_MAX):
            if not self._has(at + 1):
                break
            if self._looks_like_record(at) and self._in_step(at):
                return BadItem("malformed_file", self._described(at)), at
        rest = len(self._buffer)
        while skipped := self._stream.read(READ_BYTES):
            rest += len(skipped)
        return BadItem("malformed_file", self._described(rest)), rest

    def _described(self, count: int) -> str:
        return f"{count} bytes from byte {self.position} on are no message"

    def _looks_like_record(self, at: int) -> bool:
        """Cheap: every dialect begins with field 1 or 2, which are strings or bytes."""
        record = self._record(at)
        return record is not None and self._buffer[record.start : record.start + 1] in _BEGINNINGS

    def _in_step(self, at: int) -> bool:
        """Whether records follow one another from here on, half of them sound; the end will do."""
        steps = sound = 0
        while steps < STEPS_LOOKED_AT and self._has(at + 1):
            record = self._record(at)
            if record is None:
                return False
            steps += 1
            sound += fault_of(bytes(self._buffer[record.start : record.end])) is None
            at = record.end
        return sound >= (steps + 1) // 2

    def _record(self, at: int) -> _Record | None:
        """The record at `at`, if there is a length and that much behind it."""
        length = 0
        for place in range(_VARINT_BYTES_MAX):
            if not self._has(at + place + 1):
                return None
            byte = self._buffer[at + place]
            length |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                start, end = at + place + 1, at + place + 1 + length
                fits = length <= self._frame_bytes_max and self._has(end)
                return _Record(start, end) if fits else None
        return None

    def _has(self, count: int) -> bool:
        """Whether the stream goes on for that many bytes; they are in the buffer then."""
        while len(self._buffer) < count:
            more = self._stream.read(max(READ_BYTES, count - len(self._buffer)))
            if not more:
                return False
            self._buffer += more
        return True


def fault_of(frame: bytes) -> BadItem | None:
    """Why a frame is no message; None if it is one."""
    try:
        decode(frame)
    except MessageError as error:
        return BadItem(error.code, error.detail)
    return None
