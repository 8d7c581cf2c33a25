"""The bounds of a session that its caller sets, and its results: errors, outcomes, `Progress`, `SyncReport`.

Both records are values: a session makes a new `Progress` for each change that it announces, and one
`SyncReport` at its end. Imports no numpy, because settings read this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NOTHING_SHARED = "nothing was compared: the interests of the two nodes have no channel in common"
"""The detail of a session that ended with its hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLimits:
    """Bounds of one session that can be configured. Fixed ones are beside the code that uses them."""

    seconds_max: int = 3_600  # then the session ends as partial, and the next one continues
    whole_s: float = (
        86_400.0  # for so long (a day at most) a pair compares only news; then everything
    )
    answer_bytes_max: int = 1 << 20  # summaries and lists of one answer: 50 ms of the peer's time


DEFAULT_LIMITS = SyncLimits()


class SyncOutcome(StrEnum):
    """How a sync ended."""

    IN_SYNC = "in_sync"
    DIFFERENT = "different"
    PARTIAL = "partial"
    REFUSED = "refused"
    PEER_FAULT = "peer_fault"
    LOCAL_FAULT = "local_fault"


class SyncCode(StrEnum):
    """Why a session was aborted. Any other code names a fault of this side."""

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
    """The outcome of a session that was aborted with this code."""
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
        """The outcome of a session that this error aborts."""
        return outcome_of(self.code)


def misbehaved(detail: str) -> SyncError:
    """The peer broke the protocol."""
    return SyncError(SyncCode.PEER_MISBEHAVED, detail)


class SegmentState(StrEnum):
    """State of a part of the mutual interest, for the range bar."""

    IN_SYNC = "in_sync"
    SYNCING = "syncing"
    DONT_HAVE = "dont_have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of a session and its results. Bytes count bodies as sent.

    Refused elements are those that this session set aside, on either side and for any reason, and the
    hints inside a received entry that are too many or too long.
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
    """The progress of a sync. `segments` tile the mutual interest: state and share, ascending."""

    in_sync_percent: float = 0.0
    segments: tuple[tuple[SegmentState, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport(Traffic):
    """The result of a sync. `missing_here` and `missing_there` count the elements found to differ.

    `proved`: the peer stated a total over all its elements that equals ours, under the session's key.
    `set_aside` names the first elements that one side cannot get or refuses; `set_aside_count` counts
    all of them. `mended` counts entries that got their lost content back, `lost_here` those that did
    not.
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
        """The report of a session that could not start."""
        return cls(outcome=error.outcome, code=error.code, detail=error.detail)

    @property
    def in_sync(self) -> bool:
        """Whether both sides held equal sets at the end."""
        return self.outcome is SyncOutcome.IN_SYNC


def filled(
    segments: Sequence[tuple[SegmentState, float]], arrived_share: float
) -> list[tuple[SegmentState, float]]:
    """The bar with the arrived elements: missing segments fill up in order, as they are fetched.

    `arrived_share`: arrived elements as a share of all.
    """
    shown: list[tuple[SegmentState, float]] = []
    for state, share in segments:
        got = min(share, arrived_share) if state is SegmentState.DONT_HAVE else 0.0
        arrived_share -= got
        shown += [(SegmentState.IN_SYNC, got)] if got else []
        shown += [(state, share - got)] if share > got else []
    return shown
