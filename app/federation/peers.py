"""The peers of this node, and the sessions with them.

`app.federation.schedule` decides when to sync with which peer; one task here starts those sessions.
A peer of the settings is there for as long as the settings of a live process name it; one that an
operator added, until it is removed.

All processes over one PostgreSQL database know all peers, and each peer is held by one of them, which
syncs with it (`app.store.peerrows`). The processes share the peers (`app.federation.records`). Those that do
not hold a peer show what its row says.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import httpx
from blake3 import blake3

from app.errors import Code, Problem
from app.federation.client import (
    PeerClients,
    open_http_client,
    open_http_transport,
    parse_peer_url,
    resolve,
    url_text,
)
from app.federation.interests import Interests
from app.federation.peer import Peer, PeerOrigin, PeerTotals, verdict_of
from app.federation.records import NO_SHARE, Processes, Records, Share, share_of
from app.federation.schedule import Schedule, Verdict
from app.federation.syncs import RunSync, StartedBy, Sync, Syncs, new_sync_id, sync_busy
from app.ingest.policy import Way
from app.live.relay import CHANNELS_NAMED_MAX, Presence
from app.recon.replica import NodeReplica
from app.server.settings import Settings
from app.server.supervisor import Supervisor, ended
from app.store.peerrows import Lease, PeerRow
from recon.agreement import Interest
from recon.initiator import hello_request
from sdstore.client.transport import HttpTransport
from sdstore.sync.comparison import Mode
from sdstore.sync.driver import sync_with_peer
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import Progress, SyncError, SyncLimits, SyncReport

WHOLE_JITTER = 0.25  # whole sessions with peers that were added together spread over six hours
CONTACT_S_MAX = 3.0  # for the check that a new peer is not this node; the operator waits
LOOK_S = 1.0  # between two looks at the rows of peers, and two renewals of leases
ABANDONED_LOOK_S = 10.0  # between two looks for sessions whose processes have ended
HANDED_ON_MAX = (
    16  # peers at one look: a large memory takes 0.1 s to write, and leases must be renewed
)

_SETTINGS = PeerOrigin.SETTINGS

_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Metered(Awaitable[T]):
    """Awaits a coroutine and adds up the CPU time of its steps, without the tasks that it starts."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.cpu_s = 0.0
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            started_s = time.thread_time()
            try:
                waits_for = step()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.cpu_s += time.thread_time() - started_s
            try:
                yield waits_for
                step = partial(self._coroutine.send, None)
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle
                step = partial(self._coroutine.throw, error)


