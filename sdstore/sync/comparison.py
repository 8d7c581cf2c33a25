"""One comparison of two sets: requests about ranges, and the content that they show to be lacking beside them.

`recon.initiator.Initiator` has the work list of ranges; each answer settles ranges or splits them and yields
events: `Need` (lacked here), `Have` (lacked there), `NotThere`. `sdstore.sync.content.Content` carries the
content as soon as enough of it is known.

The first request asks for the peer's total and a mark, and no other goes out before its answer. All later ones
name that mark, so all answers are as of one moment. `Requests` adds these marks, and reads the statuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, StrEnum
from functools import cache, partial

import numpy as np

from recon.agreement import SessionHeader
from recon.codec import read_total
from recon.elements import U64
from recon.events import (
    Busy,
    Event,
    Expired,
    Fault,
    Have,
    Need,
    NotThere,
    Stated,
    Unsupported,
)
from recon.hashing import Total
from recon.initiator import Initiator, Options, refusal_of
from recon.limits import DEFAULT_LIMITS as RECON_LIMITS
from recon.limits import PROTOCOL_VERSION, Limits
from recon.marks import MARK_BYTES_MAX, MOMENT_BYTES
from recon.view import View
from recon.worklist import RangeState
from sdstore.sync.content import Content, Shared, Steps
from sdstore.sync.differences import MOVED_MAX, PASSED_OVER_MAX
from sdstore.sync.report import Counts, SegmentState, SyncCode, SyncError, SyncLimits, misbehaved
from sdstore.sync.steps import Call
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse, Retired

NEWS_UNCUT_MAX = 48  # new elements compared as one range, and listed: 300 bytes and a single trip

Taker = Callable[[ReconResponse], None]


class Why(StrEnum):
    """Why an attempt ends early although nobody is at fault: another one comes further."""

    INTEREST = "an interest or a policy changed during the session"
    NONCE = "the peer's nonce expired during the session"
    MARK = "a mark of the last session is not valid any more"
    RETIRED = "what one side has retired is left out from here on"
    CUT = "what one side has retired is named again: the other side has it"


class AttemptOverError(Exception):
    """Ends the attempt. What came is stored."""

    def __init__(self, why: Why, responder_nonce: bytes = b"") -> None:
        super().__init__(why)
        self.why = why
        self.responder_nonce = responder_nonce


def refused(refusal: Expired | Busy | Unsupported) -> AttemptOverError | SyncError:
    """The error that a refusal raises."""
    match refusal:
        case Expired():
            return AttemptOverError(Why.NONCE, refusal.responder_nonce)
        case Busy(refused=True):
            detail = "the peer refuses to reconcile this interest with us"
            return SyncError(SyncCode.FORBIDDEN, detail)
        case Busy():
            detail = f"the peer is busy; retry after {refusal.retry_after_s} s"
            return SyncError(SyncCode.OVERLOADED, detail)
        case Unsupported():
            detail = f"the peer speaks version {refusal.version}, this node {PROTOCOL_VERSION}"
            return SyncError(SyncCode.PEER_VERSION, detail)


class Requests:
    """The requests of one comparison: between which marks they are, and what their statuses say.

    `policy`: the peer's, as of its interest; an answer with another one ends the attempt. `since`: compare only
    what arrived at the peer after this mark of it. `wants_mark`: all of the comparison is as of one moment.
    """

    def __init__(
        self,
        steps: Steps,
        counts: Counts,
        header: SessionHeader,
        policy: int,
        *,
        since: bytes = b"",
        without: Sequence[tuple[bytes, bytes]] = (),
        wants_mark: bool,
    ) -> None:
        self.awaits_mark = wants_mark
        self.is_answered = False
        self.mark = self.moment = b""
        self.total: Total | None = None
        self._without = [Retired(after=after, until=until) for after, until in without]
        self._steps = steps
        self._counts = counts
        self._header = header
        self._policy = policy
        self._since = since
        self._is_bounded = True
        self._tells_interest = False

    def release(self) -> None:
        """Let the peer answer from its set as it is: more is being pushed than it looks at after a mark."""
        self._is_bounded = False

    def ask(self, message: ReconRequest, taker: Taker) -> None:
        """Send a request about ranges, which has its session; `taker` judges its status."""
        message.since, message.up_to = self._since, self._up_to
        message.mark = self.awaits_mark and message.total
        self._call(message, taker)

    def move(self, message: ReconRequest, taker: Taker) -> None:
        """Send a request for content, or with some; `taker` gets the answer if its status is OK."""
        message.session.CopyFrom(self._header.message(in_full=self._tells_interest))
        if message.HasField("fetch"):  # a push depends on no mark
            message.since, message.up_to = self._since, self._up_to
        self._call(message, partial(self._moved, message, taker, self._tells_interest))

    @property
    def _up_to(self) -> bytes:
        return self.mark if self._is_bounded else b""

    def _moved(
        self, message: ReconRequest, taker: Taker, told_interest: bool, response: ReconResponse
    ) -> None:
        if response.status == recon_pb2.UNKNOWN_INTEREST and not told_interest:
            self._tells_interest = True
            self.move(message, taker)
            return
        if refusal := refusal_of(response, self._header.responder_nonce):
            raise refused(refusal)
        taker(response)

    def _call(self, message: ReconRequest, taker: Taker) -> None:
        self._counts["requests"] += 1
        if message.push or not message.since:
            message.without.extend(self._without)
        taken = partial(self._answered, message, taker, self._counts["rounds"] + 1)
        self._steps.add(Call(message), taken)

    def _answered(
        self, message: ReconRequest, taker: Taker, round_number: int, response: ReconResponse
    ) -> None:
        # A round is a call that depends on the answer to another.
        self._counts["rounds"] = max(self._counts["rounds"], round_number)
        if response.status == recon_pb2.UNKNOWN_MARK and (message.since or message.up_to):
            raise AttemptOverError(Why.MARK)
        if response.status == recon_pb2.OK:
            self.is_answered = True
            self._take_mark(message, response)
        taker(response)
        if response.status == recon_pb2.OK and self.is_other_policy(response.policy):
            raise AttemptOverError(Why.INTEREST)

    def is_other_policy(self, policy: int) -> bool:
        """Whether the peer has changed its interest, or may accept by now what it refused."""
        return policy != self._policy

    def _take_mark(self, message: ReconRequest, response: ReconResponse) -> None:
        if not message.mark:
            return
        self.awaits_mark = False
        if len(response.mark) > MARK_BYTES_MAX:
            raise misbehaved(f"a mark has {len(response.mark)} bytes, at most {MARK_BYTES_MAX}")
        if response.mark:
            self.mark, self.total = response.mark, read_total(response)
            if response.moment and len(response.moment) != MOMENT_BYTES:
                raise misbehaved(f"a moment has {len(response.moment)} bytes, not {MOMENT_BYTES}")
            self.moment = response.moment
        # Otherwise it answers for a part of the interest, which proves nothing.


@cache
def _limits(limits: Limits, response_bytes_max: int) -> Limits:
    return replace(limits, response_bytes_max=response_bytes_max)


def initiator_of(
    view: View,
    header: SessionHeader,
    limits: SyncLimits,
    *,
    seed: int,
    recent: int | None,
    removed_orders: U64,
    tells_interest: bool,
) -> Initiator:
    """The engine of one comparison, within the session's bounds.

    `recent`: own arrivals since the last session; None if all of the view is new: most of it differs then, so
    cuts would only cost bytes before the lists. `removed_orders`: of elements that were removed from the view.
    """
    options = Options()
    if recent is None:
        options = Options(uncut_max=NEWS_UNCUT_MAX, list_max=NEWS_UNCUT_MAX)
    return Initiator(
        view,
        header,
        options=options,
        limits=_limits(RECON_LIMITS, limits.answer_bytes_max),
        seed=seed,
        recent=recent or 0,
        removed_orders=np.sort(removed_orders),
        tells_interest=tells_interest,
    )


class Mode(Enum):
    """What becomes of the differences that a comparison finds."""

    MOVE = "both ways"
    FETCH = "only what is lacked here"
    COUNT = "nothing is moved"
    CONFIRM = "both ways, but nothing that the peer has acknowledged"


class Comparison:
    """Requests about ranges, and the content that their answers call for.

    `missing_here`, `missing_there`: elements found to differ. `lacks_acknowledged`: the peer lacked an element that it has acknowledged.
    """

    def __init__(
        self, shared: Shared, requests: Requests, view: View, initiator: Initiator, mode: Mode
    ) -> None:
        self.initiator = initiator
        self.requests = requests
        self.view = view
        self.content = Content(shared, requests.move, view, initiator)
        self.missing_here = self.missing_there = 0
        self.lacks_acknowledged = False
        self.stated: Stated | None = None
        self._shared = shared
        self._mode = mode
        self._started_s = shared.now_s
        self._asks_count = 0

    def pump(self) -> None:
        """Hand out the steps that can be taken now."""
        # Until the peer has given its mark, no other request can name it.
        while not (self._asks_count and self.requests.awaits_mark) and (
            request := self.initiator.next_request()
        ):
            self._asks_count += 1
            self.requests.ask(request.message, partial(self._answered, request.request_id))
        self.content.pump(more_may_come=self._asks_count > 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to ask, to move or to store, once `pump` has run."""
        return not self._asks_count and self.content.is_quiet

    def measured(self, before_count: int) -> tuple[int, list[tuple[SegmentState, float]], int]:
        """The number of elements compared, the range bar, and the number of all elements.

        `before_count`: elements that are equal and were not compared. The bar begins with them.
        """
        measured = self.initiator.progress
        count = sum(measured.elements.values())
        size = before_count + count
        part = count / max(size, 1) if before_count else 1.0
        bar = [(SegmentState.IN_SYNC, 1.0 - part)] if before_count else []
        bar += [(SegmentState[each.state.name], part * each.share) for each in measured.segments]
        return size - measured.elements[RangeState.SYNCING], bar, size

    def _answered(self, request_id: int, response: ReconResponse) -> None:
        self._asks_count -= 1
        elapsed_s = self._shared.now_s - self._started_s
        for event in self.initiator.receive(request_id, response, elapsed_s):
            self._take(event)
        if self.content.moved.is_overfull:
            self.requests.release()

    def _take(self, event: Event) -> None:
        moved = self.content.moved
        match event:
            case Have():
                moved.offer(event.orders, event.ids)
                self._have(event)
            case Need():
                self.missing_here += event.count
                if self._mode is not Mode.COUNT:
                    self.content.add_need(event)
            case NotThere():
                self._shared.aside.forget([row.tobytes() for row in event.ids])
                moved.leave_unnamed(event.orders, event.ids)
            case Stated():
                self.stated = event
                more_count = event.count - len(self.view)
                if not -MOVED_MAX <= more_count <= PASSED_OVER_MAX:
                    moved.give_up()
            case Fault():
                raise event.error
            case Expired() | Busy() | Unsupported():
                raise refused(event)

    def _have(self, event: Have) -> None:
        if self._mode is Mode.CONFIRM:
            known = [row.tobytes() in self._shared.acknowledged for row in event.ids]
            self.lacks_acknowledged |= any(known)
            unknown = ~np.array(known, bool)
            event = Have(event.orders[unknown], event.ids[unknown])
        else:
            self.missing_there += len(event.ids)
            self._shared.ledger.offer(event.ids)
        if self._mode in (Mode.MOVE, Mode.CONFIRM):
            self.content.add_have(event)
