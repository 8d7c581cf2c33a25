"""How a session ends and how far it is: errors, outcomes, and the two records that others show.

Both records are values: a session makes a new `Progress` for each change that it announces, and one
`SyncReport` at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class SyncOutcome(StrEnum):
    """How a sync ended."""

    IN_SYNC = "in_sync"
    DIFFERENT = "different"
    PARTIAL = "partial"
    REFUSED = "refused"
    PEER_FAULT = "peer_fault"
    LOCAL_FAULT = "local_fault"


class SyncCode(StrEnum):
    """Why a session broke off. Any other code is a fault of this side, by its own name."""

    OVERLOADED = "overloaded"
    BUDGET_SPENT = "recon_budget_spent"
    PEER_MISBEHAVED = "peer_misbehaved"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_VERSION = "peer_version"
    PEER_URL_REFUSED = "peer_url_refused"
    FORBIDDEN = "forbidden"


_OUTCOMES: dict[str, SyncOutcome] = {
    SyncCode.OVERLOADED: SyncOutcome.PARTIAL,
    SyncCode.BUDGET_SPENT: SyncOutcome.PARTIAL,
    SyncCode.PEER_MISBEHAVED: SyncOutcome.PEER_FAULT,
    SyncCode.PEER_UNREACHABLE: SyncOutcome.PEER_FAULT,
    SyncCode.PEER_VERSION: SyncOutcome.REFUSED,
    SyncCode.PEER_URL_REFUSED: SyncOutcome.REFUSED,
    SyncCode.FORBIDDEN: SyncOutcome.REFUSED,
}


def outcome_of(code: str) -> SyncOutcome:
    """How a session ends that breaks off with this code."""
    return _OUTCOMES.get(code, SyncOutcome.LOCAL_FAULT)


class SyncError(Exception):
    """Ends a session. Replicas and transports raise it, or a subclass.

    `code` is stable, `detail` is for people.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail

    @property
    def outcome(self) -> SyncOutcome:
        """How a session ends that this error breaks off."""
        return outcome_of(self.code)


def misbehaved(detail: str) -> SyncError:
    """The peer broke the protocol."""
    return SyncError(SyncCode.PEER_MISBEHAVED, detail)


class SegmentState(StrEnum):
    """State of a part of the mutual interest, as the range bar draws it."""

    IN_SYNC = "in_sync"
    SYNCING = "syncing"
    DONT_HAVE = "dont_have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of a session and its results. Bytes are those of bodies, as sent.

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


Counts = Counter[str]
"""The same figures while they grow, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Traffic):
    """How far a sync is. `segments` tile the mutual interest: state and share, ascending."""

    in_sync_percent: float = 0.0
    segments: tuple[tuple[SegmentState, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
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
    set_aside: tuple[dict[str, str], ...] = ()
    mended: int = 0
    lost_here: int = 0
    seconds: float = 0.0

    @classmethod
    def of_error(cls, error: SyncError) -> SyncReport:
        """The report of a session that could not begin."""
        return cls(outcome=error.outcome, code=error.code, detail=error.detail)

    @property
    def in_sync(self) -> bool:
        """Whether both sides ended up holding the same."""
        return self.outcome is SyncOutcome.IN_SYNC


def filled(
    segments: Sequence[tuple[SegmentState, float]], arrived_share: float
) -> list[tuple[SegmentState, float]]:
    """The bar with what has arrived: missing stretches fill up in order, as they are fetched.

    `arrived_share`: elements that arrived, of all.
    """
    shown: list[tuple[SegmentState, float]] = []
    for state, share in segments:
        got = min(share, arrived_share) if state is SegmentState.DONT_HAVE else 0.0
        arrived_share -= got
        shown += [(SegmentState.IN_SYNC, got)] if got else []
        shown += [(state, share - got)] if share > got else []
    return shown
