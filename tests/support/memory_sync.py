"""A replica that is a dictionary, and a peer that answers from one, in one process.

The content of an element is any bytes: the first eight are its order, its ID is their BLAKE3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from blake3 import blake3

from recon.elements import U8, U64, Mask, bound_bytes
from recon.fetch import read_fetch, resolve
from recon.hashing import idle_root
from recon.index import RangeIndex
from recon.limits import PROTOCOL_VERSION
from recon.responder import respond
from recon.session import Interest, SessionKey, derive_session_key, interest_hash
from recon.view import View
from sdstore.sync.replica import Element, Loaded, LostPage, Prepared, Stored, columns
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
        for each in contents:
            self.add(each)

    def add(self, raw: bytes) -> None:
        """Hold this content."""
        element = element_of(raw)
        if element not in self.held:
            self._pending.append(element)
        self.held[element] = raw

    def lose(self, raw: bytes) -> None:
        """The element stays, its content is gone."""
        self.held[element_of(raw)] = None

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
            orders, ids = columns(self._pending)
            self._index.insert(orders, ids, np.zeros(len(ids), np.uint32))
            self._pending = []

    def view(self, key: SessionKey, interest: Interest) -> View:
        """See `Replica`."""
        return self._index.view(key, None, interest.window)

    def holds(self, orders: U64, ids: U8) -> Mask:
        """See `Replica`."""
        return self._index.holds(orders, ids)

    def root(
        self, _interest: Interest, policy: int, added: U8 | None = None, removed: U8 | None = None
    ) -> bytes | None:
        """See `Replica`."""
        _, ids = columns(self.held)
        ids = ids if added is None else np.concatenate((ids, added))
        sums = ids.view("<u8").sum(axis=0, dtype=np.uint64)
        count = len(ids)
        if removed is not None:
            sums = sums - removed.view("<u8").sum(axis=0, dtype=np.uint64)
            count -= len(removed)
        return idle_root(count, sums, policy)

    async def load(self, elements: Sequence[Element], _bytes_max: int) -> Loaded:
        """See `Replica`; all of it fits."""
        items = []
        for each in elements:
            item = Item(order=each.order, id=each.element_id)
            raw = self.held.get(each)
            if raw is None:
                item.absent.reason = wire.LOST
            else:
                item.entry.frame = raw
            items.append(item)
        return Loaded(items, list(elements), len(elements))

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """See `Replica`."""
        return blake3(entry_id + hint).digest()

    async def claims_on(self, _entry_ids: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """See `Replica`."""
        return {}

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

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        """See `Replica`."""
        stored = []
        for each in prepared:
            if each.refusal:
                stored.append(Stored(wire.PUSH_REFUSED, each.refusal))
            else:
                is_new = self.held.get(element_of(each.content)) is None
                self.add(each.content)
                stored.append(Stored(wire.STORED if is_new else wire.DUPLICATE))
        return stored

    async def lost(self, _interest: Interest, _after: int, _limit: int) -> LostPage:
        """See `Replica`."""
        lost = [element for element, raw in self.held.items() if raw is None]
        return LostPage(lost, 0, len(lost))

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """See `Replica`."""
        lost = {element.element_id for element, raw in self.held.items() if raw is None}
        return lost & set(entry_ids)


class MemoryPeer:
    """A `Transport` to a responder over a replica; `requests` are those it was sent."""

    def __init__(self, replica: MemoryReplica) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.requests: list[ReconRequest] = []
        self._replica = replica

    async def interest(self) -> bytes:
        """Everything."""
        return EVERYTHING.encode()

    async def recon(self, request: bytes) -> bytes:
        """One call."""
        self.bytes_up += len(request)
        self.requests.append(ReconRequest.FromString(request))
        raw = (await self._answer(self.requests[-1])).SerializeToString()
        self.bytes_down += len(raw)
        return raw

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        replica, session = self._replica, request.session
        await replica.catch_up()
        if request.idle_root:
            return ReconResponse(same_root=replica.root(EVERYTHING, 0) == request.idle_root)
        if session.responder_nonce != NONCE:
            return ReconResponse(
                version=PROTOCOL_VERSION, status=wire.NONCE_EXPIRED, responder_nonce=NONCE
            )
        stored = await replica.commit(await replica.prepare(request.push))
        await replica.catch_up()
        name = interest_hash(EVERYTHING.encode())
        key = derive_session_key(session.initiator_nonce, session.responder_nonce, name)
        view = replica.view(key, EVERYTHING)
        response = ReconResponse(version=PROTOCOL_VERSION)
        if request.HasField("ranges") or request.total:
            response = respond(view, request)
        found = resolve(view, read_fetch(request.fetch))
        rows = zip(found.orders.tolist(), found.ids, strict=True)
        loaded = await replica.load([Element(order, row.tobytes()) for order, row in rows], 0)
        response.items.extend(loaded.items)
        if found.resume is not None:
            response.truncated, response.resume = True, bound_bytes(found.resume)
        response.push_outcomes.extend(each.outcome for each in stored)
        return response
