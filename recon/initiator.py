"""The initiator: keeps the work list, asks about ranges in batches, reports what it learns.

Theory of operation. The ranges of a session tile the whole element space. Each of them is waiting
(on the work list), in flight (in a request without an answer) or settled (in sync, or to be fetched
or sent). The session is over when no range waits and none is in flight.

    waiting ── next_request ──▶ in flight ── receive ──▶ settled
       ▲                            │                       an answer that settles it
       └──── smaller ranges ◀───────┘                       an answer that splits it, or none

The rules:

1. No I/O, no clock, no randomness: the caller sends what `next_request` returns, gives the answer to
   `receive`, and passes elapsed seconds and a seed.
2. The ranges of different requests never overlap. So several requests can be in flight, answers can
   come in any order, and no answer can be taken for another.
3. Every answered request makes progress, or it is the peer's fault.
4. All bytes and requests are paid from one budget, so a session ends whatever the peer does.
5. Both sets may grow meanwhile. A range that was equal at any moment of the session covers what both
   sides held at its start, so nothing is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from recon.agreement import Interest, SessionHeader, decode_interest
from recon.codec import Asks, fill, pack_asks, read_total
from recon.elements import U64
from recon.errors import LocalProtocolError, RemoteProtocolError
from recon.events import (
    Busy,
    Event,
    Expired,
    Fault,
    Stated,
    Unsupported,
)
from recon.learning import NO_ORDERS, Asked, Learning
from recon.limits import (
    DEFAULT_LIMITS,
    FRAME_BYTES_MIN,
    FRAME_RESERVE_BYTES,
    LIST_COUNT_MAX,
    NONCE_BYTES,
    PARTS_MAX,
    PHASE_MAX,
    PROTOCOL_VERSION,
    SHORT_ID_BYTES,
    Limits,
)
from recon.view import View
from recon.worklist import Progress, RangeState, Stretch, Work, measure, opening_work
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

_ASK_BYTES = 9.0  # a range that is compared, about: bound, count, hash
_ASK_LIST_BYTES = 3.0  # a range to be listed, about: bound
_TOLD_BYTES = (
    64  # a shorter interest is told in each session: a responder that forgot it costs a trip
)
_ANSWER_BYTES = 7  # a part in an answer, about: 8, but some of what we cut ourselves is equal


@dataclass(frozen=True, slots=True)
class Options:
    """How an initiator asks. The defaults serve all sizes."""

    parts: int = 16  # of a split in the first answer; later ones are planned
    list_max: int = 16  # a range of that many elements is listed instead of split
    uncut_max: int = 0  # a set of that many elements is compared as one range


class Budget:
    """Counts requests, bytes both ways and content, so that a session ends whatever the peer does.

    Bytes and seconds grow with the content that was transferred, so an honest large sync is never
    cut; and with our own set, because even an honest peer makes us name our own elements.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._credit_bytes = 0
        self.requests = 0
        self.bytes = 0

    def credit(self, content_bytes: int) -> None:
        """Count content that arrived, or that the peer took."""
        self._credit_bytes += content_bytes

    def check(self, own_count: int, elapsed_s: float) -> None:
        """Raise `RemoteProtocolError` if any of the budgets is spent."""
        limits = self._limits
        bytes_max = limits.bytes_base + limits.bytes_per_element * own_count
        bytes_max += limits.bytes_per_credit * self._credit_bytes
        if self.bytes > bytes_max:
            raise RemoteProtocolError("budget_bytes", f"{self.bytes} bytes of at most {bytes_max}")
        if self.requests > limits.requests_max:
            raise RemoteProtocolError(
                "budget_requests", f"{self.requests} requests of at most {limits.requests_max}"
            )
        seconds_max = limits.seconds_base
        seconds_max += limits.seconds_per_credit_mib * self._credit_bytes / (1 << 20)
        if elapsed_s > seconds_max:
            raise RemoteProtocolError(
                "budget_seconds", f"{elapsed_s:.0f} s of at most {seconds_max:.0f} s"
            )


class OutgoingRequest(NamedTuple):
    """A message to send; give its answer back with the same `request_id`."""

    request_id: int
    message: ReconRequest


