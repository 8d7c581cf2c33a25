"""The content of one comparison, both ways, in bounded batches.

Elements that the peer lacks wait in an `Outbox`; elements that this side lacks wait in a
`recon.fetch.FetchQueue`, by range and short ID. A batch takes from both: one request pushes items and fetches
others. What becomes of them:

    outbox ── Load ──┐
                     ├─ Call ─▶ outcomes of what was pushed (`_take_outcomes`)
    fetch queue ─────┘      └─▶ names of what came (`_take_items`) ── Read ──▶ checked rows ── Store ──▶ held

The names of arriving items show what is left to fetch, so the next request goes out before their content is
read; the peer works on it meanwhile. An item is decoded once. Rows wait until there are enough for a
transaction that is worth its cost (8,192 in a node, which costs half of eight times 1,024), or for a second;
one transaction is written while the next items arrive. An element counts as received once it is stored.

An entry brings all its claims. A claim that comes alone, and whose entry is not here, is dropped: its entry
brings it, or is set aside with it. Everything is charged to the budget of the comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from recon.agreement import Interest
from recon.elements import END, U8, U64, Bound, Range
from recon.errors import LocalProtocolError
from recon.events import Have, Need
from recon.fetch import Batch, FetchQueue, pack_fetch
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, ID_BYTES, PROTOCOL_VERSION
from recon.view import View
from sdstore.sync.differences import Ledger, Moved, SetAside
from sdstore.sync.memory import (
    LOST,
    NO_ENTRY,
    REFUSED,
    RETIRED,
    TOO_MANY_HINTS,
    AsideElement,
    Element,
    LackedBy,
    columns,
)
from sdstore.sync.report import Counts, SyncCode, SyncError, misbehaved
from sdstore.sync.steps import Action, Decoded, Do, Load, Prepared, Read, Store, Stored
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse

MOVE_ELEMENTS_MAX = 1_024  # one group of a node's writer, while other batches are on the network
MOVE_BYTES_MAX = 2 << 20  # each way: memory per batch, and 0.2 s at 100 Mbit/s
MOVES_IN_FLIGHT_MAX = 3  # one on the network, one at the peer, one at our own writer
ITEMS_MAX = DEFAULT_LIMITS.fetch_ids_max  # of one answer: no fetch names more
READ_AT_ONCE = (
    1_024  # items of an answer: more objects at once would cost Python's garbage collector
)
UNSTORED_BYTES_MAX = 4 << 20  # as much again is being written
UNSTORED_S_MAX = 1.0  # so much later readers see a message, however slowly others come
PATIENCE_STEPS = 50  # retries when an ingest queue, ours or the peer's, is full
PATIENCE_STEP_S = 0.1
NEVER_S = float("inf")

Move = Callable[[ReconRequest, Callable[[ReconResponse], None]], None]
"""Sends a request for content, or with some; the taker gets the answer if it is OK."""

ClaimId = Callable[[bytes, bytes], bytes]
"""The ID of the claim that a hint leads to an entry, from the entry's ID and the hint."""


Taker = Callable[[Any], None]
"""Takes the result of a step."""


class Steps:
    """The steps of one attempt: those to hand out, and who takes the result of each one under way."""

    def __init__(self) -> None:
        self._new: list[Do] = []
        self._under_way: dict[int, tuple[Action, Taker]] = {}
        self._count = 0

    def add(self, action: Action, taker: Taker | None = None) -> None:
        """Have a step carried out. One without a taker has no result."""
        self._count += 1
        self._new.append(Do(self._count, action))
        if taker is not None:
            self._under_way[self._count] = action, taker

    def hand_out(self) -> list[Do]:
        """The new steps."""
        new, self._new = self._new, []
        return new

    def take(self, number: int) -> tuple[Action, Taker]:
        """End a step. Raises LocalProtocolError unless it is under way."""
        if number not in self._under_way:
            raise LocalProtocolError(f"no step {number} is under way")
        return self._under_way.pop(number)

    def awaits(self, kind: type[Action]) -> bool:
        """Whether a step of this kind is under way."""
        return any(isinstance(action, kind) for action, _ in self._under_way.values())


