"""One peer: its record, what the sessions with it have shown, and how far the node and it are apart.

What the peer lacks is counted now: everything of the mutual interest that arrived here after the mark of
the last proof, without what the peer itself sent. What this node lacks, only a session finds; the record
says what the last one found and did not get.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from app.errors import Code
from app.federation.client import url_text
from app.federation.schedule import Verdict
from app.federation.syncs import MOVED, Sync
from app.recon.index import NodeIndex
from app.store.peerrows import CHANGING, PeerRow, clean_text
from app.store.store import Store
from recon.agreement import Interest, decode_interest
from recon.elements import order_of_lamport
from recon.errors import RemoteProtocolError
from recon.marks import numbers_of
from sdstore.sync.memory import Baseline, LackedBy, PeerMemory, unpack_elements
from sdstore.sync.report import NOTHING_SHARED, SyncOutcome, SyncReport

_log = logging.getLogger(__name__)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class PeerState(StrEnum):
    """How the last sync with a peer ended."""

    NEW = "new"
    HEALTHY = "healthy"
    FAILING = "failing"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"


_LOG_LEVELS = {
    PeerState.HEALTHY: logging.INFO,
    PeerState.FAILING: logging.WARNING,
    PeerState.UNREACHABLE: logging.WARNING,
    PeerState.REFUSED: logging.ERROR,
}


class PeerOrigin(StrEnum):
    """The origin of a peer."""

    SETTINGS = "settings"
    ADDED = "added"


@dataclass(slots=True)
class PeerTotals:
    """Sums over all syncs with a peer since this process started.

    `lost_count` and `set_aside_count` are from the last sync.
    """

    outcomes: Counter[SyncOutcome] = field(default_factory=Counter)
    amounts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    lost_count: int = 0
    set_aside_count: int = 0

    def add(self, report: SyncReport) -> None:
        """Count one sync."""
        self.outcomes[report.outcome] += 1
        self.seconds += report.seconds
        for name in COUNTED:
            self.amounts[name] += getattr(report, name)
        self.lost_count, self.set_aside_count = report.lost_here, report.set_aside_count


COUNTED = ("rounds", "bytes_up", "bytes_down", *MOVED)
"""Figures of a report that are summed per peer."""


@dataclass(slots=True, eq=False)
class Peer:
    """One peer. `token` is the access token that an operator added. `failures` counts the failed syncs
    since the last good one; `code` and `reason` say why the last one failed. `instance`: its instance ID
    while the link with it is up, otherwise empty; `last_instance`: the last one. Times and what is missing:
    as in `app.store.peerrows.PeerRow`."""

    peer_id: str
    url: httpx.URL
    origin: PeerOrigin = PeerOrigin.ADDED
    token: str | None = field(default=None, repr=False)
    memory: PeerMemory = field(default_factory=PeerMemory)
    totals: PeerTotals = field(default_factory=PeerTotals)
    state: PeerState = PeerState.NEW
    since_ms: int = field(default_factory=_now_ms)
    code: str = ""
    reason: str = ""
    failures: int = 0
    instance: str = ""
    last_instance: str = ""
    last_sync: Sync | None = None
    last_sync_id: str = ""
    next_sync_at_ms: int | None = None
    in_sync_at_ms: int | None = None
    proved_at_ms: int | None = None
    missing_here: int | None = None
    missing_there: int | None = None
    apart_since_ms: int | None = None
    _interest_read: bytes | None = field(default=None, repr=False)
    _interest: Interest | None = field(default=None, repr=False)
    _fault: str = ""  # the code of the last session, if it failed by a fault of this node

    @property
    def is_syncing(self) -> bool:
        """Whether a session with it runs in this process."""
        return self.last_sync is not None and not self.last_sync.is_finished

    def document(self) -> dict[str, Any]:
        """The peer as JSON."""
        return {
            "id": self.peer_id,
            "url": url_text(self.url),
            "origin": self.origin,
            "state": self.state,
            "since_ms": self.since_ms,
            "code": self.code,
            "reason": self.reason,
            "failures": self.failures,
            "last_sync_id": self.last_sync_id or None,
            "next_sync_at_ms": self.next_sync_at_ms,
            "in_sync_at_ms": self.in_sync_at_ms,
        }

    def row(self) -> PeerRow:
        """The peer as the database keeps it."""
        return PeerRow(
            peer_id=self.peer_id,
            url=url_text(self.url),
            origin=self.origin,
            token=self.token or "",
            **{name: getattr(self, name) for name in CHANGING},
        )

    def take(self, row: PeerRow) -> None:
        """Become what the database has."""
        self.token = row.token or None
        for name in CHANGING:
            setattr(self, name, getattr(row, name))
        self.since_ms = self.since_ms or _now_ms()
        self.state = PeerState(row.state) if row.state in set(PeerState) else PeerState.NEW

    def status(self) -> dict[str, Any]:
        """The peer with the report of its last sync."""
        report = self.last_sync.report if self.last_sync else None
        return self.document() | {"last_report": asdict(report) if report else None}

    def learn(self, report: SyncReport) -> bool:
        """Record the result of a sync; log a change of the state, and return whether there was one.

        A fault of this node, such as an outage of its database, does not change the peer's state. It is
        logged once, and so is its end.
        """
        self.totals.add(report)
        before, self.code, self.reason = self.reason, report.code, clean_text(_said_of(report))
        self._learn_divergence(report)
        if report.outcome is SyncOutcome.LOCAL_FAULT:
            if report.code != self._fault:
                said = f"{report.code}: {self.reason}"
                _log.warning(
                    "no sync with peer %s, by a fault of this node: %s", url_text(self.url), said
                )
            self._fault = report.code
            self.reason = f"the fault is this node's, not the peer's: {self.reason}"
            return False
        was_fault, self._fault = self._fault, ""
        if report.in_sync and self.reason not in ("", NOTHING_SHARED, before):
            _log.warning("peer %s is in sync, but %s", url_text(self.url), self.reason)
        state = _state_of(report)
        if state is self.state:
            if was_fault:
                _log.info("syncs with peer %s go on: it is %s", url_text(self.url), state)
            return False
        self.state, self.since_ms = state, _now_ms()
        detail = f": {report.code}: {report.detail}" if report.code else ""
        _log.log(_LOG_LEVELS[state], "peer %s is %s%s", url_text(self.url), state, detail)
        return True

    def meet(self, instance: str) -> None:
        """The link with it is up; log if another store has taken the place of the last one at this URL."""
        self.instance = instance
        if not instance:
            return
        if self.last_instance not in ("", instance):
            _log.warning("peer %s is another store than before", url_text(self.url))
        self.last_instance = instance

    def _learn_divergence(self, report: SyncReport) -> None:
        now_ms = _now_ms()
        if report.proved:
            self.proved_at_ms = now_ms
        if report.in_sync:
            self.in_sync_at_ms = now_ms
            self.missing_here = self.missing_there = 0
        elif report.missing_here or report.missing_there:
            came = report.entries_received + report.claims_received
            went = report.entries_sent + report.claims_sent
            self.missing_here = max(report.missing_here - came, 0)
            self.missing_there = max(report.missing_there - went, 0)
        if not self.missing_here:
            self.apart_since_ms = None
        elif self.apart_since_ms is None:
            self.apart_since_ms = now_ms

    def wants_one_of(self, channels: Collection[str]) -> bool:
        """Whether the peer's interest, as last read, has one of the channels. True if it is not known."""
        raw = self.memory.interest
        if raw is not None and raw != self._interest_read:
            self._interest_read = raw
            self._interest = None if raw is None else decode_interest(raw)
        return self._interest is None or any(map(self._interest.matches, channels))