class Peers:
    """All peers of a node. Call `start` before and `close` after use.

    `instance_id` is this node's own ID: a server that answers with it is this node, not a peer.
    `unlisted` sums the syncs with stores that are not peers. `processes`: the others over the database;
    `announcing` is called to tell them of this one.
    """

    def __init__(
        self,
        replica: NodeReplica,
        syncs: Syncs,
        records: Records,
        interests: Interests,
        settings: Settings,
        instance_id: str,
    ) -> None:
        self.unlisted = PeerTotals()
        self._replica = replica
        self._syncs = syncs
        self._records = records
        self._process = records.process
        self._interests = interests
        self._settings = settings
        self._limits = replica.limits
        self._session_limits = replica.limits.sync
        self._instance_id = instance_id
        self.clients = PeerClients()
        self.processes = Processes()
        self.announcing: Callable[[Presence], None] = lambda _: None
        # `on_news` is one of them while this process holds peers: without any, a commit costs nothing here.
        self.news_listeners: set[Callable[[Collection[str] | None, str], None]] = set()
        self._peers: dict[str, Peer] = {}
        self._settings_peers = {peer_id_of(url): url for url in map(parse_peer_url, settings.peers)}
        self._settings_are_new = True  # since the last complete look
        # The peers that this process syncs with, which are those in the schedule, and since which fence.
        self._held: dict[str, int | None] = {}
        self.vanished_count = 0
        self._looking = asyncio.Lock()
        self._has_changed = asyncio.Event()
        # Stores that were synced with by URL, and their results; bounded like the sessions.
        self._unlisted: dict[str, Peer] = {}
        self._schedule = Schedule(
            settings.sync_interval_s,
            random.Random(),
            sessions_max=self._limits.peer_sessions_max,
            slow_sessions_max=self._limits.peer_sessions_slow_max,
        )
        self._is_due_earlier = asyncio.Event()
        self._looks_at_abandoned_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, supervisor: Supervisor) -> None:
        """Add the peers of the settings and those of the database, and begin to sync with them.

        The state of a peer shows whether it is down or not allowed.
        """
        try:
            if not self._records.is_shared:
                await self._records.end_abandoned(_now_ms())
            await self._look()
        except Problem as problem:
            # Peers of the settings work without their rows; `_look_again` adds these later.
            _log.warning("the peers cannot be written to the database: %s", problem.detail)
            for peer_id, url in self._settings_peers.items():
                self._begin(self._peers.setdefault(peer_id, Peer(peer_id, url, _SETTINGS)))
        self._tasks = [
            supervisor.keep("peers", self._keep_starting),
            supervisor.repeat("leases", self._look_again, LOOK_S),
            supervisor.keep("records", self._keep_writing),
        ]

    def configure(self, settings: Settings) -> None:
        """Take over changed settings. Peers that left the settings are forgotten; their messages stay."""
        self._settings = settings
        self._schedule.interval_s = settings.sync_interval_s
        self._settings_peers = {peer_id_of(url): url for url in map(parse_peer_url, settings.peers)}
        self._settings_are_new = True  # the next look takes them over, a moment later
        self.nudge_all()

    async def close(self) -> None:
        """Start no more sessions; running ones continue."""
        self.announce(is_leaving=True)
        await ended(*self._tasks)

    async def add(self, url_text: str, token: str | None = None) -> Peer:
        """Add a peer, or return the existing one with this URL; it is kept across restarts.

        A new `token` replaces the one of an existing peer. A peer that is down, or whose name does not
        resolve yet, is added too. Raises Problem: PEER_URL_REFUSED, TOO_MANY_ITEMS, and the errors of a
        write to the database.
        """
        url = parse_peer_url(url_text)
        known = self._peers.get(peer_id_of(url))
        if known is not None and not self._is_of_another_host(known):
            await self._replace_token(known, token)
            return known
        await self._contact(url, token)
        async with self._looking:
            if len(self._peers) >= self._limits.peers_max:
                raise Problem(
                    Code.TOO_MANY_ITEMS, f"a node has up to {self._limits.peers_max} peers"
                )
            peer = Peer(peer_id_of(url), url, PeerOrigin.ADDED, token)
            await self._records.add(peer.row())
            await self._look_now()
        return self.get(peer.peer_id)

    def _is_of_another_host(self, peer: Peer) -> bool:
        return peer.origin is _SETTINGS and peer.peer_id not in self._settings_peers

    async def _replace_token(self, peer: Peer, token: str | None) -> None:
        if token is None or token == peer.token:
            return
        await self._records.set_token(peer.peer_id, token, peer.origin)
        peer.token = token

    async def _contact(self, url: httpx.URL, token: str | None) -> None:
        """Raise PEER_URL_REFUSED for an address that is not allowed, and for this node itself."""
        try:
            async with asyncio.timeout(CONTACT_S_MAX), self._transport(url, token) as transport:
                await transport.recon(hello_request().SerializeToString())
        except SyncError as error:
            if error.code == Code.PEER_URL_REFUSED:
                raise Problem(Code.PEER_URL_REFUSED, error.detail) from None
        except TimeoutError:
            pass

    async def remove(self, peer_id: str) -> None:
        """Remove a peer that an operator added; a running sync continues.

        Raises Problem: NOT_FOUND, INVALID_PARAMETER for a peer that settings name, and the errors of a
        write to the database."""
        async with self._looking:
            peer = self.get(peer_id)
            if peer.origin is _SETTINGS:
                raise Problem(
                    Code.INVALID_PARAMETER,
                    "a running node's settings name this peer: remove it from them, then reload that node",
                )
            await self._records.remove(peer_id)
            self._forget(peer)

    def _begin(self, peer: Peer) -> None:
        """Sync with a peer from now on."""
        self._held[peer.peer_id] = self._records.fences.get(peer.peer_id)
        self.news_listeners.add(self.on_news)
        self._schedule.add(peer.peer_id, _now_s(), peer.failures)
        self._is_due_earlier.set()

    def _let_go(self, peer_id: str) -> None:
        """Sync with a peer no longer."""
        self._held.pop(peer_id, None)
        if not self._held:
            self.news_listeners.discard(self.on_news)
        self._schedule.remove(peer_id)
        self._records.let_go(peer_id)

    def _forget(self, peer: Peer) -> None:
        self._peers.pop(peer.peer_id, None)
        self._let_go(peer.peer_id)

    def get(self, peer_id: str) -> Peer:
        """The peer with this ID. Raises Problem(NOT_FOUND)."""
        if peer_id not in self._peers:
            raise Problem(Code.NOT_FOUND, f"no peer {peer_id[:64]}")
        return self._peers[peer_id]

    def all(self) -> list[Peer]:
        """All peers, oldest first."""
        return list(self._peers.values())

    def held(self) -> list[Peer]:
        """The peers that this process syncs with."""
        return [each for each in self._peers.values() if each.peer_id in self._held]

    async def sync_peer(
        self, peer_id: str, channels: tuple[str, ...] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start a sync with a peer now, or make the process that holds the peer start it.

        Raises Problem: NOT_FOUND, SYNC_BUSY, OVERLOADED.
        """
        peer = self.get(peer_id)
        if peer_id in self._held or not self._records.is_shared:
            return await self._known_to_all(self._start_asked(peer, channels, dry_run))
        return await self._request(peer, channels, dry_run)

    async def _known_to_all(self, sync: Sync) -> Sync:
        """Write the record of a session at once, so that any process can be asked for it."""
        if self._records.is_shared:
            with suppress(Problem):  # it is written later
                await self.write()
        return sync

    async def _request(self, peer: Peer, channels: tuple[str, ...], dry_run: bool) -> Sync:
        for row in await self._records.under_way():
            if row.peer_id == peer.peer_id:
                raise sync_busy(url_text(peer.url), row.sync_id)
        sync = Sync(
            sync_id=new_sync_id(),
            peer_url=url_text(peer.url),
            peer_id=peer.peer_id,
            channels=channels,
            dry_run=dry_run,
            started_at_ms=_now_ms(),
            started_by=StartedBy.OPERATOR,
        )
        await self._records.request(sync.row())
        return sync

    async def sync_url(
        self, url_text: str, channels: tuple[str, ...] = (), *, dry_run: bool = False
    ) -> Sync:
        """Start one sync with any store.

        Raises Problem: PEER_URL_REFUSED, PEER_UNREACHABLE, SYNC_BUSY, OVERLOADED.
        """
        url = parse_peer_url(url_text)
        known = self._peers.get(peer_id_of(url))
        if known is None:
            await resolve(url, private_allowed=self._settings.allows_private_peers)
            peer = self._unlisted_peer(url)
            return await self._known_to_all(self._start_asked(peer, channels, dry_run))
        return await self.sync_peer(known.peer_id, channels, dry_run=dry_run)

    def _unlisted_peer(self, url: httpx.URL) -> Peer:
        while len(self._unlisted) >= self._limits.syncs_remembered_max:
            del self._unlisted[next(iter(self._unlisted))]
        return self._unlisted.setdefault(str(url), Peer("", url))

    def _start_asked(
        self, peer: Peer, channels: tuple[str, ...], dry_run: bool, sync_id: str | None = None
    ) -> Sync:
        """Start a requested sync without waiting for a retry: the peer may work again."""
        sync = self._start(peer, channels, dry_run, StartedBy.OPERATOR, sync_id)
        # The session is a task that has not begun. A sync that is refused changes nothing.
        peer.memory = peer.memory.unserved_due()
        return sync

    def _start(
        self,
        peer: Peer,
        channels: tuple[str, ...],
        dry_run: bool,
        started_by: StartedBy,
        sync_id: str | None = None,
    ) -> Sync:
        """Start a session. Raises Problem: SYNC_BUSY, OVERLOADED."""
        is_whole = not (dry_run or channels)
        sync = self._syncs.start(
            self._run(peer, channels, is_whole=is_whole, dry_run=dry_run),
            peer_url=url_text(peer.url),
            peer_id=peer.peer_id,
            channels=channels,
            dry_run=dry_run,
            started_by=started_by,
            sync_id=sync_id,
        )
        peer.last_sync, peer.last_sync_id = sync, sync.sync_id
        if started_by is StartedBy.OPERATOR and self._is_held(peer):  # the others have begun
            self._schedule.begin(peer.peer_id, _now_s(), is_whole=is_whole)
        return sync

    def _run(
        self, peer: Peer, channels: tuple[str, ...], *, is_whole: bool, dry_run: bool
    ) -> RunSync:
        """A session with a peer. `is_whole`: it moves everything that both want."""
        replica = self._replica.for_peer(peer.peer_id, Way.SYNC)
        only = Interest.make(everything=not channels, channels=frozenset(channels))

        def interest() -> Interest:
            return self._interests.current.intersect(only)

        async def run(changed: Callable[[Progress], None]) -> SyncReport:
            async with self._transport(peer.url, peer.token) as transport:
                report, peer.memory = await sync_with_peer(
                    replica,
                    transport,
                    interest(),
                    current_interest=interest,
                    memory=peer.memory.with_own_policy(replica.policy),
                    limits=self._jittered(),
                    nonce_secret=replica.nonce_secret,
                    arrivals=replica,
                    mode=Mode.COUNT if dry_run else Mode.MOVE,
                    changed=changed,
                )
            return report

        async def run_and_learn(changed: Callable[[Progress], None]) -> SyncReport:
            metered = _Metered(run(changed))
            verdict = Verdict.NOTHING
            try:
                try:
                    report = await metered
                except Problem as problem:
                    report = SyncReport.of_error(problem)
                verdict = verdict_of(report)
                if not self._is_held(peer):
                    self.unlisted.add(report)
                elif not dry_run and peer.learn(report):
                    self._has_changed.set()
                return report
            finally:
                if self._is_held(peer):
                    self._ended(peer, verdict if is_whole else None, metered.cpu_s)

        return run_and_learn

    def _is_held(self, peer: Peer) -> bool:
        return peer.peer_id in self._held and self._peers.get(peer.peer_id) is peer

    def _jittered(self) -> SyncLimits:
        """The limits of one session: whole sessions with many peers do not fall due together."""
        limits = self._session_limits
        return replace(limits, whole_s=limits.whole_s * random.uniform(1 - WHOLE_JITTER, 1))

    def _transport(
        self, url: httpx.URL, token: str | None
    ) -> AbstractAsyncContextManager[HttpTransport]:
        return open_http_transport(
            url,
            self._limits,
            private_allowed=self._settings.allows_private_peers,
            own_instance=self._instance_id,
            token=self._token(url, token),
            ca_file=self._settings.peer_ca,
            clients=self.clients,
        )

    def client(self, peer: Peer) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """An HTTP client of a peer, with its access token. Raises Problem(TOKENS_UNAVAILABLE)."""
        return open_http_client(
            peer.url,
            private_allowed=self._settings.allows_private_peers,
            token=self._token(peer.url, peer.token),
            ca_file=self._settings.peer_ca,
        )

    def _token(self, url: httpx.URL, token: str | None) -> str | None:
        """The token of the settings' file for this URL, or else `token`."""
        file = self._settings.peer_token_files.get(url_text(url))
        return token if file is None else _token_in(file)

    # --- the schedule --------------------------------------------------------------------------

    def nudge(self, peer_id: str) -> None:
        """A peer says that it has news: sync with it soon. Unknown peers are ignored."""
        if self._schedule.nudge(peer_id, _now_s()):
            self._is_due_earlier.set()

    def nudge_all(self, without: Collection[str] = ()) -> None:
        """This node has news: sync soon with all peers but those in `without`."""
        if self._schedule.nudge_all(_now_s(), without):
            self._is_due_earlier.set()

    def on_interest_changed(self) -> None:
        """This node wants other channels: sync soon, also with peers that shared none of the old ones."""
        self._schedule.forget_apart(_now_s())
        self.nudge_all()

    def on_news(self, channels: Collection[str] | None, source: str) -> None:
        """Nudge the peers that want messages of these channels, or of any (None), but not `source`.

        What a session brought is no news for its peer, whichever of the two started the session.
        """
        if not self._schedule.hears_news:
            return  # as for most commits of a busy node: each publication runs this
        without = set()
        if source:
            peers = self._peers.values()
            without = {each.peer_id for each in peers if source in (each.peer_id, each.instance)}
        if channels is not None and len(channels) <= CHANNELS_NAMED_MAX:
            wanted = list(filter(self._interests.current.matches, channels))
            peers = self._peers.values()
            without |= {
                each.peer_id for each in peers if not (wanted and each.wants_one_of(wanted))
            }
        self.nudge_all(without)

    async def _keep_starting(self) -> None:
        while True:
            self._is_due_earlier.clear()
            now_s = _now_s()
            for peer_id in self._schedule.start_due(now_s):
                self._start_scheduled(self._peers[peer_id])
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._schedule.next_look_s(now_s)):
                    await self._is_due_earlier.wait()

    def _start_scheduled(self, peer: Peer) -> None:
        was_nudged = self._schedule.was_nudged(peer.peer_id)
        try:
            if self._records.is_in_time:
                self._start(peer, (), False, StartedBy.NUDGE if was_nudged else StartedBy.SCHEDULE)
            else:  # this process was paused, or the database is away: another one may hold the peer
                self._ended(peer, Verdict.NOTHING)
        except Problem:  # a sync with this peer, or too many in all, are running: try next time
            self._ended(peer, Verdict.NOTHING)
        except Exception:  # noqa: BLE001 - the other peers must not wait for ever
            _log.exception("the sync with %s did not start", url_text(peer.url))
            self._ended(peer, Verdict.NOTHING)

    def _ended(self, peer: Peer, verdict: Verdict | None, cost_s: float = 0.0) -> None:
        """A session has ended, or did not start. None: it was one of some channels, or moved nothing."""
        now_s = _now_s()
        if verdict is None:
            self._schedule.release(peer.peer_id)
        else:
            self._schedule.end(peer.peer_id, now_s, verdict, cost_s)
        peer.failures = self._schedule.failures(peer.peer_id)
        pause_s = self._schedule.start_s(peer.peer_id) - now_s
        peer.next_sync_at_ms = int((time.time() + max(pause_s, 0.0)) * 1_000)
        self._is_due_earlier.set()

    async def memory_of(self, peer: Peer) -> PeerMemory:
        """The memory of a peer, of whichever process holds it. Raises Problem(STORE_UNAVAILABLE)."""
        return peer.memory if self._is_held(peer) else await self._records.memory(peer.peer_id)

    # --- the database --------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Know what other processes have added, removed and learned; without the database, as before."""
        if self._records.is_shared:
            with suppress(Problem):
                await self._look()

    async def _look(self) -> None:
        async with self._looking:
            await self._look_now()

    async def _look_now(self) -> None:
        """Renew the leases, take those that have expired, and learn of peers that came or went.

        The settings of each process name the peers it wants. If one has no row, it is added. A row that no
        running process wants is not shown, and is removed later.
        """
        rows = await self._hold()
        if self._settings_are_new:
            await self._records.forget_settings(self._settings_peers)
        if self._settings_peers.keys() - {row.peer_id for row, _ in rows}:
            await self._records.add(
                *(Peer(key, url, _SETTINGS).row() for key, url in self._settings_peers.items())
            )
            rows = await self._hold()
        seen = set()
        for row, lease in rows:
            is_own_setting = row.peer_id in self._settings_peers
            is_held_elsewhere = lease.is_live and lease.holder != self._process
            if row.origin == _SETTINGS and not (is_own_setting or is_held_elsewhere):
                continue
            peer = self._peers.get(row.peer_id)
            if peer is None:
                try:
                    peer = Peer(row.peer_id, parse_peer_url(row.url))
                except Problem:  # an older version accepted URLs that are refused now
                    continue
                self._peers[row.peer_id] = peer
            peer.origin = _SETTINGS if is_own_setting else PeerOrigin(row.origin)
            seen.add(row.peer_id)
            await self._look_at(peer, row, lease)
        gone = [each for each in self._peers.values() if each.peer_id not in seen]
        for peer in gone:
            self.vanished_count += 1
            _log.warning(
                "peer %s is no longer listed: another process removed it, or no running node's settings name it",
                url_text(peer.url),
            )
            self._forget(peer)
        if gone:
            await self._records.release([each.peer_id for each in gone])
        self._settings_are_new = False

    async def _hold(self) -> list[tuple[PeerRow, Lease]]:
        """Hold this process's share; all rows."""
        self.announce()
        rows = await self._records.read()
        share = self._share(rows)
        await self._records.hold(self._settings_peers, share.left)
        if self._records.fences != self._held:
            rows = await self._records.read()
        with suppress(Problem):  # this process keeps them until a later look
            await self._hand_on(share.surplus[:HANDED_ON_MAX])
        return rows

    def announce(self, *, is_leaving: bool = False) -> None:
        """Tell the other processes that this one is there, and whose streams it reads."""
        reads = [each.instance for each in self.held() if each.instance]
        self.announcing(Presence(self._process, [*self._settings_peers], reads, is_leaving))

    def _share(self, rows: Sequence[tuple[PeerRow, Lease]]) -> Share:
        if not self._records.is_shared:
            return NO_SHARE
        others = self.processes.live(_now_s())
        settings_peers = {each.process: each.settings_peers for each in others}
        settings_peers[self._process] = tuple(self._settings_peers)
        idle = [each.peer_id for each in self.held() if not each.is_syncing]
        return share_of(self._process, settings_peers, rows, idle)

    async def _hand_on(self, surplus: Collection[str]) -> None:
        """Give up peers, once all that this process knows of them is written."""
        if not surplus:
            return
        await self.write([self._peers[each] for each in surplus], is_end=True)
        given = [each for each in surplus if not self._peers[each].is_syncing]
        for peer_id in given:
            self._let_go(peer_id)
        # If this fails, the next look takes them again.
        await self._records.release(given)

    async def _look_at(self, peer: Peer, row: PeerRow, lease: Lease) -> None:
        fence = self._records.fences.get(row.peer_id)
        is_mine = fence is not None and (
            not self._records.is_shared or (lease.holder, lease.fence) == (self._process, fence)
        )
        if (
            is_mine and self._held.get(row.peer_id) == fence
        ):  # what this process has in memory is newer than the row
            peer.token = row.token or None
            return
        if peer.peer_id in self._held:
            # The lease was lost, or expired and taken again: what a session does with it does not count.
            self._end_session(peer, "another process syncs with the peer now")
            if not is_mine:
                _log.info("another process syncs with peer %s now", url_text(peer.url))
                self._let_go(peer.peer_id)
        peer.take(row)
        if is_mine:
            peer.memory = await self._records.memory(row.peer_id)
            self._records.has_read(peer)
            if self._records.is_shared:
                _log.info("this process syncs with peer %s from now on", url_text(peer.url))
            self._begin(peer)

    @staticmethod
    def _end_session(peer: Peer, reason: str) -> None:
        sync = peer.last_sync
        if sync is not None and sync.task is not None and peer.is_syncing:
            sync.end_reason = reason
            sync.task.cancel()

    async def _look_again(self) -> None:
        if not (self._records.is_shared or self._settings_are_new):
            return  # one process: nobody else changes the rows, but a reload changes the settings
        await self._look()
        if self._records.is_shared:
            await self._take_up_requests()
            if _now_s() >= self._looks_at_abandoned_s:
                self._looks_at_abandoned_s = _now_s() + ABANDONED_LOOK_S
                await self._records.end_abandoned(_now_ms())

    async def _take_up_requests(self) -> None:
        """Start the sessions that operators asked other processes for."""
        for row in await self._records.under_way():
            peer = self._peers.get(row.peer_id)
            if row.process or peer is None or not self._is_held(peer):
                continue
            channels = tuple(map(str, row.document.get("channels", ())))
            with suppress(Problem):  # a session with the peer is running: at a later look
                self._start_asked(peer, channels, row.document.get("dry_run") is True, row.sync_id)

    async def _keep_writing(self) -> None:
        """Write what sessions have changed: once a second, and soon after the state of a peer changed."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._has_changed.wait()
            self._has_changed.clear()
            await self.write()

    async def write(self, peers: Sequence[Peer] | None = None, *, is_end: bool = False) -> None:
        """Write what is due of some peers, or all, and of sessions; everything if they are given up.

        Raises Problem as `app.ingest.door.GroupCommitter.call`.
        """
        due = self._syncs.unwritten()
        shown = [(each, each.row(), each.progress) for each in due]
        held = self.held() if peers is None else peers
        await self._records.write(held, [row for _, row, _ in shown], is_end=is_end)
        for sync, row, progress in shown:
            is_end_written = row.finished_at_ms is not None
            sync.recorded = (progress, inf if is_end_written else time.monotonic())

    async def close_records(self) -> None:
        """Write the last changes, and let other processes take the peers. Sessions have ended."""
        with suppress(Problem):
            await self.write(is_end=True)
        with suppress(Problem):
            await self._records.release()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _now_s() -> float:
    """The clock of the event loop, for the schedule."""
    return asyncio.get_running_loop().time()


def _token_in(file: Path) -> str:
    """The token in a file, which an operator may replace while the node runs."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        detail = f"the token file {file} of a peer cannot be read: {reason}"
        raise Problem(Code.TOKENS_UNAVAILABLE, detail) from None
    if not text or any(each.isspace() for each in text):
        raise Problem(Code.TOKENS_UNAVAILABLE, f"{file} does not contain one token")
    return text


def peer_id_of(url: httpx.URL) -> str:
    """The ID of a peer: 8 bytes of BLAKE3 over its URL, in hex."""
    return blake3(url_text(url).encode()).hexdigest(length=8)