@dataclass(slots=True)
class Shared:
    """What the parts of one attempt share. `interest`: the mutual one; `now_s`: the time of the last result."""

    steps: Steps
    counts: Counts
    ledger: Ledger
    aside: SetAside
    claim_id: ClaimId
    interest: Interest
    now_s: float
    acknowledged: set[bytes] = field(default_factory=set)
    """IDs of pushed items that the peer claims to have, each with an outcome of its own."""


class Outbox:
    """A queue of elements to send, filled and emptied in pieces: a disjoint million takes 40 MB."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[U64, U8]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, orders: U64, ids: U8) -> None:
        """Put elements at the end."""
        if len(ids):
            self._pieces.append((orders, ids))
            self._count += len(ids)

    def take(self, count_max: int) -> list[Element]:
        """The first elements, at most `count_max`."""
        taken: list[Element] = []
        while self._pieces and len(taken) < count_max:
            orders, ids = self._pieces.popleft()
            room = count_max - len(taken)
            if len(ids) > room:
                self._pieces.appendleft((orders[room:], ids[room:]))
            rows = zip(orders[:room].tolist(), ids[:room], strict=True)
            taken += [Element(order, row.tobytes()) for order, row in rows]
        self._count -= len(taken)
        return taken

    def put_back(self, elements: Iterable[Element]) -> None:
        """Return elements to the front."""
        orders, ids = columns(elements)
        if len(ids):
            self._pieces.appendleft((orders, ids))
            self._count += len(ids)


class Named(NamedTuple):
    """The element that an item names, and the IDs of the claims inside it."""

    element: Element
    claims: Sequence[bytes]


class Row(NamedTuple):
    """A received item that can be stored, and the elements that it proved to be."""

    prepared: Prepared
    named: Named


class Answered(NamedTuple):
    """Items that are still to be read, with what they name. `for_lost`: they mend lost content.

    `is_last`: they are the last ones of an answer of `paid_bytes`, with its request.
    """

    items: Sequence[Item]
    named: Sequence[Named]
    for_lost: bool
    is_last: bool
    paid_bytes: int


class Books:
    """What one comparison writes down of its elements: moved, set aside, counted."""

    def __init__(self, shared: Shared) -> None:
        self.moved = Moved()
        self._shared = shared

    def set_aside(
        self, lacked_by: LackedBy, element: Element, code: str, entry_id: bytes = b""
    ) -> None:
        aside, shared = AsideElement(lacked_by, *element, code, entry_id), self._shared
        if element.element_id not in shared.aside:
            if not shared.aside.add(aside, shared.now_s):
                self.moved.pass_over(aside)
            shared.counts["claims_refused" if entry_id else "entries_refused"] += 1

    def set_aside_entry(self, lacked_by: LackedBy, named: Named, code: str) -> None:
        """Set an entry aside, and the claims on it."""
        (order, entry_id), claims = named
        self.set_aside(lacked_by, named.element, code)
        for claim_id in claims:
            self.set_aside(lacked_by, Element(order, claim_id), code, entry_id)

    def count(self, what: str, *, is_claim: bool, claims: int) -> None:
        """Count an entry with the claims inside it, or a claim."""
        self._shared.counts[f"claims_{what}"] += claims + is_claim
        self._shared.counts[f"entries_{what}"] += not is_claim


# --- in ----------------------------------------------------------------------------------------


class Inbox:
    """What came: read, checked against what was named, and stored in large transactions.

    `mended_ids`: entries among `lost_ids` whose content came back.
    """

    def __init__(self, shared: Shared, books: Books, initiator: Initiator) -> None:
        self.lost_ids: frozenset[bytes] = frozenset()
        self.mended_ids: set[bytes] = set()
        self.unread_count = 0  # answers that are not read to their end
        self._shared = shared
        self._books = books
        self._initiator = initiator
        self._interest = shared.interest
        self._window = shared.interest.window
        self._started_s = shared.now_s
        self._unread: deque[Answered] = deque()
        self._is_reading = self._is_storing = self._is_dropping = False
        self._unstored: list[Row] = []
        self._unstored_bytes = 0
        self._unstored_since_s = 0.0
        self._stored_at_once = 1
        self._waiting_steps = 0
        self._store_at_s = 0.0

    def add(
        self, items: Sequence[Item], named: Sequence[Named], *, for_lost: bool, paid_bytes: int
    ) -> None:
        """Take over the items of one answer; `paid_bytes`: of the answer and its request."""
        if self._is_dropping:
            return
        if not items:
            self._charge(paid_bytes)
            return
        self.unread_count += 1
        for start in range(0, len(items), READ_AT_ONCE):
            some = slice(start, start + READ_AT_ONCE)
            is_last = start + READ_AT_ONCE >= len(items)
            self._unread.append(Answered(items[some], named[some], for_lost, is_last, paid_bytes))

    @property
    def is_storing(self) -> bool:
        """Whether something that came is not stored yet."""
        return bool(self._unread or self._unstored or self._is_reading or self._is_storing)

    @property
    def deadline_s(self) -> float:
        """When `pump` has something to do, if no result comes before."""
        if not self._unstored or self._is_storing:
            return NEVER_S
        return max(self._unstored_since_s + UNSTORED_S_MAX, self._store_at_s)

    def failed(self, action: Read | Store) -> None:
        """Drop what is not stored, because a step failed on this side: the next session brings it again."""
        self._is_dropping = True
        self._unread.clear()
        self._unstored.clear()
        if isinstance(action, Read):
            self._is_reading = False
        else:
            self._is_storing = False

    def pump(self, *, more_comes: bool) -> None:
        """Read and store what can be now. A small transaction waits while more comes."""
        now_s = self._shared.now_s
        is_full = self._is_storing and len(self._unstored) >= self._stored_at_once
        if self._unread and not self._is_reading and not is_full:
            self._read_next()
        if self._unstored and not self._is_storing and now_s >= self._store_at_s:
            is_worth_it = len(self._unstored) >= self._stored_at_once
            is_worth_it |= self._unstored_bytes >= UNSTORED_BYTES_MAX
            is_old = now_s >= self._unstored_since_s + UNSTORED_S_MAX
            if is_worth_it or is_old or not (more_comes or self._unread or self._is_reading):
                self._store()

    def _read_next(self) -> None:
        answered = self._unread.popleft()
        self._is_reading = True
        with_content = [item for item in answered.items if not item.HasField("absent")]
        self._shared.steps.add(Read(with_content), partial(self._read, answered))

    def _read(self, answered: Answered, decoded: Decoded) -> None:
        """Check items against the elements that they name; only the digest of content proves what it is."""
        self._is_reading = False
        self._stored_at_once = decoded.stored_at_once
        prepared = iter(decoded.prepared)
        content_bytes = 0
        for item, named in zip(answered.items, answered.named, strict=True):
            content_bytes += item.ByteSize()
            if item.HasField("absent"):
                if not answered.for_lost:
                    code = RETIRED if item.absent.reason == recon_pb2.RETIRED else LOST
                    self._books.set_aside_entry(LackedBy.HERE, named, code)
                continue
            each = next(prepared)
            self._check_interest(named.element, each.channel_id)
            if item.HasField("claim"):
                self._take_claim(named, each)
            else:
                self._take_entry(named, each, for_lost=answered.for_lost)
        self._unstored_bytes += content_bytes
        self._initiator.credit(content_bytes)
        if answered.is_last:
            self.unread_count -= 1
            self._charge(answered.paid_bytes)

    def _check_interest(self, element: Element, channel_id: str | None) -> None:
        """What both sides compare is within the mutual interest: whoever serves more would plant it here."""
        if channel_id is None:
            return
        if not (self._interest.matches(channel_id) and self._window.holds(element.order)):
            name = element.element_id.hex()
            raise misbehaved(f"the item served as {name} is outside the interest of the session")

    def _take_claim(self, named: Named, claim: Prepared) -> None:
        entry = self._shared.aside.get(claim.entry_id)
        if claim.order not in (None, named.element.order):
            raise misbehaved("a claim was served with a wrong order value")
        if entry is not None:
            self._books.set_aside(LackedBy.HERE, named.element, entry.code, claim.entry_id)
        elif claim.order is not None and not claim.is_held:
            self._keep(Row(claim, named))

    def _take_entry(self, named: Named, entry: Prepared, *, for_lost: bool) -> None:
        if entry.element_id and (entry.order, entry.element_id) != named.element:
            name = named.element.element_id.hex()
            raise misbehaved(f"the frame served as {name} is another entry")
        if not entry.refusal:
            self._keep(Row(entry, named))
        elif not for_lost:
            self._books.set_aside_entry(LackedBy.HERE, named, entry.refusal)

    def _keep(self, row: Row) -> None:
        if self._is_dropping:
            return
        if not self._unstored:
            self._unstored_since_s = self._shared.now_s
        self._unstored.append(row)

    def _store(self) -> None:
        rows, self._unstored, self._unstored_bytes = self._unstored, [], 0
        self._is_storing = True
        prepared = [row.prepared for row in rows]
        self._shared.steps.add(Store(prepared), partial(self._stored, rows))

    def _stored(self, rows: Sequence[Row], outcomes: Sequence[Stored]) -> None:
        self._is_storing = False
        waiting = [
            row
            for row, stored in zip(rows, outcomes, strict=True)
            if not self._is_settled(row, stored)
        ]
        self._waiting_steps = self._waiting_steps + 1 if waiting else 0
        if self._waiting_steps >= PATIENCE_STEPS:
            raise SyncError(SyncCode.OVERLOADED, "this node's own ingest queue stays full")
        if waiting:
            self._unstored[:0] = waiting
            self._store_at_s = self._shared.now_s + PATIENCE_STEP_S

    def _is_settled(self, row: Row, stored: Stored) -> bool:
        """Record the outcome of an item; False if there was no room for it yet."""
        prepared, named = row
        match stored.outcome:
            case recon_pb2.NOT_EXAMINED:
                return False
            case recon_pb2.NO_ENTRY:
                pass
            case recon_pb2.PUSH_REFUSED if prepared.entry_id:
                self._books.set_aside(LackedBy.HERE, named.element, stored.code, prepared.entry_id)
            case recon_pb2.PUSH_REFUSED:
                self._books.set_aside_entry(LackedBy.HERE, named, stored.code)
            case _:
                self._take_stored(prepared, named, stored)
        return True

    def _take_stored(self, prepared: Prepared, named: Named, stored: Stored) -> None:
        order, element_id = named.element
        self._shared.aside.cut_in_vain_count += stored.code == RETIRED
        self._shared.aside.forget([element_id])
        self._books.moved.hold(element_id)
        kept_count = 0
        for claim_id in named.claims:
            if claim_id in prepared.claims and claim_id not in stored.claims_dropped:
                self._books.moved.hold(claim_id)
                kept_count += 1
            else:
                claim = Element(order, claim_id)
                self._books.set_aside(LackedBy.HERE, claim, TOO_MANY_HINTS, element_id)
        if element_id in self.lost_ids:
            self.mended_ids.add(element_id)
        if stored.outcome == recon_pb2.STORED:
            self._books.count("received", is_claim=bool(prepared.entry_id), claims=kept_count)

    def _charge(self, paid_bytes: int) -> None:
        self._initiator.charge(paid_bytes, self._shared.now_s - self._started_s)


# --- both ways ---------------------------------------------------------------------------------


class Content:
    """The queues of both directions, and the batches under way."""

    def __init__(self, shared: Shared, move: Move, view: View, initiator: Initiator) -> None:
        self.books = Books(shared)
        self.inbox = Inbox(shared, self.books, initiator)
        self.unsent_ids: set[bytes] = set()
        """Entries that the peer lacks and whose content is lost here: it need not be asked for them."""
        self._shared = shared
        self._move = move
        self._view = view
        self._initiator = initiator
        self._outbox = Outbox()
        self._fetches = FetchQueue(view)
        self._lost = FetchQueue(view)
        self._refused_there = _short_ids_of(view, shared.aside)
        # Requests under way, and how many of them fetch.
        self._moving_count = self._fetching_count = 0
        self._postponed: list[Element] = []  # the peer had no room for them
        self._postponed_steps = 0
        self._push_at_s = NEVER_S
        self._is_ending = False

    @property
    def moved(self) -> Moved:
        """The differences that were found so far."""
        return self.books.moved

    # --- what is to do -------------------------------------------------------------------------

    def add_have(self, event: Have) -> None:
        """Queue elements that the peer lacks."""
        self._outbox.add(event.orders, event.ids)

    def add_need(self, event: Need) -> None:
        """Queue elements that we lack, except those that the peer refused before and names now."""
        need, aside = event, self._shared.aside
        if self._refused_there and event.short_ids is not None:
            names = [row.tobytes() for row in event.short_ids]
            there = [self._refused_there[n] for n in names if n in self._refused_there]
            asides = [each for each in map(aside.get, there) if each]
            self.moved.need(Element(each.order, each.element_id) for each in asides)
            aside.forget(there)
            kept = event.short_ids[[n not in self._refused_there for n in names]]
            need = Need(event.range, kept, len(kept))
        if need.count or need.short_ids is None:
            self._fetches.add(need)

    def add_lost(self, lost: Sequence[Element]) -> None:
        """Queue entries whose content is lost here, by name: equal sets do not show what is lost."""
        self.inbox.lost_ids = frozenset(each.element_id for each in lost)
        for need in _needs_of(self._view, lost):
            self._lost.add(need)

    def check_served(self) -> None:
        """Raise SyncError if the peer named elements that it neither served nor called absent."""
        if count := self._fetches.unserved_count:
            raise misbehaved(f"the peer offered {count} elements that it did not serve")

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is left to move, to read or to store."""
        is_moving = self._moving_count or self._postponed or len(self._outbox)
        is_fetching = len(self._fetches) or len(self._lost)
        return not (is_moving or is_fetching or self.inbox.is_storing)

    @property
    def deadline_s(self) -> float:
        """When `pump` has something to do, if no result comes before."""
        push_at_s = self._push_at_s if self._postponed and not self._is_ending else NEVER_S
        return min(push_at_s, self.inbox.deadline_s)

    def end(self) -> None:
        """Move nothing more. What came is stored."""
        self._is_ending = True

    def pump(self, *, more_may_come: bool) -> None:
        """Hand out the steps that can be taken now. A small batch waits while more can join it."""
        if self._postponed and self._shared.now_s >= self._push_at_s:
            self._outbox.put_back(self._postponed)
            self._postponed = []
        while self._may_move(more_may_come):
            self._begin_batch()
        is_waiting = not self._is_ending and len(self._fetches) + len(self._lost)
        self.inbox.pump(more_comes=bool(is_waiting or self._fetching_count))

    def _may_move(self, more_may_come: bool) -> bool:
        waiting_count = len(self._outbox) + len(self._fetches) + len(self._lost)
        in_flight_count = self._moving_count + self.inbox.unread_count
        if self._is_ending or not waiting_count or in_flight_count >= MOVES_IN_FLIGHT_MAX:
            return False
        return waiting_count >= MOVE_ELEMENTS_MAX or not more_may_come

    # --- out -----------------------------------------------------------------------------------

    def _begin_batch(self) -> None:
        queue = self._fetches if len(self._fetches) else self._lost
        fetch = queue.next_batch(MOVE_ELEMENTS_MAX)
        aside = self._shared.aside
        taken = self._outbox.take(MOVE_ELEMENTS_MAX)
        send = [each for each in taken if each.element_id not in aside]
        self._moving_count += 1
        self._fetching_count += bool(fetch)
        if send:
            load = Load(send, MOVE_BYTES_MAX)
            self._shared.steps.add(load, partial(self._loaded, queue, fetch, send))
        else:
            self._request(queue, fetch, [])

    def _loaded(
        self, queue: FetchQueue, fetch: Batch, send: Sequence[Element], items: Sequence[Item]
    ) -> None:
        self._outbox.put_back(send[len(items) :])
        beside = {each.element_id for each in send}
        sent = []
        for item, element in zip(items, send, strict=False):
            entry_id = item.claim.digest
            if item.HasField("absent"):
                named = _named(self._shared.claim_id, item, element)
                is_retired = item.absent.reason == recon_pb2.RETIRED
                self.books.set_aside_entry(LackedBy.THERE, named, RETIRED if is_retired else LOST)
                if not is_retired:
                    self.unsent_ids.add(element.element_id)
            elif entry := self._shared.aside.get(entry_id):
                self.books.set_aside(LackedBy.THERE, element, entry.code, entry_id)
            elif entry_id not in beside and entry_id not in self.moved.offered:
                sent.append((item, element))  # otherwise its entry brings it
        self._request(queue, fetch, sent)

    def _request(
        self, queue: FetchQueue, fetch: Batch, sent: Sequence[tuple[Item, Element]]
    ) -> None:
        if not (fetch or sent) or self._is_ending:
            self._end_batch(fetch)
            return
        request = ReconRequest(
            version=PROTOCOL_VERSION,
            push=[_unnamed(item) for item, _ in sent],
            response_bytes_max=MOVE_BYTES_MAX,
        )
        if fetch:
            request.fetch.CopyFrom(pack_fetch(fetch))
        self._move(request, partial(self._answered, queue, fetch, sent, request))

    def _answered(
        self,
        queue: FetchQueue,
        fetch: Batch,
        sent: Sequence[tuple[Item, Element]],
        request: ReconRequest,
        response: ReconResponse,
    ) -> None:
        self._end_batch(fetch)
        self._take_outcomes(sent, response.push_outcomes)
        # Pushes are not charged: each element of ours is sent once, whatever the peer answers.
        paid_bytes = request.fetch.ByteSize() + response.ByteSize()
        self._take_items(queue, fetch, response, paid_bytes)

    def _end_batch(self, fetch: Batch) -> None:
        self._moving_count -= 1
        self._fetching_count -= bool(fetch)

    def _take_outcomes(  # noqa: C901 - one row for each outcome
        self, sent: Sequence[tuple[Item, Element]], outcomes: Sequence[int]
    ) -> None:
        """What the peer says became of pushed items. Whether it kept them, `Sync` confirms at the end."""
        if len(outcomes) != len(sent):
            raise misbehaved(f"the peer sent {len(outcomes)} outcomes for {len(sent)} pushed items")
        taken: list[Element] = []
        stored: list[Element] = []
        postponed: list[Element] = []
        for (item, element), outcome in zip(sent, outcomes, strict=True):
            entry_id = item.claim.digest
            match outcome:
                case recon_pb2.NOT_EXAMINED:
                    postponed.append(element)
                    continue
                case recon_pb2.STORED | recon_pb2.DUPLICATE:
                    taken.append(element)
                    if outcome == recon_pb2.STORED:
                        stored.append(element)
                        self.books.count(
                            "sent", is_claim=bool(entry_id), claims=len(item.entry.hints)
                        )
                case recon_pb2.PUSH_REFUSED if entry_id:
                    self.books.set_aside(LackedBy.THERE, element, REFUSED, entry_id)
                case recon_pb2.PUSH_REFUSED | recon_pb2.PUSH_RETIRED:
                    self._shared.aside.cut_in_vain_count += outcome == recon_pb2.PUSH_RETIRED
                    named = _named(self._shared.claim_id, item, element)
                    self.books.set_aside_entry(LackedBy.THERE, named, REFUSED)
                case recon_pb2.NO_ENTRY if entry_id:
                    # The entry brings its claims. If it is there, this peer takes no claim on it from us.
                    if not (self.moved.is_overfull or entry_id in self.moved.offered):
                        self.books.set_aside(LackedBy.THERE, element, NO_ENTRY, entry_id)
                case _:
                    raise misbehaved(f"the peer sent the outcome {outcome} for a pushed item")
            self._initiator.credit(item.ByteSize())
        self._shared.ledger.acknowledge(taken, stored)
        if not self.moved.is_overfull:
            self._shared.acknowledged.update(each.element_id for each in taken)
        if postponed:
            self._postpone(postponed)

    def _postpone(self, elements: list[Element]) -> None:
        self._postponed_steps += 1
        if self._postponed_steps > PATIENCE_STEPS:
            detail = f"the peer did not examine {len(elements)} items"
            raise SyncError(SyncCode.OVERLOADED, detail)
        self._postponed += elements
        self._push_at_s = self._shared.now_s + PATIENCE_STEP_S

    def _take_items(
        self, queue: FetchQueue, fetch: Batch, response: ReconResponse, paid_bytes: int
    ) -> None:
        """Check that all items of an answer were requested, and queue them to be read."""
        if len(response.items) > ITEMS_MAX:
            raise misbehaved(f"an answer has {len(response.items)} items; at most {ITEMS_MAX}")
        named = names_in(self._shared.claim_id, response.items)
        resume = response.resume if response.truncated else None
        orders, ids = columns(each.element for each in named)
        asked = queue.accept(fetch, orders, ids, resume)
        if not asked.all():
            count = int((~asked).sum())
            raise misbehaved(f"{count} of {len(asked)} served elements were not requested")
        queue.settle(fetch, orders, ids, resume, [each.claims for each in named])
        for_lost = queue is self._lost
        if not for_lost:
            self.moved.need(each.element for each in named)
            self.moved.need(
                Element(each.element.order, claim) for each in named for claim in each.claims
            )
        self.inbox.add(response.items, named, for_lost=for_lost, paid_bytes=paid_bytes)


