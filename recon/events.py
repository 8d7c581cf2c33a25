"""An initiator's reports to its caller: events, in the order it learns them, and progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recon.elements import I64, Range, RangeColumns
from recon.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Have:
    """We hold these and the peer does not: send them. orders u64[n], ids u8[n, 32]."""

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Need:
    """The peer holds these and we do not: fetch them.

    `short_ids` u8[n, 6]; None means every element of the range (we hold none there), `count` by
    the peer's word.
    """

    range: Range
    short_ids: NDArray[np.uint8] | None
    count: int


@dataclass(frozen=True, slots=True)
class NotThere:
    """The peer does not name these, which the view has only because they were set aside."""

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Stated:
    """The first answer's total of all that the peer holds, and whether it is that of our view.

    The peer does not learn ours. So if it states the same total, it holds, or has read, every element.
    """

    count: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """The peer broke the protocol or its budget; the session is over."""

    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Expired:
    """The responder's nonce is no longer valid: start a new session with this one."""

    responder_nonce: bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """The responder is at its limit or refuses: the session is over, try again later."""

    retry_after_s: int
    refused: bool


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The responder speaks versions up to `version`, and none of ours: the session is over."""

    version: int


Event = Have | Need | NotThere | Stated | Fault | Expired | Busy | Unsupported


# ---- progress: by elements, and as segments for a range bar


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
    """Elements of the larger side per state, and the bar."""

    elements: dict[RangeState, int]
    segments: tuple[Segment, ...]


class Stretch(NamedTuple):
    """Ranges with their element counts i64[n] and one state."""

    ranges: RangeColumns
    counts: I64
    state: RangeState


def measure(stretches: Iterable[Stretch]) -> Progress:
    """Progress over disjoint ranges, in any order."""
    pieces = [stretch for stretch in stretches if len(stretch.counts)]
    if not pieces:
        return Progress(dict.fromkeys(_STATES, 0), ())
    ranges = RangeColumns.concatenate([piece.ranges for piece in pieces])
    counts = np.concatenate([piece.counts for piece in pieces])
    lengths = [len(piece.counts) for piece in pieces]
    states = np.repeat([_STATES.index(piece.state) for piece in pieces], lengths)
    elements = np.bincount(states, counts, minlength=len(_STATES))
    sequence = np.lexsort((ranges.lower_heads, ranges.lower_orders))
    return Progress(
        {state: int(elements[place]) for place, state in enumerate(_STATES)},
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
