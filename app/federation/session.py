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
from typing import NoReturn

from app.errors import Code, Problem
from app.federation.aside import SetAside
from app.federation.equality import compare_everything, is_still_proved, proof_of
from app.federation.exchange import Exchange, NonceExpiredError, busy, unsupported
from app.federation.inbound import Element
from app.federation.local import LocalSide, LostElement
from app.federation.memory import PeerMemory, Proof
from app.federation.moves import MOVE_ELEMENTS_MAX, Ledger, Moves
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
from recon.events import (
    Busy,
    Event,
    Expired,
    Fault,
    Have,
    Need,
    NotThere,
    RangeState,
    Stated,
    Unsupported,
)
from recon.initiator import Initiator, OutgoingRequest
from recon.limits import DEFAULT_LIMITS, NONCE_BYTES
from recon.session import Interest, SessionHeader, decode_interest, initiator_nonce

ASKS_IN_FLIGHT_MAX = 4  # hides the latency of a round; more only queue at the peer
MOVES_IN_FLIGHT_MAX = 3  # one on its way, one at the peer, one at our own door
RESTARTS_MAX = 3  # a nonce expires at most once in an honest session
PASSES_MAX = 4  # of one attempt: the first, one more for what was dropped or grew, two to be sure
PASS_PAUSE_S = 0.2  # before the third: what was stored is seen by every worker of the peer
LOST_FETCHED_MAX = 256  # entries with lost content that a pass asks for: about one batch
LOST_PAGES_MAX = 8  # of lost entries read to find those; the others wait for their time
PROGRESS_INTERVAL_S = 0.1
NOTHING_SHARED = "nothing was compared: the two nodes want no channel in common"

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
    is_equal = outcome is SyncOutcome.IN_SYNC and not session.shares_nothing
    session.show_progress(is_last=True, is_equal=is_equal)
    return SyncReport(
        outcome=outcome,
        code=code,
        detail=detail,
        elements=session.elements_count,
        missing_here=session.missing_here,
        missing_there=session.missing_there,
        proved=session.proof is not None,
        set_aside_count=len(session.aside),
        set_aside=session.aside.reported(),
        mended=session.mended_count,
        lost_here=session.lost_count,
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
    return SyncOutcome.IN_SYNC, "", NOTHING_SHARED if session.shares_nothing else ""


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
        self.found_count = 0
        self.shares_nothing = False
        self.elements_count = 0
        self.unserved_count = 0
        self.mended_count = 0
        self.lost_count = 0
        self.proof: Proof | None = None
        self.aside = SetAside()
        self.stated: Stated | None = None
        self.ledger = Ledger()
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
        self.aside = self._memory.set_aside(mutual)
        await self.aside.forget_mended(self._local.store)
        self.shares_nothing = mutual.is_empty
        if mutual.is_empty or (self.sends and await self._is_idle(mutual)):
            return
        for _ in range(RESTARTS_MAX):
            try:
                await self._attempt(await self._header(mutual.encode()), mutual)
            except NonceExpiredError as expired:
                self._memory.responder_nonce = expired.responder_nonce
            else:
                return
        raise Problem(Code.PEER_MISBEHAVED, "the peer's nonces expire faster than they are used")

    async def _is_idle(self, mutual: Interest) -> bool:
        due, after = await self._lost_due(mutual)
        if due:
            return False
        self._memory.lost_after = after
        if not await is_still_proved(self._local, self._exchange, self._memory, mutual):
            return False
        if self._memory.proof is not None:
            self.elements_count = self._memory.proof.elements_count
        return True

    async def _peer_interest(self) -> bytes:
        now = time.monotonic()
        lifetime_s = self._local.limits.session_nonce_lifetime_s
        if now - self._memory.interest_read_at_s > lifetime_s:
            self._memory.interest = await self._transport.interest()
            self._memory.interest_read_at_s = now
        return self._memory.interest

    async def _header(self, interest: bytes) -> SessionHeader:
        ours = initiator_nonce(self._local.nonce_secret, os.urandom(NONCE_BYTES // 2))
        if len(self._memory.responder_nonce) != NONCE_BYTES:
            self._memory.responder_nonce = await self._exchange.first_contact(ours, interest)
        if len(self._memory.responder_nonce) != NONCE_BYTES:
            raise Problem(Code.PEER_MISBEHAVED, f"a nonce has {NONCE_BYTES} bytes")
        return SessionHeader(ours, self._memory.responder_nonce, interest)

    async def _attempt(self, header: SessionHeader, mutual: Interest) -> None:
        """Passes under one key until the peer's total is ours.

        An honest pair needs one, and another where a side grew, or where claims were dropped.
        """
        # What an attempt that was broken off found missing there is in the ledger.
        self.missing_here = self.progress.entries_received + self.progress.claims_received
        self.aside.try_again()
        length = len(self._local.index.elements)
        for number in range(PASSES_MAX):
            if number > 1:
                await asyncio.sleep(PASS_PAUSE_S)
            compared = await self._pass(header, mutual)
            if self._memory.learn_policy(self._exchange.policy or 0):
                self.ledger.policy_changed = True
                self.missing_here *= self.fetches  # a dry run finds it once more
                continue  # what the peer refused before is offered again
            if self.stated is not None and self.stated.agrees:
                self.proof = compared
            elif self._is_comparable:
                self.proof = await compare_everything(
                    self._local, self._exchange, header, mutual, self.aside
                )
            if self.proof is not None or not self._is_comparable:
                break
        self._memory.index_length = length
        self._memory.proof = self.proof
        if self.proof is None and self._is_comparable and not self.found_count:
            detail = "the peer says that all ranges are equal, and that it holds something else"
            raise Problem(Code.PEER_MISBEHAVED, detail)

    @property
    def _is_comparable(self) -> bool:
        """Whether both totals have to be equal now: everything found was moved, both ways."""
        if self.sends or not self.fetches:
            is_moved = self.sends or not (self.missing_here or self.missing_there)
            return is_moved and not self.unserved_count
        return False

    async def _pass(self, header: SessionHeader, mutual: Interest) -> Proof:
        """Compare, and move what differs. The proof to record if the first answer was equality."""
        await self._local.index.catch_up()
        self.aside.forget_held(self._local.index)
        view = self.aside.view(self._local.index.view(header.key(), mutual))
        compared = proof_of(self._local, mutual, view, self.aside, self._memory.policy)
        self.stated, self.found_count = None, 0
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
            self._local,
            view,
            header,
            self._exchange,
            self.aside,
            self.ledger,
            self.progress,
            initiator,
        )
        await _Streams(self, initiator, moves, self._exchange).run()
        await moves.finish()
        if self.fetches:
            await self._fetch_lost(moves, mutual)
        self.unserved_count = moves.unserved_count
        if self._exchange.policy != self._memory.policy:
            compared = proof_of(self._local, mutual, view, self.aside, self._exchange.policy)
        return compared

    async def _lost_due(self, mutual: Interest) -> tuple[list[Element], int]:
        """Entries whose content is lost here, and which this peer is to be asked for now.

        Sought from where the last pass stopped, and at the end from the start; and where to go on.
        """
        store = self._local.store
        after = self._memory.lost_after
        is_from_start = after == 0
        found: dict[bytes, Element] = {}
        self.lost_count = await store.lost_count()
        for _ in range(LOST_PAGES_MAX if self.lost_count else 0):
            page = await store.lost_elements(LOST_FETCHED_MAX, after)
            for each in page:
                after = each.seq
                if self._is_due(each, mutual):
                    found[each.digest] = Element(each.order, each.digest)
                if len(found) == LOST_FETCHED_MAX:
                    return list(found.values()), after
            if len(page) < LOST_FETCHED_MAX:
                after = 0
                if is_from_start:
                    break
                is_from_start = True
        return list(found.values()), after

    def _is_due(self, lost: LostElement, mutual: Interest) -> bool:
        """A peer is told of no element outside of what both want, not even by name."""
        return (
            mutual.window.holds(lost.order)
            and self._local.index.covers(mutual, lost.channel_no)
            and self._memory.lost_asked.is_due(lost.digest)
        )

    async def _fetch_lost(self, moves: Moves, mutual: Interest) -> None:
        """The sets may be equal although content is lost here: the peer is asked for it by name."""
        lost, after = await self._lost_due(mutual)
        if lost:
            came = await moves.fetch_lost(lost)
            for each in lost:
                if each.element_id not in came:
                    self._memory.lost_asked.add(each.element_id)
            self.mended_count += len(came)
            self.lost_count = await self._local.store.lost_count()
        self._memory.lost_after = after

    def show_progress(self, *, is_last: bool = False, is_equal: bool = False) -> None:
        """Bring `progress` up to date, at most ten times a second until the last time."""
        now = time.monotonic()
        if not is_last and now - self._shown_at_s < PROGRESS_INTERVAL_S:
            return
        self._shown_at_s = now
        if self._initiator is not None:
            measured = self._initiator.progress
            total = sum(measured.elements.values())
            # Where a session breaks off, the rest of the elements was not compared.
            self.elements_count = total - measured.elements[RangeState.SYNCING]
            segments = [(SegmentState[each.state.name], each.share) for each in measured.segments]
            arrived = self.progress.entries_received + self.progress.claims_received
            self.progress.segments = filled(segments, arrived / max(total, 1))
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
                await self._end_of(done)
                self._session.show_progress()
        finally:
            await _cancel(self._asks | self._carries)

    async def _end_of(self, done: set[asyncio.Task[None]]) -> None:
        try:
            for task in done:
                task.result()
        except NonceExpiredError:
            # What is on its way was refused too: each batch sends its push again, then ends.
            await asyncio.gather(*self._carries, return_exceptions=True)
            raise

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
        session = self._session
        match event:
            case Have():
                session.found_count += 1
                session.missing_there += session.ledger.offer(event.ids)
                if session.sends:
                    self._moves.add_have(event)
            case Need():
                session.found_count += 1
                session.missing_here += event.count
                if session.fetches:
                    self._moves.add_need(event)
            case NotThere():
                session.found_count += 1
                session.aside.forget([row.tobytes() for row in event.ids])
            case Stated():
                session.stated = event
            case Fault() | Expired() | Busy() | Unsupported():
                _raise(event)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


def _raise(event: Fault | Expired | Busy | Unsupported) -> NoReturn:
    match event:
        case Fault():
            raise event.error
        case Expired():
            raise NonceExpiredError(event.responder_nonce)
        case Busy(refused=True):
            raise Problem(Code.FORBIDDEN, "the peer refuses to reconcile this interest with us")
        case Busy():
            raise busy(event.retry_after_s)
        case Unsupported():
            raise unsupported(event.version)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
