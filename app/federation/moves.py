"""The content of one pass: what is still to be fetched and sent, in bounded batches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.entries import ClaimSource, Outcome, OutcomeKind
from app.errors import Code, Problem
from app.federation.aside import LOST, NO_ENTRY, REFUSED, AsideElement, LackedBy, SetAside
from app.federation.content import is_refusal, load_items, publish_items, pushed
from app.federation.exchange import Exchange, NonceExpiredError
from app.federation.inbound import (
    Arrived,
    Element,
    Row,
    claims_of,
    columns,
    read_items,
    refused_entry,
    sort_claims,
)
from app.federation.local import LocalSide
from app.federation.outbox import Outbox
from app.federation.report import Traffic
from recon.elements import END, Bound, Mask, Range, heads_of
from recon.events import Have, Need
from recon.fetch import Batch, FetchQueue, pack_fetch
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from recon.session import SessionHeader
from recon.view import View
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

NOT_STORED = "not_stored"  # a message that the door relays and does not keep


class Move(NamedTuple):
    """One batch: what to fetch, and elements to send."""

    fetch: Batch
    send: list[Element]


@dataclass(slots=True)
class Ledger:
    """What the passes of a session tell each other, 8 bytes an element.

    `acknowledged`: heads of what the peer said it stored; `offered`: of what it was found to lack;
    `doubted`: of what it acknowledged and lacked in a later pass.
    """

    acknowledged: list[NDArray[np.uint64]] = field(default_factory=list)
    offered: list[NDArray[np.uint64]] = field(default_factory=list)
    doubted: list[NDArray[np.uint64]] = field(default_factory=list)
    policy_changed: bool = False

    def acknowledge(self, elements: Iterable[Element]) -> None:
        """The peer has these, by its word."""
        if elements := list(elements):
            self.acknowledged.append(heads_of(columns(elements)[1]))

    def offer(self, ids: NDArray[np.uint8]) -> int:
        """The peer lacks these, u8[n, 32]; how many of them it was not found to lack before.

        A store whose workers commit side by side may see an element a moment after it was stored,
        so what was acknowledged is offered once more. Raises Problem where it is lacking again.
        """
        heads = heads_of(np.ascontiguousarray(ids))
        if count := int(_known(self.doubted, heads).sum()):
            if self.policy_changed:
                raise Problem(Code.OVERLOADED, "the peer's policy changed during the session")
            detail = f"the peer acknowledged {count} elements that it does not hold"
            raise Problem(Code.PEER_MISBEHAVED, detail)
        repeated = heads[_known(self.acknowledged, heads)]
        if len(repeated):
            self.doubted.append(repeated)
        is_known = _known(self.offered, heads)
        self.offered.append(heads[~is_known])
        return int((~is_known).sum())


def _known(pieces: list[NDArray[np.uint64]], heads: NDArray[np.uint64]) -> Mask:
    return np.isin(heads, np.concatenate(pieces)) if pieces else np.zeros(len(heads), bool)


class Moves:
    """Queues of both directions, and how one batch is carried; paid from the session's budget."""

    def __init__(
        self,
        local: LocalSide,
        view: View,
        header: SessionHeader,
        exchange: Exchange,
        aside: SetAside,
        ledger: Ledger,
        traffic: Traffic,
        initiator: Initiator,
    ) -> None:
        self._local = local
        self._header = header
        self._exchange = exchange
        self._aside = aside
        self._ledger = ledger
        self._traffic = traffic
        self._initiator = initiator
        self._started_s = time.monotonic()
        self._view = view
        self._outbox = Outbox()
        self._fetches = FetchQueue(view)
        self._orphans: list[Row] = []
        self._early_claims: list[Element] = []
        self._is_last_offer = False
        self._request_bytes = 0
        self._postponed_steps = 0
        self._refused_there = _short_ids_of(view, aside)

    def add_have(self, event: Have) -> None:
        """Queue what the peer lacks."""
        self._outbox.add(event.orders, event.ids)

    def add_need(self, event: Need) -> None:
        """Queue what we lack. What the peer refused before and names now is no need."""
        need = event
        if self._refused_there and event.short_ids is not None:
            names = [row.tobytes() for row in event.short_ids]
            self._aside.forget(self._refused_there[n] for n in names if n in self._refused_there)
            kept = event.short_ids[[n not in self._refused_there for n in names]]
            need = Need(event.range, kept, len(kept))
        if need.count or need.short_ids is None:
            self._fetches.add(need)

    @property
    def waiting_count(self) -> int:
        """Batches and elements that wait: zero when nothing is left to do."""
        return len(self._outbox) + len(self._fetches)

    @property
    def unserved_count(self) -> int:
        """Elements that the peer named, and neither brought nor said why not."""
        return self._fetches.unserved_count

    def take(self) -> Move:
        """The next batch."""
        return Move(
            self._fetches.next_batch(MOVE_ELEMENTS_MAX), self._outbox.take(MOVE_ELEMENTS_MAX)
        )

    async def carry(self, move: Move) -> None:
        """Fetch and send one batch. Raises Problem, NonceExpiredError, RemoteProtocolError."""
        send = [each for each in move.send if each.element_id not in self._aside]
        loaded = await load_items(
            self._local.store,
            send,
            bytes_max=MOVE_BYTES_MAX,
            hints_max=self._local.limits.hints_per_publish_max,
        )
        self._outbox.put_back(send[loaded.covered :])
        sent = self._without_lost(map(Row, loaded.items, loaded.elements))
        if not (move.fetch or sent):
            return
        request = ReconRequest(
            version=PROTOCOL_VERSION,
            push=pushed(row.item for row in sent),
            response_bytes_max=MOVE_BYTES_MAX,
        )
        padded_bytes = self._request_bytes
        if move.fetch:
            _add_fetch(request, move.fetch, padded_bytes)
        try:
            response = await self._exchange.content_call(self._header, request)
        except NonceExpiredError as expired:
            await self._push_under(expired.responder_nonce, request, sent)
            raise
        await self._take_outcomes(sent, list(response.push_outcomes))
        if self._has_to_ask_longer(response, padded_bytes):
            self._fetches.put_back(move.fetch)
        else:
            await self._take_arrivals(move.fetch, response)
        # What is pushed costs nothing: each element of ours goes once, whatever the peer says.
        size = request.fetch.ByteSize() + len(request.padding) + response.ByteSize()
        self._initiator.charge(size, time.monotonic() - self._started_s)

    def _has_to_ask_longer(self, response: ReconResponse, padded_bytes: int) -> bool:
        """Whether the answer is nothing but how long the request has to be; the next ones are."""
        wanted_bytes = min(response.request_bytes_min, REQUEST_BYTES_MAX)
        self._request_bytes = max(self._request_bytes, wanted_bytes)
        return response.truncated and not response.resume and wanted_bytes > padded_bytes

    async def finish(self) -> None:
        """Offer claims once more whose entries the peer may have by now, and publish ours."""
        self._is_last_offer = True
        self._outbox.put_back(self._early_claims)
        while self.waiting_count:
            await self.carry(self.take())
        await self._try_orphans()
        for item, element in self._orphans:
            entry = self._aside.get(item.claim.digest)
            code = entry.code if entry else NO_ENTRY
            self._set_aside([AsideElement(LackedBy.HERE, *element, code, item.claim.digest)])

    def _set_aside(self, elements: Iterable[AsideElement]) -> None:
        for element in elements:
            if element.element_id not in self._aside:
                self._aside.add(element)
                self._count("claims" if element.entry_digest else "entries", "refused")

    # --- sent ----------------------------------------------------------------------------------

    def _without_lost(self, rows: Iterable[Row]) -> list[Row]:
        """What can be sent; content that is lost here is set aside."""
        kept = []
        for row in rows:
            if row.item.HasField("absent"):
                self._set_aside([AsideElement(LackedBy.THERE, *row.element, LOST)])
            else:
                kept.append(row)
        return kept

    async def _push_under(self, nonce: bytes, request: ReconRequest, sent: list[Row]) -> None:
        """The same push under the nonce that the peer gave: a push has nothing to do with the key."""
        if not sent:
            return
        ours = self._header
        header = SessionHeader(ours.initiator_nonce, nonce, ours.interest)
        again = ReconRequest(version=PROTOCOL_VERSION, push=request.push)
        response = await self._exchange.content_call(header, again)
        await self._take_outcomes(sent, list(response.push_outcomes))

    async def _take_outcomes(self, sent: Sequence[Row], outcomes: Sequence[int]) -> None:
        if len(outcomes) != len(sent):
            detail = f"{len(outcomes)} outcomes for {len(sent)} pushed items"
            raise Problem(Code.PEER_MISBEHAVED, detail)
        postponed: list[Element] = []
        taken: list[Element] = []
        refused: list[Row] = []
        for row, outcome in zip(sent, outcomes, strict=True):
            if outcome == recon_pb2.NOT_EXAMINED:
                postponed.append(row.element)
                continue
            self._initiator.credit(row.item.ByteSize())
            if outcome == recon_pb2.NO_ENTRY and row.item.HasField("claim"):
                self._take_early(row)
            elif outcome == recon_pb2.PUSH_REFUSED:
                refused.append(row)
            elif outcome in (recon_pb2.STORED, recon_pb2.DUPLICATE):
                taken.append(row.element)
                if outcome == recon_pb2.STORED:
                    self._count_item(row.item, "sent")
            else:
                detail = f"the outcome {outcome} for a pushed item"
                raise Problem(Code.PEER_MISBEHAVED, detail)
        self._ledger.acknowledge(taken)
        await self._take_refusals(refused)
        await self._postpone(postponed)

    def _take_early(self, row: Row) -> None:
        """A claim may be offered before its entry: once more at the end, then it is set aside."""
        digest = row.item.claim.digest
        if self._is_last_offer or digest in self._aside:
            self._set_aside([AsideElement(LackedBy.THERE, *row.element, NO_ENTRY, digest)])
        else:
            self._early_claims.append(row.element)

    async def _take_refusals(self, rows: list[Row]) -> None:
        """A refused entry covers the claims on it, however many are waiting."""
        entries = {
            row.element.element_id: row.element for row in rows if row.item.HasField("entry")
        }
        claims = await self._local.store.hints_of(list(entries)) if entries else {}
        for row in rows:
            digest = row.item.claim.digest
            self._set_aside([AsideElement(LackedBy.THERE, *row.element, REFUSED, digest)])
        for digest, known in claims.items():
            order = entries[digest].order
            self._set_aside(
                AsideElement(LackedBy.THERE, order, claim_id(digest, each.hint), REFUSED, digest)
                for each in known
                if each.source < ClaimSource.HISTORY
            )

    async def _postpone(self, elements: list[Element]) -> None:
        if not elements:
            return
        self._postponed_steps += 1
        if self._postponed_steps > PATIENCE_STEPS:
            raise Problem(Code.OVERLOADED, f"the peer left {len(elements)} items unexamined")
        await asyncio.sleep(PATIENCE_STEP_S)
        self._outbox.put_back(elements)

    # --- fetched -------------------------------------------------------------------------------

    async def fetch_lost(self, lost: Sequence[Element]) -> set[bytes]:
        """Ask for entries whose content is lost here; the digests of those that came."""
        queue = FetchQueue(self._view)
        for need in _needs_of(self._view, lost):
            queue.add(need)
        came: set[bytes] = set()
        while batch := queue.next_batch(MOVE_ELEMENTS_MAX):
            request = ReconRequest(version=PROTOCOL_VERSION, response_bytes_max=MOVE_BYTES_MAX)
            padded_bytes = self._request_bytes
            _add_fetch(request, batch, padded_bytes)
            response = await self._exchange.content_call(self._header, request)
            if self._has_to_ask_longer(response, padded_bytes):
                queue.put_back(batch)
            else:
                arrived = await self._checked(queue, batch, response)
                await self._publish(arrived.rows)
                came.update(row.element.element_id for row in arrived.rows)
                self._initiator.credit(_content_bytes(response))
                queue.settle(batch, *columns(arrived.named), _resume_of(response))
            self._initiator.charge(
                request.ByteSize() + response.ByteSize(), time.monotonic() - self._started_s
            )
        return came

    async def _checked(self, queue: FetchQueue, batch: Batch, response: ReconResponse) -> Arrived:
        """The items of an answer, if all were asked for."""
        if len(response.items) > ITEMS_MAX:
            raise Problem(Code.PEER_MISBEHAVED, f"{len(response.items)} items in one answer")
        arrived = await read_items(self._local.store, response.items)
        asked = queue.accept(batch, *columns(arrived.named), _resume_of(response))
        if not asked.all():
            detail = f"{int((~asked).sum())} of {len(asked)} served elements were not asked for"
            raise Problem(Code.PEER_MISBEHAVED, detail)
        return arrived

    async def _take_arrivals(self, batch: Batch, response: ReconResponse) -> None:
        """Publish what was served."""
        arrived = await self._checked(self._fetches, batch, response)
        self._set_aside(arrived.aside)
        await self._publish(await self._without_known_claims(arrived.rows, arrived.folded))
        self._initiator.credit(_content_bytes(response))
        brought = columns([*arrived.named, *arrived.folded])
        self._fetches.settle(batch, *brought, _resume_of(response))
        self._orphans += arrived.orphans
        if len(self._orphans) > ORPHANS_MAX:
            await self._try_orphans()
        if len(self._orphans) > ORPHANS_MAX:
            raise Problem(Code.OVERLOADED, "too many claims arrived before their entries")

    async def _try_orphans(self) -> None:
        """Publish those whose entries are here by now."""
        arrived = Arrived()
        await sort_claims(self._local.store, arrived, self._orphans, {})
        await self._publish(await self._without_known_claims(arrived.rows, []))
        self._orphans = arrived.orphans

    async def _without_known_claims(
        self, rows: Sequence[Row], folded: Sequence[Element]
    ) -> list[Row]:
        """A claim may come alone after it came inside its entry: no need to write it again."""
        claims = [element.element_id for item, element in rows if item.HasField("claim")]
        known = {claim_id(*each) for each in await self._local.store.claims_by_element(claims)}
        known.update(element.element_id for element in folded)
        return [row for row in rows if row.element.element_id not in known]

    async def _publish(self, waiting: Sequence[Row]) -> None:
        """Through the door; while it is overloaded, again and again for a while."""
        for _ in range(PATIENCE_STEPS):
            if not waiting:
                return
            outcomes = await publish_items(self._local, [item for item, _ in waiting])
            rows = zip(waiting, outcomes, strict=True)
            waiting = [row for row, outcome in rows if not self._took(row, outcome)]
            if waiting:
                await asyncio.sleep(PATIENCE_STEP_S)
        raise Problem(Code.OVERLOADED, "this node's own ingest queue stays full")

    def _took(self, row: Row, outcome: Outcome | Problem | None) -> bool:
        item, element = row
        if outcome is None:
            self._orphans.append(row)
            return True
        if is_refusal(outcome):
            code = outcome.code if isinstance(outcome, Problem) else NOT_STORED
            digest = item.claim.digest
            aside = [AsideElement(LackedBy.HERE, *element, code, digest)]
            self._set_aside(aside if digest else refused_entry(element, claims_of(*row), code))
            return True
        if isinstance(outcome, Problem):
            return False
        self._aside.forget([element.element_id])
        if outcome.kind is OutcomeKind.STORED or item.HasField("claim"):
            self._count_item(item, "received")
        return True

    def _count_item(self, item: Item, what: str) -> None:
        self._count("claims" if item.HasField("claim") else "entries", what)
        for _ in item.entry.hints:
            self._count("claims", what)

    def _count(self, kind: str, what: str) -> None:
        name = f"{kind}_{what}"
        setattr(self._traffic, name, getattr(self._traffic, name) + 1)


