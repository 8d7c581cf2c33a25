"""A node: all parts of one process of the service, opened and closed in order, and the settings that change
while it runs: on SIGHUP, and over HTTP."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from cryptography import x509
from prometheus_client import CollectorRegistry

from app.access.callers import AnonymousCallers
from app.access.operator import operator_token
from app.access.rates import Rates, ReconBudgets
from app.access.tokens import TokenFile, Tokens, tokens_path
from app.errors import SettingsError
from app.federation.interests import Interests, interest_of
from app.federation.links import Links
from app.federation.peers import Peers
from app.federation.records import Records
from app.federation.syncs import Syncs
from app.ingest.door import DiskWatermark, Door, GroupCommitter
from app.ingest.policy import Judge, LoadedPolicy, load_policy
from app.ingest.quarantine import FILE as QUARANTINE_FILE
from app.ingest.quarantine import Quarantine
from app.ingest.retention import Retention
from app.ingest.retirement import ERASE_EVERY_S, Retirement
from app.live.hub import LiveHub
from app.live.relay import Relay
from app.mvds import MvdsEndpoint
from app.orders import Orders
from app.recon.endpoint import NegentropyEndpoint, ReconEndpoint
from app.recon.index import NodeIndex
from app.recon.replica import NodeReplica
from app.server.disk import kept_once
from app.server.health import (
    Cause,
    Readiness,
    register_expiry_metrics,
    register_node_metrics,
    register_relay_metrics,
    register_task_metrics,
)
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.logs import set_level
from app.server.settings import Settings
from app.server.sharing import Sharing
from app.server.supervisor import Supervisor
from app.server.workers import WorkerPlace
from app.store.groupwriter import wall_clock_ms
from app.store.recovery import LostContent
from app.store.store import Store

SECRET_BYTES = 32
INSTANCE_BYTES = 16
INDEX_FILE = "index.checkpoint"
INDEX_FOLLOW_S = 1.0
"""Pauses after which the range index follows what was committed, so that no session has to wait for it."""

_log = logging.getLogger(__name__)


class Certificate(NamedTuple):
    """The file of a TLS certificate and its chain. `not_after_s`: when the first of them expires."""

    sha256: bytes
    not_after_s: float
    path: Path

    @property
    def is_expired(self) -> bool:
        """Whether callers refuse it."""
        return self.not_after_s <= time.time()

    @property
    def expiry(self) -> str:
        """When it expired, as a part of a sentence."""
        moment = datetime.fromtimestamp(self.not_after_s, UTC)
        return f"tls_cert {self.path} expired at {moment:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(slots=True)
class Access:
    """Who may do what, and how much of it."""

    tokens: Tokens
    anonymous: AnonymousCallers
    rates: Rates


@dataclass(slots=True)
class Ingest:
    """How every message enters the store. `judge` calls `policy`, if there is one."""

    committer: GroupCommitter
    door: Door
    quarantine: Quarantine
    judge: Judge | None
    policy: LoadedPolicy | None
    retirement: Retirement
    retention: Retention


@dataclass(slots=True)
class Live:
    """What is told at once: to live readers, and to streams of other stores."""

    hub: LiveHub
    relay: Relay


@dataclass(slots=True)
class Recon:
    """The responding side of comparisons."""

    index: NodeIndex
    endpoint: ReconEndpoint
    negentropy: NegentropyEndpoint


@dataclass(slots=True)
class Federation:
    """The initiating side, and the channels that this node wants."""

    interests: Interests
    peers: Peers
    syncs: Syncs
    links: Links


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """See the module; `Node.open` makes one. Its parts are grouped as the folders of `app`."""

    settings: Settings
    limits: Limits
    instance_id: str
    store: Store
    lost_content: LostContent
    access: Access
    ingest: Ingest
    live: Live
    recon: Recon
    federation: Federation
    mvds: MvdsEndpoint
    orders: Orders
    # The process.
    sharing: Sharing
    supervisor: Supervisor
    readiness: Readiness
    metrics: CollectorRegistry
    worker: WorkerPlace | None = None
    tls: ssl.SSLContext | None = None
    certificate: Certificate | None = None
    # Called with the settings after each reload.
    reload_listeners: list[Callable[[Settings], None]] = field(default_factory=list)

    @property
    def node_id(self) -> str:
        """Names the store behind this node, for as long as its database lives."""
        return self.store.database_id

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        limits: Limits = DEFAULT_LIMITS,
        worker: WorkerPlace | None = None,
    ) -> AsyncIterator[Node]:
        """An open node; raises `app.store.database.StoreError` if the database cannot be used.

        With several workers, only the first writes the index file and reads every frame.
        """
        is_first = worker is None or worker.is_first
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with AsyncExitStack() as closing:
            store = await Store.open(settings.database_url, limits)
            closing.push_async_callback(store.close)
            committer = GroupCommitter(store, limits)
            await committer.start()
            closing.push_async_callback(committer.close)
            node = _assemble(settings, limits, store, committer)
            closing.callback(node.close_judge)
            node.worker = worker
            tasks = node.supervisor
            node.access.tokens.says_changes = is_first
            await closing.enter_async_context(node.access.tokens.watched(tasks))
            await closing.enter_async_context(node.federation.interests.watched(tasks))
            closing.push_async_callback(node.readiness.close)
            await closing.enter_async_context(tasks.keeping("readiness", node.readiness.watch))
            await node.recon.index.start(settings.data_dir / INDEX_FILE)
            await closing.enter_async_context(
                tasks.repeating("index", node.recon.index.catch_up, INDEX_FOLLOW_S)
            )
            if is_first:
                await closing.enter_async_context(_index_kept(node))
            await closing.enter_async_context(node.lost_content.followed(tasks, reads_all=is_first))
            erase = node.ingest.retirement.erase_pending
            await closing.enter_async_context(tasks.repeating("erasure", erase, ERASE_EVERY_S))
            if is_first:
                await closing.enter_async_context(
                    tasks.keeping("retention", node.ingest.retention.run)
                )
            closing.push_async_callback(node.live.hub.close)
            closing.push_async_callback(node.federation.peers.clients.close)
            closing.push_async_callback(node.live.relay.close)
            await closing.enter_async_context(_connected_to_others(node))
            closing.push_async_callback(node.federation.peers.close_records)
            closing.push_async_callback(node.federation.syncs.close)
            # Registered before the start, so that a failed start leaves no loops running.
            closing.push_async_callback(node.federation.peers.close)
            closing.push_async_callback(node.federation.links.close)
            await node.federation.peers.start(tasks)
            node.federation.links.start(tasks)
            yield node

    def take_policy(self, policy: LoadedPolicy | None) -> None:
        """Judge by another policy from the next message on; peers offer again what the old one refused."""
        ingest = self.ingest
        old, ingest.policy = ingest.judge, policy
        new = None if policy is None else Judge(policy.rules, ingest.quarantine, self.limits)
        if old is not None:
            self.metrics.unregister(old)
            old.close()
        if new is not None:
            if old is not None:
                new.verdicts = old.verdicts  # counters of a process never fall
            self.metrics.register(new)
        ingest.judge = ingest.door.judge = new
        self.revise()

    def revise(self) -> None:
        """Take over what messages are refused now: peers offer again what was refused before."""
        self.ingest.door.demand_bound_senders(self.settings.bound_senders)
        self.federation.interests.revise(_revision(self.ingest.policy, self.settings))

    def close_judge(self) -> None:
        """End the thread of the policy, if there is one."""
        if self.ingest.judge is not None:
            self.ingest.judge.close()


@asynccontextmanager
async def _connected_to_others(node: Node) -> AsyncIterator[None]:
    """Exchange relayed messages and notices of commits with the other processes of the database."""
    if not node.settings.database_url.startswith("postgresql:"):
        yield
        return
    from app.live.notifybus import NotifyBus  # noqa: PLC0415 - an extra

    bus = NotifyBus(node.settings.database_url, node.limits, node.live.relay)
    async with bus.running(node.supervisor):
        node.live.relay.bus = bus
        yield


@asynccontextmanager
async def _index_kept(node: Node) -> AsyncIterator[None]:
    """Write the range index periodically and at the end."""
    limits = node.limits
    save = partial(node.recon.index.save, node.settings.data_dir / INDEX_FILE)
    write = partial(save, limits.index_save_growth_min)
    try:
        async with node.supervisor.repeating("index file", write, limits.index_save_interval_s):
            yield
    finally:
        try:
            await save(1)
        except Exception as error:  # noqa: BLE001 - a node closes what it opened
            # Without a new index file the next start only takes some seconds longer.
            _log.warning("the index was not written: %s: %s", type(error).__name__, error)


def _revision(policy: LoadedPolicy | None, settings: Settings) -> str:
    """Changes when this node might take messages that it refused before."""
    revision = "" if policy is None else policy.revision
    if settings.bound_senders:
        revision += f" bound senders {sorted(settings.bound_senders)}"
    return revision


def _assemble(settings: Settings, limits: Limits, store: Store, committer: GroupCommitter) -> Node:
    secret = node_secret(settings.data_dir)
    instance_id = instance_id_of(secret)
    sharing = Sharing(limits)
    supervisor = Supervisor()

    access = Access(
        Tokens(TokenFile(tokens_path(settings)), operator_token(settings.data_dir)),
        AnonymousCallers(settings),
        Rates(limits),
    )
    access.rates.configure(settings)

    watermark = DiskWatermark(settings.disk_folder, settings.disk_free_min_bytes)
    watermark.look()  # a node that starts on a full disk says so
    quarantine = Quarantine(settings.data_dir / QUARANTINE_FILE, limits)
    policy = None if settings.policy is None else load_policy(settings.policy)
    judge = None if policy is None else Judge(policy.rules, quarantine, limits)
    door = Door(store, committer, limits, watermark=watermark, judge=judge)

    door.demand_bound_senders(settings.bound_senders)
    revision = _revision(policy, settings)
    interests = Interests(store, committer, limits, interest_of(settings), revision)
    hub = LiveHub(store, limits, sharing, supervisor)
    relay = Relay(door, hub, limits, lambda: interests.current, instance_id)

    index = NodeIndex(store, limits)
    nonces = nonce_secret(secret, settings.data_dir)
    replica = NodeReplica(store, door, index, limits, nonces, lambda: interests.policy)
    budgets = ReconBudgets(limits)

    records = Records(store, committer)
    syncs = Syncs(limits, store.syncs, records.process)
    peers = Peers(replica, syncs, records, interests, settings, instance_id)
    links = Links(relay, peers, limits, instance_id, peers.nudge)

    # Who hears of what.
    committer.listeners.append(relay.on_committed)
    peers.news_listeners = relay.news_listeners
    peers.announcing = relay.announce
    relay.presence_listeners.append(links.on_presence)
    interests.listeners += [peers.on_interest_changed, relay.on_interest_changed]
    readiness = Readiness(store, committer, limits)
    readiness.refusals[Cause.TOKENS] = access.tokens.refusal

    retirement = Retirement(store, committer, quarantine, hub, limits)
    retention = Retention(store, retirement, limits, wall_clock_ms)
    retention.configure(settings.retention)

    node = Node(
        settings=settings,
        limits=limits,
        instance_id=instance_id,
        store=store,
        lost_content=LostContent(store, limits),
        access=access,
        ingest=Ingest(
            committer,
            door,
            quarantine,
            judge,
            policy,
            retirement,
            retention,
        ),
        live=Live(hub, relay),
        recon=Recon(
            index,
            ReconEndpoint(replica, index, interests, secret, budgets),
            NegentropyEndpoint(index, limits, budgets),
        ),
        federation=Federation(interests, peers, syncs, links),
        mvds=MvdsEndpoint(store, door, committer, limits),
        orders=Orders(store, limits, sharing),
        sharing=sharing,
        supervisor=supervisor,
        readiness=readiness,
        metrics=CollectorRegistry(),
    )
    for each in (node.mvds, watermark, readiness, retention, *([] if judge is None else [judge])):
        node.metrics.register(each)
    register_node_metrics(
        node.metrics, committer, index, hub, node.orders, node.lost_content, peers
    )
    register_task_metrics(node.metrics, supervisor)
    register_expiry_metrics(
        node.metrics,
        lambda: None if node.certificate is None else node.certificate.not_after_s,
        access.tokens,
    )
    register_relay_metrics(node.metrics, relay, links)
    return node


def instance_id_of(secret: bytes) -> str:
    """A public ID of the node's data directory that does not reveal its secret.

    The node ID cannot serve: it names a database, and a copy of a database is another node and a valid
    peer.
    """
    return blake3(b"sdstore instance", key=secret).hexdigest(length=INSTANCE_BYTES)


def node_secret(data_dir: Path) -> bytes:
    """The secret for session nonces, made once and shared by the workers of a node."""
    return kept_once(data_dir / "node.secret", secrets.token_bytes(SECRET_BYTES))


def nonce_secret(secret: bytes, data_dir: Path) -> bytes:
    """The key by which the workers of a node recognise their own session nonces.

    It covers the host, the path and the parent process, because a copy of a data directory has the same
    secret and is another node.
    """
    place = f"{socket.gethostname()} {data_dir.resolve()} {os.getppid()}"
    return blake3(secret + place.encode()).digest()


CHANGEABLE = frozenset(
    {
        "peers",
        "sync_interval_s",
        "channels",
        "channel_prefixes",
        "lamport_from",
        "lamport_to",
        "private_peers",
        "drain_s",
        "peer_ca",
        "peer_token_files",
        "tls_cert",
        "tls_key",
        "log_level",
        "policy",
        "retention",
        "anonymous_read",
        "anonymous_publish",
        "bound_senders",
        "caller_requests_per_minute",
        "caller_bytes_per_minute",
        "anonymous_requests_per_minute",
        "anonymous_bytes_per_minute",
    }
)
"""The settings that a running node takes over; all others take a restart."""


class Loaded(NamedTuple):
    """What a process runs with: its settings, their policy and their certificate."""

    settings: Settings
    policy: LoadedPolicy | None
    certificate: Certificate | None


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload found: names of settings that it took over, and of those that take a restart."""

    changed: list[str]
    needs_restart: list[str]


