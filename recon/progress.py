"""How far a session is: by elements, by key space, and as segments for a range bar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from recon.ranges import Range

SEGMENTS_MAX = 512  # a bar is drawn a few hundred characters or pixels wide


class RangeState(Enum):
    """States of a range (the seed's words)."""

    IN_SYNC = "in sync"
    SYNCING = "syncing"
    DONT_HAVE = "don't have"


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


Part = tuple[Range, int, RangeState]


def measure(parts: Iterable[Part]) -> Progress:
    """Progress over disjoint ranges with their element counts and states, in any order."""
    elements = dict.fromkeys(RangeState, 0)
    key_space = dict.fromkeys(RangeState, 0.0)
    ordered = sorted(parts, key=lambda part: part[0].lower)
    for span, count, state in ordered:
        elements[state] += count
        key_space[state] += (span.upper.order - span.lower.order) / 2**64
    return Progress(elements, key_space, _segments(ordered, sum(elements.values())))


def _segments(ordered: list[Part], total: int) -> tuple[Segment, ...]:
    merged: list[tuple[int, RangeState]] = []
    for _, count, state in ordered:
        if merged and merged[-1][1] is state:
            merged[-1] = (merged[-1][0] + count, state)
        else:
            merged.append((count, state))
    return tuple(Segment(count / max(total, 1), state) for count, state in merged[:SEGMENTS_MAX])