def _said_of(report: SyncReport) -> str:
    """The detail of a report, with the messages that this node's policy gave no verdict on."""
    failed_count = sum(each["code"] == Code.POLICY_FAILED for each in report.set_aside)
    if not failed_count:
        return report.detail
    failed = f"this node's policy gave no verdict on {failed_count} of its messages"
    return f"{report.detail}; {failed}" if report.detail else failed


def _state_of(report: SyncReport) -> PeerState:
    if report.in_sync:
        return PeerState.HEALTHY
    if report.outcome is SyncOutcome.REFUSED:
        return PeerState.REFUSED
    if report.code == Code.PEER_UNREACHABLE:
        return PeerState.UNREACHABLE
    return PeerState.FAILING


def verdict_of(report: SyncReport) -> Verdict:
    """What a session says about its peer, for the schedule."""
    if report.outcome is SyncOutcome.LOCAL_FAULT:
        return Verdict.NOTHING
    if not report.in_sync:
        return Verdict.FAILED
    return Verdict.APART if report.detail == NOTHING_SHARED else Verdict.GOOD


# ---- divergence

COUNTED_MAX = 10_000  # entries of one record: some ten milliseconds


async def divergence_of(
    peer: Peer, memory: PeerMemory, store: Store, index: NodeIndex, now_ms: int
) -> dict[str, Any]:
    """The record as JSON. `memory`: of the process that holds the peer, or as it was written last.

    `missing_there_is_exact` is false if there is more than `COUNTED_MAX`, or nothing was proved yet.
    """
    missing_there, is_exact, oldest_ms = peer.missing_there, False, None
    baseline = memory.baselines[-1] if memory.baselines else None
    if baseline is not None:
        seqs = await _arrived_after(baseline, store, index)
        if seqs is not None:
            missing_there, is_exact = len(seqs), len(seqs) <= COUNTED_MAX
            oldest_ms = await store.arrivals.received_at_ms(min(seqs)) if seqs else None
    first_seen = [
        each for each in (oldest_ms, peer.apart_since_ms if peer.missing_here else None) if each
    ]
    oldest = min(first_seen, default=None)
    aside = [each.lacked_by for kept in memory.asides[-1:] for each in kept.elements]
    return {
        "missing_here": peer.missing_here,
        "missing_there": missing_there,
        "missing_there_is_exact": is_exact,
        "set_aside_here": aside.count(LackedBy.HERE),
        "set_aside_there": aside.count(LackedBy.THERE),
        "oldest_difference_at_ms": oldest,
        "oldest_difference_age_s": None if oldest is None else max(now_ms - oldest, 0) / 1_000,
        "proved_at_ms": peer.proved_at_ms,
    }


async def _arrived_after(baseline: Baseline, store: Store, index: NodeIndex) -> list[int] | None:
    """The numbers of the entries that the peer lacks, one more than the bound at most."""
    numbers = numbers_of(baseline.own, store.mark_secret, baseline.interest)
    try:
        interest = decode_interest(baseline.interest)
    except RemoteProtocolError:
        return None
    if numbers is None:
        return None
    last, _ = await store.arrivals.watermark()
    await index.catch_up()
    channels = index.channel_numbers(interest)
    rows = await store.arrivals.entries_between(numbers.entry, last, channels, COUNTED_MAX + 1)
    brought = unpack_elements(baseline.counted_out)
    window = interest.window
    return [
        seq
        for seq, _, lamport, digest in rows
        if digest not in brought
        and (order := order_of_lamport(lamport)) >= window.lower
        and (window.upper is None or order < window.upper)
    ]