def _add_fetch(request: ReconRequest, batch: Batch, bytes_min: int) -> None:
    """Ask for a batch, by a request as long as the answer has to be earned by."""
    request.fetch.CopyFrom(pack_fetch(batch))
    request.padding = os.urandom(max(bytes_min - request.fetch.ByteSize(), 0))


def _resume_of(response: ReconResponse) -> bytes | None:
    return response.resume if response.truncated else None


def _content_bytes(response: ReconResponse) -> int:
    return sum(item.ByteSize() for item in response.items)


def _short_ids_of(view: View, aside: SetAside) -> dict[bytes, bytes]:
    """IDs of what the peer refused before, by the short ids of this session."""
    refused = aside.columns(LackedBy.THERE)
    if not len(refused):
        return {}
    names = view.short_ids(refused.orders, refused.ids)
    rows = zip(names, refused.ids, strict=True)
    return {name.tobytes(): row.tobytes() for name, row in rows}


def _needs_of(view: View, elements: Sequence[Element]) -> list[Need]:
    """A need for each element, in a range of its own."""
    names = view.short_ids(*columns(elements))
    needs = []
    for (order, element_id), name in zip(elements, names, strict=True):
        lower = Bound(order, int.from_bytes(element_id[:8], "big"))
        needs.append(Need(Range(lower, _next(lower)), name.reshape(1, -1), 1))
    return needs


def _next(bound: Bound) -> Bound:
    order, head = divmod((bound.order << 64) + bound.head + 1, 1 << 64)
    return min(Bound(order, head), END)
