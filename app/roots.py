"""Roots: BLAKE3 over the sorted 32-byte digests of a set, as channels and snapshots name them."""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

DIGEST_BYTES = 32
EMPTY_ROOT = blake3(b"").digest()


def root(digests: NDArray[np.uint8]) -> bytes:
    """The root of digests u8[n, 32] in any order."""
    return blake3(in_order(digests.tobytes())).digest()


def in_order(digests: bytes) -> bytes:
    """Concatenated digests, sorted, each once."""
    # numpy compares fixed-length strings like memcmp; its NUL padding is harmless at equal lengths.
    ordered = np.sort(np.frombuffer(digests, f"S{DIGEST_BYTES}"))
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new].tobytes()
