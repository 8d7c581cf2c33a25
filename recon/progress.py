"""How far a session is: by elements, by key space, and as segments for a range bar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from recon.columns import I64
from recon.ranges import RangeColumns

SEGMENTS_MAX = 512  # a bar is drawn a few hundred characters or pixels wide


class RangeState(Enum):
    """States of a range."""

    IN_SYNC = "in sync"
    SYNCING = "syncing"
    DONT_HAVE = "don't have"


_STATES = tuple(RangeState)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the bar: share of the elements, 0 to 1, and its state."""

    share: float
    state: RangeState


@dataclass(frozen=True, slots=True)
class Progress:
    """Elements of the larger side per state, shares of the key space, and the bar."""

    elements: dict[RangeState, int]
    key_space: dict[RangeState, float]
    segments: tuple[Segment, ...]

    @property
    def percent_in_sync(self) -> float:
        """By elements, 0 to 100; 100 for two empty sets."""
        total = sum(self.elements.values())
        return 100.0 * self.elements[RangeState.IN_SYNC] / total if total else 100.0


class Stretch(NamedTuple):
    """Ranges with their element counts i64[n] and one state."""

    ranges: RangeColumns
    counts: I64
    state: RangeState


def measure(stretches: Iterable[Stretch]) -> Progress:
    """Progress over disjoint ranges, in any order."""
    pieces = [stretch for stretch in stretches if len(stretch.counts)]
    if not pieces:
        return Progress(dict.fromkeys(_STATES, 0), dict.fromkeys(_STATES, 0.0), ())
    ranges = RangeColumns.concatenate([piece.ranges for piece in pieces])
    counts = np.concatenate([piece.counts for piece in pieces])
    lengths = [len(piece.counts) for piece in pieces]
    states = np.repeat([_STATES.index(piece.state) for piece in pieces], lengths)
    widths = ranges.upper_orders.astype(np.float64) - ranges.lower_orders.astype(np.float64)
    elements = np.bincount(states, counts, minlength=len(_STATES))
    space = np.bincount(states, widths / 2.0**64, minlength=len(_STATES))
    sequence = np.lexsort((ranges.lower_heads, ranges.lower_orders))
    return Progress(
        {state: int(elements[place]) for place, state in enumerate(_STATES)},
        {state: float(space[place]) for place, state in enumerate(_STATES)},
        _segments(counts[sequence], states[sequence]),
    )


def _segments(counts: I64, states: I64) -> tuple[Segment, ...]:
    """Neighbours in one state join; if there are too many, the narrowest join their neighbours."""
    ends = np.cumsum(counts)
    total = max(int(ends[-1]), 1)
    lasts = np.flatnonzero(np.append(states[1:] != states[:-1], True))
    if len(lasts) > SEGMENTS_MAX:
        grid = np.linspace(0, total, SEGMENTS_MAX + 1)[1:]
        lasts = np.unique(np.minimum(np.searchsorted(ends, grid), len(ends) - 1))
    shares = np.diff(ends[lasts], prepend=0) / total
    return tuple(
        Segment(float(share), _STATES[state])
        for share, state in zip(shares, states[lasts].tolist(), strict=True)
    )
