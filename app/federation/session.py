"""One session with one peer, as the initiator: find the differences and move the content.

Two streams of requests run side by side: the work list of `recon.Initiator` (which ranges differ),
and content, fetched and sent in bounded batches as soon as enough of it is known. Whatever the peer
does, the session ends within its budgets, with a report.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import fields, replace

from app.errors import Code, Problem
from app.federation.equality import compare_everything, is_still_proved, proof_of
from app.federation.exchange import Exchange, NonceExpiredError, busy, unsupported
from app.federation.local import LocalSide
from app.federation.memory import PeerMemory, Proof
from app.federation.moves import MOVE_ELEMENTS_MAX, Moves
from app.federation.report import (
    Progress,
    SegmentState,
    SyncOutcome,
    SyncReport,
    Traffic,
    filled,
)
from app.federation.transport import PeerTransport
from recon.errors import RemoteProtocolError
from recon.events import Busy, Event, Expired, Fault, Have, InSync, Need, Unsupported
from recon.initiator import Initiator, OutgoingRequest
from recon.interest import Interest, decode_interest
from recon.limits import DEFAULT_LIMITS, NONCE_BYTES
from recon.session import SessionHeader

ASKS_IN_FLIGHT_MAX = 4  # hides the latency of a round; more only queue at the peer
MOVES_IN_FLIGHT_MAX = 3  # one on its way, one at the peer, one at our own door
RESTARTS_MAX = 3  # a nonce expires at most once in an honest session
PROGRESS_INTERVAL_S = 0.1

_PARTIAL = {Code.OVERLOADED, Code.SYNC_BUSY, Code.RECON_BUDGET_SPENT}
_PEER_FAULT = {Code.PEER_MISBEHAVED, Code.PEER_UNREACHABLE}
_REFUSED = {Code.FORBIDDEN, Code.UNAUTHENTICATED, Code.PEER_URL_REFUSED, Code.PEER_VERSION}


async def sync_with_peer(
    local: LocalSide,
    transport: PeerTransport,
    interest: Interest,
    *,
    memory: PeerMemory | None = None,
    dry_run: bool = False,
    fetch_only: bool = False,
    progress: Progress | None = None,
    changed: Callable[[], None] = lambda: None,
) -> SyncReport:
    """Make this store and a peer equal over what both want of `interest`.

    `progress` is kept up to date, and `changed` called, while the session runs. A dry run finds the
    differences and moves nothing, `fetch_only` sends nothing. Never raises for what the peer does:
    the report says it.
    """
    started = time.monotonic()
    session = _Session(
        local, transport, interest, memory or PeerMemory(), progress or Progress(), changed
    )
    session.fetches = not dry_run
    session.sends = not (dry_run or fetch_only)
    outcome, code, detail = await _judged(session, local.limits.sync_seconds_max)
    session.show_progress(is_last=True, is_equal=outcome is SyncOutcome.IN_SYNC)
    return SyncReport(
        outcome=outcome,
        code=code,
        detail=detail,
        elements=session.elements_count,
        missing_here=session.missing_here,
        missing_there=session.missing_there,
        proved=session.proof is not None,
        seconds=round(time.monotonic() - started, 3),
        **{each.name: getattr(session.progress, each.name) for each in fields(Traffic)},
    )


def report_of_refusal(problem: Problem) -> SyncReport:
    """The report of a session that could not begin."""
    return SyncReport(outcome=_outcome_of(problem.code), code=problem.code, detail=problem.detail)


async def _judged(session: _Session, seconds_max: float) -> tuple[SyncOutcome, str, str]:
    """Run the session; how it ended: outcome, code, detail."""
    try:
        async with asyncio.timeout(seconds_max):
            await session.run()
    except RemoteProtocolError as error:
        spent = error.code.startswith("budget")
        code = Code.RECON_BUDGET_SPENT if spent else Code.PEER_MISBEHAVED
        return _outcome_of(code), code, str(error)
    except Problem as problem:
        return _outcome_of(problem.code), problem.code, problem.detail
    except TimeoutError:
        return SyncOutcome.PARTIAL, Code.RECON_BUDGET_SPENT, f"not done after {seconds_max} s"
    if not session.fetches and (session.missing_here or session.missing_there):
        return SyncOutcome.DIFFERENT, "", ""
    if session.unserved_count:
        detail = f"the peer offered {session.unserved_count} elements that it did not serve"
        return SyncOutcome.PEER_FAULT, Code.PEER_MISBEHAVED, detail
    return SyncOutcome.IN_SYNC, "", ""


def _outcome_of(code: Code) -> SyncOutcome:
    if code in _PARTIAL:
        return SyncOutcome.PARTIAL
    if code in _PEER_FAULT:
        return SyncOutcome.PEER_FAULT
    return SyncOutcome.REFUSED if code in _REFUSED else SyncOutcome.LOCAL_FAULT


class _Session:
    def __init__(
        self,
        local: LocalSide,
        transport: PeerTransport,
        interest: Interest,
        memory: PeerMemory,
        progress: Progress,
        changed: Callable[[], None],
    ) -> None:
        self.fetches = True
        self.sends = True
        self.progress = progress
        self.missing_here = 0
        self.missing_there = 0
        self.in_sync_count = 0
        self.elements_count = 0
        self.unserved_count = 0
        self.proof: Proof | None = None
        self._local = local
        self._transport = transport
        self._interest = interest
        self._memory = memory
        self._changed = changed
        self._exchange = Exchange(transport, progress)
        self._shown_at_s = float("-inf")
        self._initiator: Initiator | None = None

    async def run(self) -> None:
        """Hand-shake and reconcile, again where the peer's nonce expires under way."""
        mutual = self._interest.intersect(decode_interest(await self._peer_interest()))
        if mutual.is_empty or (self.sends and await self._is_idle(mutual)):
            return
        for _ in range(RESTARTS_MAX):
            try:
                await self._reconcile(await self._header(mutual.encode()), mutual)
            except NonceExpiredError as expired:
                self._memory.responder_nonce = expired.responder_nonce
            else:
                return
        raise Problem(Code.PEER_MISBEHAVED, "the peer's nonces expire faster than they are used")

    async def _is_idle(self, mutual: Interest) -> bool:
        if self._memory.proof is not None:
            self.elements_count = self._memory.proof.elements_count
        return await is_still_proved(self._local, self._exchange, self._memory, mutual)

    async def _peer_interest(self) -> bytes:
        now = time.monotonic()
        lifetime_s = self._local.limits.session_nonce_lifetime_s
        if now - self._memory.interest_read_at_s > lifetime_s:
            self._memory.interest = await self._transport.interest()
            self._memory.interest_read_at_s = now
        return self._memory.interest

    async def _header(self, interest: bytes) -> SessionHeader:
        ours = os.urandom(NONCE_BYTES)
        if len(self._memory.responder_nonce) != NONCE_BYTES:
            self._memory.responder_nonce = await self._exchange.first_contact(ours, interest)
        if len(self._memory.responder_nonce) != NONCE_BYTES:
            raise Problem(Code.PEER_MISBEHAVED, f"a nonce has {NONCE_BYTES} bytes")
        return SessionHeader(ours, self._memory.responder_nonce, interest)

    async def _reconcile(self, header: SessionHeader, mutual: Interest) -> None:
        await self._local.index.catch_up()
        view = self._local.index.view(header.key(), mutual)
        compared, self.in_sync_count = proof_of(self._local, mutual, view), 0
        length = len(self._local.index.elements)
        initiator = Initiator(
            view,
            header,
            limits=replace(
                DEFAULT_LIMITS,
                response_bytes_max=self._local.limits.recon_answer_bytes_max,
                in_flight_max=ASKS_IN_FLIGHT_MAX,
            ),
            seed=secrets.randbits(64),
            recent=length - self._memory.index_length,
        )
        self._initiator = initiator
        moves = Moves(
            self._local, view, header, self._exchange, self._memory, self.progress, initiator
        )
        await _Streams(self, initiator, moves, self._exchange).run()
        await moves.settle_orphans()
        self._memory.index_length = length
        self.unserved_count = moves.unserved_count
        if self.in_sync_count == compared.elements_count and not self.missing_here:
            self.proof = compared
        elif self.sends and not (self.progress.entries_refused or self.progress.claims_refused):
            self.proof = await compare_everything(self._local, self._exchange, header, mutual)
        self._memory.proof = self.proof

    def show_progress(self, *, is_last: bool = False, is_equal: bool = False) -> None:
        """Bring `progress` up to date, at most ten times a second until the last time."""
        now = time.monotonic()
        if not is_last and now - self._shown_at_s < PROGRESS_INTERVAL_S:
            return
        self._shown_at_s = now
        if self._initiator is not None:
            measured = self._initiator.progress
            self.elements_count = sum(measured.elements.values())
            segments = [(SegmentState[each.state.name], each.share) for each in measured.segments]
            arrived = self.progress.entries_received + self.progress.claims_received
            self.progress.segments = filled(segments, arrived / max(self.elements_count, 1))
        if is_equal:
            self.progress.segments = [(SegmentState.IN_SYNC, 1.0)]
        self.progress.in_sync_percent = 100.0 * sum(
            share for state, share in self.progress.segments if state is SegmentState.IN_SYNC
        )
        self._changed()


