"""The node's own set and its marks, for both sides of a session.

A mark (`recon.marks`) is verified against SQL and the index whenever it comes back, so any worker of the node can do
that. The elements after it are read from SQL by number, in time proportional to them.

An element is an entry or a published hint claim. An entry is sent with all its claims, so that a message
and its hints are written once; a claim is sent alone if the other side has the entry. The initiating side
uses the class as `sdstore.sync.driver.Replica`, and the responding side as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from app.access.callers import Caller
from app.entries import NewEntry, OutcomeKind, Watermark
from app.errors import Code, Problem
from app.ingest.door import Door
from app.ingest.door import Prepared as FromDoor
from app.ingest.policy import Way
from app.ingest.prepare import Publication, Relayed, acceptable_hints
from app.recon.index import Moments, NodeIndex
from app.server.limits import Limits
from app.store.arrivals import arrived_rows
from app.store.entryrows import ContentState
from app.store.store import Store
from recon.agreement import Interest, SessionKey
from recon.elements import ALL_ORDERS, U8, U64, Mask, order_of_lamport
from recon.marks import (
    NEWS_MAX,
    NOTHING_CAME,
    Arrived,
    Moment,
    Numbers,
    is_mark_of,
    mark_of,
    numbers_of,
)
from recon.view import View
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.model import claim_id, entry_digest
from sdstore.sync.memory import RETIRED, Element
from sdstore.sync.steps import NOT_CONTENT, LostPage, Prepared, Stored
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item

# ---- marks


@dataclass(frozen=True, slots=True)
class Between:
    """Elements of an interest: those after the mark `since` and up to `up_to`, and those after `up_to`."""

    news: Arrived
    later: Arrived


class Marks:
    """Makes and reads the marks of one database."""

    def __init__(self, store: Store, index: NodeIndex) -> None:
        self._store = store
        self._index = index
        self._secret = store.mark_secret

    def at_present(self, interest: Interest, policy: int) -> bytes:
        """The mark of all that the index has now."""
        moment = self._moment(interest, policy, self._index.read, NOTHING_CAME)
        return mark_of(self._secret, interest.encode(), moment)

    def claims_end(self, mark: bytes, interest: Interest) -> int | None:
        """The number of the last claim up to a mark; None if it is no mark of this interest."""
        numbers = numbers_of(mark, self._secret, interest.encode())
        return None if numbers is None else numbers.claim

    async def arrived_since(self, mark: bytes, interest: Interest, policy: int) -> Arrived | None:
        """The elements that arrived after a mark, up to what the index has when this returns.

        None if the mark fails, or if more than `NEWS_MAX` arrived.
        """
        between = await self.between(mark, b"", interest, policy)
        return None if between is None else between.news

    async def between(
        self,
        since: bytes,
        up_to: bytes,
        interest: Interest,
        policy: int,
        charge: Callable[[int], None] = lambda _: None,
    ) -> Between | None:
        """The elements between two marks and after them; an empty mark is the beginning, or the present.

        At least one mark is given. None if one fails, or if more than `NEWS_MAX` arrived after the first.
        `charge` is called with the number of elements that are about to be read, at most, and again with
        what was not read, as a negative number.
        """
        places: list[Watermark] = []
        for mark in filter(None, (since, up_to)):
            numbers = numbers_of(mark, self._secret, interest.encode())
            place = None if numbers is None else await self._store.arrivals.places(numbers)
            if place is None:
                return None
            places.append(place)
        # The older one: `since` can be newer than `up_to`, and nothing is between them then.
        start = (
            Numbers(*map(min, *map(_numbers, places))) if len(places) > 1 else _numbers(places[0])
        )
        there = _numbers(self._index.read)
        read_max = min(
            NEWS_MAX, max(0, there.entry - start.entry) + max(0, there.claim - start.claim)
        )
        charge(read_max)
        arrived = await self._read_after(start, interest)
        if arrived is None:
            return None
        charge(len(arrived) - read_max)
        # Nothing waits from here on: the index stays where the reading ended.
        for mark, place in zip(filter(None, (since, up_to)), places, strict=True):
            after = arrived.after(_numbers(place))
            moment = self._moment(interest, policy, place, after)
            if not is_mark_of(mark, self._secret, interest.encode(), moment):
                return None
        window = interest.window
        if window != ALL_ORDERS:
            upper = np.uint64(2**64 - 1 if window.upper is None else window.upper - 1)
            is_inside = (arrived.orders >= np.uint64(window.lower)) & (arrived.orders <= upper)
            arrived = arrived.take(is_inside)
        if not up_to:
            return Between(arrived, NOTHING_CAME)
        end = _numbers(places[-1])
        news = arrived.after(_numbers(places[0])).up_to(end) if since else NOTHING_CAME
        return Between(news, arrived.after(end))

    async def _read_after(self, start: Numbers, interest: Interest) -> Arrived | None:
        """What arrived after these numbers, in any window, up to the place of the index at the end.

        The index moves on while this reads, so it reads on until both are at one place.
        """
        arrived = NOTHING_CAME
        read = start
        arrivals = self._store.arrivals
        while read != (target := _numbers(self._index.read)):
            if target.entry < read.entry or target.claim < read.claim:
                return None  # the index was read again, from a database that was rolled back
            channels = self._index.channel_numbers(interest)
            limit = NEWS_MAX + 1
            entries = await arrivals.entries_between(read.entry, target.entry, channels, limit)
            claims = await arrivals.claims_between(read.claim, target.claim, channels, limit)
            arrived = arrived.beside(arrived_rows(entries, claims))
            if len(arrived) > NEWS_MAX:
                return None
            read = target
        return arrived

    def _moment(self, interest: Interest, policy: int, place: Watermark, after: Arrived) -> Moment:
        """What a mark at `place` authenticates, given all that arrived after it."""
        # Over all windows: the index has no sums of a window.
        count, sums = self._index.sums_of(interest, after.ids)
        contents = policy.to_bytes(4, "little") + count.to_bytes(8, "little", signed=True) + sums
        return Moment(_numbers(place), (place.entries.sum, place.claims.sum), contents)


def _numbers(place: Watermark) -> Numbers:
    return Numbers(place.entries.number, place.claims.number)


# ---- the set

COMMITTED_AT_ONCE = 8_192  # a whole group of the committer: half the time of eight smaller ones
COMMITTED_BESIDE_OTHERS = 1_024  # where others publish: they wait for one group, which takes 0.05 s
ITEMS_PER_MESSAGE_MAX = 4_096  # claims are small: bounds the look-ups behind one message
_FIRST_CHUNK = 32  # frames loaded before their sizes are known: 32 MiB at worst
_FRAME_BYTES_GUESSED = 1024  # a guess, so that few frames are loaded in vain when room is short
_CHUNK_MAX = 512  # a few milliseconds of the event loop
_ITEM_OVERHEAD_BYTES = 16  # tags and lengths
_HINT_OVERHEAD_BYTES = 20  # so that what fits a batch has fewer fields than `recon_fields_max`


class NodeReplica:
    """See the module. `nonce_secret`: the key by which the node recognises its own nonces.

    The number that `policy` returns changes when this node might accept what it refused before: then
    its marks fail.
    """

    def __init__(
        self,
        store: Store,
        door: Door,
        index: NodeIndex,
        limits: Limits,
        nonce_secret: bytes,
        policy: Callable[[], int] = lambda: 0,
    ) -> None:
        self.limits = limits
        self.nonce_secret = nonce_secret
        self.marks = Marks(store, index)
        self._policy = policy
        self._source = ""
        self._way = Way.RECON
        self._caller: Caller | None = None
        self._store = store
        self._door = door
        self._index = index

    def for_peer(self, peer_id: str, way: Way, caller: Caller | None = None) -> NodeReplica:
        """This replica for a session with one peer, which commits name as their source.

        `peer_id`: of a peer, or the instance ID of a store that calls, or empty if it gave none; `way`: who
        started the session, for the policy; `caller`: the peer, where it calls.
        """
        replica = copy(self)
        replica._source, replica._way, replica._caller = peer_id, way, caller  # noqa: SLF001 - of a copy
        return replica

    @property
    def demands_senders(self) -> bool:
        """Whether this node demands bound senders in some channels."""
        return self._door.demands_senders

    @property
    def policy(self) -> int:
        """The number of this node's policy at this moment."""
        return self._policy()

    @property
    def is_disk_low(self) -> bool:
        """Whether this node takes no messages now, to keep some of its disk free."""
        return self._door.is_disk_low

    # --- elements ------------------------------------------------------------------------------

    @property
    def arrived_count(self) -> int:
        """See `Replica`."""
        return len(self._index.elements)

    async def catch_up(self) -> None:
        """See `Replica`."""
        await self._index.catch_up()

    def view(self, key: SessionKey, interest: Interest) -> View:
        """See `Replica`."""
        return self._index.view(key, interest)

    def moment(self) -> bytes:
        """See `ArrivalOrder`."""
        return self._index.moment

    async def view_without(
        self, key: SessionKey, interest: Interest, pairs: Sequence[Moments]
    ) -> View:
        """See `ArrivalOrder`."""
        await self._index.follow_retired()
        return self._index.view(key, interest, pairs)

    def holds(self, orders: U64, ids: U8) -> Mask:
        """See `Replica`."""
        return self._index.elements.holds(orders, ids)

    def mark(self, interest: Interest) -> bytes:
        """See `ArrivalOrder`."""
        return self.marks.at_present(interest, self._policy())

    async def arrived_since(self, mark: bytes, interest: Interest) -> Arrived | None:
        """See `ArrivalOrder`."""
        return await self.marks.arrived_since(mark, interest, self._policy())

    # --- content that goes out -----------------------------------------------------------------

    async def load(
        self, elements: Sequence[Element], bytes_max: int, claims_end: int | None = None
    ) -> list[Item]:
        """See `Replica`. `claims_end`: the number of the last claim that an entry's item has; None: all."""
        wanted = elements[:ITEMS_PER_MESSAGE_MAX]
        items: list[Item] = []
        room = bytes_max
        while len(items) < len(wanted):
            size = _chunk_size(len(items), bytes_max - room, room)
            found = await self._items_of(wanted[len(items) :][:size], claims_end)
            sizes = list(map(_size, found))
            fitting = _fitting_count(sizes, room, bool(items))
            items += found[:fitting]
            room -= sum(sizes[:fitting])
            if fitting < len(found):
                break
        return items

    async def _items_of(self, elements: Sequence[Element], claims_end: int | None) -> list[Item]:
        store = self._store
        ids = [each.element_id for each in elements]
        entries = {entry.digest: entry for entry in await store.entries.by_digest(ids)}
        others = [each for each in ids if each not in entries]
        claims = await store.claims.by_element(others)
        absent = [each for each in others if each not in claims]
        states = await store.frames.content_states(absent) if absent else {}
        hints = await store.claims.of_entries(list(entries.values()), claims_end)
        if absent:
            hints |= await store.claims.of(absent, claims_end)
        items = []
        for order, element_id in elements:
            # Set in place: a message that is given to another one is copied.
            item = Item(order=order)
            claim = claims.get(element_id)
            if claim is not None and claim[1]:
                item.claim.digest, item.claim.hint = claim
            else:
                item.id = element_id
                entry = entries.get(element_id)
                if entry is None:
                    # Hints go with the content, so a claim on a retired entry is absent for itself.
                    is_retired = claim or states.get(element_id) is ContentState.RETIRED
                    item.absent.reason = wire.RETIRED if is_retired else wire.LOST
                else:
                    item.entry.frame = entry.frame
                if of_entry := hints.get(element_id):
                    part = item.absent if entry is None else item.entry
                    part.hints.extend([each.hint for each in of_entry])
            items.append(item)
        return items

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """See `Replica`."""
        return claim_id(entry_id, hint)

    # --- content that comes in -----------------------------------------------------------------

    async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
        """See `Replica`. Only the door decodes frames."""
        entries = [item.entry for item in items if item.HasField("entry")]
        publications = [
            Publication(
                each.frame,
                acceptable_hints(each.hints, self.limits) if each.hints else (),
                is_from_peer=True,
            )
            for each in entries
        ]
        from_door = iter(await self._door.prepare_many(publications))
        kept = iter([each.hints for each in publications])
        prepared: list[Prepared] = []
        for start in range(0, len(items), _CHUNK_MAX):
            for item in items[start : start + _CHUNK_MAX]:
                is_entry = item.HasField("entry")
                prepared.append(
                    _entry(item, next(from_door), next(kept)) if is_entry else _claim(item.claim)
                )
            await asyncio.sleep(0)
        claims = [at for at, each in enumerate(prepared) if each.entry_id]
        for start in range(0, len(claims), _CHUNK_MAX):
            part = claims[start : start + _CHUNK_MAX]
            looked_up = await self._looked_up([prepared[at] for at in part])
            for at, claim in zip(part, looked_up, strict=True):
                prepared[at] = claim
        return prepared

    async def _looked_up(self, claims: Sequence[Prepared]) -> list[Prepared]:
        """Claims with the orders and channels of their entries, as far as those are stored."""
        here = await self._store.entries.outlines(list({each.entry_id for each in claims}))
        held = await self._store.claims.by_element([each.element_id for each in claims])
        return [
            replace(
                claim,
                order=order_of_lamport(entry.lamport_timestamp),
                channel_id=entry.channel_id,
                is_held=claim.element_id in held,
            )
            if (entry := here.get(claim.entry_id))
            else claim
            for claim in claims
        ]

    @property
    def stored_at_once(self) -> int:
        """See `Replica`."""
        return COMMITTED_BESIDE_OTHERS if self._door.is_busy_with_others else COMMITTED_AT_ONCE

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        """See `Replica`. A message without content is relayed to live readers, and refused."""
        stored = [Stored(wire.PUSH_REFUSED, each.refusal) for each in prepared]
        entries = [at for at, each in enumerate(prepared) if not each.entry_id]
        crowded: list[int] = []
        start = 0
        while part := entries[start : start + self.stored_at_once]:
            start += len(part)
            outcomes = await self._door.publish_prepared(
                [prepared[at].content for at in part], self._source, self._way, self._caller
            )
            for at, outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, Problem) and outcome.code is Code.RETIRED:
                    # It is an element of this store, as of every other one.
                    stored[at] = Stored(wire.DUPLICATE, RETIRED)
                elif isinstance(outcome, Problem):
                    stored[at] = _refusal(outcome)
                elif outcome.kind is not OutcomeKind.RELAYED:
                    is_new = outcome.kind is OutcomeKind.STORED
                    stored[at] = Stored(wire.STORED if is_new else wire.DUPLICATE)
                    crowded += [at] if outcome.hints_dropped else []
        for at in crowded:
            kept = await self._kept(prepared[at].claims)
            dropped = tuple([each for each in prepared[at].claims if each not in kept])
            stored[at] = stored[at]._replace(claims_dropped=dropped)
        claims = [at for at, each in enumerate(prepared) if each.entry_id]
        for start in range(0, len(claims), COMMITTED_BESIDE_OTHERS):
            part = claims[start : start + COMMITTED_BESIDE_OTHERS]
            results = await self._commit_claims([prepared[at] for at in part])
            for at, result in zip(part, results, strict=True):
                stored[at] = result
        return stored

    async def _kept(self, claims: Sequence[bytes]) -> set[bytes]:
        """Those of these claims that the store has."""
        return set(await self._store.claims.by_element(claims))

    async def _commit_claims(self, claims: Sequence[Prepared]) -> list[Stored]:
        """Write claims without reading their entries, which can be large.

        The door reports faults of a claim's entry; the store shows whether the claim was kept. A claim
        beyond the maximum of an entry is refused as too many hints.
        """
        written = [each for each in claims if each.order is not None]
        faults = await self._door.publish_claims([(c.entry_id, c.content) for c in written])
        rows = zip(written, faults, strict=True)
        kept = await self._kept([claim.element_id for claim, fault in rows if fault is None])
        rest = iter(faults)
        stored = []
        for claim in claims:
            if claim.order is None:
                stored.append(Stored(wire.NO_ENTRY))
            elif fault := next(rest):
                stored.append(_refusal(fault))
            elif claim.element_id in kept:
                stored.append(Stored(wire.STORED))
            else:
                stored.append(Stored(wire.PUSH_REFUSED, Code.TOO_MANY_HINTS))
        return stored

    # --- content that is lost here -------------------------------------------------------------

    async def lost(self, interest: Interest, after: int, limit: int) -> LostPage:
        """See `Replica`."""
        total = await self._store.frames.lost_count()
        if not total:
            return LostPage([], 0, 0)
        rows = await self._store.frames.lost_elements(limit, after)
        elements = [
            Element(each.order, each.digest)
            for each in rows
            if interest.window.holds(each.order) and self._index.covers(interest, each.channel_no)
        ]
        return LostPage(elements, rows[-1].seq if len(rows) == limit else 0, total)

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """See `Replica`."""
        return set(await self._store.frames.content_states(entry_ids))


