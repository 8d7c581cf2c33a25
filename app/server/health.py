"""What the node reports of itself: readiness, and its counters for Prometheus.

A node is ready if the database answered recently and can be written, and the access tokens can be read. The
node probes the database once a second, and again for a caller that finds the last answer old. So a pause of
this process never counts as a fault of the database. Each change is logged once. After a write that failed
because the database is damaged, the node stays unready until it is restarted: a later write may succeed only
because it touches no damaged page.

Counters have the prefix `sdstore_` and are read when they are scraped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.access.tokens import Tokens
from app.errors import Problem
from app.federation.client import url_text
from app.federation.links import Links
from app.federation.peer import PeerState, PeerTotals
from app.federation.peers import Peers
from app.ingest.door import GroupCommitter
from app.live.hub import LiveHub
from app.live.relay import Relay
from app.orders import Orders
from app.recon.index import NodeIndex
from app.server.limits import Limits
from app.server.supervisor import Supervisor
from app.store.recovery import LostContent
from app.store.store import Store
from sdstore.sync.report import SyncOutcome

# ---- readiness

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


# ---- counters

Family = CounterMetricFamily | GaugeMetricFamily

NOT_A_PEER = "other"
"""Label of all stores together that were synced with by URL."""


def register_node_metrics(
    registry: CollectorRegistry,
    committer: GroupCommitter,
    index: NodeIndex,
    live: LiveHub,
    orders: Orders,
    lost_content: LostContent,
    peers: Peers,
) -> None:
    """Add ingest, index, content, peer and process families to a registry."""
    registry.register(_NodeCollector(committer, index, live, orders, lost_content))
    registry.register(_PeerCollector(peers))
    ProcessCollector(namespace="sdstore", registry=registry)


def register_relay_metrics(registry: CollectorRegistry, relay: Relay, links: Links) -> None:
    """Add the families of relayed messages and nudges to a registry."""
    registry.register(_RelayCollector(relay, links))


def register_task_metrics(registry: CollectorRegistry, supervisor: Supervisor) -> None:
    """Add the families of background tasks to a registry."""
    registry.register(_TaskCollector(supervisor))


def register_expiry_metrics(
    registry: CollectorRegistry, certificate: Callable[[], float | None], tokens: Tokens
) -> None:
    """Add the times at which the certificate and the tokens expire to a registry."""
    registry.register(_ExpiryCollector(certificate, tokens))


class _ExpiryCollector(Collector):
    def __init__(self, certificate: Callable[[], float | None], tokens: Tokens) -> None:
        self._certificate = certificate
        self._tokens = tokens

    def collect(self) -> Iterator[Family]:
        # Both are there without a value too, so that an alert can be checked on any node.
        family = GaugeMetricFamily(
            "sdstore_certificate_not_after_seconds",
            "When the TLS certificate, or one of its chain, expires",
        )
        if (ends_s := self._certificate()) is not None:
            family.add_metric([], ends_s)
        yield family
        family = GaugeMetricFamily(
            "sdstore_token_not_after_seconds", "When an access token expires", labels=("token",)
        )
        for token_id, ends_s in self._tokens.expiries().items():
            family.add_metric([token_id], ends_s)
        yield family


class _TaskCollector(Collector):
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Family]:
        failures = CounterMetricFamily(
            "sdstore_task_failures", "Failures of background tasks", labels=("task",)
        )
        failing = GaugeMetricFamily(
            "sdstore_task_failing",
            "1 from a failure of the background task until it works again, else 0",
            labels=("task",),
        )
        names = self._supervisor.failing
        for name, count in sorted(self._supervisor.failures.items()):
            failures.add_metric([name], count)
            failing.add_metric([name], name in names)
        yield from (failures, failing)


class _NodeCollector(Collector):
    def __init__(
        self,
        committer: GroupCommitter,
        index: NodeIndex,
        live: LiveHub,
        orders: Orders,
        lost_content: LostContent,
    ) -> None:
        self._committer = committer
        self._index = index
        self._live = live
        self._orders = orders
        self._lost_content = lost_content

    def collect(self) -> Iterator[Family]:
        counters = self._committer.counters
        yield _counter("ingest_groups", "Transactions committed", counters.groups)
        yield _counter("ingest_entries", "Messages in committed transactions", counters.entries)
        yield _counter("ingest_bytes", "Bytes of frames committed", counters.bytes)
        yield _counter("ingest_failed_groups", "Transactions that failed", counters.failed_groups)
        yield _gauge(
            "ingest_group_largest", "Messages of the largest transaction", counters.largest_group
        )
        yield _gauge("ingest_queue_items", "Messages waiting", counters.queue_items)
        yield _gauge("ingest_queue_bytes", "Bytes of frames waiting", counters.queue_bytes)
        yield _gauge("index_elements", "Elements of the range index", len(self._index.elements))
        lost = self._lost_content.lost_count
        yield _gauge("content_lost", "Messages whose content cannot be read", lost)
        yield _counter(
            "content_mended", "Lost messages whose content came again", counters.mended_entries
        )
        read = self._lost_content.read_count
        yield _counter("verified_frames", "Stored frames read by passes over all of them", read)
        ended_s = self._lost_content.pass_ended_s
        yield _gauge(
            "verification_pass_ended_seconds",
            "When the last pass over all frames ended; 0 before the first",
            ended_s,
        )
        yield _gauge("live_readers", "Live readers connected", self._live.readers_count)
        yield _gauge("orders_cached", "Orders of channels in memory", self._orders.count)
        yield _gauge("orders_bytes", "Memory of the orders, estimated", self._orders.bytes_count)


class _RelayCollector(Collector):
    def __init__(self, relay: Relay, links: Links) -> None:
        self._relay = relay
        self._links = links

    def collect(self) -> Iterator[Family]:
        counters = self._relay.counters
        yield _gauge("relay_links", "Links with peers that are up", self._links.count)
        relayed = CounterMetricFamily(
            "sdstore_relayed",
            "Sync and ephemeral messages by outcome; dropped counts each peer or worker that was too slow",
            labels=("outcome",),
        )
        relayed.add_metric(["passed"], counters.passed)
        relayed.add_metric(["duplicate"], counters.duplicate)
        relayed.add_metric(["refused"], counters.refused)
        unsent = 0 if self._relay.bus is None else self._relay.bus.dropped_count
        relayed.add_metric(["dropped"], counters.dropped + unsent)
        yield relayed
        nudges = CounterMetricFamily(
            "sdstore_nudges", "Nudges from and to peers", labels=("direction",)
        )
        nudges.add_metric(["received"], counters.nudges_received)
        nudges.add_metric(["sent"], counters.nudges_sent)
        yield nudges


class _PeerCollector(Collector):
    """Labels: the URLs of peers, which only an operator can make, and closed sets.

    Syncs with stores that are not peers share the label `other`.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Family]:
        # Each peer is reported by the process that syncs with it.
        peers = [(url_text(peer.url), peer) for peer in self._peers.held()]
        totals = [(url, peer.totals) for url, peer in peers]
        if self._peers.unlisted.outcomes:
            totals.append((NOT_A_PEER, self._peers.unlisted))
        yield from _sync_families(totals)
        state = GaugeMetricFamily(
            "sdstore_peer_state", "1 for the state of a peer, else 0", labels=("peer", "state")
        )
        failures = GaugeMetricFamily(
            "sdstore_peer_failures", "Failed syncs since the last good one", labels=("peer",)
        )
        missing = GaugeMetricFamily(
            "sdstore_peer_missing",
            "Entries and hint claims that the last sync found missing on one side and did not move",
            labels=("peer", "side"),
        )
        apart = GaugeMetricFamily(
            "sdstore_peer_apart_since_timestamp_seconds",
            "When a sync first left something missing here; absent if nothing is",
            labels=("peer",),
        )
        proof = GaugeMetricFamily(
            "sdstore_peer_last_proof_timestamp_seconds",
            "When both sides were last proved equal",
            labels=("peer",),
        )
        for url, peer in peers:
            if peer.proved_at_ms is not None:
                proof.add_metric([url], peer.proved_at_ms / 1_000)
            for each in PeerState:
                state.add_metric([url, each], peer.state is each)
            failures.add_metric([url], peer.failures)
            for side, count in (("here", peer.missing_here), ("there", peer.missing_there)):
                if count is not None:
                    missing.add_metric([url, side], count)
            if peer.apart_since_ms is not None:
                apart.add_metric([url], peer.apart_since_ms / 1_000)
        yield from (proof, state, failures, missing, apart)
        yield _counter(
            "peers_vanished",
            "Peers that another process removed, or that no running node's settings name",
            self._peers.vanished_count,
        )


