"""Hashes of elements, ranges and sets; whole columns at a time.

Anybody who can publish can make an unkeyed sum or XOR over many ids collide. So each session hashes
every element with its own key: AES-128 CBC-MAC over the two blocks of the id, with the order value
XORed into the second block. (Two elements with the same hash input would need ids that agree in
their first 16 bytes.) CBC over a column is two ECB calls with an XOR between; chunks stay inside the
processor's cache. A range's hash is the sum of its elements' 128 bits in two 64-bit lanes, mixed
with the count. The low bytes of an element's hash are its short id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from recon.agreement import SessionKey
from recon.elements import (
    I64,
    U8,
    U64,
    Mask,
)
from recon.limits import (
    SHORT_ID_BYTES,
    SUMMARY_HASH_BYTES,
)

_CHUNK = 4096  # elements; two buffers of 64 KiB live in the second-level cache
_BLOCK_BYTES = 16
_MIX_LOW = np.uint64(0x9E3779B97F4A7C15)
_MIX_HIGH = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_COUNT = np.uint64(0x165667B19E3779F9)
_HALF = np.uint64(32)
_NAME_BITS = np.uint64(8 * SHORT_ID_BYTES)
_NAME_MASK = np.uint64(2 ** (8 * SHORT_ID_BYTES) - 1)


class ElementHasher:
    """Hashes of elements under one session key. One instance serves one thread."""

    def __init__(self, key: SessionKey) -> None:
        # ECB is the block function itself here, the building block of the CBC-MAC above.
        self._encrypt = Cipher(algorithms.AES(key.raw), modes.ECB()).encryptor()  # noqa: S305

    def hash_into(self, orders: U64, ids: U8, low: U64, high: U64) -> None:
        """Write the two lanes of each element's hash: orders u64[n], ids u8[n, 32], lanes u64[n]."""
        words = ids.view("<u8")
        # Not kept: hundreds of views have a hasher each. A cipher demands room for one more block.
        left, right = np.empty((2, min(len(orders), _CHUNK) + 1, 2), "<u8")
        left_bytes, right_bytes = left.data.cast("B"), right.data.cast("B")
        for start in range(0, len(orders), _CHUNK):
            stop = min(start + _CHUNK, len(orders))
            size = (stop - start) * _BLOCK_BYTES
            first, second = left[: stop - start], right[: stop - start]
            first[...] = words[start:stop, :2]
            self._encrypt.update_into(left_bytes[:size], right_bytes)
            second ^= words[start:stop, 2:]
            second[:, 0] ^= orders[start:stop]
            self._encrypt.update_into(right_bytes[:size], left_bytes)
            low[start:stop], high[start:stop] = first.T

    def lanes(self, orders: U64, ids: U8) -> tuple[U64, U64]:
        """Both lanes as new columns u64[n]."""
        low, high = np.empty(len(orders), np.uint64), np.empty(len(orders), np.uint64)
        self.hash_into(orders, ids, low, high)
        return low, high


def summary_hashes(low: U64, high: U64, counts: I64) -> U8:
    """Range hashes u8[n, 6] of lane sums u64[n] and counts.

    The mix is not linear, so what goes over the wire is no longer a sum that could be combined.
    """
    mixed = (low ^ (low >> _HALF)) * _MIX_LOW
    mixed ^= (high ^ (high >> _HALF)) * _MIX_HIGH
    mixed += counts.astype(np.uint64) * _MIX_COUNT
    mixed ^= mixed >> _HALF
    mixed *= _MIX_HIGH
    mixed ^= mixed >> _HALF
    return _low_bytes(mixed, SUMMARY_HASH_BYTES)


# ---- short ids


def short_ids_of(low: U64) -> U8:
    """Short ids u8[n, 6] of hash lanes or of names: their lowest bytes."""
    return _low_bytes(low, SHORT_ID_BYTES)


def names_of(low: U64) -> U64:
    """Short ids as numbers, u64[n] below 2^48."""
    return low & _NAME_MASK


def names_of_short_ids(short_ids: U8) -> U64:
    """The numbers of short ids u8[n, 6]."""
    padded = np.zeros((len(short_ids), 8), np.uint8)
    padded[:, :SHORT_ID_BYTES] = short_ids
    return padded.view("<u8")[:, 0].astype(np.uint64)


def names_in_ranges(ranges: I64, names: U64) -> U64:
    """Names that hold among many ranges, u64[n]: the range's number above the short id's 48 bits."""
    return (ranges.astype(np.uint64) << _NAME_BITS) | names


def ranges_of_names(names: U64) -> I64:
    """The numbers of the ranges in such names, i64[n]."""
    return (names >> _NAME_BITS).astype(np.int64)


def contains(sorted_names: U64, wanted: U64) -> Mask:
    """Which of the wanted names are among those that ascend, bool[n]."""
    if not len(sorted_names):
        return np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(sorted_names, wanted), len(sorted_names) - 1)
    there: Mask = sorted_names[places] == wanted
    return there


def _low_bytes(values: U64, size: int) -> U8:
    return np.ascontiguousarray(values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :size])


# ---- whole sets


@dataclass(frozen=True, slots=True)
class Total:
    """A whole view: the number of its elements, and 16 bytes of keyed sums over all of them.

    It proves two sets equal: a peer that does not learn ours can state it only if it has our elements.
    """

    count: int
    sum: bytes
