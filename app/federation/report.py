"""What a sync did, and how far it is: the two records everything else shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class SyncOutcome(StrEnum):
    """How a sync ended."""

    IN_SYNC = "in_sync"
    DIFFERENT = "different"
    PARTIAL = "partial"
    REFUSED = "refused"
    PEER_FAULT = "peer_fault"
    LOCAL_FAULT = "local_fault"


class SegmentState(StrEnum):
    """State of a part of the mutual interest, as the range bar draws it."""

    IN_SYNC = "in_sync"
    SYNCING = "syncing"
    DONT_HAVE = "dont_have"


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What went over the wire and what became of it. Bytes are those of bodies, as sent.

    Refused are those that this session set aside, on either side and for whatever reason.
    """

    rounds: int = 0
    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    entries_received: int = 0
    entries_sent: int = 0
    entries_refused: int = 0
    claims_received: int = 0
    claims_sent: int = 0
    claims_refused: int = 0


@dataclass(slots=True, kw_only=True)
class Progress(Traffic):
    """Where a sync stands. `segments` tile the mutual interest: state and share, ascending."""

    in_sync_percent: float = 0.0
    segments: list[tuple[SegmentState, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class SyncReport(Traffic):
    """The end of a sync. `missing_here` and `missing_there` count the elements found to differ.

    `proved`: the peer stated a total over all its elements that is ours, under the session's key.
    `set_aside` names the first of the elements that one side cannot get or does not take;
    `set_aside_count` counts them. `mended` entries had lost their content here and have it again;
    `lost_here` have not.
    """

    outcome: SyncOutcome
    code: str = ""
    detail: str = ""
    elements: int = 0
    missing_here: int = 0
    missing_there: int = 0
    proved: bool = False
    set_aside_count: int = 0
    set_aside: list[dict[str, str]] = field(default_factory=list)
    mended: int = 0
    lost_here: int = 0
    seconds: float = 0.0

    @property
    def in_sync(self) -> bool:
        """Whether both sides ended up holding the same."""
        return self.outcome is SyncOutcome.IN_SYNC


Segments = list[tuple[SegmentState, float]]


def filled(segments: Segments, arrived_share: float) -> Segments:
    """The bar with what has arrived: missing stretches fill up in order, as they are fetched.

    `arrived_share`: elements that arrived, of all.
    """
    shown: Segments = []
    for state, share in segments:
        got = min(share, arrived_share) if state is SegmentState.DONT_HAVE else 0.0
        arrived_share -= got
        shown += [(SegmentState.IN_SYNC, got)] if got else []
        shown += [(state, share - got)] if share > got else []
    return shown