def reload_settings(node: Node) -> Reloaded:
    """Read the settings again and take over what can change. Raises SettingsError; then nothing changes.

    The access tokens and the files of the node's certificate are read again, too.
    """
    (settings, policy, certificate), found = merged(
        Loaded(node.settings, node.ingest.policy, node.certificate)
    )
    node.settings, node.certificate = settings, certificate
    warn_of(certificate)
    if policy is not node.ingest.policy:
        node.take_policy(policy)
    node.revise()
    node.access.rates.configure(settings)
    for listener in node.reload_listeners:
        listener(settings)
    node.access.anonymous.configure(settings)
    set_level(settings.log_level)
    if node.tls is not None:
        load_certificate(node.tls, settings)
    node.federation.interests.configure(interest_of(settings))
    node.federation.peers.configure(settings)
    node.ingest.retention.configure(settings.retention)
    node.access.tokens.look()
    log_reload(found)
    return found


def merged(loaded: Loaded) -> tuple[Loaded, Reloaded]:
    """`loaded` with what changed in the sources of the settings and can change.

    The policy is the same object unless its name or its code changed. Raises SettingsError.
    """
    current, fresh = loaded.settings, loaded.settings.read_again()
    different = {
        name for name in Settings.model_fields if getattr(fresh, name) != getattr(current, name)
    }
    policy = None if fresh.policy is None else load_policy(fresh.policy, loaded.policy)
    if loaded.policy is not None and policy is not loaded.policy:
        different.add("policy")
    fixed = different - CHANGEABLE
    if (fresh.tls_cert is None) is not (current.tls_cert is None):
        fixed |= different & {"tls_cert", "tls_key"}  # from http to https or back
    changed = different - fixed
    settings = current.model_copy(update={name: getattr(fresh, name) for name in changed})
    certificate = checked_certificate(settings)
    if certificate != loaded.certificate:
        old = loaded.certificate
        if certificate is not None and certificate.is_expired and old and not old.is_expired:
            raise SettingsError(f"{certificate.expiry}; the node keeps its valid one")
        changed.add("tls_cert")
    return Loaded(settings, policy, certificate), Reloaded(_in_order(changed), _in_order(fixed))


