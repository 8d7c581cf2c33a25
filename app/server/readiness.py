"""Readiness: the database answered recently and can be written, and the access tokens can be read.

The node probes the database once a second, and again for a caller that finds the last answer old. So a
pause of this process never counts as a fault of the database. Each change is logged once. After a write
that failed because the database is damaged, the node stays unready until it is restarted: a later
write may succeed only because it touches no damaged page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.errors import Problem
from app.ingest.committer import GroupCommitter
from app.server.limits import Limits
from app.store.store import Store

PATIENCE_S = 1.0
"""The longest wait for an answer of the database, which usually takes a millisecond."""

_log = logging.getLogger(__name__)


class Cause(StrEnum):
    """Kinds of reasons: labels of the metric."""

    STOPPING = "stopping"
    DAMAGE = "damage"
    WRITING = "writing"
    DATABASE = "database"
    TOKENS = "tokens"


class Readiness(Collector):
    """The readiness of one process. `watch` runs as long as the node is open."""

    def __init__(self, store: Store, committer: GroupCommitter, limits: Limits) -> None:
        self._store = store
        self._committer = committer
        self._interval_s = limits.database_probe_interval_s
        self._age_s_max = limits.database_answer_age_s_max
        self._asking: asyncio.Task[None] | None = None
        self._answered_at_s = time.monotonic()
        self._refusal: str | None = None
        self._unready_since_s: float | None = None
        self.is_stopping = False
        # Asked for a reason why the node is not ready, beside the database.
        self.refusals: dict[Cause, Callable[[], str | None]] = {}

    @property
    def reason(self) -> str | None:
        """Why the node is not ready, by its current knowledge; None if it is ready."""
        return next(iter(self.reasons().values()), None)

    def reasons(self) -> dict[Cause, str]:
        """All reasons that hold, the most important one first."""
        damage, fault, refusal = self._committer.damage, self._committer.fault, self._refusal
        if refusal is None and self._is_old:
            refusal = f"the database has not answered for {self._age_s_max} s"
        found = {
            Cause.STOPPING: "the node is about to stop" if self.is_stopping else None,
            Cause.DAMAGE: damage and f"{damage.detail}; repair the database, then restart the node",
            Cause.WRITING: fault and fault.detail,
            Cause.DATABASE: refusal,
            **{cause: ask() for cause, ask in self.refusals.items()},
        }
        return {cause: reason for cause, reason in found.items() if reason}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        family = GaugeMetricFamily(
            "sdstore_ready", "0 while the node is not ready for this reason", labels=("reason",)
        )
        reasons = self.reasons()
        for cause in Cause:
            family.add_metric([cause], cause not in reasons)
        yield family

    async def check(self) -> str | None:
        """`reason`, after a new probe of the database if the last answer is old."""
        if self._is_old:
            await self._ask()
        return self.reason

    async def watch(self) -> None:
        """Probe once a second, and log each change."""
        while True:
            await self._ask()
            self._log_change()
            await asyncio.sleep(self._interval_s)

    @property
    def _is_old(self) -> bool:
        return time.monotonic() - self._answered_at_s > self._age_s_max

    async def _ask(self) -> None:
        # All callers share one probe; a hung probe is not repeated.
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._probe(), name="database probe")
        await asyncio.wait({self._asking}, timeout=PATIENCE_S)

    async def _probe(self) -> None:
        try:
            await self._store.ping()
        except Problem as problem:
            self._refusal = problem.detail
        else:
            self._refusal = None
            self._answered_at_s = time.monotonic()

    def _log_change(self) -> None:
        reason = None if self.is_stopping else self.reason
        if reason is not None and self._unready_since_s is None:
            self._unready_since_s = time.monotonic()
            _log.warning("not ready: %s", " ".join(reason.split()))
        elif reason is None and self._unready_since_s is not None:
            _log.info("ready again after %.1f s", time.monotonic() - self._unready_since_s)
            self._unready_since_s = None

    async def close(self) -> None:
        """Cancel a pending probe."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
