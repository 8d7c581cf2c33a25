"""The sessions of this node, running and finished, with their progress.

A watcher sees the latest state, never a queue of past ones, so a watcher that does not read costs
nothing. Sessions of this process are in memory; those of other processes, and of earlier ones, are read
from their records in the database (`app.store.peerrows`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from app.errors import Code, Problem
from app.server.limits import Limits
from app.server.logs import begin_sync
from app.store.peerrows import Document, SyncRow, SyncRows
from sdstore.sync.report import Progress, SyncOutcome, SyncReport

_log = logging.getLogger(__name__)

EVENT_INTERVAL_S = 0.1  # ten times a second looks continuous
RECORD_INTERVAL_S = 1.0  # from one writing of a running session's record to the next, if it changed
TOUCH_S = 5.0  # if it did not: see `app.store.peerrows.ABANDONED_S`

RunSync = Callable[[Callable[[Progress], None]], Awaitable[SyncReport]]
"""Runs one session; it calls its argument with the progress after each change."""


class StartedBy(StrEnum):
    """Who started a session."""

    SCHEDULE = "schedule"
    NUDGE = "nudge"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One state of a session; `name` is progress, or end for the last one."""

    number: int
    name: str
    document: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Sync:
    """One session. `report` is set once it has finished.

    `process` runs it. `end_reason` says why it was cancelled. `is_kept`: its record is in the database,
    or due to be. `recorded`: the progress that was written last, and when.
    """

    sync_id: str
    peer_url: str
    peer_id: str
    channels: tuple[str, ...]
    dry_run: bool
    started_at_ms: int
    started_by: StartedBy = StartedBy.SCHEDULE
    process: str = ""
    end_reason: str = "this node was shut down"
    is_kept: bool = False
    recorded: tuple[Progress | None, float] = (None, 0.0)
    first_percent: float | None = None
    finished_at_ms: int | None = None
    progress: Progress = field(default_factory=Progress)
    report: SyncReport | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the session has a report."""
        return self.report is not None

    def document(self) -> dict[str, Any]:
        """The session as JSON."""
        progress = asdict(self.progress)
        progress["segments"] = [
            {"state": state, "share": round(share, 4)} for state, share in self.progress.segments
        ]
        return {
            "id": self.sync_id,
            "peer_url": self.peer_url,
            "peer_id": self.peer_id,
            "channels": list(self.channels),
            "dry_run": self.dry_run,
            "state": "finished" if self.is_finished else "running",
            "started_by": self.started_by,
            "process": self.process,
            "started_at_ms": self.started_at_ms,
            "finished_at_ms": self.finished_at_ms,
            "outcome": self.report.outcome if self.report else None,
            "progress": progress,
            **self._pace(),
            "report": asdict(self.report) if self.report else None,
        }

    def _pace(self) -> dict[str, float | None]:
        """Entries and bytes a second so far, both ways, and the seconds that the rest will take."""
        end_ms = _now_ms() if self.finished_at_ms is None else self.finished_at_ms
        elapsed_s = max(end_ms - self.started_at_ms, 1) / 1_000
        done = self.progress if self.report is None else self.report
        percent, first = self.progress.in_sync_percent, self.first_percent
        eta_s = None
        if self.report is None and first is not None and percent > first:
            eta_s = round(elapsed_s * (100 - percent) / (percent - first), 1)
        return {
            "entries_per_s": round((done.entries_received + done.entries_sent) / elapsed_s, 1),
            "bytes_per_s": round((done.bytes_up + done.bytes_down) / elapsed_s, 1),
            "eta_s": eta_s,
        }

    def row(self) -> SyncRow:
        """The record of the session."""
        document = self.document()
        return SyncRow(self.sync_id, self.peer_id, self.process, self.finished_at_ms, document)

    async def finished(self) -> SyncReport:
        """Wait for the report."""
        while self.report is None:
            await self.next_change()
        return self.report

    async def next_change(self) -> None:
        """Wait for the next change of the state."""
        await self.changed.wait()

    def show(self, progress: Progress) -> None:
        """Set the progress of the session."""
        self.progress = progress
        if self.first_percent is None and progress.segments:
            self.first_percent = progress.in_sync_percent
        self.notify()

    def notify(self) -> None:
        """Wake all waiters for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class Syncs:
    """The sessions of a node, running and remembered.

    `process` names the process in the records of its sessions.
    """

    def __init__(self, limits: Limits, rows: SyncRows | None = None, process: str = "") -> None:
        self._remembered_max = limits.syncs_remembered_max
        self._rows = rows
        self._process = process
        self._syncs: dict[str, Sync] = {}
        # The end of the last session with each store: one that ends likewise and moved nothing says nothing.
        self._last_ends: dict[str, tuple[SyncOutcome, str]] = {}

    def start(
        self,
        run: RunSync,
        *,
        peer_url: str,
        peer_id: str = "",
        channels: tuple[str, ...] = (),
        dry_run: bool = False,
        started_by: StartedBy = StartedBy.SCHEDULE,
        sync_id: str | None = None,
    ) -> Sync:
        """Start a session in the background, under a given ID or a new one.

        Raises Problem: SYNC_BUSY while a session with this peer runs, OVERLOADED while the maximum
        number of sessions runs.
        """
        for each in self._syncs.values():
            if each.peer_url == peer_url and not each.is_finished:
                raise sync_busy(peer_url, each.sync_id)
        self._forget_oldest()
        sync = Sync(
            sync_id=sync_id or new_sync_id(),
            peer_url=peer_url,
            peer_id=peer_id,
            channels=channels,
            dry_run=dry_run,
            started_at_ms=_now_ms(),
            started_by=started_by,
            process=self._process,
            is_kept=started_by is StartedBy.OPERATOR,
        )
        self._syncs[sync.sync_id] = sync
        sync.task = asyncio.create_task(self._run(sync, run), name=f"sync {peer_url}")
        return sync

    def get(self, sync_id: str) -> Sync:
        """The session with this ID. Raises Problem(NOT_FOUND)."""
        if sync_id not in self._syncs:
            raise Problem(Code.NOT_FOUND, f"no sync {sync_id[:64]}")
        return self._syncs[sync_id]

    def recent(self) -> list[Sync]:
        """All remembered sessions, newest first."""
        return list(reversed(self._syncs.values()))

    async def events(self, sync_id: str) -> AsyncIterator[SyncEvent]:
        """The state now and after each change, at most ten a second, until the end."""
        sync = self.get(sync_id)
        number = 0
        while not sync.is_finished:
            number += 1
            change = sync.changed
            yield SyncEvent(number, "progress", sync.document())
            await asyncio.sleep(EVENT_INTERVAL_S)
            if not sync.is_finished:
                await change.wait()
        yield SyncEvent(number + 1, "end", sync.document())

    # ---- records

    def unwritten(self) -> list[Sync]:
        """Sessions whose records are due.

        Those that run for a second or longer; and those that ended, if they moved something, ended
        otherwise than the one before, or were asked for by an operator.
        """
        now_s = time.monotonic()
        due = []
        for sync in self._syncs.values():
            written, at_s = sync.recorded
            if sync.is_finished:
                is_due = sync.is_kept and at_s != inf
            elif sync.is_kept or _now_ms() - sync.started_at_ms >= RECORD_INTERVAL_S * 1_000:
                is_due = now_s - at_s >= (
                    TOUCH_S if written is sync.progress else RECORD_INTERVAL_S
                )
            else:
                is_due = False
            if is_due:
                due.append(sync)
        return due

    async def documents(self) -> list[Document]:
        """All remembered sessions as JSON, of all processes, newest first."""
        found = {each.sync_id: each.document() for each in self.recent()}
        for row in await self._rows.recent() if self._rows else ():
            found.setdefault(row.sync_id, row.document)
        return sorted(found.values(), key=lambda each: -_number(each.get("started_at_ms")))[
            : self._remembered_max
        ]

    async def find(self, sync_id: str) -> Document:
        """A session of any process as JSON. Raises Problem(NOT_FOUND)."""
        if sync_id in self._syncs:
            return self._syncs[sync_id].document()
        row = await self._rows.get(sync_id) if self._rows else None
        if row is None:
            raise Problem(Code.NOT_FOUND, f"no sync {sync_id[:64]}")
        return row.document

    async def watch(self, sync_id: str) -> AsyncIterator[SyncEvent]:
        """As `events`, also for a session of another process: then at most one event a second."""
        number = 0
        shown: Document = {}
        while sync_id not in self._syncs:
            document = await self.find(sync_id)
            if document.get("state") == "finished":
                yield SyncEvent(number + 1, "end", document)
                return
            if document != shown:
                number, shown = number + 1, document
                yield SyncEvent(number, "progress", document)
            await asyncio.sleep(RECORD_INTERVAL_S)
        async for each in self.events(sync_id):
            yield each

    async def close(self) -> None:
        """End all running sessions."""
        tasks = [s.task for s in self._syncs.values() if s.task and not s.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, sync: Sync, run: RunSync) -> None:
        begin_sync(sync.sync_id)
        report: SyncReport | None = None
        try:
            report = await run(sync.show)
        except Exception:  # noqa: BLE001 - logged, and reported below
            # No caller awaits this task: without a report its watchers would wait for ever.
            _log.exception("the sync with %s failed", sync.peer_url)
            report = SyncReport(
                outcome=SyncOutcome.LOCAL_FAULT,
                code=Code.INTERNAL_ERROR,
                detail="the fault is this node's; see its log",
            )
        finally:
            sync.finished_at_ms = _now_ms()
            sync.report = report or SyncReport(outcome=SyncOutcome.PARTIAL, detail=sync.end_reason)
            self._judge(sync, sync.report)
            sync.notify()

    def _judge(self, sync: Sync, report: SyncReport) -> None:
        """Decide whether the record of a session that ended is kept."""
        end = (report.outcome, report.code)
        before = self._last_ends.pop(sync.peer_url, (SyncOutcome.IN_SYNC, ""))
        self._last_ends[sync.peer_url] = end
        while len(self._last_ends) > self._remembered_max:
            del self._last_ends[next(iter(self._last_ends))]
        has_moved = any(getattr(report, name) for name in MOVED)
        sync.is_kept = sync.is_kept or has_moved or end != before or sync.recorded[1] > 0

    def _forget_oldest(self) -> None:
        if len(self._syncs) < self._remembered_max:
            return
        oldest = next((s for s in self._syncs.values() if s.is_finished), None)
        if oldest is None:
            raise Problem(
                Code.OVERLOADED,
                f"{self._remembered_max} syncs are running, the maximum; retry when one has finished",
            )
        del self._syncs[oldest.sync_id]


MOVED = (
    "entries_received",
    "entries_sent",
    "entries_refused",
    "claims_received",
    "claims_sent",
    "claims_refused",
    "mended",
)
"""Figures of a report that count what a session did with content."""


def sync_busy(peer_url: str, sync_id: str) -> Problem:
    """The error of a second session with a store."""
    detail = f"a sync with {peer_url} is running; see GET /v1/syncs/{sync_id}"
    return Problem(Code.SYNC_BUSY, detail, extra={"sync_id": sync_id})


def new_sync_id() -> str:
    """The ID of a new session."""
    return secrets.token_hex(8)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