class Initiator:
    """One session. `seed` makes the random cuts; `recent` counts own arrivals since the last session.

    `removed_orders`: ascending orders of elements that are here, but not in the view. A range that can contain
    one is not fetched as a whole, but by names. `tells_interest`: the first request has the interest in full, because
    the responder does not know it yet.
    """

    def __init__(
        self,
        view: View,
        header: SessionHeader,
        *,
        options: Options | None = None,
        limits: Limits = DEFAULT_LIMITS,
        seed: int = 0,
        recent: int = 0,
        removed_orders: U64 = NO_ORDERS,
        tells_interest: bool = False,
    ) -> None:
        self._view = view
        self._removed_orders = removed_orders
        self._header = header
        self._options = options or Options()
        self._limits = limits
        _check_settings(self._options, limits)
        self._rng = np.random.default_rng(seed)
        self._parts = self._options.parts
        room = limits.response_bytes_max // SHORT_ID_BYTES
        self._list_cap = min(LIST_COUNT_MAX, room - FRAME_RESERVE_BYTES) // 2
        self._waiting = opening_work(view, self._phase(), recent, self._options.uncut_max)
        self._opening_count = len(self._waiting)
        self._total = view.total()
        self._wants_total = True
        self._in_flight: dict[int, Asked] = {}
        self._settled: list[Stretch] = []
        self._budget = Budget(limits)
        self._tells_interest = tells_interest or len(header.interest) <= _TOLD_BYTES
        self._is_unknown = (
            False  # the responder forgot the interest, or another process of it answers
        )
        self._over = False

    def _phase(self) -> int:
        return int(self._rng.integers(0, PHASE_MAX + 1))

    @property
    def done(self) -> bool:
        """Whether the session is over: complete, refused or at fault."""
        return self._over

    @property
    def progress(self) -> Progress:
        """The session's progress."""
        return measure(self._stretches())

    def _stretches(self) -> Iterator[Stretch]:
        yield from self._settled
        for work in (self._waiting, *(flying.work for flying in self._in_flight.values())):
            yield Stretch(work.ranges, work.sizes, RangeState.SYNCING)

    def credit(self, content_bytes: int) -> None:
        """Count content that arrived or that the peer took: the budget grows with it."""
        self._budget.credit(content_bytes)

    def charge(self, content_call_bytes: int, elapsed_s: float = 0.0) -> None:
        """Pay for a call that moved content from the same budget. Raises `RemoteProtocolError`."""
        self._budget.bytes += content_call_bytes
        self._budget.check(len(self._view), elapsed_s)

    def next_request(self) -> OutgoingRequest | None:
        """The next message, or None: nothing waits, or enough is in flight, or it is over."""
        if self._over or not len(self._waiting):
            return None
        if len(self._in_flight) >= self._limits.in_flight_max:
            return None
        flying, message = self._batch()
        self._waiting = self._waiting.take(slice(len(flying.work), None))
        self._budget.requests += 1
        self._budget.bytes += message.ByteSize()
        self._in_flight[self._budget.requests] = flying
        return OutgoingRequest(self._budget.requests, message)

    def _batch(self) -> tuple[Asked, ReconRequest]:
        """As many waiting ranges as fit one request, and whose answers fit one response, about."""
        room, phase = self._limits.request_bytes_max - FRAME_BYTES_MIN // 4, self._phase()
        listed = self._waiting.listed[: self._answerable()]
        costs = np.where(listed, _ASK_LIST_BYTES, _ASK_BYTES)
        count, message = fill(partial(self._message, phase), costs, room)
        work = self._waiting.take(slice(count))
        in_full = self._tells_interest or self._is_unknown
        asked = Asked(work, self._parts, phase, in_full, self._wants_total)
        self._wants_total = self._tells_interest = False
        return asked, message

    def _answerable(self) -> int:
        """The number of ranges for one request, by their number and by the expected answers."""
        work = self._waiting
        parts = np.where(work.sizes <= self._options.list_max, 1, self._parts)
        answers = np.where(work.listed, work.sizes * SHORT_ID_BYTES, parts * _ANSWER_BYTES)
        fits = int(np.searchsorted(np.cumsum(answers), self._limits.response_bytes_max))
        return max(1, min(fits, self._limits.ranges_max))

    def _message(self, phase: int, count: int) -> ReconRequest:
        work = self._waiting.take(slice(count))
        asks = Asks(work.ranges, work.listed, work.counts, work.hashes)
        return ReconRequest(
            version=PROTOCOL_VERSION,
            session=self._header.message(in_full=self._tells_interest or self._is_unknown),
            ranges=pack_asks(asks, self._parts, self._options.list_max, phase),
            response_bytes_max=self._limits.response_bytes_max,
            total=self._wants_total,
        )

    def receive(
        self, request_id: int, response: ReconResponse, elapsed_s: float = 0.0
    ) -> list[Event]:
        """Events of one answer. A fault or a refusal ends the session; later answers have no events."""
        if request_id not in self._in_flight:
            raise LocalProtocolError(f"no request {request_id} is in flight")
        flying = self._in_flight.pop(request_id)
        if self._over:
            return []
        self._budget.bytes += response.ByteSize()
        try:
            self._budget.check(len(self._view), elapsed_s)
            events = self._take(flying, response)
        except RemoteProtocolError as error:
            self._over = True
            return [Fault(error)]
        if not (self._over or len(self._waiting) or self._in_flight):
            self._over = True
        return events

    def _take(self, flying: Asked, response: ReconResponse) -> list[Event]:
        if response.status == recon_pb2.UNKNOWN_INTEREST and not flying.told_interest:
            self._is_unknown = True
            self._wants_total |= flying.wants_total
            self._waiting = Work.concatenate([self._waiting, flying.work])
            return []
        if refusal := refusal_of(response, self._header.responder_nonce):
            self._over = True
            return [refusal]
        learning = Learning(
            self._view, flying, self._limits.depth_max, self._list_cap, self._removed_orders
        )
        learned = learning.from_answers(response.answers, self._phase())
        self._settled += learned.settled
        self._parts = learned.peer_parts or self._parts
        self._list_cap = min(self._list_cap, learned.list_cap)
        self._waiting = Work.concatenate([self._waiting, learned.work])
        if flying.wants_total:
            learned.events.insert(0, self._stated(flying, response))
        return learned.events

    def _stated(self, flying: Asked, response: ReconResponse) -> Stated:
        """The peer's total. If all ranges of the first request are equal, so are the totals."""
        theirs, answers = read_total(response), response.answers
        compares_all = len(flying.work) == self._opening_count == answers.answered
        if compares_all and not any(answers.kinds) and theirs != self._total:
            raise RemoteProtocolError(
                "total", "the answers say that all ranges are equal, but the total differs"
            )
        return Stated(theirs.count, theirs == self._total)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a session begins with: the responder's nonce, its interest, and the policy that goes with it."""

    responder_nonce: bytes
    interest: Interest
    policy: int


