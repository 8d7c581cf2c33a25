"""XOR elimination: choosing messages so that two XOR sums are equal is solving a linear system.

One message of each pair goes to the first store or the other to the second. Choosing pair i adds
a_i xor b_i to the difference of the two sums, and keeps the counts equal; a little more than 256
pairs span everything, the victim too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def combination(rows: list[int], target: int) -> list[int]:
    """Indices of rows whose XOR is `target`, by Gaussian elimination over GF(2).

    `ValueError` when the rows do not span it.
    """
    basis: dict[int, tuple[int, int]] = {}  # leading bit: (row, which inputs it is made of)
    for index, row in enumerate(rows):
        rest, made_of = _reduce(row, 1 << index, basis)
        if rest:
            basis[rest.bit_length()] = rest, made_of
    rest, made_of = _reduce(target, 0, basis)
    if rest:
        raise ValueError("the rows do not span the target")
    return [index for index in range(len(rows)) if made_of >> index & 1]


def _reduce(row: int, made_of: int, basis: dict[int, tuple[int, int]]) -> tuple[int, int]:
    for bit in range(row.bit_length(), 0, -1):
        if row >> (bit - 1) & 1 and bit in basis:
            row, made_of = row ^ basis[bit][0], made_of ^ basis[bit][1]
    return row, made_of


def colliding_pairs(
    firsts: NDArray[np.uint8], seconds: NDArray[np.uint8], offset: bytes
) -> list[int]:
    """Which pairs to publish: XOR of the chosen `firsts` = XOR of the chosen `seconds` ^ `offset`."""
    rows = [int.from_bytes(row.tobytes(), "big") for row in firsts ^ seconds]
    return combination(rows, int.from_bytes(offset, "big"))