# --- items to prepared items -------------------------------------------------------------------


def _entry(item: Item, content: FromDoor, hints: Sequence[bytes]) -> Prepared:
    """A prepared entry with the hints that can be kept.

    An entry that the door refuses is still an element, named by its digest.
    """
    message, digest, refusal = None, b"", ""
    match content:
        case NewEntry():
            message, digest = content.message, content.digest
        case Relayed():
            message, refusal = content.message, NOT_CONTENT
        case Problem():
            refusal = content.code
            with suppress(MessageError):
                message, _ = decode(item.entry.frame)
    if message is not None and not digest:
        digest = entry_digest(message)
    return Prepared(
        order=None if message is None else order_of_lamport(message.lamport_timestamp or 0),
        element_id=digest,
        claims=tuple([claim_id(digest or item.id, hint) for hint in hints]) if hints else (),
        refusal=refusal,
        content=content,
        channel_id=None if message is None else message.channel_id,
    )


def _claim(claim: Item.Claim) -> Prepared:
    return Prepared(
        element_id=claim_id(claim.digest, claim.hint), entry_id=claim.digest, content=claim.hint
    )


def _refusal(problem: Problem) -> Stored:
    """The outcome of an item that the door refused. Raises the problem if this node is at fault."""
    if problem.code is Code.OVERLOADED:
        return Stored(wire.NOT_EXAMINED)
    if (
        problem.code is Code.POLICY_FAILED and problem.extra
    ):  # of this message; others have a verdict
        return Stored(wire.PUSH_REFUSED, problem.code)
    if problem.status >= 500:
        raise problem
    return Stored(wire.PUSH_REFUSED, problem.code)


# --- how much fits -----------------------------------------------------------------------------


def _chunk_size(items_count: int, items_bytes: int, room: int) -> int:
    """Elements to look up next: about as many as fit, by the average size so far."""
    if not items_count:
        return min(max(1, room // _FRAME_BYTES_GUESSED), _FIRST_CHUNK)
    return max(1, min(room * items_count // max(items_bytes, 1) + 1, _CHUNK_MAX))


def items_size(items: Iterable[Item]) -> int:
    """Bytes that items take in a message, at most."""
    return sum(map(_size, items))


def _size(item: Item) -> int:
    hints_count = len(item.entry.hints) + len(item.absent.hints)
    return item.ByteSize() + _ITEM_OVERHEAD_BYTES + _HINT_OVERHEAD_BYTES * hints_count


def _fitting_count(sizes: Sequence[int], room: int, is_begun: bool) -> int:
    """The number of items that fit; at least one if the message is still empty."""
    fitting = sum(total <= room for total in accumulate(sizes))
    return fitting if is_begun else max(fitting, min(len(sizes), 1))