def _sync_families(totals: list[tuple[str, PeerTotals]]) -> Iterator[Family]:
    syncs = _by_peer("syncs", "Syncs by outcome", "outcome")
    seconds = _by_peer("sync_seconds", "Time spent in syncs")
    rounds = _by_peer("sync_rounds", "Round trips of syncs")
    sent_bytes = _by_peer("sync_bytes", "Bytes of bodies in syncs, as sent", "direction")
    elements = _by_peer("elements", "Entries and hint claims moved", "direction", "kind")
    mended = _by_peer("mended", "Entries that got their lost content back")
    lost = GaugeMetricFamily(
        "sdstore_peer_lost_content",
        "Entries whose content is lost here and that the last sync did not mend",
        labels=("peer",),
    )
    aside = GaugeMetricFamily(
        "sdstore_peer_set_aside",
        "Elements that the last sync left out, because one side cannot send or refuses them",
        labels=("peer",),
    )
    for url, each in totals:
        for outcome in SyncOutcome:
            syncs.add_metric([url, outcome], each.outcomes[outcome])
        seconds.add_metric([url], each.seconds)
        rounds.add_metric([url], each.amounts["rounds"])
        for direction in ("up", "down"):
            sent_bytes.add_metric([url, direction], each.amounts[f"bytes_{direction}"])
        for direction in ("received", "sent", "refused"):
            for kind in ("entries", "claims"):
                elements.add_metric([url, direction, kind], each.amounts[f"{kind}_{direction}"])
        mended.add_metric([url], each.amounts["mended"])
        lost.add_metric([url], each.lost_count)
        aside.add_metric([url], each.set_aside_count)
    yield from (syncs, seconds, rounds, sent_bytes, elements, mended, lost, aside)


def _by_peer(name: str, about: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"sdstore_peer_{name}", about, labels=("peer", *labels))


def _counter(name: str, about: str, value: float) -> Family:
    return CounterMetricFamily(f"sdstore_{name}", about, value=value)


def _gauge(name: str, about: str, value: float) -> Family:
    return GaugeMetricFamily(f"sdstore_{name}", about, value=value)
