"""One attempt to make two sets equal, as the initiator: a machine without I/O, clock or randomness.

Theory of operation. `Sync.poll` returns steps to carry out (`sdstore.sync.steps`), `Sync.done` takes their
results in any order, and `Sync.deadline_s` says when to poll if no result comes. The peer keeps nothing
between calls, so all state is here. `sdstore.sync.driver` carries the steps out; it is the only part of this
package that waits for anything.

1. Hello (`_meet`). The peer tells its interest, its policy and a nonce in one answer. The memory of the last
   session saves this call. Both sides compare the mutual interest under a key from both nonces.
2. A look (`_look`). A pair that was proved equal has a `Baseline` with a mark of each side, and compares only
   what arrived after the marks, so the cost does not depend on the history. Everything is compared if a mark
   fails, if an element is due for a retry, and once a day.
3. A comparison (`sdstore.sync.comparison`), which finds what differs and has it moved beside
   (`sdstore.sync.content`). Content that is lost here is fetched by name.
4. The proof (`_judge`, `sdstore.sync.differences`). That ranges are equal is only the peer's claim. The peer also
   states the total of its set under the session's key; this side never sends its own. What was moved must
   explain the whole difference between the two totals.
5. The confirmation (`_confirm`). That total is older than the peer's acknowledgements. So everything that was
   pushed is compared once more, with what arrived at the peer since: here a pushed entry is checked.
6. Disputes. Elements that one side refuses or cannot serve are set aside (`memory.SetAside`) on both sides of
   the comparison, so they cost nothing afterwards; they are retried after a while.

An attempt that cannot come further although nobody is at fault ends with all that it learned, and `Done.again`
asks for another one: an interest, a policy, a nonce or a mark changed, or the totals are not explained yet.
`Course` is what the attempts of one session share. Whatever the peer does, an attempt ends within its budgets:
every answered request makes progress or is the peer's fault, content is charged to the budget of `recon`, and
the session has a time limit. All times of a session:

| what waits | how long | bound |
|---|---|---|
| the session | an hour | `report.SyncLimits.seconds_max`, then partial |
| a comparison | 60 s, and 10 s for each MiB moved | `recon.limits.Limits`, then partial |
| a call | 60 s | the transport, `sdstore.client.transport.REQUEST_TIMEOUT_S` |
| pushes that the peer has no room for | 50 times 0.1 s | `content.PATIENCE_STEPS`, then partial |
| rows that this side has no room for | 50 times 0.1 s | the same |
| rows of a small transaction | 1 s | `content.UNSTORED_S_MAX`, then stored |
| a confirmation, an attempt after an unexplained total | 0.2 s | `PAUSE_S` |
| the next comparison of everything | 18 to 24 hours | `report.SyncLimits.whole_s` |
| a retry of what is set aside, or was asked for in vain | 15 minutes, four times as long each time, a day | `memory.RETRY_S_MIN` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from recon.agreement import Interest, SessionHeader, decode_interest, initiator_nonce
from recon.elements import Mask
from recon.errors import RemoteProtocolError
from recon.initiator import Hello, hello_of, hello_request
from recon.limits import NONCE_BYTES
from recon.marks import Arrived, view_of
from recon.view import View
from sdstore.sync.comparison import (
    AttemptOverError,
    Comparison,
    Mode,
    Requests,
    Why,
    initiator_of,
    refused,
)
from sdstore.sync.content import NEVER_S, ClaimId, Content, Shared, Steps
from sdstore.sync.differences import Ledger, SetAside, brought_columns, columns_of, news_of
from sdstore.sync.memory import (
    RETIRED_NAMED_MAX,
    SET_ASIDE_MAX,
    WHOLE_S_MAX,
    Baseline,
    Element,
    LackedBy,
    PeerMemory,
    columns,
    pack_elements,
    unpack_elements,
)
from sdstore.sync.report import (
    NOTHING_SHARED,
    Counts,
    Progress,
    SegmentState,
    SyncCode,
    SyncError,
    SyncLimits,
    SyncOutcome,
    SyncReport,
    filled,
    misbehaved,
    outcome_of,
)
from sdstore.sync.steps import (
    Call,
    Do,
    Done,
    Failed,
    FindLost,
    Holds,
    Look,
    Looked,
    LostPage,
    Read,
    Show,
    StillLost,
    Store,
)
from sdstore.wire.recon_pb2 import ReconResponse

CONFIRMATIONS_MAX = 3  # of one attempt: one, and two if a claim was dropped or a process lags
PAUSE_S = 0.2  # before a peer is asked again, so that all its processes see what they stored
LOST_FETCHED_MAX = 256  # entries with lost content that an attempt requests, about: one batch
LOST_PAGES_MAX = 8  # of lost entries read to find those; later attempts read on
NONCES_UNUSED_MAX = 3  # the one that was remembered, and one of a peer that is started anew
MARKS_FAILED_MAX = 2  # then a session ends without a proof
PROGRESS_INTERVAL_S = 0.1


@dataclass(slots=True, kw_only=True)
class Course:
    """What the attempts of one session share: its terms, and what it has come to.

    `claim_id` names claims, `draw` gives random bytes. `nonce_secret` is the key by which this side's own
    responder recognises the nonces of its sessions. `marks_failed_count`: how many of the peer's marks failed
    while everything was compared. Then more arrived there than it looks at after a mark, so the next attempt
    goes on without (`with_marks`). `with_cuts`: false once much of what they left out was found on the other side. `nonces_unused_count`: how many of its nonces expired without an answer.
    """

    started_s: float
    mode: Mode
    limits: SyncLimits
    claim_id: ClaimId
    nonce_secret: bytes
    draw: Callable[[int], bytes]
    counts: Counts = field(default_factory=Counts)
    ledger: Ledger = field(default_factory=Ledger)
    mended_count: int = 0
    with_marks: bool = True
    with_cuts: bool = True
    marks_failed_count: int = 0
    nonces_unused_count: int = 0

    @property
    def ends_at_s(self) -> float:
        """The time limit of the session."""
        return self.started_s + self.limits.seconds_max

    @property
    def arrived_count(self) -> int:
        """Elements that this side has received."""
        return self.counts["entries_received"] + self.counts["claims_received"]


UNEXPLAINED = "the differences that were found do not explain the total that the peer states"
_EARLY = (SyncOutcome.PARTIAL, SyncCode.OVERLOADED)


class Ending(NamedTuple):
    """How the attempt ends, once what came is stored. `awaits_answers`: and what is on its way."""

    outcome: SyncOutcome
    code: str = ""
    detail: str = ""
    again: bool = False
    pause_s: float = 0.0
    awaits_answers: bool = False


class Sync:
    """See the module. `interest`: what this side wants."""

    def __init__(
        self, memory: PeerMemory, interest: Interest, course: Course, now_s: float
    ) -> None:
        self._memory = memory
        self._interest = interest
        self._course = course
        self._steps = Steps()
        aside = SetAside(memory.aside_over(b""))
        self._shared = Shared(
            self._steps, course.counts, course.ledger, aside, course.claim_id, interest, now_s
        )
        # What both sides agreed on.
        self._has_met = False
        self._mutual = Interest()
        self._header = SessionHeader(b"", b"", b"")
        # What is compared: `_main` is the comparison to be proved, `_comparison` the one that runs.
        self._baseline: Baseline | None = None
        self._own_mark = self._own_moment = b""
        self._arrived_count = 0
        self._lost: dict[bytes, Element] = {}
        self._main: Comparison | None = None
        self._comparison: Comparison | None = None
        self._next: Callable[[Comparison], None] = self._judge
        # What the peer acknowledged, until it is confirmed.
        self._sent: dict[bytes, int] = {}
        self._confirmations_count = 0
        self._resume_at_s = NEVER_S
        self._resume: Callable[[], None] = self._meet
        # For the report.
        self._arrived_before = course.arrived_count
        self._lost_count = 0
        self._proved_count: int | None = None
        self._shown_at_s = now_s
        self._ending: Ending | None = None
        self._is_done = False
        self._meet()

    # --- the machine ---------------------------------------------------------------------------

    def poll(self, now_s: float) -> list[Do]:
        """The steps that can be taken now. None: wait for a result, or until `deadline_s`."""
        self._shared.now_s = now_s
        if not self._is_done:
            self._guarded(self._advance)
            self._end_if_stored()
            if self._shared.now_s - self._shown_at_s >= PROGRESS_INTERVAL_S and not self._is_done:
                self._show_progress()
        return self._steps.hand_out()

    def done(self, number: int, result: Any, now_s: float) -> None:
        """Take the result of a step, or `Failed`. Raises LocalProtocolError if none is awaited."""
        action, taker = self._steps.take(number)
        self._shared.now_s = now_s
        if self._is_done:
            return
        if not isinstance(result, Failed):
            self._guarded(partial(taker, result))
            return
        if isinstance(action, Read | Store) and self._content is not None:
            self._content.inbox.failed(action)
        self._fail(SyncError(result.code, result.detail))

    def interest_changed(self) -> None:
        """This side wants something else by now: end the attempt."""
        if self._ending is None:
            self._end(Ending(*_EARLY, Why.INTEREST, again=True, awaits_answers=True))

    @property
    def deadline_s(self) -> float:
        """When to poll, if no result comes before."""
        deadline_s = min(self._course.ends_at_s, self._resume_at_s)
        return min(deadline_s, self._content.deadline_s) if self._content else deadline_s

    @property
    def _content(self) -> Content | None:
        return self._comparison.content if self._comparison else None

    def _advance(self) -> None:
        now_s = self._shared.now_s
        if now_s >= self._course.ends_at_s:
            detail = f"not complete after {self._course.limits.seconds_max} s"
            self._finish(Ending(SyncOutcome.PARTIAL, SyncCode.BUDGET_SPENT, detail))
            return
        if now_s >= self._resume_at_s:
            self._resume_at_s = NEVER_S
            self._resume()
        while (comparison := self._comparison) and not self._ending:
            comparison.pump()
            self._cut()
            if self._ending or not comparison.is_over:
                break
            self._comparison = None
            self._next(comparison)
        if self._ending and self._content:
            self._content.pump(more_may_come=False)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except AttemptOverError as over:
            self._end_early(over)
        except SyncError as error:
            self._fail(error)
        except RemoteProtocolError as error:
            is_spent = error.code.startswith("budget")
            code = SyncCode.BUDGET_SPENT if is_spent else SyncCode.PEER_MISBEHAVED
            self._fail(SyncError(code, str(error)))

    # --- 1. hello ------------------------------------------------------------------------------

    def _meet(self) -> None:
        memory = self._memory
        is_known = memory.interest is not None and memory.policy is not None
        if is_known and len(memory.responder_nonce) == NONCE_BYTES:
            self._guarded(self._agree)
            return
        self._course.counts["requests"] += 1
        self._course.counts["rounds"] += 1
        self._steps.add(Call(hello_request()), self._met)

    def _met(self, response: ReconResponse) -> None:
        hello = hello_of(response)
        if not isinstance(hello, Hello):
            raise refused(hello)
        memory = self._memory.with_policy(hello.policy)
        nonce, interest = hello.responder_nonce, hello.interest.encode()
        self._memory = replace(memory, responder_nonce=nonce, interest=interest)
        self._has_met = True
        self._agree()

    def _agree(self) -> None:
        self._mutual = self._interest.intersect(decode_interest(self._memory.interest or b""))
        self._shared.interest = self._mutual
        mutual = self._mutual.encode()
        self._shared.aside = SetAside(self._memory.aside_over(mutual))
        if self._mutual.is_empty:
            # No answer says when the peer changes it, so each session asks for it.
            self._memory = replace(self._memory, interest=None)
            self._end(Ending(SyncOutcome.IN_SYNC, detail=NOTHING_SHARED))
            return
        course = self._course
        ours = initiator_nonce(course.nonce_secret, course.draw(NONCE_BYTES // 2))
        self._header = SessionHeader(ours, self._memory.responder_nonce, mutual)
        before = self._memory.baseline_over(mutual)
        if before is not None:
            course.ledger.kept_before = unpack_elements(before.counted_in).keys()
        unsent_ids = self._shared.aside.unsent_ids()
        if unsent_ids:
            self._steps.add(StillLost(unsent_ids), partial(self._know_unsent, unsent_ids))
        else:
            self._find_lost(self._memory.lost_after, LOST_PAGES_MAX)

    def _know_unsent(self, unsent_ids: list[bytes], still_lost: set[bytes]) -> None:
        """Send entries again that were set aside because their content was lost here, and that are mended."""
        self._shared.aside.forget(set(unsent_ids) - still_lost)
        self._find_lost(self._memory.lost_after, LOST_PAGES_MAX)

    # --- content that is lost here -------------------------------------------------------------

    @property
    def _fetches_lost(self) -> bool:
        return self._baseline is None and self._course.mode is not Mode.COUNT

    def _find_lost(self, after: int, pages_max: int) -> None:
        """Find entries to request from this peer by name.

        The search starts where the last one stopped and wraps around at the end. Only elements of the
        mutual interest are requested: the peer must not learn even the names of others.
        """
        step = FindLost(self._mutual, after, LOST_FETCHED_MAX)
        self._steps.add(step, partial(self._found_lost, after, pages_max))

    def _found_lost(self, after: int, pages_max: int, page: LostPage) -> None:
        self._lost_count = page.total
        waiting = self._memory.lost_waiting(self._shared.now_s)
        for each in page.elements:
            if each.element_id not in waiting:
                self._lost[each.element_id] = each
        self._memory = replace(self._memory, lost_after=page.next)
        has_wrapped = page.next == 0 and after == 0
        if has_wrapped or pages_max == 1 or len(self._lost) >= LOST_FETCHED_MAX:
            self._look()
        else:
            self._find_lost(page.next, pages_max - 1)

    # --- 2. a look -----------------------------------------------------------------------------

    def _look(self) -> None:
        """Read what is to be compared: the news since the baseline if everything it rests on is unchanged.

        What was set aside is not compared again, so a change there takes a comparison of everything.
        """
        aside, now_s = self._shared.aside, self._shared.now_s
        baseline = self._memory.baseline_over(self._header.interest)
        if baseline is not None and not (
            self._course.mode is not Mode.MOVE
            or self._lost
            or aside.is_due(now_s)
            or baseline.is_due(now_s)
            or baseline.aside != aside.name
        ):
            self._baseline = baseline
            self._steps.add(self._looking(baseline), self._looked)
        else:
            self._look_at_everything()

    def _look_at_everything(self) -> None:
        # Elements that are tried again are no longer set aside, so no baseline covers them.
        self._baseline = None
        if self._course.mode is Mode.MOVE:
            self._memory = self._memory.with_baseline(self._header.interest, None)
        self._shared.aside.try_again(self._shared.now_s)
        self._steps.add(self._looking(None), self._looked)

    def _looking(self, baseline: Baseline | None) -> Look:
        """Look up what was set aside, which may be here by now, and what the last session brought."""
        here = self._shared.aside.columns(LackedBy.HERE)
        brought = brought_columns(baseline, self._shared.aside)
        since = baseline.own if baseline else b""
        orders = np.concatenate((here.orders, brought[0]))
        ids = np.concatenate((here.ids, brought[1]))
        without = () if since else self._shared.aside.ours.pairs
        return Look(self._header.key(), self._mutual, since, orders, ids, without)

    def _looked(self, looked: Looked) -> None:
        aside, baseline = self._shared.aside, self._baseline
        here = aside.columns(LackedBy.HERE)
        name = aside.name
        aside.forget_held(here, looked.held[: len(here)])
        recent = None
        match looked.found:
            case View() as whole:
                view = aside.view(whole)
                recent = looked.arrived_count - self._memory.arrived_count
            case Arrived() as arrived if (
                baseline and aside.name == name and looked.held[len(here) :].all()
            ):
                view = view_of(news_of(baseline, arrived), self._header.key())
            case _:
                self._look_at_everything()  # nothing went out yet, so the attempt goes on
                return
        self._own_mark, self._own_moment = looked.mark, looked.moment
        self._arrived_count = looked.arrived_count
        since = baseline.peer if baseline else b""
        wants_mark = self._course.mode is Mode.MOVE and self._course.with_marks
        main = self._compare(
            view, self._course.mode, recent, since, self._judge, wants_mark=wants_mark
        )
        if self._fetches_lost:
            main.content.add_lost(list(self._lost.values()))
        self._main = main

    # --- 3. a comparison -----------------------------------------------------------------------

    def _compare(
        self,
        view: View,
        mode: Mode,
        recent: int | None,
        since: bytes,
        following: Callable[[Comparison], None],
        *,
        wants_mark: bool,
    ) -> Comparison:
        shared, policy = self._shared, self._memory.policy or 0
        requests = Requests(
            self._steps,
            shared.counts,
            self._header,
            policy,
            since=since,
            without=shared.aside.theirs.pairs,
            wants_mark=wants_mark,
        )
        initiator = initiator_of(
            view,
            self._header,
            self._course.limits,
            seed=int.from_bytes(self._course.draw(8), "big"),
            recent=recent,
            removed_orders=shared.aside.columns(LackedBy.THERE).orders,
            tells_interest=self._has_met,
        )
        self._has_met = False
        self._comparison = Comparison(shared, requests, view, initiator, mode)
        self._next = following
        return self._comparison

    # --- 4. the proof --------------------------------------------------------------------------

    def _judge(self, comparison: Comparison) -> None:
        """Every difference that was found has been moved or set aside. Is that all?"""
        moved, requests = comparison.content.moved, comparison.requests
        self._settle_lost(comparison.content)
        self._memory = replace(self._memory, arrived_count=self._arrived_count)
        comparison.content.check_served()
        if requests.total is None:
            self._judge_without_mark(comparison)
        elif moved.is_overfull:
            self._end_unproved("more was moved than a proof covers")
        elif not moved.accounts_for(comparison.view, requests.total):
            is_fault = not (comparison.missing_here or comparison.missing_there)
            code = SyncCode.PEER_MISBEHAVED if is_fault else SyncCode.OVERLOADED
            self._end_unproved(UNEXPLAINED, code)
        elif self._baseline is not None and self._course.ledger.has_doubts:
            self._end_unproved("the peer has dropped elements since the last session")
        else:
            self._sent = moved.counted_in(self._shared.aside)
            if self._sent:
                self._confirm(comparison)
            else:
                self._look_up_needed(comparison)

    def _judge_without_mark(self, comparison: Comparison) -> None:
        is_equal = comparison.stated is not None and comparison.stated.agrees
        if self._course.mode is Mode.COUNT and (
            comparison.missing_here or comparison.missing_there
        ):
            self._end(Ending(SyncOutcome.DIFFERENT))
            return
        if is_equal:
            self._proved_count = len(comparison.view)
        # What was moved without a mark, the next attempt proves with one.
        again = not self._course.with_marks and self._course.marks_failed_count < MARKS_FAILED_MAX
        self._course.with_marks = True
        self._end(Ending(SyncOutcome.IN_SYNC, again=again))

    def _cut(self) -> None:
        """Leave out what one side has retired, if naming it costs too much; or name it, if the other has it."""
        aside, course = self._shared.aside, self._course
        if not course.with_cuts or course.mode is Mode.COUNT or self._main is None:
            return
        if aside.cut_in_vain_count > RETIRED_NAMED_MAX:
            course.with_cuts = False
            aside.forget_cuts()
            self._end(Ending(*_EARLY, Why.CUT, again=True, awaits_answers=True))
            return
        moments = {LackedBy.HERE: self._main.requests.moment, LackedBy.THERE: self._own_moment}
        for lacked_by, until in moments.items():
            if until and aside.names_more_retired(lacked_by, RETIRED_NAMED_MAX):
                aside.cut(lacked_by, until)
                self._memory = self._memory.with_baseline(self._header.interest, None)
                self._end(Ending(*_EARLY, Why.RETIRED, again=True, awaits_answers=True))
                return

    def _end_unproved(self, detail: str, code: SyncCode = SyncCode.OVERLOADED) -> None:
        """The next attempt compares everything; if there is none, the report says this."""
        self._memory = self._memory.with_baseline(self._header.interest, None)
        aside = self._shared.aside
        if aside.beyond_count:
            count = len(aside) + aside.beyond_count
            detail = f"{count} elements need to be set aside; {SET_ASIDE_MAX} are remembered"
            raise SyncError(SyncCode.OVERLOADED, detail)
        self._end(Ending(outcome_of(code), code, detail, again=True, pause_s=PAUSE_S))

    def _settle_lost(self, content: Content) -> None:
        """Remember which lost entries this peer could not serve."""
        asked_ids = self._lost.keys() if self._fetches_lost else set()
        in_vain = (asked_ids | content.unsent_ids) - content.inbox.mended_ids
        self._memory = self._memory.asked_in_vain(in_vain, self._shared.now_s)
        self._course.mended_count += len(content.inbox.mended_ids)
        self._lost_count -= len(content.inbox.mended_ids)

    # --- 5. the confirmation -------------------------------------------------------------------

    def _confirm(self, main: Comparison) -> None:
        """Compare what was pushed with what arrived at the peer after its mark.

        That takes one round trip, if nobody else brought anything; what others brought is fetched, too.
        """
        self._confirmations_count += 1
        view, since = view_of(columns_of(self._sent), self._header.key()), main.requests.mark
        following = partial(self._judge_confirmation, main)
        self._compare(view, Mode.CONFIRM, None, since, following, wants_mark=True)

    def _judge_confirmation(self, main: Comparison, comparison: Comparison) -> None:
        moved, aside = comparison.content.moved, self._shared.aside
        comparison.content.check_served()
        total = comparison.requests.total
        if total is None or not moved.accounts_for(comparison.view, total):
            self._end_unproved(UNEXPLAINED)
            return
        # An entry is acknowledged without the claims inside it, so those that were dropped have been pushed
        # alone meanwhile: each is refused now, and set aside, or confirmed like the others.
        compared = self._sent | moved.needed
        self._sent = {each: order for each, order in compared.items() if each not in aside}
        if not moved.counted_in(aside):
            self._look_up_needed(main)
        elif self._confirmations_count == CONFIRMATIONS_MAX:
            self._end_unproved("the peer does not show everything that it acknowledged")
        elif comparison.lacks_acknowledged:
            self._resume_at_s = self._shared.now_s + PAUSE_S
            self._resume = partial(self._confirm, main)
        else:
            self._confirm(main)

    # --- the end -------------------------------------------------------------------------------

    def _look_up_needed(self, main: Comparison) -> None:
        """This side must hold all that it lacked, or have set it aside."""
        moved, aside = main.content.moved, self._shared.aside
        unsure = moved.needed.keys() - moved.held
        elements = columns((moved.needed[each], each) for each in unsure if each not in aside)
        if len(elements[0]):
            self._steps.add(Holds(*elements), partial(self._know_needed, main))
        else:
            self._prove(main)

    def _know_needed(self, main: Comparison, held: Mask) -> None:
        if held.all():
            self._prove(main)
        else:
            self._end_unproved("claims came without their entries")

    def _prove(self, main: Comparison) -> None:
        moved, before = main.content.moved, self._baseline
        count = len(main.view) + len(moved.needed) + moved.passed_over_count
        if before is not None:
            count += before.elements_count - len(unpack_elements(before.counted_in))
        self._proved_count = count
        aside = self._shared.aside
        if self._own_mark:
            if before is None or before.peer != main.requests.mark:
                # Otherwise nothing arrived, and the memory need not be written again.
                aside.theirs = replace(aside.theirs, place=main.requests.moment)
                aside.ours = replace(aside.ours, place=self._own_moment)
            whole_s = min(self._course.limits.whole_s, WHOLE_S_MAX)
            baseline = Baseline(
                interest=self._header.interest,
                own=self._own_mark,
                peer=main.requests.mark,
                counted_in=pack_elements(moved.counted_in(aside)),
                counted_out=pack_elements(moved.counted_out(aside)),
                aside=aside.name,
                elements_count=count,
                whole_due_at_s=before.whole_due_at_s if before else self._shared.now_s + whole_s,
            )
            self._memory = self._memory.with_baseline(self._header.interest, baseline)
        said = [self._course.ledger.said]
        if aside.theirs.pairs or aside.ours.pairs:
            said.append("without what one side had retired before the other asked for it")
        self._end(Ending(SyncOutcome.IN_SYNC, detail="; ".join(filter(None, said))))

    def _fail(self, error: SyncError) -> None:
        """End the attempt and the session by a fault of either side."""
        if self._ending is None or self._ending.again:
            self._end(Ending(error.outcome, error.code, error.detail))

    def _end_early(self, over: AttemptOverError) -> None:
        """End the attempt so that the next one comes further."""
        if self._ending is not None:
            return
        match over.why:
            case Why.NONCE:
                if self._main is None or not self._main.requests.is_answered:
                    self._course.nonces_unused_count += 1
                if self._course.nonces_unused_count >= NONCES_UNUSED_MAX:
                    self._fail(misbehaved("the peer's nonces expire faster than they are used"))
                    return
                self._memory = replace(self._memory, responder_nonce=over.responder_nonce)
            case Why.INTEREST:
                self._memory = replace(self._memory, interest=None)
            case Why.MARK:
                if self._baseline is None:
                    self._course.with_marks = False
                    self._course.marks_failed_count += 1
                self._memory = self._memory.with_baseline(self._header.interest, None)
        self._end(Ending(*_EARLY, over.why, again=True, awaits_answers=True))

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        if self._content is not None:
            self._content.end()

    def _end_if_stored(self) -> None:
        if self._ending is None or self._is_done:
            return
        if self._content is not None and self._content.inbox.is_storing:
            return
        if not (self._ending.awaits_answers and self._steps.awaits(Call)):
            self._finish(self._ending)

    def _finish(self, ending: Ending) -> None:
        self._is_done = True
        course, aside, main = self._course, self._shared.aside, self._main
        is_equal = ending.outcome is SyncOutcome.IN_SYNC and not self._mutual.is_empty
        measured_count = self._show_progress(is_equal=is_equal)
        is_proved = self._proved_count is not None
        report = SyncReport(
            outcome=ending.outcome,
            code=ending.code,
            detail=ending.detail,
            elements=measured_count if self._proved_count is None else self._proved_count,
            missing_here=self._arrived_before + (main.missing_here if main else 0),
            missing_there=course.ledger.offered_count,
            proved=is_proved,
            set_aside_count=len(aside) + aside.beyond_count,
            set_aside=aside.reported(),
            mended=course.mended_count,
            lost_here=self._lost_count,
            seconds=round(self._shared.now_s - course.started_s, 3),
            **course.counts,
        )
        memory = self._memory.with_aside(aside.value())
        self._steps.add(Done(report, memory, ending.again, ending.pause_s))

    # --- progress ------------------------------------------------------------------------------

    def _show_progress(self, *, is_equal: bool = False) -> int:
        """Announce the progress: after a tenth of a second, then ten times a second, and at the end.

        Returns the number of elements that were compared or are covered by the baseline.
        """
        self._shown_at_s = self._shared.now_s
        count, segments = 0, list[tuple[SegmentState, float]]()
        if self._main is not None:
            # What the baseline covers counts once the peer has accepted its own mark of it.
            is_covered = self._baseline is not None and self._main.requests.mark
            before = self._baseline.elements_count if self._baseline and is_covered else 0
            count, bar, size = self._main.measured(before)
            segments = filled(bar, self._course.arrived_count / max(size, 1))
        if is_equal:
            segments = [(SegmentState.IN_SYNC, 1.0)]
        in_sync = sum(share for state, share in segments if state is SegmentState.IN_SYNC)
        counts = self._course.counts
        progress = Progress(in_sync_percent=100.0 * in_sync, segments=tuple(segments), **counts)
        self._steps.add(Show(progress))
        return count
