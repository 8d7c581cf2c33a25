"""What a publisher can do to fingerprints that anybody can compute: make sets that collide.

Two classical attacks. XOR: linear algebra over GF(2). Sums: Wagner's k-tree (generalised birthday),
depth first, so that memory stays at a few lists. Both find sets X and Y of equal size and equal
fingerprint; give X to one honest node and Y to the other, and they call the range equal for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Words = U64  # u64[n, w], least significant word first
Leaves = NDArray[np.uint16]
ListOf = Callable[[int], Words]
WORD_BITS = 64


def xor_collision(values: Sequence[int], bits: int) -> tuple[list[int], list[int]]:
    """Places of two disjoint, equally large sets with equal XOR. Needs about `bits` + 2 values."""
    basis: dict[int, tuple[int, int]] = {}
    for place, value in enumerate(values):
        # One more bit counts the members, so that what cancels has an even size.
        rest, members = value | 1 << bits, 1 << place
        while rest:
            top = rest.bit_length()
            if top not in basis:
                basis[top] = (rest, members)
                break
            rest, members = rest ^ basis[top][0], members ^ basis[top][1]
        else:
            chosen = [at for at in range(len(values)) if members >> at & 1]
            return chosen[::2], chosen[1::2]
    raise ValueError("too few values")


def sum_collision(list_of: ListOf, bits: int, levels: int) -> Leaves:
    """One value of each of 2^levels lists so that the sum is 0 mod 2^bits; places u16[lists].

    `list_of(number)`: values u64[n, w] of a list, with n about 2^(bits / (levels + 1)).
    """
    step = bits // (levels + 1)
    _, places = _tree(list_of, levels, 0, step, bits)
    if not len(places):
        raise ValueError("no collision in these lists")
    return places[0]


def _tree(list_of: ListOf, level: int, number: int, step: int, bits: int) -> tuple[Words, Leaves]:
    """Sums of 2^level values whose lowest bits cancel, and the places they come from."""
    if level == 0:
        values = list_of(number)
        return values, np.arange(len(values), dtype=np.uint16)[:, None]
    left, left_places = _tree(list_of, level - 1, 2 * number, step, bits)
    right, right_places = _tree(list_of, level - 1, 2 * number + 1, step, bits)
    top = bits == step * (level + 1)
    cancelled = bits if top else step * level
    a, b = _pairs(left, right, step * (level - 1), cancelled, 2 << step)
    sums = _masked(_add(left[a], right[b]), bits)
    zero = (_window(sums, 0, min(cancelled, WORD_BITS)) == 0) if not top else ~sums.any(axis=1)
    a, b, sums = a[zero], b[zero], sums[zero]
    return sums, np.concatenate((left_places[a], right_places[b]), axis=1)


def _pairs(left: Words, right: Words, start: int, stop: int, most: int) -> tuple[U64, U64]:
    """Places of pairs whose bits start … stop (at most 64 of them) cancel; `most` pairs."""
    width = min(stop - start, WORD_BITS)
    mask = np.uint64((1 << width) - 1)
    wanted = (~_window(left, start, width) + np.uint64(1)) & mask
    theirs = _window(right, start, width)
    sequence = np.argsort(theirs)
    first = np.searchsorted(theirs[sequence], wanted, "left")
    counts = np.searchsorted(theirs[sequence], wanted, "right") - first
    a = np.repeat(np.arange(len(left)), counts)
    within = np.arange(len(a)) - np.repeat(np.cumsum(counts) - counts, counts)
    return a[:most], sequence[first[a] + within][:most]


def _window(values: Words, start: int, width: int) -> U64:
    """`width` bits (at most 64) from bit `start`."""
    word, shift = divmod(start, WORD_BITS)
    out = values[:, word] >> np.uint64(shift)
    if shift and word + 1 < values.shape[1]:
        out |= values[:, word + 1] << np.uint64(WORD_BITS - shift)
    return out & np.uint64((1 << width) - 1)


def _add(a: Words, b: Words) -> Words:
    sums = a + b
    for word in range(1, a.shape[1]):
        carry = sums[:, word - 1] < a[:, word - 1]
        if word > 1:  # a carry into an all-ones word carries on
            carry |= (sums[:, word - 1] == a[:, word - 1]) & (b[:, word - 1] != 0)
        sums[:, word] += carry.astype(np.uint64)
    return sums


def _masked(values: Words, bits: int) -> Words:
    if rest := bits % WORD_BITS:
        values[:, -1] &= np.uint64((1 << rest) - 1)
    return values


def negated(values: Words, bits: int) -> Words:
    """Minus each value, mod 2^bits."""
    one = np.zeros_like(values)
    one[:, 0] = 1
    return _masked(_add(~values, one), bits)
