"""Two sides of a reconciliation in one process, for tests: sets in, differences out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from recon.agreement import SessionHeader
from recon.elements import ALL_ORDERS, WHOLE, Bound, OrderWindow, Range, RangeColumns, bound_bytes
from recon.events import Busy, Event, Expired, Fault, Have, Need, Unsupported
from recon.fetch import FetchQueue, pack_fetch, read_fetch, resolve
from recon.index import RangeIndex
from recon.initiator import Initiator, Options
from recon.limits import DEFAULT_LIMITS, Limits
from recon.responder import respond
from recon.view import View
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse, Total

Element = tuple[int, bytes]
Responder = Callable[[ReconRequest], ReconResponse]
NO_TOTAL = Total(sum=bytes(16))  # for answers made by hand, to which nothing is equal
HEADER = SessionHeader(b"i" * 16, b"r" * 16, b"")


def columns_of(elements: Iterable[Element]):
    """orders u64[n] and ids u8[n, 32]."""
    rows = list(elements)
    ids = np.frombuffer(b"".join(e for _, e in rows), dtype=np.uint8).reshape(-1, 32)
    return np.array([o for o, _ in rows], dtype=np.uint64), ids


def insert(index: RangeIndex, elements: Iterable[Element], group: int = 0) -> int:
    """Insert elements into a group."""
    orders, ids = columns_of(elements)
    return index.insert(orders, ids, np.full(len(orders), group, dtype=np.uint32))


def index_of(elements: Iterable[Element], batch: int = 1 << 20) -> RangeIndex:
    """An index filled in batches: small ones leave several runs."""
    index = RangeIndex()
    rows = list(elements)
    for start in range(0, len(rows), batch):
        insert(index, rows[start : start + batch])
    return index


def view_of(
    elements: Iterable[Element], batch: int = 1 << 20, window: OrderWindow = ALL_ORDERS
) -> View:
    """A view of everything under the tests' key."""
    return View(index_of(elements, batch), HEADER.key(), window=window)


def set_of(orders, ids) -> set[Element]:
    """Columns as a set."""
    return set(zip(orders.tolist(), map(bytes, ids), strict=True))


@dataclass
class Outcome:
    """The initiator's results, and their cost."""

    have: set[Element] = field(default_factory=set)
    need: set[Element] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    rounds: int = 0
    requests: int = 0
    bytes: int = 0
    longest: int = 0
    is_over: bool = False

    @property
    def done(self) -> bool:
        """Whether the session ended well."""
        ended_by = self.events[-1] if self.events else None
        return self.is_over and not isinstance(ended_by, Fault | Expired | Busy | Unsupported)

    @property
    def fault(self) -> str | None:
        """The code of the fault that ended it."""
        last = self.events[-1] if self.events else None
        return last.error.code if isinstance(last, Fault) else None


def summary_of(view: View, span: Range = WHOLE) -> tuple[bytes, int]:
    """(hash, count) of a range."""
    hashes, counts = view.summaries(view.locate(RangeColumns.of(span)))
    return hashes[0].tobytes(), int(counts[0])


def honest(view: View, limits: Limits = DEFAULT_LIMITS) -> Responder:
    """A responder that answers from the view as it is at that moment."""

    def answer(request: ReconRequest) -> ReconResponse:
        view.refresh()
        return respond(view, request, limits)

    return answer


def converse(
    initiator: Initiator,
    answer: Responder,
    *,
    between: Callable[[], object] = lambda: None,
    rounds_max: int = 10_000,
) -> Outcome:
    """Run a session to its end: all requests of a round, then all answers, last one first."""
    out = Outcome()
    while not initiator.done:
        round_ = []
        while (request := initiator.next_request()) is not None:
            raw = request.message.SerializeToString()
            reply = answer(ReconRequest.FromString(raw)).SerializeToString()
            round_.append((request.request_id, reply))
            out.bytes += len(raw) + len(reply)
            out.longest = max(out.longest, len(raw), len(reply))
        assert round_, "the initiator is stuck"
        out.rounds += 1
        out.requests += len(round_)
        assert out.rounds <= rounds_max, "the session does not end"
        for request_id, reply in reversed(round_):
            out.events += initiator.receive(request_id, ReconResponse.FromString(reply))
        between()
    out.is_over = True
    return out


def collect(out: Outcome, ours: View, theirs: View, ids_max: int = 1000, cut: int = 50) -> None:
    """Fetch every need from the other view as a node would, `cut` elements to a response."""
    queue = FetchQueue(ours)
    for event in out.events:
        if isinstance(event, Have):
            out.have |= set_of(event.orders, event.ids)
        if isinstance(event, Need):
            queue.add(event)
    while len(queue):
        batch = queue.next_batch(ids_max)
        orders, ids, resume = serve(theirs, pack_fetch(batch), cut)
        assert queue.accept(batch, orders, ids).all()
        out.need |= set_of(orders, ids)
        queue.settle(batch, orders, ids, resume)


def serve(view: View, fetch, cut: int):
    """At most `cut` elements of a fetch, and where to go on."""
    orders, ids, resume = resolve(view, read_fetch(fetch))
    if len(orders) <= cut:
        return orders, ids, None if resume is None else bound_bytes(resume)
    head = int.from_bytes(ids[cut, :8].tobytes(), "big")
    return orders[:cut], ids[:cut], bound_bytes(Bound(int(orders[cut]), head))


def reconcile(
    ours: set[Element],
    theirs: set[Element],
    *,
    batch: int = 1 << 20,
    options: Options | None = None,
    limits: Limits = DEFAULT_LIMITS,
    seed: int = 0,
    recent: int = 0,
) -> Outcome:
    """A whole session between two sets, needs fetched."""
    mine, yours = view_of(sorted(ours), batch), view_of(sorted(theirs), batch)
    initiator = Initiator(mine, HEADER, options=options, limits=limits, seed=seed, recent=recent)
    out = converse(initiator, honest(yours, limits))
    if out.done:
        collect(out, mine, yours)
    return out
