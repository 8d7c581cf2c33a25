"""Wagner's k-tree on wrapping sums: far below the birthday bound when many messages may be used.

2^depth lists of hashes are merged two by two; each merge keeps the pairs whose sum is zero on the
next bits, and the last one wants zero on all that are left. The first merge is given fewer bits,
so that lists grow from `leaf_bits` to `list_bits`: hashing is dearer than merging. Lists are kept a
quarter longer than they must be, because a list that is short by chance makes the next one shorter
by the square. Every second list enters negated: it belongs to the other store, so both get the same
number of messages.
D. Wagner, A Generalized Birthday Problem, CRYPTO 2002.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.recon.attack.weak import LANE_BITS

Lanes = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one attack: sums of `bits`, 2^depth lists of 2^leaf_bits hashes.

    Memory: mostly the choices of the two lists under the root, `size_max` · 2^depth · 2 bytes.
    """

    bits: int
    depth: int
    leaf_bits: int  # ≤ 16: a choice is a u16
    list_bits: int

    @property
    def size_max(self) -> int:
        """Longest list that is kept."""
        return 5 << self.list_bits >> 2

    def window(self, level: int) -> tuple[int, int]:
        """First bit and number of bits that the merge into `level` (1 = lowest) makes zero."""
        first = 2 * self.leaf_bits - self.list_bits - 1
        start = 0 if level == 1 else first + (level - 2) * self.list_bits
        width = first if level == 1 else self.list_bits
        return start, min(self.bits - start if level == self.depth else width, LANE_BITS)


class _List(NamedTuple):
    sums: Lanes  # u32[n, lanes]
    choices: NDArray[np.uint16]  # u16[n, 2^level]: which hash of each leaf


def collide(plan: Plan, leaf: Callable[[int], Lanes]) -> list[int] | None:
    """One index per leaf: hashes of even leaves minus those of odd ones sum to zero on all lanes.

    `leaf(i)` gives list i, u32[2^leaf_bits, lanes]; lists are made depth first, when needed.
    None: no luck; the last window has w bits, so there are size_max^2 / 2^w solutions on average.
    """
    root = _node(plan, leaf, plan.depth, 0)
    solved = np.flatnonzero(~root.sums.any(axis=1))
    return root.choices[solved[0]].tolist() if len(solved) else None


def _node(plan: Plan, leaf: Callable[[int], Lanes], level: int, first: int) -> _List:
    if level == 0:
        hashes = leaf(first)
        sums = np.negative(hashes) if first % 2 else hashes
        return _List(sums, np.arange(len(hashes), dtype=np.uint16)[:, None])
    left = _node(plan, leaf, level - 1, first)
    right = _node(plan, leaf, level - 1, first + 2 ** (level - 1))
    return _merge(left, right, plan.window(level), plan.size_max)


def _merge(left: _List, right: _List, window: tuple[int, int], size_max: int) -> _List:
    ours, theirs = _bits(left.sums, *window), _bits(np.negative(right.sums), *window)
    by_key = np.argsort(theirs)
    theirs = theirs[by_key]
    starts = np.searchsorted(theirs, ours)
    counts = np.searchsorted(theirs, ours, side="right") - starts
    i = np.repeat(np.arange(len(ours)), counts)[:size_max]
    nth = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)[:size_max]
    j = by_key[starts[i] + nth]
    return _List(left.sums[i] + right.sums[j], np.hstack((left.choices[i], right.choices[j])))


def _bits(sums: Lanes, start: int, width: int) -> NDArray[np.uint64]:
    """`width` ≤ 32 bits from bit `start`, counted from the low end of the first lane."""
    lane, shift = divmod(start, LANE_BITS)
    low = sums[:, lane].astype(np.uint64)
    if lane + 1 < sums.shape[1]:
        low |= sums[:, lane + 1].astype(np.uint64) << np.uint64(LANE_BITS)
    return low >> np.uint64(shift) & np.uint64((1 << width) - 1)
