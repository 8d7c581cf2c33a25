"""One session with one peer, as the initiator: make two sets equal over the mutual interest.

Theory of operation. This side has a `Replica` (a set of elements with content) and a `Transport` (a
way to call the peer). The peer keeps nothing between calls, so all state of a session is here.

1. Hello. `Session.run` gets the peer's interest and a nonce, and intersects the interest with this side's;
   the `PeerMemory` of the last session saves the call.
2. News. A pair that was proved equal has a `Baseline` with a mark of each side. The session then
   compares only what arrived after the marks (`_compare_news`), so its cost does not depend on the
   history. Everything else follows if a mark fails, if an element is due for a retry, and once a day.
3. A pass (`sdstore.sync.comparison.Pass`). Two streams of requests run side by side.
   `recon.initiator.Initiator` has a work list of ranges; each answer settles ranges or splits them, and
   yields events: `Need` (lacked here), `Have` (lacked there), `NotThere`. `Moves` fetches and pushes
   content in bounded batches as soon as enough of it is known. A received item is decoded once, checked
   against the request, and committed to the replica (`sdstore.sync.received`).
4. The proof. That ranges are equal is only the peer's claim. The peer also states the total of its set
   under the session's key. This side never sends its own total. With marks, both totals are as of the
   first exchange, and `sdstore.sync.news.Moved` shows that what the pass moved explains the whole
   difference. If the peer acknowledged elements since, it must state a total that contains them, too
   (`_keeps`). Without marks, the peer states its total again at the end. If the totals agree, the sets
   are equal, and that is remembered for step 2. Otherwise something was dropped or a side grew, and
   another pass under the same key finds it; there are at most four.
5. Disputes. Elements that one side refuses or cannot serve are set aside (`memory.SetAside`) on both
   sides of the comparison, so they cost nothing afterwards; they are retried after a while.

Whatever the peer does, the session ends within its budgets, with a `SyncReport`: every answered
request makes progress or is the peer's fault, content is charged to the budget of `recon`, and the
session has a time limit. A `SyncError` of the replica or the transport ends it too. Committed elements
stay, and the memory that is returned with the report contains everything learned so far.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace

from recon.codec import closing_request, read_total
from recon.errors import RemoteProtocolError
from recon.events import RangeState, Stated
from recon.initiator import Initiator
from recon.limits import NONCE_BYTES
from recon.marks import view_of
from recon.session import Interest, SessionHeader, decode_interest, initiator_nonce
from recon.view import View
from sdstore.sync.comparison import Confirmation, Pass
from sdstore.sync.exchange import (
    Exchange,
    InterestChangedError,
    MarkUnknownError,
    NonceExpiredError,
    Transport,
)
from sdstore.sync.limits import DEFAULT_LIMITS, SyncLimits
from sdstore.sync.memory import (
    SET_ASIDE_MAX,
    WHOLE_S_MAX,
    Baseline,
    PeerMemory,
    Proof,
    SetAside,
    pack_elements,
    unpack_elements,
)
from sdstore.sync.moves import Ledger, Moves
from sdstore.sync.news import Moved, columns_of, news_of
from sdstore.sync.replica import ArrivalOrder, Element, Replica, columns
from sdstore.sync.report import (
    Counts,
    Progress,
    SegmentState,
    SyncCode,
    SyncError,
    SyncOutcome,
    SyncReport,
    filled,
    misbehaved,
    outcome_of,
)

INTEREST_CHANGES_MAX = 8  # that a session follows; it ends with the last of them
RESTARTS_MAX = 3  # a nonce expires at most once in an honest session
PASSES_MAX = 4  # of one attempt: the first, one more for what was dropped or grew, two to be sure
CONFIRMATIONS_MAX = 2  # of one pass: a worker of the peer can see stored elements a moment later
PASS_PAUSE_S = 0.2  # before the third, so that every worker of the peer sees the stored elements
LOST_FETCHED_MAX = 256  # entries with lost content that a pass requests, about: one batch
LOST_PAGES_MAX = 8  # of lost entries read to find those; later passes read on
PROGRESS_INTERVAL_S = 0.1
NOTHING_SHARED = "nothing was compared: the interests of the two nodes have no channel in common"

NOTHING_REMEMBERED = PeerMemory()


async def sync_with_peer(
    replica: Replica,
    transport: Transport,
    interest: Interest,
    *,
    memory: PeerMemory = NOTHING_REMEMBERED,
    limits: SyncLimits = DEFAULT_LIMITS,
    nonce_secret: bytes | None = None,
    arrivals: ArrivalOrder | None = None,
    dry_run: bool = False,
    fetch_only: bool = False,
    current_interest: Callable[[], Interest] | None = None,
    changed: Callable[[Progress], None] = lambda _: None,
) -> tuple[SyncReport, PeerMemory]:
    """Make a replica and a peer equal over the mutual part of `interest`.

    Returns the report, and the memory for the next session with this peer. `changed` is called with the
    progress while the session runs. A dry run finds the differences and moves nothing; `fetch_only`
    sends nothing. `nonce_secret` is the key by which the caller's own responder recognises the nonces of its
    sessions. `current_interest` returns the interest of the moment, where it
    can change during the session: then the session goes on with the new one, as it does when the peer's
    changes. With `arrivals`, the arrival order of the replica, later sessions compare only what is new; a
    dry run and `fetch_only` compare everything. Never raises for faults of the peer: the report contains
    them.
    """
    started_s = time.monotonic()
    session = Session(replica, transport, interest, memory, limits, changed)
    session.nonce_secret = nonce_secret or os.urandom(NONCE_BYTES)
    session.fetches = not dry_run
    session.sends = not (dry_run or fetch_only)
    session.arrivals = arrivals if session.sends else None
    session.current_interest = current_interest or (lambda: interest)
    outcome, code, detail = await _judged(session, limits.seconds_max)
    is_equal = outcome is SyncOutcome.IN_SYNC and not session.shares_nothing
    session.show_progress(is_last=True, is_equal=is_equal)
    report = SyncReport(
        outcome=outcome,
        code=code,
        detail=detail,
        elements=session.elements_count,
        missing_here=session.missing_here,
        missing_there=session.missing_there,
        proved=session.proof is not None,
        set_aside_count=len(session.aside) + session.aside.beyond_count,
        set_aside=session.aside.reported(),
        mended=session.mended_count,
        lost_here=session.lost_count,
        seconds=round(time.monotonic() - started_s, 3),
        **session.counts,
    )
    return report, session.memory


async def _judged(session: Session, seconds_max: float) -> tuple[SyncOutcome, str, str]:
    """Run the session; returns outcome, code, detail."""
    try:
        async with asyncio.timeout(seconds_max):
            await session.run()
    except SyncError as error:
        return error.outcome, error.code, error.detail
    except RemoteProtocolError as error:
        is_spent = error.code.startswith("budget")
        code = SyncCode.BUDGET_SPENT if is_spent else SyncCode.PEER_MISBEHAVED
        return outcome_of(code), code, str(error)
    except TimeoutError:
        return SyncOutcome.PARTIAL, SyncCode.BUDGET_SPENT, f"not complete after {seconds_max} s"
    if not session.fetches and (session.missing_here or session.missing_there):
        return SyncOutcome.DIFFERENT, "", ""
    if session.unserved_count and len(session.agreed) > 1:
        detail = f"an interest changed during the session; {session.unserved_count} offered elements were not served"
        return SyncOutcome.PARTIAL, SyncCode.OVERLOADED, detail
    if session.unserved_count:
        detail = f"the peer offered {session.unserved_count} elements that it did not serve"
        return SyncOutcome.PEER_FAULT, SyncCode.PEER_MISBEHAVED, detail
    return (
        SyncOutcome.IN_SYNC,
        "",
        NOTHING_SHARED if session.shares_nothing else session.ledger.said,
    )


class Session:
    def __init__(
        self,
        replica: Replica,
        transport: Transport,
        interest: Interest,
        memory: PeerMemory,
        limits: SyncLimits,
        changed: Callable[[Progress], None],
    ) -> None:
        self.replica = replica
        self.limits = limits
        self.nonce_secret = b""
        self.fetches = True
        self.sends = True
        self.arrivals: ArrivalOrder | None = None
        self.current_interest: Callable[[], Interest] = lambda: interest
        # For the report.
        self.counts = Counts()
        self.missing_here = 0
        self.missing_there = 0
        self.shares_nothing = False
        self.agreed: set[bytes] = set()  # mutual interests that were in force
        self.elements_count = 0
        self.mended_count = 0
        self.lost_count = 0
        self.proof: Proof | None = None
        # Of the last pass.
        self.found_count = 0
        self.unserved_count = 0
        self.stated: Stated | None = None
        self.initiator: Initiator | None = None
        # What the comparison starts from, and the baseline of the next session.
        self._baseline: Baseline | None = None
        self._made: Baseline | None = None
        self._proved_before_count = 0  # elements that the baseline covers, which are not compared
        self._is_policy_steady = True  # the peer's, in the last pass

        self.exchange = Exchange(transport, self.counts)
        self.ledger = Ledger()
        self._interest = interest
        self._agreed_policy: int | None = None  # of the peer, while the mutual interest is in force
        self._memory = memory
        self._mutual, self._mutual_bytes = Interest(), b""
        self._tells_interest = False
        self.aside = SetAside(memory.aside_over(b""))
        self._changed = changed
        self._segments: tuple[tuple[SegmentState, float], ...] = ()
        self._shown_at_s = time.monotonic()

    @property
    def memory(self) -> PeerMemory:
        """The current memory of the peer."""
        memory = self._memory.with_aside(self.aside.value())
        if memory.policy is None:
            # What the peer refused before an interruption, it refused under this policy.
            memory = replace(memory, policy=self.exchange.policy)
        return memory

    # --- from the hand-shake to the proof --------------------------------------------------------

    async def run(self) -> None:
        """Greet and reconcile; begin again while a side changes what it wants."""
        arrivals = self.arrivals
        for changes_count in range(INTEREST_CHANGES_MAX + 1):
            is_last = changes_count == INTEREST_CHANGES_MAX
            self.exchange.has_changed = (lambda: False) if is_last else self._has_changed
            self._interest, self._agreed_policy = self.current_interest(), self._memory.policy
            try:
                await self._run()
            except InterestChangedError:
                self._learn_policy_between()
                self.arrivals, self.proof, self._baseline, self._made = arrivals, None, None, None
                self.unserved_count = 0
            else:
                break
        if (
            self.shares_nothing
        ):  # then no answer says whether the peer has changed its interest since
            self._memory = replace(self._memory, interest=None)

    def _has_changed(self) -> bool:
        """Whether a side wants something else than it did when both agreed on the mutual interest."""
        policy = self.exchange.policy
        return (
            policy not in (None, self._agreed_policy) or self.current_interest() != self._interest
        )

    def _learn_policy_between(self) -> None:
        """Keep what this session set aside, under the peer's policy of now; read its interest again."""
        self._memory = self.memory
        if self.exchange.policy is not None:
            self._learn_policy(self.exchange.policy)
        self.ledger.forget_answers()
        self._memory = replace(self._memory, interest=None)

    async def _run(self) -> None:
        """Greet and reconcile; repeat if the peer's nonce expires meanwhile."""
        self._mutual = self._interest.intersect(await self._peer_interest())
        self._mutual_bytes = self._mutual.encode()
        self.agreed.add(self._mutual_bytes)
        self.aside = SetAside(self._memory.aside_over(self._mutual_bytes))
        before = self._memory.baseline_over(self._mutual_bytes)
        self.ledger.kept_before = (
            unpack_elements(before.counted_in).keys() if before else frozenset()
        )
        aside_name = self.aside.name
        await self.aside.forget_mended(self.replica)
        self.shares_nothing = self._mutual.is_empty
        if self.shares_nothing:
            return
        if self.sends and not await self._has_due():
            self._baseline = self._usable_baseline(aside_name)
        for _ in range(RESTARTS_MAX):
            try:
                await self._attempt(self._header())
            except NonceExpiredError as expired:
                self._memory = replace(self._memory, responder_nonce=expired.responder_nonce)
            else:
                return
        raise misbehaved("the peer's nonces expire faster than they are used")

    async def _peer_interest(self) -> Interest:
        """What the peer wants, by a hello if this side does not know it, or has no nonce."""
        known = self._memory.interest
        if known is not None and len(self._memory.responder_nonce) == NONCE_BYTES:
            return decode_interest(known)
        hello = await self.exchange.hello()
        # An answer with another policy shows that the interest has changed meanwhile.
        self._memory = replace(
            self._memory.with_policy(hello.policy),
            responder_nonce=hello.responder_nonce,
            interest=hello.interest.encode(),
        )
        self._agreed_policy, self._tells_interest = hello.policy, True
        return hello.interest

    def tells_interest(self) -> bool:
        """Whether the next request must have the mutual interest in full; True once after a hello."""
        tells, self._tells_interest = self._tells_interest, False
        return tells

    async def _has_due(self) -> bool:
        """Whether an element must be tried again, which takes a comparison of everything."""
        due, after = await self._lost_due()
        if due or self.aside.is_due():
            return True
        self._memory = replace(self._memory, lost_after=after)
        return False

    def _usable_baseline(self, aside_name: bytes) -> Baseline | None:
        """The baseline of the mutual interest, if all that it rests on is unchanged on this side.

        What was set aside is not compared again, so a change there takes a comparison of everything.
        """
        baseline = self._memory.baseline_over(self._mutual_bytes)
        if self.arrivals is None or baseline is None or baseline.is_due():
            return None
        is_same = baseline.aside == aside_name == self.aside.name
        return baseline if is_same else None

    def _header(self) -> SessionHeader:
        ours = initiator_nonce(self.nonce_secret, os.urandom(NONCE_BYTES // 2))
        return SessionHeader(ours, self._memory.responder_nonce, self._mutual_bytes)

    async def _attempt(self, header: SessionHeader) -> None:
        """Compare the news, or else everything, and remember what was proved."""
        # The ledger contains the elements that an interrupted attempt found missing there.
        self.missing_here = self._arrived_count
        arrived_count = self.replica.arrived_count
        is_news = await self._compare_news(header)
        if not is_news:
            await self._compare_all(header)
        self._memory = replace(self._memory, arrived_count=arrived_count, proof=self.proof)
        self._memory = self._memory.with_baseline(self._mutual_bytes, self._made)
        if not self._is_policy_steady:
            raise SyncError(SyncCode.OVERLOADED, "the peer's policy keeps changing")
        if self.proof is None and self._is_comparable and not self.found_count:
            detail = "the peer claims that all ranges are equal, but its total differs"
            raise misbehaved(detail)

    async def _compare_news(self, header: SessionHeader) -> bool:
        """Make what is new on both sides equal; False if everything must be compared.

        A session that is aborted here keeps its baseline: what it moved is news on both sides.
        """
        if self._baseline is None:
            return False
        try:
            compared = await self._pass(header, self._baseline)
        except MarkUnknownError:
            return False
        if self._learn_policy(self.exchange.policy or 0) or self._made is None:
            self._made = None
            return False
        self.proof = compared
        return True

    async def _compare_all(self, header: SessionHeader) -> None:
        """Passes under one key until the sets are proved equal.

        An honest pair needs one, and another if claims were dropped, or a side without marks grew.
        """
        # Elements that are tried again are no longer set aside, so no baseline covers them.
        self._baseline = None
        self._memory = self._memory.with_baseline(self._mutual_bytes, None)
        self.aside.try_again()
        for number in range(PASSES_MAX):
            if number > 1:
                await asyncio.sleep(PASS_PAUSE_S)
            try:
                compared = await self._pass(header)
            except MarkUnknownError:
                self.arrivals = None  # too much arrives meanwhile, or the peer's history changed
                continue
            self._is_policy_steady = not self._learn_policy(self.exchange.policy or 0)
            if not self._is_policy_steady:
                self.ledger.policy_changed = True
                self.missing_here *= self.fetches  # a dry run finds these elements again
                self._made = None
                continue  # elements that the peer refused before are offered again
            if self._made is None and self.aside.beyond_count:
                detail = (
                    f"{len(self.aside) + self.aside.beyond_count} elements need to be set aside"
                )
                raise SyncError(SyncCode.OVERLOADED, f"{detail}; {SET_ASIDE_MAX} are remembered")
            if self._made is not None or (self.stated is not None and self.stated.agrees):
                self.proof = compared
            elif self._is_comparable:
                self.proof = await self._compare_everything(header)
            if self.proof is not None or not self._is_comparable:
                break

    def _learn_policy(self, policy: int) -> bool:
        """Whether the peer's policy has changed; refused elements are then offered again."""
        known = self._memory.policy
        if known == policy:
            return False
        self._memory = self.memory.with_policy(policy)
        if known is None:
            return False
        self.aside = SetAside(self._memory.aside_over(self._mutual_bytes))
        return True

    @property
    def _is_comparable(self) -> bool:
        """Whether both totals must be equal now: all differences found were moved, both ways."""
        if self.sends or not self.fetches:
            is_moved = self.sends or not (self.missing_here or self.missing_there)
            return is_moved and not self.unserved_count
        return False

    async def _pass(self, header: SessionHeader, baseline: Baseline | None = None) -> Proof:
        """Compare, and move the differences. Returns the proof to record if the sets were equal.

        With a baseline, compare what arrived after it; then the proof says nothing without `_made`.
        Raises MarkUnknownError if one of its marks fails.
        """
        view, own_mark = await self._view_since(header, baseline)
        is_news = baseline is not None
        compared = self._proof_of(view)
        total = view.total()
        self.stated, self.found_count = None, 0
        self._proved_before_count = baseline.elements_count if baseline else 0
        self.exchange.begin_pass(baseline.peer if baseline else b"", wants_mark=bool(own_mark))
        recent = None if is_news else self.replica.arrived_count - self._memory.arrived_count
        one_pass = Pass(self, header, view, recent)
        self.initiator = one_pass.initiator
        await one_pass.run()
        if self.exchange.has_changed():  # what the peer stopped serving is no fault of it
            raise InterestChangedError
        if self.fetches and not is_news:
            await self._fetch_lost(one_pass.moves)
        self.unserved_count = one_pass.moves.unserved_count
        moved, theirs, mark = one_pass.moves.moved, self.exchange.total, self.exchange.mark
        is_settled = not self.unserved_count and not self.ledger.has_doubts
        is_as_of_mark = theirs is not None and view.total() == total
        if theirs and is_settled and is_as_of_mark and moved.accounts_for(view, theirs):
            sent = moved.counted_in(self.aside)
            if not sent or await self._keeps(header, mark, sent):
                marks = (own_mark, mark)
                self._made = await self._baseline_after(moved, marks, len(view), baseline)
        if self._made is not None:
            compared = replace(compared, elements_count=self._made.elements_count)
        return compared

    async def _keeps(self, header: SessionHeader, since: bytes, sent: dict[bytes, int]) -> bool:
        """Whether the peer states a total that contains what it acknowledged in a pass.

        The total of the pass is as of its mark `since`, before the acknowledgements. So what was sent is
        compared with what arrived there after that mark: one round trip, if nobody else brought anything.
        Elements that others brought are fetched, too.
        """
        compared = dict(sent)
        for number in range(CONFIRMATIONS_MAX):
            if number:
                await asyncio.sleep(PASS_PAUSE_S)
            self.exchange.begin_pass(since, wants_mark=True)
            view = view_of(columns_of(compared), header.key())
            confirming = Confirmation(self, header, view, None)
            try:
                await confirming.run()
            except MarkUnknownError:
                return False
            if self.exchange.has_changed():
                raise InterestChangedError
            moved, theirs = confirming.moves.moved, self.exchange.total
            self.unserved_count += confirming.moves.unserved_count
            if theirs is None or not moved.accounts_for(view, theirs):
                return False
            if not moved.offered:
                return True
            compared |= moved.needed
        return False

    async def _view_since(
        self, header: SessionHeader, baseline: Baseline | None
    ) -> tuple[View, bytes]:
        """What a pass compares, as of now, and this side's mark of that moment.

        Raises MarkUnknownError if this side's mark in the baseline fails.
        """
        await self.replica.catch_up()
        arrived = None
        if baseline is not None and self.arrivals is not None:
            arrived = await self.arrivals.arrived_since(baseline.own, self._mutual)
            if arrived is None:
                raise MarkUnknownError
        # From here on nothing waits, so the mark is that of the view.
        self.aside.forget_held(self.replica)
        own_mark = self.arrivals.mark(self._mutual) if self.arrivals else b""
        if baseline is None or arrived is None:
            return self.aside.view(self.replica.view(header.key(), self._mutual)), own_mark
        elements = news_of(baseline, arrived, self.replica, self.aside)
        if elements is None:
            raise MarkUnknownError
        return view_of(elements, header.key()), own_mark

    async def _baseline_after(
        self, moved: Moved, marks: tuple[bytes, bytes], view_count: int, before: Baseline | None
    ) -> Baseline | None:
        """The next baseline, if this side holds all that the peer has up to its mark, or set it aside.

        `marks`: this side's and the peer's.
        """
        # A claim that came alone is not in `held` if its entry came later and brought it.
        unsure = moved.needed.keys() - moved.held
        unsure_at = [(moved.needed[each], each) for each in unsure if each not in self.aside]
        if unsure_at:
            await self.replica.catch_up()
            if not self.replica.holds(*columns(unsure_at)).all():
                return None
        elements_count = view_count + len(moved.needed) + moved.passed_over_count
        if before is not None:
            elements_count += before.elements_count - len(unpack_elements(before.counted_in))
        whole_s = min(self.limits.whole_s, WHOLE_S_MAX)
        return Baseline(
            interest=self._mutual_bytes,
            own=marks[0],
            peer=marks[1],
            counted_in=pack_elements(moved.counted_in(self.aside)),
            counted_out=pack_elements(moved.counted_out(self.aside)),
            aside=self.aside.name,
            elements_count=elements_count,
            whole_due_at_s=before.whole_due_at_s if before else time.time() + whole_s,
        )

    async def _compare_everything(self, header: SessionHeader) -> Proof | None:
        """Request the peer's total under the session's key; None if it differs from ours.

        A difference is not a fault, because either side may have grown: the next pass finds it.
        """
        await self.replica.catch_up()
        self.aside.forget_held(self.replica)
        own_mark = self.arrivals.mark(self._mutual) if self.arrivals else b""
        view = self.replica.view(header.key(), self._mutual)
        ours, proof = self.aside.total(view), self._proof_of(view)
        self.exchange.begin_pass(b"", wants_mark=bool(own_mark))
        theirs = read_total(await self.exchange.content_call(header, closing_request()))
        if ours != theirs:
            return None
        if self.exchange.mark:
            marks = (own_mark, self.exchange.mark)
            self._made = await self._baseline_after(Moved(), marks, ours.count, None)
        return proof

    def _proof_of(self, view: View) -> Proof:
        """The proof to record if the peer equals this view, without what is set aside."""
        return Proof(self._mutual_bytes, len(view), time.time())

    # --- content that is lost here ---------------------------------------------------------------

    async def _lost_due(self) -> tuple[list[Element], int]:
        """Entries with lost content to request from this peer now, and the place to resume the search.

        The search starts where the last pass stopped and wraps around at the end. Only elements of the
        mutual interest are requested: the peer must not learn even the names of others.
        """
        after = self._memory.lost_after
        waiting = self._memory.lost_waiting()
        is_from_start = after == 0
        found: dict[bytes, Element] = {}
        for _ in range(LOST_PAGES_MAX):
            page = await self.replica.lost(self._mutual, after, LOST_FETCHED_MAX)
            self.lost_count, after = page.total, page.next
            due = (each for each in page.elements if each.element_id not in waiting)
            found |= {each.element_id: each for each in due}
            if len(found) >= LOST_FETCHED_MAX or (after == 0 and is_from_start):
                break
            is_from_start = is_from_start or after == 0
        return list(found.values()), after

    async def _fetch_lost(self, moves: Moves) -> None:
        """Request lost content by name: equal sets do not show that content is lost here."""
        lost, after = await self._lost_due()
        if lost:
            came = await moves.fetch_lost(lost)
            in_vain = [each.element_id for each in lost if each.element_id not in came]
            self._memory = self._memory.asked_in_vain(in_vain)
            self.mended_count += len(came)
            self.lost_count -= len(came)
        self._memory = replace(self._memory, lost_after=after)

    # --- progress --------------------------------------------------------------------------------

    @property
    def _arrived_count(self) -> int:
        return self.counts["entries_received"] + self.counts["claims_received"]

    def show_progress(self, *, is_last: bool = False, is_equal: bool = False) -> None:
        """Announce the progress: after a tenth of a second, then ten times a second, and at the end."""
        now_s = time.monotonic()
        if not is_last and now_s - self._shown_at_s < PROGRESS_INTERVAL_S:
            return
        self._shown_at_s = now_s
        if is_equal and self.proof is not None:
            self.elements_count = self.proof.elements_count
        elif self.initiator is not None:
            measured = self.initiator.progress
            total = sum(measured.elements.values())
            # An aborted session did not compare the other elements, and those that the baseline covers
            # count once the peer has accepted its own mark of them.
            before = self._proved_before_count if self.exchange.mark else 0
            self.elements_count = before + total - measured.elements[RangeState.SYNCING]
            part = total / max(before + total, 1) if before else 1.0
            bar = tuple(
                (SegmentState[each.state.name], part * each.share) for each in measured.segments
            )
            bar = ((SegmentState.IN_SYNC, 1.0 - part), *bar) if before else bar
            self._segments = tuple(filled(bar, self._arrived_count / max(before + total, 1)))
            if is_last and self.proof is not None:
                self.elements_count = self.proof.elements_count
        if is_equal:
            self._segments = ((SegmentState.IN_SYNC, 1.0),)
        in_sync = sum(share for state, share in self._segments if state is SegmentState.IN_SYNC)
        self._changed(
            Progress(in_sync_percent=100.0 * in_sync, segments=self._segments, **self.counts)
        )