def _in_order(names: Collection[str]) -> list[str]:
    return [name for name in Settings.model_fields if name in names]


def log_reload(found: Reloaded) -> None:
    """Name what changed; never a value, which can be a secret."""
    _log.info("settings read again: %s", ", ".join(found.changed) or "nothing changed")
    if found.needs_restart:
        _log.warning("not before a restart: %s", ", ".join(found.needs_restart))


def load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Load the certificate of the settings, if they have one. Raises SettingsError."""
    if settings.tls_cert is None:
        return
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        key = f"tls_key {settings.tls_key}"
        if settings.tls_key is None:
            key = "no tls_key, so the file must contain the key too"
        detail = f"tls_cert {settings.tls_cert}, {key}: {error.strerror or error}"
        raise SettingsError(detail) from None


def checked_certificate(settings: Settings) -> Certificate | None:
    """Check that the certificate can be loaded; None if there is none. Raises SettingsError."""
    if settings.tls_cert is None:
        return None
    try:
        content = settings.tls_cert.read_bytes()
    except OSError as error:
        raise SettingsError(f"tls_cert {settings.tls_cert}: {error.strerror or error}") from None
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings)
    try:
        chain = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise SettingsError(f"tls_cert {settings.tls_cert}: {error}") from None
    not_after_s = min(each.not_valid_after_utc.timestamp() for each in chain)
    return Certificate(sha256(content).digest(), not_after_s, settings.tls_cert)


def warn_of(certificate: Certificate | None) -> None:
    """Log that a certificate has expired, if it has."""
    if certificate is not None and certificate.is_expired:
        _log.warning("%s: callers refuse it", certificate.expiry)
