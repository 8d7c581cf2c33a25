"""Whole sessions in one process: the caller's loop around an `Initiator`, against any peer.

The loop is the documented one. It keeps no bound of its own except `EXCHANGES_MAX`, which no
session may reach: that it ends is the engine's promise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from recon.agreement import SessionHeader
from recon.elements import Bound, bound_bytes
from recon.errors import RemoteProtocolError
from recon.events import Busy, Event, Expired, Fault, Have, Need, Unsupported
from recon.fetch import Batch, FetchQueue, pack_fetch, read_fetch, resolve
from recon.index import RangeIndex
from recon.initiator import Initiator, OutgoingRequest
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION, Limits
from recon.responder import respond
from recon.view import View
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

EXCHANGES_MAX = 2_000
FETCH_IDS_MAX = 1000
STEP_S = 0.001  # the clock of these sessions: one exchange
CONTENT_BYTES = 100  # assumed content of an element

Element = tuple[int, bytes]
Orders = NDArray[np.uint64]
Ids = NDArray[np.uint8]


def header(number: int = 0) -> SessionHeader:
    """The header of the session with this number; each has a key of its own."""
    nonces = random.Random(number)
    return SessionHeader(nonces.randbytes(16), nonces.randbytes(16), b"")


def columns(elements: Iterable[Element]) -> tuple[Orders, Ids]:
    """Elements as columns, sorted."""
    rows = sorted(elements)
    ids = np.frombuffer(b"".join(raw for _, raw in rows), dtype=np.uint8).reshape(-1, 32)
    return np.array([order for order, _ in rows], dtype=np.uint64), ids


def elements_of(orders: Orders, ids: Ids) -> set[Element]:
    """The inverse of `columns`."""
    return {(order, row.tobytes()) for order, row in zip(orders.tolist(), ids, strict=True)}


def view_of(elements: Iterable[Element], under: SessionHeader) -> View:
    """A view of exactly these elements."""
    index = RangeIndex()
    orders, ids = columns(elements)
    index.insert(orders, ids, np.zeros(len(orders), dtype=np.uint32))
    return View(index, under.key())


class Reply(NamedTuple):
    """A response, and the elements of its `items` (which the engine never sees)."""

    response: ReconResponse
    elements: tuple[Element, ...] = ()


class Peer(Protocol):
    """A responder, honest or not."""

    def answer(self, request: ReconRequest) -> Reply:
        """The reply to one request."""


class HonestPeer:
    """A responder as the node is one: answers, and serves what is fetched, some at a time."""

    def __init__(self, view: View, limits: Limits = DEFAULT_LIMITS, items_max: int = 50) -> None:
        self.view = view
        self._limits = limits
        self._items_max = items_max

    def answer(self, request: ReconRequest) -> Reply:
        """Summaries, lists and up to `items_max` elements."""
        response = ReconResponse(version=request.version)
        if request.HasField("ranges") or request.total:
            response = respond(self.view, request, self._limits)
        found = resolve(self.view, read_fetch(request.fetch, self._limits), self._limits)
        wanted, resume = sorted(elements_of(found.orders, found.ids)), found.resume
        if len(wanted) > self._items_max:
            order, raw = wanted[self._items_max]
            resume = Bound(order, int.from_bytes(raw[:8], "big"))
        if resume is not None:
            response.truncated = True
            response.resume = bound_bytes(resume)
        return Reply(response, tuple(wanted[: self._items_max]))


@dataclass(slots=True)
class Outcome:
    """The results of a session, and their cost."""

    have: set[Element] = field(default_factory=set)
    accepted: set[Element] = field(default_factory=set)
    refused: set[Element] = field(default_factory=set)
    needs: list[Need] = field(default_factory=list)
    end: Fault | Expired | Busy | Unsupported | None = None  # None: complete
    rounds: int = 0  # requests of the initiator
    fetches: int = 0  # requests with a fetch in them
    bytes: int = 0  # of summaries and lists, both ways
    message_bytes_max: int = 0


class Session:
    """One session over `view` with `peer`. Answers of requests in flight arrive in any order."""

    def __init__(
        self,
        view: View,
        under: SessionHeader,
        peer: Peer,
        *,
        limits: Limits = DEFAULT_LIMITS,
        seed: int = 0,
        in_flight: int = 3,
    ) -> None:
        self.initiator = Initiator(view, under, limits=limits, seed=seed)
        self.fetch_queue = FetchQueue(view)
        self.outcome = Outcome()
        self._peer = peer
        self._listeners: list[Callable[[ReconRequest], object]] = []
        self._random = random.Random(seed)
        self._in_flight = in_flight
        self._exchanges = 0

    def listen(self, listener: Callable[[ReconRequest], object]) -> None:
        """Call `listener` with every request."""
        self._listeners.append(listener)

    def run(self) -> Outcome:
        """Exchange messages until the session ends; a `RemoteProtocolError` ends it too."""
        try:
            while not self._ended():
                for request in self._ask():
                    self._exchange(request)
        except RemoteProtocolError as error:
            self.outcome.end = Fault(error)
        return self.outcome

    def _ended(self) -> bool:
        return self.outcome.end is not None or (self.initiator.done and not self.fetch_queue)

    def _ask(self) -> list[OutgoingRequest] | list[None]:
        """Requests in the order in which they will be answered; [None]: one for content alone."""
        asked = (self.initiator.next_request() for _ in range(self._in_flight))
        ready = [request for request in asked if request is not None]
        self._random.shuffle(ready)
        return ready or [None]

    def _now_s(self) -> float:
        return self._exchanges * STEP_S

    def _exchange(self, asked: OutgoingRequest | None) -> None:
        if self._ended():
            return
        batch = self.fetch_queue.next_batch(FETCH_IDS_MAX)
        assert asked or batch, "the session is not done, but has nothing to ask"
        self._exchanges += 1
        assert self._exchanges < EXCHANGES_MAX, "the session does not end"
        message = asked.message if asked else ReconRequest(version=PROTOCOL_VERSION)
        if batch:
            message.fetch.CopyFrom(pack_fetch(batch))
        for listener in self._listeners:
            listener(message)
        reply = self._peer.answer(ReconRequest.FromString(message.SerializeToString()))
        response = ReconResponse.FromString(reply.response.SerializeToString())
        if asked:
            self._count(message, response)
            for event in self.initiator.receive(asked.request_id, response, self._now_s()):
                self._take(event)
        if batch and not isinstance(self.outcome.end, Fault):
            self._collect(batch, response, reply.elements)

    def _count(self, message: ReconRequest, response: ReconResponse) -> None:
        size = message.ByteSize() - message.fetch.ByteSize() + response.ByteSize()
        self.outcome.rounds += 1
        self.outcome.bytes += size
        self.outcome.message_bytes_max = max(self.outcome.message_bytes_max, size)

    def _take(self, event: Event) -> None:
        match event:
            case Have(orders, ids):
                self.outcome.have |= elements_of(orders, ids)
            case Need():
                self.outcome.needs.append(event)
                self.fetch_queue.add(event)
            case Fault() | Expired() | Busy() | Unsupported():
                self.outcome.end = event

    def _collect(self, batch: Batch, response: ReconResponse, arrived: tuple[Element, ...]) -> None:
        self.outcome.fetches += 1
        resume = response.resume if response.truncated else None
        orders, ids = columns(arrived)
        asked = self.fetch_queue.accept(batch, orders, ids, resume)
        accepted = elements_of(orders[asked], ids[asked])
        self.outcome.refused |= elements_of(orders[~asked], ids[~asked])
        self.outcome.accepted |= accepted
        self.initiator.credit(CONTENT_BYTES * len(accepted))
        self.fetch_queue.settle(batch, orders, ids, resume)


def was_wanted(view: View, needs: list[Need], element: Element) -> bool:
    """Whether some need names the element, by its range and, where it has them, its short ids."""
    own = view.short_ids(*columns([element]))[0].tobytes()
    return any(
        need.range.contains(*element)
        and (need.short_ids is None or own in {row.tobytes() for row in need.short_ids})
        for need in needs
    )
