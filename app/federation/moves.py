"""The content of one session: what is still to be fetched and sent, in bounded batches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.entries import Outcome, OutcomeKind
from app.errors import Code, Problem
from app.federation.content import is_refusal, load_items, publish_items
from app.federation.exchange import Exchange
from app.federation.inbound import Arrived, Element, columns, read_items
from app.federation.local import LocalSide
from app.federation.memory import PeerMemory
from app.federation.outbox import Outbox
from app.federation.report import Traffic
from recon.events import Have, Need
from recon.fetch import Batch, FetchQueue, pack_fetch
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, ID_BYTES, PROTOCOL_VERSION
from recon.session import SessionHeader
from recon.view import View, short_ids
from sdstore.sds.digest import claim_id
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse

MOVE_ELEMENTS_MAX = 1_024  # one group of the door, while the batches before and behind travel
MOVE_BYTES_MAX = 2 << 20  # each way: memory per batch, and 0.2 s at 100 Mbit/s
REQUEST_BYTES_MAX = MOVE_BYTES_MAX // 16  # earns a full batch where it has to be earned
ITEMS_MAX = DEFAULT_LIMITS.fetch_ids_max  # of one answer: no fetch names more
ORPHANS_MAX = 1 << 17  # 40 MB; all of 10^5 entries of one order, hints first, have fewer
PATIENCE_STEPS = 50  # how often a full queue, ours or the peer's, is tried again
PATIENCE_STEP_S = 0.1


class Move(NamedTuple):
    """One batch: what to fetch, and IDs of elements to send."""

    fetch: Batch
    send: list[bytes]


class Moves:
    """Queues of both directions, and how one batch is carried; paid from the session's budget."""

    def __init__(
        self,
        local: LocalSide,
        view: View,
        header: SessionHeader,
        exchange: Exchange,
        memory: PeerMemory,
        traffic: Traffic,
        initiator: Initiator,
    ) -> None:
        self._local = local
        self._header = header
        self._exchange = exchange
        self._memory = memory
        self._traffic = traffic
        self._initiator = initiator
        self._started_s = time.monotonic()
        self._outbox = Outbox()
        self._fetches = FetchQueue(view)
        self._orphans: list[Item] = []
        self._retired_count = 0
        self._request_bytes = 0
        self._refused = _RefusedNeeds(view, memory)
        self._postponed_steps = 0

    def add_have(self, event: Have) -> None:
        """Queue what the peer lacks, but for what it refused before."""
        known = self._memory.refused_there
        wanted = [row.tobytes() not in known for row in event.ids] if len(known) else slice(None)
        self._outbox.add(event.ids[wanted])

    def add_need(self, event: Need) -> None:
        """Queue what we lack, but for what we refused before."""
        if (need := self._refused.subtracted_from(event)) is not None:
            self._fetches.add(need)

    @property
    def waiting_count(self) -> int:
        """Batches and elements that wait: zero when nothing is left to do."""
        return len(self._outbox) + len(self._fetches)

    @property
    def unserved_count(self) -> int:
        """Elements that the peer offered and did not bring, nor said that it lost them."""
        return max(self._fetches.unserved_count - self._retired_count, 0)

    def take(self) -> Move:
        """The next batch."""
        return Move(
            self._fetches.next_batch(MOVE_ELEMENTS_MAX), self._outbox.take(MOVE_ELEMENTS_MAX)
        )

    async def carry(self, move: Move) -> None:
        """Fetch and send one batch. Raises Problem, NonceExpiredError, RemoteProtocolError."""
        loaded = await load_items(
            self._local.store,
            move.send,
            bytes_max=MOVE_BYTES_MAX,
            hints_max=self._local.limits.hints_per_publish_max,
        )
        self._outbox.put_back(move.send[loaded.covered :])
        if not (move.fetch or loaded.items):
            return
        request = ReconRequest(
            version=PROTOCOL_VERSION, push=loaded.items, response_bytes_max=MOVE_BYTES_MAX
        )
        padded_bytes = self._request_bytes
        if move.fetch:
            request.fetch.CopyFrom(pack_fetch(move.fetch))
            request.padding = os.urandom(max(padded_bytes - request.fetch.ByteSize(), 0))
        response = await self._exchange.content_call(self._header, request)
        await self._take_outcomes(loaded.ids, loaded.items, list(response.push_outcomes))
        wanted_bytes = min(response.request_bytes_min, REQUEST_BYTES_MAX)
        self._request_bytes = max(self._request_bytes, wanted_bytes)
        if response.truncated and not response.resume and wanted_bytes > padded_bytes:
            self._fetches.put_back(move.fetch)
        else:
            await self._take_arrivals(move.fetch, response)
        # What is pushed costs nothing: each element of ours goes once, whatever the peer says.
        size = request.fetch.ByteSize() + len(request.padding) + response.ByteSize()
        self._initiator.charge(size, time.monotonic() - self._started_s)

    async def settle_orphans(self) -> None:
        """Publish the claims that arrived before their entries; what has none by now is refused."""
        await self._try_orphans()
        for item in self._orphans:
            self._refuse_orphan(item)

    # --- sent ----------------------------------------------------------------------------------

    async def _take_outcomes(
        self, ids: Sequence[bytes], items: Sequence[Item], outcomes: Sequence[int]
    ) -> None:
        if len(outcomes) != len(items):
            detail = f"{len(outcomes)} outcomes for {len(items)} pushed items"
            raise Problem(Code.PEER_MISBEHAVED, detail)
        postponed: list[bytes] = []
        for element_id, item, outcome in zip(ids, items, outcomes, strict=True):
            if outcome == recon_pb2.NOT_EXAMINED:
                postponed.append(element_id)
                continue
            self._initiator.credit(item.ByteSize())
            if outcome == recon_pb2.PUSH_REFUSED:
                self._memory.refused_there.add(element_id)
                self._count(item, "refused")
            elif outcome == recon_pb2.STORED:
                self._count(item, "sent")
                self._traffic.claims_sent += len(item.entry.hints)
        await self._postpone(postponed)

    async def _postpone(self, ids: list[bytes]) -> None:
        if not ids:
            return
        self._postponed_steps += 1
        if self._postponed_steps > PATIENCE_STEPS:
            raise Problem(Code.OVERLOADED, f"the peer left {len(ids)} items unexamined")
        await asyncio.sleep(PATIENCE_STEP_S)
        self._outbox.put_back(ids)

    # --- fetched -------------------------------------------------------------------------------

    async def _take_arrivals(self, batch: Batch, response: ReconResponse) -> None:
        """Publish what was served."""
        if len(response.items) > ITEMS_MAX:
            raise Problem(Code.PEER_MISBEHAVED, f"{len(response.items)} items in one answer")
        resume = response.resume if response.truncated else None
        arrived = await read_items(self._local.store, response.items)
        asked = self._fetches.accept(batch, *columns(arrived.elements), resume)
        if not asked.all():
            detail = f"{int((~asked).sum())} of {len(asked)} served elements were not asked for"
            raise Problem(Code.PEER_MISBEHAVED, detail)
        await self._publish(await self._without_known_claims(arrived))
        self._initiator.credit(arrived.content_bytes)
        self._fetches.settle(batch, *columns([*arrived.elements, *arrived.folded]), resume)
        self._retired_count += arrived.retired_count
        self._orphans += arrived.orphans
        if len(self._orphans) > ORPHANS_MAX:
            await self._try_orphans()
        if len(self._orphans) > ORPHANS_MAX:
            raise Problem(Code.OVERLOADED, "too many claims arrived before their entries")

    async def _try_orphans(self) -> None:
        """Publish those whose entries are here by now."""
        orphans, self._orphans = self._orphans, []
        arrived = await read_items(self._local.store, orphans)
        await self._publish(await self._without_known_claims(arrived))
        self._fetches.settle_late(*columns(arrived.elements))
        self._orphans += arrived.orphans

    async def _without_known_claims(self, arrived: Arrived) -> list[tuple[Item, Element]]:
        """A claim may come alone after it came inside its entry: no need to write it again."""
        rows = list(zip(arrived.items, arrived.elements, strict=True))
        claims = [element.element_id for item, element in rows if item.HasField("claim")]
        known = {claim_id(*each) for each in await self._local.store.claims_by_element(claims)}
        known.update(element.element_id for element in arrived.folded)
        return [row for row in rows if row[1].element_id not in known]

    async def _publish(self, waiting: list[tuple[Item, Element]]) -> None:
        """Through the door; while it is overloaded, again and again for a while."""
        for _ in range(PATIENCE_STEPS):
            if not waiting:
                return
            outcomes = await publish_items(self._local, [item for item, _ in waiting])
            rows = zip(waiting, outcomes, strict=True)
            waiting = [row for row, outcome in rows if not self._took(*row, outcome)]
            if waiting:
                await asyncio.sleep(PATIENCE_STEP_S)
        raise Problem(Code.OVERLOADED, "this node's own ingest queue stays full")

    def _took(self, item: Item, element: Element, outcome: Outcome | Problem | None) -> bool:
        if outcome is None or is_refusal(outcome):
            self._memory.refused_here.add(element.element_id, element.order)
            self._count(item, "refused")
            return True
        if isinstance(outcome, Problem):
            return False
        if outcome.kind is OutcomeKind.STORED or item.HasField("claim"):
            self._count(item, "received")
            self._traffic.claims_received += len(item.entry.hints)
        return True

    def _refuse_orphan(self, item: Item) -> None:
        order = self._memory.refused_here.order_of(item.claim.digest)
        if order is not None:
            element = Element(order, claim_id(item.claim.digest, item.claim.hint))
            self._memory.refused_here.add(element.element_id, order)
            self._fetches.settle_late(*columns([element]))
        self._count(item, "refused")

    def _count(self, item: Item, what: str) -> None:
        name = f"{'claims' if item.HasField('claim') else 'entries'}_{what}"
        setattr(self._traffic, name, getattr(self._traffic, name) + 1)


class _RefusedNeeds:
    """Takes what this node refused before out of what it would fetch."""

    def __init__(self, view: View, memory: PeerMemory) -> None:
        refused = memory.refused_here.items()
        self._elements = [Element(order, element_id) for element_id, order in refused]
        orders = np.array([order for _, order in refused], dtype=np.uint64)
        ids = np.frombuffer(b"".join(each for each, _ in refused), np.uint8).reshape(-1, ID_BYTES)
        self._shorts = {row.tobytes() for row in short_ids(view, orders, ids)} if refused else set()

    def subtracted_from(self, need: Need) -> Need | None:
        """The need without them; None if nothing is left.

        A whole range is skipped only where everything in it was refused: its elements have no
        names yet, so the others cannot be asked for without them.
        """
        if not self._shorts:
            return need
        if need.short_ids is None:
            inside = sum(need.range.contains(*element) for element in self._elements)
            return need if inside < need.count else None
        keep = np.array([row.tobytes() not in self._shorts for row in need.short_ids], dtype=bool)
        left = need.short_ids[keep]
        return Need(need.range, left, len(left)) if len(left) else None
