"""The wire format of negentropy v1: varints, bounds and ranges.

    message = version byte, then ranges in ascending order
    range   = upper bound, mode, payload          (lower bound: the previous upper one)
    bound   = varint(0 for infinity, else 1 + distance to the previous timestamp),
              length byte, that many leading bytes of an ID (the rest are zeros)
    payload = nothing | 16-byte fingerprint | varint(count), count IDs of 32 bytes

Varints are base 128, most significant digit first, in as few digits as possible.
Source: Negentropy Protocol V1, https://github.com/hoytech/negentropy, docs/.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from recon.errors import RemoteProtocolError

PROTOCOL_VERSION: Final = 0x61
VERSION_BYTES: Final = range(0x60, 0x70)
ID_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 16
VARINT_BYTES_MAX: Final = 10
"""The bytes of a 64-bit number at seven bits a byte."""

SKIP: Final = 0
FINGERPRINT: Final = 1
ID_LIST: Final = 2

INFINITY: Final = 2**64 - 1
"""The end of the key space; no record has this timestamp."""


class Bound(NamedTuple):
    """A place between records: before every record >= (timestamp, prefix padded with zeros)."""

    timestamp: int
    prefix: bytes

    def padded(self) -> bytes:
        """The prefix in full: `ab` and `ab00` name one place."""
        return self.prefix.ljust(ID_BYTES, b"\0")


ORIGIN: Final = Bound(0, b"")
END: Final = Bound(INFINITY, b"")


class Range(NamedTuple):
    """One range of a message; payload: the fingerprint, or the listed IDs end to end."""

    upper: Bound
    mode: int
    payload: bytes


def encode_varint(value: int) -> bytes:
    """Write an unsigned number."""
    digits = [value & 0x7F]
    while value := value >> 7:
        digits.append(value & 0x7F | 0x80)
    return bytes(reversed(digits))


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned 64-bit number; returns it and the offset behind it.

    Raises RemoteProtocolError when it is not minimal or does not fit, IndexError when cut off.
    """
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    if byte == 0x80:
        raise RemoteProtocolError("negentropy_malformed", "a varint begins with a zero digit")
    value = 0
    for offset in range(at, at + VARINT_BYTES_MAX):
        byte = data[offset]
        value = value << 7 | byte & 0x7F
        if byte < 0x80 and value <= INFINITY:
            return value, offset + 1
    raise RemoteProtocolError("negentropy_malformed", "a varint exceeds 64 bits")


def read_ranges(message: bytes, ranges_max: int = sys.maxsize) -> Iterator[Range]:
    """Read the ranges behind the version byte, one at a time: memory follows what is used.

    Raises RemoteProtocolError at the first byte that is not of the format, or a range too many.
    """
    at, lower, count = 1, ORIGIN, 0
    while at < len(message):
        count += 1
        if count > ranges_max:
            raise RemoteProtocolError("negentropy_too_large", f"more than {ranges_max} ranges")
        try:
            found, at = _read_range(message, at, lower)
        except IndexError:
            raise RemoteProtocolError(
                "negentropy_malformed", "the message ends inside a range"
            ) from None
        lower = found.upper
        yield found


def _read_range(data: bytes, at: int, lower: Bound) -> tuple[Range, int]:
    upper, at = _read_bound(data, at, lower)
    mode = data[at]
    at += 1
    if mode == FINGERPRINT:
        end = at + FINGERPRINT_BYTES
    elif mode == ID_LIST:
        count, at = read_varint(data, at)
        end = at + count * ID_BYTES
    elif mode == SKIP:
        end = at
    else:
        raise RemoteProtocolError("negentropy_malformed", f"unknown range mode {mode}")
    if end > len(data):
        raise IndexError
    return Range(upper, mode, data[at:end]), end


def _read_bound(data: bytes, at: int, lower: Bound) -> tuple[Bound, int]:
    step, at = read_varint(data, at)
    timestamp = lower.timestamp + step - 1 if step else INFINITY
    if step and timestamp >= INFINITY:
        raise RemoteProtocolError("negentropy_malformed", "a timestamp exceeds 64 bits")
    length = data[at]
    if length > ID_BYTES:
        raise RemoteProtocolError("negentropy_malformed", f"an ID prefix of {length} bytes")
    end = at + 1 + length
    upper = Bound(timestamp, data[at + 1 : end])
    # Timestamps cannot run backwards, the format has no way to say so.
    if timestamp == lower.timestamp and upper.padded() < lower.padded():
        raise RemoteProtocolError("negentropy_malformed", "range bounds run backwards")
    return upper, end


class MessageWriter:
    """Builds one message, range by range, in ascending order."""

    def __init__(self) -> None:
        self._buffer = bytearray([PROTOCOL_VERSION])
        self._timestamp = 0

    def __len__(self) -> int:
        """Bytes written so far, the version byte among them."""
        return len(self._buffer)

    def skip(self, upper: Bound) -> None:
        """Leave everything up to this bound out of the conversation."""
        self._bound(upper)
        self._buffer.append(SKIP)

    def fingerprints(self, ranges: Iterable[tuple[Bound, bytes]]) -> None:
        """Write adjacent ranges as (upper bound, fingerprint)."""
        for upper, fingerprint in ranges:
            self._bound(upper)
            self._buffer.append(FINGERPRINT)
            self._buffer += fingerprint

    def id_list(self, upper: Bound, ids: bytes) -> None:
        """List a range's IDs, given end to end."""
        self._bound(upper)
        self._buffer.append(ID_LIST)
        self._buffer += encode_varint(len(ids) // ID_BYTES)
        self._buffer += ids

    def mark(self) -> tuple[int, int]:
        """The place to which `rewind` can return."""
        return len(self._buffer), self._timestamp

    def rewind(self, mark: tuple[int, int]) -> None:
        """Take back what was written since the mark."""
        length, self._timestamp = mark
        del self._buffer[length:]

    def to_bytes(self) -> bytes:
        """Give the message."""
        return bytes(self._buffer)

    def _bound(self, bound: Bound) -> None:
        timestamp, prefix = bound
        step = timestamp - self._timestamp + 1 if timestamp != INFINITY else 0
        self._timestamp = timestamp
        buffer = self._buffer
        if step < 0x80:
            buffer.append(step)
        else:
            buffer += encode_varint(step)
        buffer.append(len(prefix))
        buffer += prefix
