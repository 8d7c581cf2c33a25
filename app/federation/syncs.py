"""The sessions of this node, running and finished, with their progress.

A watcher sees the latest state, never a queue of past ones, so a watcher that does not read costs
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import Code, Problem
from app.limits import Limits
from app.logs import begin_sync
from sdstore.sync.report import Progress, SyncOutcome, SyncReport

_log = logging.getLogger(__name__)

EVENT_INTERVAL_S = 0.1  # ten times a second looks continuous

RunSync = Callable[[Callable[[Progress], None]], Awaitable[SyncReport]]
"""Runs one session; it calls its argument with the progress after each change."""


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One state of a session; `name` is progress, or end for the last one."""

    number: int
    name: str
    document: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Sync:
    """One session. `report` is set once it has finished."""

    sync_id: str
    peer_url: str
    peer_id: str
    channels: tuple[str, ...]
    dry_run: bool
    started_at_ms: int
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
            "started_at_ms": self.started_at_ms,
            "finished_at_ms": self.finished_at_ms,
            "progress": progress,
            "report": asdict(self.report) if self.report else None,
        }

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
        self.notify()

    def notify(self) -> None:
        """Wake all waiters for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class Syncs:
    """The sessions of a node, running and remembered."""

    def __init__(self, limits: Limits) -> None:
        self._remembered_max = limits.syncs_remembered_max
        self._syncs: dict[str, Sync] = {}

    def start(
        self,
        run: RunSync,
        *,
        peer_url: str,
        peer_id: str = "",
        channels: tuple[str, ...] = (),
        dry_run: bool = False,
    ) -> Sync:
        """Start a session in the background.

        Raises Problem: SYNC_BUSY while a session with this peer runs, OVERLOADED while the maximum
        number of sessions runs.
        """
        for each in self._syncs.values():
            if each.peer_url == peer_url and not each.is_finished:
                detail = f"a sync with {peer_url} is running; see GET /v1/syncs/{each.sync_id}"
                raise Problem(Code.SYNC_BUSY, detail, extra={"sync_id": each.sync_id})
        self._forget_oldest()
        sync = Sync(
            sync_id=secrets.token_hex(8),
            peer_url=peer_url,
            peer_id=peer_id,
            channels=channels,
            dry_run=dry_run,
            started_at_ms=_now_ms(),
        )
        self._syncs[sync.sync_id] = sync
        sync.task = asyncio.create_task(self._run(sync, run), name=f"sync {peer_url}")
        return sync

    def get(self, sync_id: str) -> Sync:
        """The session with this ID. Raises Problem(NOT_FOUND)."""
        if sync_id not in self._syncs:
            raise Problem(Code.NOT_FOUND, f"no sync {sync_id}")
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

    async def close(self) -> None:
        """End all running sessions."""
        tasks = [s.task for s in self._syncs.values() if s.task and not s.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, sync: Sync, run: RunSync) -> None:
        begin_sync(sync.sync_id)
        report = SyncReport(outcome=SyncOutcome.PARTIAL, detail="this node was shut down")
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
            sync.report = report
            sync.notify()

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


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