class _Streams:
    """The two streams of requests of one session."""

    def __init__(
        self, session: _Session, initiator: Initiator, moves: Moves, exchange: Exchange
    ) -> None:
        self._session = session
        self._initiator = initiator
        self._moves = moves
        self._exchange = exchange
        self._started_s = time.monotonic()
        self._asks: set[asyncio.Task[None]] = set()
        self._carries: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until nothing is left to ask or to move."""
        try:
            while tasks := self._launched():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._asks -= done
                self._carries -= done
                for task in done:
                    task.result()
                self._session.show_progress()
        finally:
            await _cancel(self._asks | self._carries)

    def _launched(self) -> set[asyncio.Task[None]]:
        while request := self._initiator.next_request(self._elapsed_s()):
            self._asks.add(asyncio.create_task(self._ask(request)))
        while self._may_carry():
            self._carries.add(asyncio.create_task(self._moves.carry(self._moves.take())))
        return self._asks | self._carries

    def _may_carry(self) -> bool:
        """Small batches wait until nothing more can join them."""
        waiting = self._moves.waiting_count
        if not waiting or len(self._carries) >= MOVES_IN_FLIGHT_MAX:
            return False
        return waiting >= MOVE_ELEMENTS_MAX or not self._asks

    async def _ask(self, request: OutgoingRequest) -> None:
        response = await self._exchange.call(request.message)
        for event in self._initiator.receive(request.request_id, response, self._elapsed_s()):
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Have):
            self._session.missing_there += len(event.ids)
            if self._session.sends:
                self._moves.add_have(event)
        elif isinstance(event, Need):
            self._session.missing_here += event.count
            if self._session.fetches:
                self._moves.add_need(event)
        elif isinstance(event, InSync):
            self._session.in_sync_count += event.count
        elif isinstance(event, Fault):
            raise event.error
        elif isinstance(event, Expired):
            raise NonceExpiredError(event.responder_nonce)
        elif isinstance(event, Busy):
            raise _problem_of_busy(event)
        elif isinstance(event, Unsupported):
            raise unsupported(event.version)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


def _problem_of_busy(event: Busy) -> Problem:
    if event.refused:
        return Problem(Code.FORBIDDEN, "the peer refuses to reconcile this interest with us")
    return busy(event.retry_after_s)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