# --- names -------------------------------------------------------------------------------------


def names_in(claim_id: ClaimId, items: Sequence[Item]) -> list[Named]:
    """What each item claims to be, before anything is decoded. Raises SyncError."""
    named = []
    for item in items:
        kind = item.WhichOneof("item")
        if kind is None:
            raise misbehaved("a served item names no element")
        element_id = item.claim.digest if kind == "claim" else item.id
        if len(element_id) != ID_BYTES:
            raise misbehaved(f"a served item names no element: an ID must have {ID_BYTES} bytes")
        if kind == "claim":
            element_id = claim_id(element_id, item.claim.hint)
        named.append(_named(claim_id, item, Element(item.order, element_id)))
    return named


def _named(claim_id: ClaimId, item: Item, element: Element) -> Named:
    """An item with the claims inside it."""
    hints = item.entry.hints or item.absent.hints
    return Named(element, [claim_id(element.element_id, each) for each in hints] if hints else ())


def _unnamed(item: Item) -> Item:
    """The item without the name of its element, which only an answer needs."""
    return Item(entry=item.entry) if item.HasField("entry") else Item(claim=item.claim)


def _short_ids_of(view: View, aside: SetAside) -> dict[bytes, bytes]:
    """IDs of elements that the peer refused before, by this session's short ids."""
    refused = aside.columns(LackedBy.THERE)
    if not len(refused):
        return {}
    names = view.short_ids(refused.orders, refused.ids)
    rows = zip(names, refused.ids, strict=True)
    return {name.tobytes(): row.tobytes() for name, row in rows}


def _needs_of(view: View, elements: Sequence[Element]) -> list[Need]:
    """A need for each element, each with its own range."""
    needs = []
    for (order, element_id), name in zip(elements, view.short_ids(*columns(elements)), strict=True):
        lower = Bound(order, int.from_bytes(element_id[:8], "big"))
        upper = Bound(*divmod((lower.order << 64) + lower.head + 1, 1 << 64))
        needs.append(Need(Range(lower, min(upper, END)), name.reshape(1, -1), 1))
    return needs
