"""Bounds as bytes: what is needed to separate two neighbours, and no more.

Bounds ascend, so each is a step from the one before. A bound may be any value between two elements,
so it is chosen with as many trailing zero bits as fit; sixteen steps share one shift, which makes a
nanosecond clock cost hardly more than a counter. Only bounds inside a tie carry bytes of an id.
"""

from __future__ import annotations

import numpy as np

from recon.columns import I64, U8, U64, bit_lengths
from recon.errors import RemoteProtocolError
from recon.varint import (
    pack_pairs_of_bits,
    pack_varints,
    unpack_pairs_of_bits,
    unpack_varints,
)

BLOCK = 16  # steps that share a shift: one byte among sixteen
_ONE = np.uint64(1)
_HEAD_BYTES = (0, 1, 2, 8)  # bytes of an id that a head class carries
_HEAD_BITS = 64


def between(below: U64, at: U64) -> U64:
    """The roundest numbers above `below` and not above `at` (where below < at), u64[n]."""
    differing = (bit_lengths(below ^ at) - 1).astype(np.uint64)
    return (at >> differing) << differing


def between_heads(below: U64, at: U64) -> U64:
    """The same for heads, whole bytes of them."""
    differing = bit_lengths(below ^ at) - 1
    cleared = (differing // 8 * 8).astype(np.uint64)
    return (at >> cleared) << cleared


def pack_bounds(steps: U64, heads: U64) -> bytes:
    """Shifts, steps as varints, classes of heads (one byte 0 where all are 0), bytes of heads."""
    if not len(steps):
        return b""
    shifts = _shared_zero_bits(steps)
    mantissas = steps >> np.repeat(shifts, BLOCK)[: len(steps)].astype(np.uint64)
    packed = shifts.tobytes() + pack_varints(mantissas)
    if not heads.any():
        return packed + b"\0"
    classes = _classes(heads)
    pieces = [packed, b"\1", pack_pairs_of_bits(classes)]
    raw = heads.astype(">u8").view(np.uint8).reshape(-1, 8)
    pieces += [raw[classes == c, : _HEAD_BYTES[c]].tobytes() for c in (1, 2, 3)]
    return b"".join(pieces)


def _shared_zero_bits(steps: U64) -> U8:
    union = np.bitwise_or.reduceat(steps, np.arange(0, len(steps), BLOCK))
    lowest = union & (~union + _ONE)
    return np.maximum(bit_lengths(lowest) - 1, 0).astype(np.uint8)


def _classes(heads: U64) -> U8:
    classes = np.full(len(heads), 3, np.uint8)
    classes[(heads << np.uint64(16)) == 0] = 2
    classes[(heads << np.uint64(8)) == 0] = 1
    classes[heads == 0] = 0
    return classes


def unpack_bounds(raw: U8, count: int) -> tuple[U64, U64, int]:
    """Steps u64[count], heads u64[count], and the bytes taken."""
    if not count:
        return np.empty(0, np.uint64), np.empty(0, np.uint64), 0
    blocks = -(-count // BLOCK)
    shifts = raw[:blocks]
    if len(shifts) < blocks or (shifts >= _HEAD_BITS).any():
        raise RemoteProtocolError("malformed", "a column of bounds has bad shifts")
    mantissas, taken = unpack_varints(raw[blocks:], count)
    shift = np.repeat(shifts, BLOCK)[:count].astype(np.uint64)
    steps = mantissas << shift
    if ((steps >> shift) != mantissas).any():
        raise RemoteProtocolError("malformed", "a bound exceeds 64 bits")
    heads, more = _unpack_heads(raw[blocks + taken :], count)
    return steps, heads, blocks + taken + more


def _unpack_heads(raw: U8, count: int) -> tuple[U64, int]:
    if not len(raw) or raw[0] > 1:
        raise RemoteProtocolError("malformed", "a column of bounds lacks its heads")
    if not raw[0]:
        return np.zeros(count, np.uint64), 1
    heads = np.zeros((count, 8), np.uint8)
    classes, more = unpack_pairs_of_bits(raw[1:], count)
    taken = 1 + more
    for kind in (1, 2, 3):
        rows: I64 = np.flatnonzero(classes == kind)
        size = _HEAD_BYTES[kind]
        piece = raw[taken : taken + size * len(rows)]
        if len(piece) < size * len(rows):
            raise RemoteProtocolError("malformed", "a column of heads is too short")
        heads[rows, :size] = piece.reshape(-1, size)
        taken += len(piece)
    return heads.view(">u8")[:, 0].astype(np.uint64), taken
