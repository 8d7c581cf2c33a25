"""Pairs of sets for the reconciliation bench: a universe of elements, and what each side lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recon.index import RangeIndex

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
SEED = 20_240_607


@dataclass(frozen=True)
class Universe:
    """Sorted elements: orders u64[n], ids u8[n, 32]."""

    orders: U64
    ids: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.orders)

    def index_without(self, lacking: I64) -> RangeIndex:
        """An index of everything but some places."""
        kept = np.ones(len(self), bool)
        kept[lacking] = False
        orders, ids = self.orders[kept], np.ascontiguousarray(self.ids[kept])
        return RangeIndex.from_sorted(orders, ids, np.zeros(len(orders), np.uint32))


def universe_of(orders: U64, rng: np.random.Generator) -> Universe:
    """Random ids for the given order values, sorted."""
    ids = rng.integers(0, 256, (len(orders), 32), dtype=np.uint8)
    sequence = np.lexsort((ids.view(">u8")[:, 0], orders))
    return Universe(orders[sequence], ids[sequence])


def plain(count: int) -> Universe:
    """`count` elements with orders uniform over `count` values: a third of neighbours tie."""
    rng = np.random.default_rng(SEED)
    return universe_of(rng.integers(0, count, count).astype(np.uint64), rng)


def twice(count: int) -> Universe:
    """Twice as many, to be shared out."""
    return plain(2 * count)


def ten_times(count: int) -> Universe:
    """Ten times as many."""
    return plain(10 * count)


def mixed_clocks(count: int) -> Universe:
    """Channels clocked in seconds, milliseconds and nanoseconds over the same year."""
    rng = np.random.default_rng(SEED)
    moments = rng.uniform(1.70e9, 1.73e9, count)
    units = rng.choice([1.0, 1e3, 1e9], count)
    orders = (moments * units).astype(np.uint64) + np.uint64(1 << 63)
    return universe_of(orders, rng)


def with_far_future(count: int, far_count: int = 10_000) -> Universe:
    """Nanosecond clocks, and `far_count` elements with absurd ones."""
    rng = np.random.default_rng(SEED)
    near = rng.uniform(1.70e18, 1.73e18, count - far_count).astype(np.uint64)
    far = rng.uniform(8e18, 9e18, far_count).astype(np.uint64)
    return universe_of(np.concatenate((near, far)) + np.uint64(1 << 63), rng)


def channels(count: int, channel_count: int = 1000) -> Universe:
    """Channels with a counting clock each: the newest of all of them share order values."""
    rng = np.random.default_rng(SEED)
    return universe_of(
        np.repeat(np.arange(count // channel_count, dtype=np.uint64), channel_count), rng
    )


Lacking = Callable[[int, np.random.Generator], tuple[I64, I64]]


def halves(places: I64, rng: np.random.Generator) -> tuple[I64, I64]:
    """Each difference is lacking at one side; a single one at the initiator."""
    mixed = rng.permutation(places)
    middle = len(mixed) - len(mixed) // 2
    return mixed[:middle], mixed[middle:]


def uniform(differences: int) -> Lacking:
    """Differences anywhere."""
    return lambda count, rng: halves(rng.choice(count, differences, replace=False), rng)


def newest(differences: int) -> Lacking:
    """Differences at the newest end."""
    return lambda count, rng: halves(np.arange(count - differences, count), rng)


def disjoint(count: int, rng: np.random.Generator) -> tuple[I64, I64]:
    """Nothing in common: the universe is shared out."""
    return halves(np.arange(count), rng)
