"""Names of the column types, and the few vector operations that everything shares."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]
Column = TypeVar("Column", U64, U32, I64)

ZERO = np.uint64(0)


def heads_of(ids: U8) -> U64:
    """The first 8 bytes of ids u8[n, 32] as big-endian numbers, u64[n]."""
    return ids.view(">u8")[:, 0].astype(np.uint64)


def bit_lengths(values: U64) -> I64:
    """Bits needed to write each number; 0 for 0."""
    # Clearing every bit below a set one keeps the float conversion from rounding up a power of two.
    exact = (values & ~(values >> np.uint64(1))).astype(np.float64)
    return np.frexp(exact)[1].astype(np.int64)


def steps_of(values: Column) -> Column:
    """The difference of each number to the one before (the first: to 0)."""
    steps = values.copy()
    steps[1:] -= values[:-1]
    return steps


def laid(outer: Column, at: I64, inner: Column) -> Column:
    """A new column: `outer` at the places `at`, ascending, and `inner` in order everywhere else."""
    out = np.empty(len(outer) + len(inner), outer.dtype)
    rest = np.ones(len(out), bool)
    rest[at] = False
    out[at] = outer
    out[rest] = inner
    return out


def spread(counts: I64) -> tuple[I64, I64]:
    """For groups of the given sizes laid end to end: each slot's group, and place in its group."""
    owner = np.arange(len(counts)).repeat(counts)
    starts = counts.cumsum() - counts
    return owner, np.arange(len(owner)) - starts[owner]
