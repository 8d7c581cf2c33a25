"""The content of one pass, both ways, in bounded batches.

Elements that the peer lacks wait in a queue; elements that this side lacks wait in
`recon.fetch.FetchQueue`, by range and short ID. A batch takes from both: one request pushes items and
fetches others. The names of arriving items show what is left to fetch, so the next request goes out before
their content is read; the peer works on it meanwhile. `sdstore.sync.received` reads, checks and stores it.
Everything is charged to the session's budget.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from recon.elements import END, U8, U64, Bound, Mask, Range, heads_of
from recon.events import Have, Need
from recon.fetch import Batch, FetchQueue, pack_fetch
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from recon.session import SessionHeader
from recon.view import View
from sdstore.sync.exchange import Exchange, NonceExpiredError
from sdstore.sync.memory import (
    LOST,
    REFUSED,
    TOO_MANY_HINTS,
    AsideElement,
    LackedBy,
    SetAside,
)
from sdstore.sync.news import Moved
from sdstore.sync.received import (
    PATIENCE_STEP_S,
    PATIENCE_STEPS,
    Arrived,
    Named,
    Row,
    WriteBehind,
    aside_of,
    claims_in,
    names_in,
    read_items,
)
from sdstore.sync.replica import Element, Replica, Stored, columns
from sdstore.sync.report import Counts, SyncCode, SyncError, misbehaved
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse

MOVE_ELEMENTS_MAX = 1_024  # one group of a node's writer, while other batches are on the network
MOVE_BYTES_MAX = 2 << 20  # each way: memory per batch, and 0.2 s at 100 Mbit/s
ITEMS_MAX = DEFAULT_LIMITS.fetch_ids_max  # of one answer: no fetch names more
READ_AT_ONCE = (
    1_024  # items of an answer: more objects at once would cost Python's garbage collector
)
SENDING_S = 0.001  # for the next request to leave before the work on an answer holds the event loop
NAMED_MAX = 5  # elements in a report's detail: log lines stay short


# --- what is sent ------------------------------------------------------------------------------


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


@dataclass(slots=True)
class Ledger:
    """Facts that the passes of a session share, 8 bytes an element.

    Each is a set of heads: `acknowledged` elements, which the peer claims to have stored; `offered`
    ones, which it lacked; `doubted` ones, which it acknowledged and lacked in a later pass.
    `kept_before`: the elements that the last session sent, and that a total of the peer contained;
    `dropped`: those of them that it lacked now, and stored again.
    """

    acknowledged: list[U64] = field(default_factory=list)
    offered: list[U64] = field(default_factory=list)
    doubted: list[U64] = field(default_factory=list)
    policy_changed: bool = False
    has_doubts: bool = False
    """Whether the peer lacked an element that it had acknowledged: only its total at the end settles that."""
    kept_before: AbstractSet[bytes] = frozenset()
    dropped: set[bytes] = field(default_factory=set)

    @property
    def said(self) -> str:
        """Which elements the peer has dropped since the last session, for people; empty: none."""
        if not self.dropped:
            return ""
        return f"the peer acknowledged {_counted(self.dropped)}, and had dropped them since"

    def acknowledge(self, elements: Sequence[Element], stored: Sequence[Element]) -> None:
        """Record elements that the peer claims to have, and those of them that it claims to have stored now."""
        if elements:
            self.acknowledged.append(heads_of(columns(elements)[1]))
        # It had these in the last session, and lacked them now, whatever it claims.
        self.has_doubts |= any(each.element_id in self.kept_before for each in elements)
        self.dropped |= {each.element_id for each in stored} & self.kept_before

    def forget_answers(self) -> None:
        """Forget what the peer acknowledged: it may have another policy since."""
        self.acknowledged.clear()
        self.doubted.clear()
        self.has_doubts, self.policy_changed = False, True

    def offer(self, ids: U8) -> int:
        """Record elements that the peer lacks, u8[n, 32]; returns how many are newly found.

        In a store with several workers an element can become visible shortly after it was stored, so an
        acknowledged element is offered once more. Raises SyncError if the peer then lacks it again.
        """
        heads = heads_of(np.ascontiguousarray(ids))
        if _known(self.doubted, heads).any():
            if self.policy_changed:
                detail = "the peer's policy changed during the session"
                raise SyncError(SyncCode.OVERLOADED, detail)
            lacking = map(bytes, ids[_known(self.doubted, heads)])
            raise misbehaved(
                f"the peer acknowledged {_counted(set(lacking))}, and does not hold them"
            )
        repeated = heads[_known(self.acknowledged, heads)]
        if len(repeated):
            self.doubted.append(repeated)
            self.has_doubts = True
        is_known = _known(self.offered, heads)
        self.offered.append(heads[~is_known])
        return int((~is_known).sum())


def _counted(ids: Collection[bytes]) -> str:
    """How many elements, and the names of the first."""
    named = ", ".join(each.hex() for each in sorted(ids)[:NAMED_MAX])
    return f"{len(ids)} elements ({named}{', …' if len(ids) > NAMED_MAX else ''})"


def _known(pieces: list[U64], heads: U64) -> Mask:
    return np.isin(heads, np.concatenate(pieces)) if pieces else np.zeros(len(heads), bool)


# --- one pass ----------------------------------------------------------------------------------


class Move(NamedTuple):
    """One batch: needs to fetch, and elements to send."""

    fetch: Batch
    send: list[Element]


class Moves:
    """The queues of both directions, and the transfer of batches."""

    def __init__(
        self,
        replica: Replica,
        view: View,
        header: SessionHeader,
        exchange: Exchange,
        aside: SetAside,
        ledger: Ledger,
        counts: Counts,
        initiator: Initiator,
        carry_more: Callable[[], None],
    ) -> None:
        """`carry_more` starts to carry waiting batches, as far as more can be in flight."""
        self._replica = replica
        self._view = view
        self._header = header
        self._exchange = exchange
        self._aside = aside
        self._ledger = ledger
        self._counts = counts
        self._initiator = initiator
        self._carry_more = carry_more
        self.moved = Moved()
        self._started_s = time.monotonic()
        self._outbox = Outbox()
        self._fetches = FetchQueue(view)
        self.storing: set[asyncio.Task[object] | None] = set()  # tasks that have an answer
        self._fetching_count = 0
        self._behind = WriteBehind(replica, self._is_settled)
        self._postponed_steps = 0
        self._refused_there = _short_ids_of(view, aside)

    def add_have(self, event: Have) -> None:
        """Queue elements that the peer lacks."""
        self._outbox.add(event.orders, event.ids)

    def add_need(self, event: Need) -> None:
        """Queue elements that we lack, except those that the peer refused before and names now."""
        need = event
        if self._refused_there and event.short_ids is not None:
            names = [row.tobytes() for row in event.short_ids]
            there = [self._refused_there[n] for n in names if n in self._refused_there]
            asides = [each for each in map(self._aside.get, there) if each]
            self.moved.need(Element(each.order, each.element_id) for each in asides)
            self._aside.forget(there)
            kept = event.short_ids[[n not in self._refused_there for n in names]]
            need = Need(event.range, kept, len(kept))
        if need.count or need.short_ids is None:
            self._fetches.add(need)

    @property
    def waiting_count(self) -> int:
        """Waiting batches and elements; 0 when nothing is left to do."""
        return len(self._outbox) + len(self._fetches)

    @property
    def unserved_count(self) -> int:
        """Elements that the peer named, and neither served nor refused."""
        return self._fetches.unserved_count

    def take(self) -> Move:
        """The next batch."""
        return Move(
            self._fetches.next_batch(MOVE_ELEMENTS_MAX), self._outbox.take(MOVE_ELEMENTS_MAX)
        )

    async def carry(self, move: Move) -> None:
        """Fetch and send one batch. Raises SyncError, NonceExpiredError, RemoteProtocolError."""
        send = [each for each in move.send if each.element_id not in self._aside]
        items = await self._replica.load(send, MOVE_BYTES_MAX)
        self._outbox.put_back(send[len(items) :])
        send_ids = {each.element_id for each in send}
        sent = []
        for item, element in zip(items, send, strict=False):
            entry_id = item.claim.digest
            if item.HasField("absent"):
                claims = claims_in(self._replica, item, element.element_id)
                self._set_aside(aside_of(LackedBy.THERE, element, claims, LOST))
            elif entry_id in send_ids or entry_id in self.moved.offered:
                continue  # its entry brings it
            elif entry := self._aside.get(entry_id):
                self._set_aside(aside_of(LackedBy.THERE, element, (), entry.code, entry_id))
            else:
                sent.append((item, element))
        if not (move.fetch or sent):
            return
        request = ReconRequest(
            version=PROTOCOL_VERSION,
            push=[_unnamed(item) for item, _ in sent],
            response_bytes_max=MOVE_BYTES_MAX,
        )
        self._fetching_count += bool(move.fetch)
        try:
            await self._exchanged(move.fetch, sent, request)
        finally:
            self._fetching_count -= bool(move.fetch)

    async def _exchanged(
        self, fetch: Batch, sent: Sequence[tuple[Item, Element]], request: ReconRequest
    ) -> None:
        """Send a batch, and take what the answer says of the sent items and the fetched ones."""
        if fetch:
            request.fetch.CopyFrom(pack_fetch(fetch))
        try:
            response = await self._exchange.content_call(self._header, request)
        except NonceExpiredError as expired:
            if sent:  # repeat the push under the new nonce: a push does not depend on the key
                ours = self._header
                header = SessionHeader(ours.initiator_nonce, expired.responder_nonce, ours.interest)
                again = ReconRequest(version=PROTOCOL_VERSION, push=request.push)
                response = await self._exchange.content_call(header, again)
                await self._take_outcomes(sent, response.push_outcomes)
            raise
        await self._take_outcomes(sent, response.push_outcomes)
        task = asyncio.current_task()
        self.storing.add(task)
        try:
            await self._take_arrivals(fetch, response)
        finally:
            self.storing.discard(task)
        # Pushes are not charged: each element of ours is sent once, whatever the peer answers.
        size = request.fetch.ByteSize() + response.ByteSize()
        self._initiator.charge(size, time.monotonic() - self._started_s)

    async def flush(self) -> None:
        """Store everything that was received. Raises as `carry`."""
        await self._behind.flush()

    async def end(self) -> None:
        """Forget what was received and is not stored."""
        await self._behind.end()

    def _set_aside(self, elements: Iterable[AsideElement]) -> None:
        for element in elements:
            if element.element_id not in self._aside:
                if not self._aside.add(element):
                    self.moved.pass_over(element)
                self._counts["claims_refused" if element.entry_id else "entries_refused"] += 1

    # --- sent ----------------------------------------------------------------------------------

    async def _take_outcomes(
        self, sent: Sequence[tuple[Item, Element]], outcomes: Sequence[int]
    ) -> None:
        if len(outcomes) != len(sent):
            raise misbehaved(f"the peer sent {len(outcomes)} outcomes for {len(sent)} pushed items")
        postponed: list[Element] = []
        taken: list[Element] = []
        stored: list[Element] = []
        for (item, element), outcome in zip(sent, outcomes, strict=True):
            if outcome == recon_pb2.NOT_EXAMINED:
                postponed.append(element)
                continue
            self._initiator.credit(item.ByteSize())
            entry_id = item.claim.digest
            if outcome == recon_pb2.NO_ENTRY and entry_id:
                pass  # if the entry is still to come, it brings the claim
            elif outcome == recon_pb2.PUSH_REFUSED:
                claims = claims_in(self._replica, item, element.element_id)
                self._set_aside(aside_of(LackedBy.THERE, element, claims, REFUSED, entry_id))
            elif outcome in (recon_pb2.STORED, recon_pb2.DUPLICATE):
                taken.append(element)
                if outcome == recon_pb2.STORED:
                    stored.append(element)
                    self._count("sent", is_claim=bool(entry_id), claims=len(item.entry.hints))
            else:
                raise misbehaved(f"the peer sent the unknown outcome {outcome} for a pushed item")
        self._ledger.acknowledge(taken, stored)
        await self._postpone(postponed)

    async def _postpone(self, elements: list[Element]) -> None:
        if not elements:
            return
        self._postponed_steps += 1
        if self._postponed_steps > PATIENCE_STEPS:
            detail = f"the peer did not examine {len(elements)} items"
            raise SyncError(SyncCode.OVERLOADED, detail)
        await asyncio.sleep(PATIENCE_STEP_S)
        self._outbox.put_back(elements)

    # --- fetched -------------------------------------------------------------------------------

    async def fetch_lost(self, lost: Sequence[Element]) -> set[bytes]:
        """Request entries whose content is lost here; returns the IDs of those that arrived."""
        queue = FetchQueue(self._view)
        for need in _needs_of(self._view, lost):
            queue.add(need)
        came: set[bytes] = set()
        while batch := queue.next_batch(MOVE_ELEMENTS_MAX):
            request = ReconRequest(version=PROTOCOL_VERSION, response_bytes_max=MOVE_BYTES_MAX)
            request.fetch.CopyFrom(pack_fetch(batch))
            response = await self._exchange.content_call(self._header, request)
            named = self._named(queue, batch, response)
            async for arrived in self._read(response, named):
                await self._behind.store(arrived.rows)
                came.update(row.element.element_id for row in arrived.rows)
                self._initiator.credit(arrived.content_bytes)
            queue.settle(batch, *named.columns(), _resume_of(response))
            self._initiator.charge(
                request.ByteSize() + response.ByteSize(), time.monotonic() - self._started_s
            )
        return came

    def _named(self, queue: FetchQueue, batch: Batch, response: ReconResponse) -> Named:
        """The elements that an answer names, after a check that all were requested."""
        if len(response.items) > ITEMS_MAX:
            raise misbehaved(f"an answer has {len(response.items)} items; at most {ITEMS_MAX}")
        named = names_in(self._replica, response.items)
        asked = queue.accept(batch, *named.columns(), _resume_of(response))
        if not asked.all():
            count = int((~asked).sum())
            raise misbehaved(f"{count} of {len(asked)} served elements were not requested")
        return named

    async def _read(self, response: ReconResponse, named: Named) -> AsyncIterator[Arrived]:
        """The items of an answer, some at a time: others have their turn between."""
        for start in range(0, len(named.ids), READ_AT_ONCE):
            some = slice(start, start + READ_AT_ONCE)
            part = Named(named.orders[some], named.ids[some], named.claims[some])
            yield await read_items(self._replica, response.items[some], part)
            await asyncio.sleep(0)

    async def _take_arrivals(self, batch: Batch, response: ReconResponse) -> None:
        """Store the served items."""
        named = self._named(self._fetches, batch, response)
        self._fetches.settle(batch, *named.columns(), _resume_of(response), named.claims)
        self.moved.need(named.elements())
        if response.truncated:
            self._carry_more()
            await asyncio.sleep(SENDING_S)
        async for arrived in self._read(response, named):
            self._set_aside(arrived.aside)
            for claim in arrived.lone_claims:  # others are dropped: their entries bring them
                entry_id = claim.prepared.entry_id
                if entry := self._aside.get(entry_id):
                    aside = aside_of(LackedBy.HERE, claim.element, (), entry.code, entry_id)
                    self._set_aside(aside)
            rows = [row for row in arrived.rows if not row.prepared.is_held]
            await self._behind.add(rows, arrived.content_bytes)
            self._initiator.credit(arrived.content_bytes)
        if self._fetching_count == 1 and not len(self._fetches):
            await self._behind.flush()  # nothing more is on its way

    def _is_settled(self, row: Row, stored: Stored) -> bool:
        """Record the outcome of an item; False if there was no room for it yet."""
        prepared, (order, element_id) = row.prepared, row.element
        match stored.outcome:
            case recon_pb2.NOT_EXAMINED:
                return False
            case recon_pb2.NO_ENTRY:
                pass
            case recon_pb2.PUSH_REFUSED:
                entry_id = prepared.entry_id
                aside = aside_of(LackedBy.HERE, row.element, row.claims, stored.code, entry_id)
                self._set_aside(aside)
            case outcome:
                self._aside.forget([element_id])
                self.moved.hold(element_id)
                kept = 0
                for each in row.claims:
                    if each in stored.claims_dropped or each not in prepared.claims:
                        dropped = AsideElement(
                            LackedBy.HERE, order, each, TOO_MANY_HINTS, element_id
                        )
                        self._set_aside([dropped])
                    else:
                        self.moved.hold(each)
                        kept += 1
                if outcome == recon_pb2.STORED:
                    self._count("received", is_claim=bool(prepared.entry_id), claims=kept)
        return True

    def _count(self, what: str, *, is_claim: bool, claims: int) -> None:
        """Count an entry with the claims inside it, or a claim."""
        self._counts[f"claims_{what}"] += claims + is_claim
        self._counts[f"entries_{what}"] += not is_claim


def _unnamed(item: Item) -> Item:
    """The item without the name of its element, which only an answer needs."""
    return Item(entry=item.entry) if item.HasField("entry") else Item(claim=item.claim)


def _resume_of(response: ReconResponse) -> bytes | None:
    return response.resume if response.truncated else None


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
