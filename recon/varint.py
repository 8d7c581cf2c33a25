"""Columns of numbers as bytes, whole columns at a time: one pass per byte of the longest number.

Base-128 varints, least significant group first, as in protobuf. Counts that resemble each other are
written as zigzag differences, so that equal parts cost one byte each.
"""

from __future__ import annotations

import numpy as np

from recon.columns import I64, U8, U64, bit_lengths
from recon.errors import RemoteProtocolError

VARINT_BYTES_MAX = 10  # 64 bits in groups of 7
COUNT_MAX = 1 << 40  # elements in a range: more than any store, so that sums stay inside 64 bits
_MORE = 0x80  # set in every byte of a number but the last
_GROUP = np.uint64(7)
_LOW_SEVEN = np.uint64(0x7F)


def pack_varints(values: U64) -> bytes:
    """Numbers as varints, one after the other."""
    if int(values.max(initial=0)) < _MORE:  # most columns: one byte each
        return values.astype(np.uint8).tobytes()
    lengths = np.maximum((bit_lengths(values) + 6) // 7, 1)
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - lengths
    rest = values
    for byte in range(int(lengths.max(initial=0))):
        if byte:
            longer = lengths > byte
            starts, lengths, rest = starts[longer], lengths[longer], rest[longer] >> _GROUP
        more = (lengths > byte + 1).astype(np.uint8) << 7
        out[starts + byte] = (rest & _LOW_SEVEN).astype(np.uint8) | more
    return out.tobytes()


def unpack_varints(raw: U8, count: int) -> tuple[U64, int]:
    """`count` numbers from the front of u8[n], and how many bytes they took."""
    front = raw[:count]
    if len(front) == count and int(front.max(initial=0)) < _MORE:
        return front.astype(np.uint64), count
    ends = np.flatnonzero(raw[: count * VARINT_BYTES_MAX] < _MORE)[:count] + 1
    if len(ends) < count:
        raise RemoteProtocolError("malformed", "a column of numbers is too short")
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    lengths = ends - starts
    longest = int(lengths.max())
    if longest > VARINT_BYTES_MAX:
        raise RemoteProtocolError("malformed", "a number is too long")
    values = (raw[starts] & 0x7F).astype(np.uint64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        group = (raw[starts[longer] + byte] & 0x7F).astype(np.uint64)
        if byte == VARINT_BYTES_MAX - 1 and (group > 1).any():
            raise RemoteProtocolError("malformed", "a number exceeds 64 bits")
        values[longer] |= group << np.uint64(7 * byte)
    return values, int(ends[-1])


def pack_counts(counts: I64) -> bytes:
    """Counts as zigzag varints of the difference to the one before (the first: to 0)."""
    steps = np.diff(counts, prepend=0)
    return pack_varints(((steps << 1) ^ (steps >> 63)).astype(np.uint64))


def unpack_counts(raw: U8, count: int) -> tuple[I64, int]:
    """The inverse of `pack_counts`, and the bytes taken."""
    zigzag, taken = unpack_varints(raw, count)
    if (zigzag > np.uint64(2 * COUNT_MAX)).any():
        raise RemoteProtocolError("malformed", "a count is absurd")
    steps = (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
    counts = np.cumsum(steps)
    if len(counts) and (counts.min() < 0 or counts.max() > COUNT_MAX):
        raise RemoteProtocolError("malformed", "a count is out of range")
    return counts, taken


def pack_pairs_of_bits(values: U8) -> bytes:
    """Numbers 0 … 3, four to a byte, the first in the lowest bits."""
    padded = np.zeros(-(-len(values) // 4) * 4, np.uint8)
    padded[: len(values)] = values
    fours = padded.reshape(-1, 4)
    packed = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    return packed.astype(np.uint8).tobytes()


def unpack_pairs_of_bits(raw: U8, count: int) -> tuple[U8, int]:
    """The inverse of `pack_pairs_of_bits`, and the bytes taken."""
    taken = -(-count // 4)
    if len(raw) < taken:
        raise RemoteProtocolError("malformed", "a column of kinds is too short")
    spread = (raw[:taken, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    values = spread.reshape(-1).astype(np.uint8)
    if values[count:].any():
        raise RemoteProtocolError("malformed", "a column of kinds has bits to spare")
    return values[:count], taken
