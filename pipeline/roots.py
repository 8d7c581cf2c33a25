"""Roots: BLAKE3 over the sorted 32-byte digests of a set."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from numpy.typing import NDArray

DIGEST_BYTES = 32
EMPTY_ROOT = blake3(b"").digest()


def root(digests: NDArray[np.uint8]) -> bytes:
    """The root of `digests`, an (n, 32) array of bytes in any order."""
    return blake3(in_order(digests.tobytes())).digest()


def in_order(digests: bytes) -> bytes:
    """Digests that lie one after the other, sorted, each once."""
    # As fixed strings numpy compares them like memcmp; padding NULs cannot confuse equal lengths.
    ordered = np.sort(np.frombuffer(digests, f"S{DIGEST_BYTES}"))
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new].tobytes()


def digest_array(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint8]:
    """A binary column of 32-byte values as an (n, 32) array; ValueError for other lengths."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if len(column) == 0:
        return np.empty((0, DIGEST_BYTES), np.uint8)
    lengths = pc.unique(pc.binary_length(column)).to_pylist()
    if lengths != [DIGEST_BYTES]:
        raise ValueError(f"digests have 32 bytes, not {lengths[:5]}")
    _, offsets, values = column.cast(pa.binary()).buffers()
    start = int(np.frombuffer(offsets, np.int32)[column.offset])
    stop = start + len(column) * DIGEST_BYTES
    return np.frombuffer(values, np.uint8)[start:stop].reshape(-1, DIGEST_BYTES)
