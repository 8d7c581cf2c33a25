"""A replica that is a dictionary, and a peer that answers from one, in one process.

The content of an element is any bytes: the first eight are its order, its ID is their BLAKE3.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import numpy as np
from blake3 import blake3

from recon.agreement import (
    Interest,
    SessionKey,
    decode_interest,
    derive_session_key,
    interest_hash,
)
from recon.elements import U8, U64, Bound, Mask, bound_bytes
from recon.fetch import Found, read_fetch, resolve
from recon.index import RangeIndex
from recon.limits import PROTOCOL_VERSION
from recon.marks import NEWS_MAX, Arrived, Moment, Numbers, is_mark_of, mark_of, numbers_of, view_of
from recon.responder import respond
from recon.view import View
from sdstore.sync.memory import RETIRED, Element, columns
from sdstore.sync.steps import LostPage, Prepared, Stored
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse

EVERYTHING = Interest.make(everything=True)
NONCE = bytes(range(16))


def content(order: int, text: str = "") -> bytes:
    """The content of one element."""
    return order.to_bytes(8, "big") + text.encode()


def element_of(raw: bytes) -> Element:
    """The element that this content is."""
    return Element(int.from_bytes(raw[:8], "big"), blake3(raw).digest())


_clock = count(1)


class MemoryReplica:
    """A `Replica` without claims. `refuses` names content that it does not take."""

    def __init__(
        self, contents: Iterable[bytes] = (), refuses: Callable[[bytes], bool] = lambda _: False
    ) -> None:
        self.held: dict[Element, bytes | None] = {}
        self.prepared_count = 0
        self._index = RangeIndex()
        self._refuses = refuses
        self._pending: list[Element] = []
        # Arrival order: None where a row was lost, and the sum of the chain after each.
        self.arrived: list[Element | None] = []
        self._sums = [0]
        self.secret = b"the secret of a replica in memory"
        self.policy = 0
        self.retired: dict[Element, int] = {}  # and when
        self.news_max = NEWS_MAX
        for each in contents:
            self.add(each)

    def add(self, raw: bytes) -> None:
        """Hold this content."""
        element = element_of(raw)
        if element not in self.held:
            self._pending.append(element)
        self.held[element] = None if element in self.retired else raw

    def retire(self, raw: bytes) -> None:
        """The element stays, its content is gone for good."""
        element = element_of(raw)
        self.held[element] = None
        self.retired[element] = next(_clock)

    def lose(self, raw: bytes) -> None:
        """The element stays, its content is gone."""
        self.held[element_of(raw)] = None

    def restore(self, backup: MemoryReplica) -> None:
        """Go back to an older copy."""
        kept = self.secret, self.policy, self._refuses
        self.__dict__.update(copy.deepcopy({**backup.__dict__, "_refuses": None}))
        self.secret, self.policy, self._refuses = kept

    def lose_row(self, element: Element) -> None:
        """The element is gone; nobody deleted it."""
        assert not self._pending
        self.arrived[self.arrived.index(element)] = None
        del self.held[element]
        self._index = RangeIndex()
        self._insert([each for each in self.arrived if each])

    @property
    def contents(self) -> set[bytes]:
        """All content that can be read."""
        return {each for each in self.held.values() if each is not None}

    @property
    def arrived_count(self) -> int:
        """See `Replica`."""
        return len(self._index)

    async def catch_up(self) -> None:
        """See `Replica`."""
        if self._pending:
            self._insert(self._pending)
            for each in self._pending:
                name = blake3(self._sums[-1].to_bytes(8, "big") + each.element_id)
                self._sums.append(int.from_bytes(name.digest(length=7), "big"))
            self.arrived += self._pending
            self._pending = []

    def _insert(self, elements: list[Element]) -> None:
        orders, ids = columns(elements)
        self._index.insert(orders, ids, np.zeros(len(ids), np.uint32))

    def _moment(self, count: int) -> Moment:
        ids = b"".join(sorted(each.element_id for each in self.arrived[:count] if each))
        root = blake3(bytes([self.policy]) + ids).digest()
        return Moment(Numbers(count, 0), (self._sums[count], 0), root)

    def mark(self, interest: Interest) -> bytes:
        """See `ArrivalOrder`."""
        return mark_of(self.secret, interest.encode(), self._moment(len(self.arrived)))

    async def arrived_since(self, mark: bytes, interest: Interest) -> Arrived | None:
        """See `ArrivalOrder`."""
        await self.catch_up()
        numbers = numbers_of(mark, self.secret, interest.encode())
        if numbers is None or numbers.entry > len(self.arrived):
            return None
        if not is_mark_of(mark, self.secret, interest.encode(), self._moment(numbers.entry)):
            return None
        window, start = interest.window, numbers.entry
        rows = [
            (at, each)
            for at, each in enumerate(self.arrived[start:], start + 1)
            if each and window.holds(each.order)
        ]
        if len(rows) > self.news_max:
            return None
        orders, ids = columns(each for _, each in rows)
        return Arrived(
            orders, ids, np.array([at for at, _ in rows], np.int64), np.zeros(len(rows), bool)
        )

    def moment(self) -> bytes:
        """See `ArrivalOrder`."""
        return struct.pack(">QQ", len(self.arrived), next(_clock))

    async def view_without(
        self, key: SessionKey, interest: Interest, pairs: Sequence[tuple[bytes, bytes]]
    ) -> View:
        """See `ArrivalOrder`."""
        gone = []
        for after, until in pairs:
            first = struct.unpack(">QQ", after)[0] if after else 0
            last, time = struct.unpack(">QQ", until)
            came = [each for each in self.arrived[first:last] if each]
            gone += [each for each in came if self.retired.get(each, time + 1) <= time]
        without = np.zeros(len(self._index), bool)
        without[self._index.rows_of_elements(*columns(gone))[0]] = True
        return View(self._index, key, window=interest.window, without=without)

    def view(self, key: SessionKey, interest: Interest) -> View:
        """See `Replica`."""
        return View(self._index, key, window=interest.window)

    def holds(self, orders: U64, ids: U8) -> Mask:
        """See `Replica`."""
        return self._index.holds(orders, ids)

    async def load(self, elements: Sequence[Element], _bytes_max: int) -> list[Item]:
        """See `Replica`; all of it fits."""
        items = []
        for each in elements:
            item = Item(order=each.order, id=each.element_id)
            raw = self.held.get(each)
            if raw is None:
                item.absent.reason = wire.RETIRED if each in self.retired else wire.LOST
            else:
                item.entry.frame = raw
            items.append(item)
        return items

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """See `Replica`."""
        return blake3(entry_id + hint).digest()

    async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
        """See `Replica`."""
        self.prepared_count += len(items)
        prepared = []
        for item in items:
            raw = item.entry.frame
            order, element_id = element_of(raw)
            refusal = "not_wanted" if self._refuses(raw) else ""
            prepared.append(
                Prepared(order=order, element_id=element_id, refusal=refusal, content=raw)
            )
        return prepared

    @property
    def stored_at_once(self) -> int:
        """See `Replica`."""
        return 1_024

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        """See `Replica`."""
        stored = []
        for each in prepared:
            if each.refusal:
                stored.append(Stored(wire.PUSH_REFUSED, each.refusal))
            elif element_of(each.content) in self.retired:
                self.add(each.content)
                stored.append(Stored(wire.DUPLICATE, RETIRED))
            else:
                is_new = self.held.get(element_of(each.content)) is None
                self.add(each.content)
                stored.append(Stored(wire.STORED if is_new else wire.DUPLICATE))
        return stored

    async def lost(self, _interest: Interest, _after: int, _limit: int) -> LostPage:
        """See `Replica`."""
        lost = self._lost()
        return LostPage(lost, 0, len(lost))

    def _lost(self) -> list[Element]:
        return [e for e, raw in self.held.items() if raw is None and e not in self.retired]

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """See `Replica`."""
        lost = {element.element_id for element in self._lost()}
        return lost & set(entry_ids)


class MemoryPeer:
    """A `Transport` to a responder over a replica; `requests` are those it was sent.

    `nonce` is the only one that it takes. An answer has at most `items_max` items. `asked` runs before each.
    """

    def __init__(
        self,
        replica: MemoryReplica,
        *,
        interest: Interest = EVERYTHING,
        asked: Callable[[ReconRequest], None] = lambda _: None,
    ) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.requests: list[ReconRequest] = []
        self.own_interest = interest
        self.nonce = NONCE
        self.items_max = 1 << 16
        self.asked = asked
        self._replica = replica
        self._interests: dict[bytes, Interest] = {}

    async def recon(self, request: bytes) -> bytes:
        """One call."""
        self.bytes_up += len(request)
        self.requests.append(ReconRequest.FromString(request))
        self.asked(self.requests[-1])
        response = await self._answer(self.requests[-1])
        response.policy = response.policy or self.policy
        raw = response.SerializeToString()
        self.bytes_down += len(raw)
        return raw

    @property
    def policy(self) -> int:
        """It changes with the replica's policy and with the interest."""
        names = interest_hash(self.own_interest.encode())
        is_usual = self.own_interest == EVERYTHING
        return self._replica.policy + (0 if is_usual else 1_000 + names[0])

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        replica, session = self._replica, request.session
        await replica.catch_up()
        expired = ReconResponse(
            version=PROTOCOL_VERSION, status=wire.NONCE_EXPIRED, responder_nonce=self.nonce
        )
        if not session.WhichOneof("interest"):
            expired.interest = self.own_interest.encode()
            return expired
        if session.interest_bytes:
            name = interest_hash(session.interest_bytes)
            self._interests[name] = decode_interest(session.interest_bytes)
        else:
            name = session.interest_hash
        if session.responder_nonce != self.nonce:
            return expired
        asked = self._interests.get(name)
        if asked is None:
            return ReconResponse(version=PROTOCOL_VERSION, status=wire.UNKNOWN_INTEREST)
        mutual = asked.intersect(self.own_interest)
        stored = await replica.commit(await replica.prepare(request.push))
        await replica.catch_up()
        key = derive_session_key(session.initiator_nonce, session.responder_nonce, name)
        pairs = [] if request.since else [(each.after, each.until) for each in request.without]
        view = await replica.view_without(key, mutual, pairs)
        if request.since or request.up_to:
            bounded = await self._bounded(request, view, key, mutual)
            if bounded is None:
                return ReconResponse(version=PROTOCOL_VERSION, status=wire.UNKNOWN_MARK)
            view = bounded
        response = ReconResponse(version=PROTOCOL_VERSION)
        if request.HasField("ranges") or request.total:
            response = respond(view, request)
        if request.mark and mutual == asked:
            response.mark, response.moment = replica.mark(mutual), replica.moment()
        found = self._found(view, request)
        rows = zip(found.orders.tolist(), found.ids, strict=True)
        elements = [Element(order, row.tobytes()) for order, row in rows]
        response.items.extend(await replica.load(elements, 0))
        if found.resume is not None:
            response.truncated, response.resume = True, bound_bytes(found.resume)
        response.push_outcomes.extend(
            wire.PUSH_RETIRED if request.without and each.code == RETIRED else each.outcome
            for each in stored
        )
        return response

    def _found(self, view: View, request: ReconRequest) -> Found:
        """The elements of a fetch, as many as an answer may have."""
        found = resolve(view, read_fetch(request.fetch))
        if len(found.ids) <= self.items_max:
            return found
        head = int.from_bytes(found.ids[self.items_max, :8].tobytes(), "big")
        resume = Bound(int(found.orders[self.items_max]), head)
        return Found(found.orders[: self.items_max], found.ids[: self.items_max], resume)

    async def _bounded(
        self, request: ReconRequest, whole: View, key: SessionKey, mutual: Interest
    ) -> View | None:
        """The view between the marks of a request."""
        marks = (request.since, request.up_to)
        since, later = [
            await self._replica.arrived_since(each, mutual) if each else None for each in marks
        ]
        if (since is None) is bool(request.since) or (later is None) is bool(request.up_to):
            return None
        if since is None:
            assert later is not None
            return whole.corrected(later.columns().take(slice(0)), later.columns())
        last = numbers_of(request.up_to, self._replica.secret, mutual.encode())
        if last is not None:
            since = since.up_to(last)
        return view_of(since.columns(), key)
