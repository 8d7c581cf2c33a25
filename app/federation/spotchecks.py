"""Spot checks of the peers that this node syncs with (`sdstore.sync.spotcheck`), for the audit.

A check follows a proved session on the same connection: one request of some 300 bytes and a
millisecond. What it finds is counted, and a false proof makes the next session compare everything.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from app.audit import Findings, Kind
from app.errors import Problem
from app.limits import Limits
from app.recon.index import NodeIndex
from app.recon.replica import NodeReplica
from recon.errors import RemoteProtocolError
from recon.session import decode_interest
from sdstore.sync.exchange import NonceExpiredError, Transport
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import SyncError
from sdstore.sync.spotcheck import Difference, Verdict, check_part, forget_proof

JITTER = 0.25
"""Of the interval between two checks: those of many peers spread."""

WHOLE_AGAIN_S_MIN = 3_600.0
"""Between two whole sessions that checks of one peer cause: a lying peer causes no more."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Checked:
    """The checks of one peer: their verdicts, and when the last one was."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    last_at_ms: int | None = None
    due_at_s: float = 0.0
    whole_at_s: float | None = None
    difference: Difference | None = None

    def document(self) -> dict[str, Any]:
        """The checks as JSON."""
        counts = {each.value: self.verdicts[each] for each in Verdict}
        return counts | {"last_at_ms": self.last_at_ms}


class SpotChecks:
    """Checks peers after proved sessions. `checked`: by peer ID, of peers that were checked."""

    def __init__(self, index: NodeIndex, findings: Findings, limits: Limits) -> None:
        self.checked: dict[str, Checked] = {}
        self._index = index
        self._findings = findings
        self._limits = limits
        self._random = random.Random()

    async def after_proof(
        self, peer_id: str, url: str, memory: PeerMemory, replica: NodeReplica, transport: Transport
    ) -> PeerMemory:
        """Check the peer if that is due; returns its memory, without its proof if that was false."""
        if not memory.baselines or not memory.responder_nonce:
            return memory
        checked = self.checked.setdefault(peer_id, Checked())
        now_s = time.monotonic()
        if checked.difference is None and now_s < checked.due_at_s:
            return memory
        interval_s = self._limits.audit_peer_interval_s
        checked.due_at_s = now_s + interval_s * self._random.uniform(1 - JITTER, 1 + JITTER)
        before, checked.difference = checked.difference, None
        part = self._index.random_part(
            decode_interest(memory.baselines[-1].interest),
            self._limits.audit_part_elements_max,
            self._random,
        )
        if part is None:
            return memory
        try:
            verdict, checked.difference = await check_part(
                replica,
                transport,
                memory,
                part,
                replica.nonce_secret,
                self._index.prepare_view,
                before,
            )
        except (SyncError, NonceExpiredError, RemoteProtocolError, Problem) as error:
            _log.debug("%s was not checked: %s", url, error)
            return memory
        checked.verdicts[verdict] += 1
        checked.last_at_ms = time.time_ns() // 1_000_000
        if verdict is not Verdict.FALSE_PROOF:
            return memory
        checked.difference = None
        self._findings.add(Kind.PEER, f"{url} was proved equal and differs in a part of the set")
        if checked.whole_at_s is not None and now_s - checked.whole_at_s < WHOLE_AGAIN_S_MIN:
            return memory
        checked.whole_at_s = now_s
        return forget_proof(memory)

    def forget(self, peer_id: str) -> None:
        """Forget a peer that was removed."""
        self.checked.pop(peer_id, None)