def hello_request() -> ReconRequest:
    """The request that asks for it."""
    return ReconRequest(version=PROTOCOL_VERSION)


def hello_of(response: ReconResponse) -> Hello | Busy | Unsupported:
    """The answer to a hello. Raises `RemoteProtocolError`."""
    match refusal_of(response):
        case Expired(responder_nonce) if response.HasField("interest"):
            return Hello(responder_nonce, decode_interest(response.interest), response.policy)
        case Busy() | Unsupported() as refusal:
            return refusal
        case _:
            raise RemoteProtocolError("status", "the answer to a hello has no interest")


def refusal_of(
    response: ReconResponse, used_nonce: bytes = b""
) -> Expired | Busy | Unsupported | None:
    """Why a responder did not answer; None: it did.

    `used_nonce`: the responder's, as the request had it. Raises `RemoteProtocolError`.
    """
    match response.status:
        case recon_pb2.OK:
            return None
        case recon_pb2.NONCE_EXPIRED:
            fresh = response.responder_nonce
            # An expired nonce must be replaced by a different one.
            if len(fresh) != NONCE_BYTES or fresh == used_nonce:
                detail = (
                    "the responder did not replace the expired nonce with another one of 16 bytes"
                )
                raise RemoteProtocolError("nonce", detail)
            return Expired(fresh)
        case recon_pb2.BUSY:
            return Busy(response.retry_after_s, refused=False)
        case recon_pb2.REFUSED:
            return Busy(response.retry_after_s, refused=True)
        case recon_pb2.UNSUPPORTED_VERSION if response.version != PROTOCOL_VERSION:
            return Unsupported(response.version)
        case status:
            raise RemoteProtocolError("status", f"an answer has the unexpected status {status}")


def _check_settings(options: Options, limits: Limits) -> None:
    if not 2 <= options.parts <= PARTS_MAX or not 0 <= options.list_max <= LIST_COUNT_MAX:
        raise LocalProtocolError(
            f"parts {options.parts} (2 to {PARTS_MAX}) or list_max {options.list_max} "
            f"(0 to {LIST_COUNT_MAX}) is out of range"
        )
    if min(limits.request_bytes_max, limits.response_bytes_max) < FRAME_BYTES_MIN:
        raise LocalProtocolError(f"a frame limit must be at least {FRAME_BYTES_MIN} bytes")
