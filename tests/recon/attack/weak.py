"""Range reconciliation over unkeyed summaries, as several systems have it: what the attacks break.

A summary is (BLAKE3 of the combined digests, count): hashing the sum and adding the count is part
of it, because it is said to help.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Digests = NDArray[np.uint8]
Combine = Callable[[Digests], bytes]
Element = tuple[int, bytes]

LANE_BITS = 32
_ORDERS = 2**64


def xor_256(digests: Digests) -> bytes:
    """Exclusive or of whole digests."""
    return bytes(np.bitwise_xor.reduce(digests, axis=0))


def lanes(digests: Digests, bits: int) -> NDArray[np.uint32]:
    """The first `bits` of each digest as wrapping 32-bit lanes: u32[n, bits / 32]."""
    return np.ascontiguousarray(digests[:, : bits // 8]).view("<u4")


def sum_of(bits: int) -> Combine:
    """Lane-wise wrapping sum of the first `bits` of digests."""
    return lambda digests: lanes(digests, bits).sum(axis=0, dtype=np.uint32).tobytes()


def keyed(combine: Combine, key: bytes) -> Combine:
    """The same over keyed hashes of the digests: good for as long as nobody knows the key."""
    return lambda digests: combine(keyed_digests(digests, key))


def keyed_digests(digests: Digests, key: bytes) -> Digests:
    """BLAKE3 of each digest under a 32-byte key: u8[n, 32]."""
    raw = b"".join(blake3(row.tobytes(), key=key).digest() for row in digests)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)


def reconcile(ours: set[Element], theirs: set[Element], combine: Combine) -> set[Element]:
    """The differences that two honest stores find by halving ranges with unequal summaries."""
    found: set[Element] = set()
    waiting = [(0, _ORDERS)]
    while waiting:
        lower, upper = waiting.pop()
        mine, yours = (_slice(side, lower, upper) for side in (ours, theirs))
        if _summary(mine, combine) == _summary(yours, combine):
            continue
        if upper - lower == 1:
            found |= mine ^ yours
            continue
        middle = (lower + upper) // 2
        waiting += [(lower, middle), (middle, upper)]
    return found


def _slice(side: set[Element], lower: int, upper: int) -> set[Element]:
    return {element for element in side if lower <= element[0] < upper}


def _summary(side: set[Element], combine: Combine) -> tuple[bytes, int]:
    raw = b"".join(digest for _, digest in side)
    digests = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)
    return blake3(combine(digests)).digest(), len(side)
