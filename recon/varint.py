"""Columns of numbers as bytes, whole columns at a time.

Base-128 varints, least significant group first, as in protobuf. Counts that resemble each other are
written as zigzag differences, so that equal parts cost one byte each.
"""

from __future__ import annotations

import numpy as np

from recon.columns import I64, U8, U64, steps_of
from recon.errors import RemoteProtocolError
from recon.limits import COUNT_MAX

VARINT_BYTES_MAX = 10  # 64 bits in groups of 7
_MORE = 0x80  # set in every byte of a number but the last
_FIRST = np.zeros(1, np.int64)
_SHIFTS = np.arange(0, 7 * VARINT_BYTES_MAX, 7, dtype=np.uint64)


def pack_varints(values: U64) -> bytes:
    """Numbers as varints, one after the other."""
    longest = max(-(-int(values.max(initial=0)).bit_length() // 7), 1)
    if longest == 1:  # most columns: one byte each
        return values.astype(np.uint8).tobytes()
    groups = values[:, None] >> _SHIFTS[:longest]
    used = groups != 0
    used[:, 0] = True
    out = groups.astype(np.uint8) & (_MORE - 1)
    out[:, :-1] |= used[:, 1:].view(np.uint8) << 7
    packed: bytes = out[used].tobytes()
    return packed


def unpack_varints(raw: U8, count: int) -> tuple[U64, int]:
    """`count` numbers from the front of u8[n], and how many bytes they took."""
    ends = (raw[: count * VARINT_BYTES_MAX] < _MORE).nonzero()[0][:count] + 1
    if len(ends) < count:
        raise RemoteProtocolError("malformed", "a column of numbers is too short")
    taken = int(ends[-1]) if count else 0
    if taken == count:
        return raw[:count].astype(np.uint64), count
    starts = np.concatenate((_FIRST, ends[:-1]))
    lengths = ends - starts
    longest = int(lengths.max())
    if longest > VARINT_BYTES_MAX:
        raise RemoteProtocolError("malformed", "a number is too long")
    if longest == VARINT_BYTES_MAX and (raw[ends[lengths == longest] - 1] > 1).any():
        raise RemoteProtocolError("malformed", "a number exceeds 64 bits")
    groups = (raw[:taken] & (_MORE - 1)).astype(np.uint64)
    groups <<= _SHIFTS[np.arange(taken) - starts.repeat(lengths)]
    return np.bitwise_or.reduceat(groups, starts), taken


def pack_counts(counts: I64) -> bytes:
    """Counts as zigzag varints of the difference to the one before (the first: to 0)."""
    steps = steps_of(counts)
    return pack_varints(((steps << 1) ^ (steps >> 63)).astype(np.uint64))


def unpack_counts(raw: U8, count: int) -> tuple[I64, int]:
    """The inverse of `pack_counts`, and the bytes taken."""
    zigzag, taken = unpack_varints(raw, count)
    if (zigzag > np.uint64(2 * COUNT_MAX)).any():
        raise RemoteProtocolError("malformed", "a count is absurd")
    steps = (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
    counts = np.cumsum(steps)
    if (counts.view(np.uint64) > np.uint64(COUNT_MAX)).any():  # negative ones are far above it
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
