"""The node's own set, for both sides of a session: elements to items, items to the one door.

An element is an entry or a published hint claim. An entry is sent with its claims if they are few, so
that a message and its hints are written once; a claim is sent alone if the other side has the entry.
The initiating side uses the class as `sdstore.sync.replica.Replica`. The responding side uses the same
class, and passes the current contents of the reply to each call of `load`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

from app.entries import Claim, ClaimSource, NewEntry, OutcomeKind
from app.errors import Code, Problem
from app.ingest.door import Door
from app.ingest.door import Prepared as FromDoor
from app.ingest.prepare import Publication, Relayed, acceptable_hints
from app.limits import Limits
from app.policy import Way
from app.recon.index import NodeIndex
from app.recon.marks import Marks
from app.store.store import Store
from recon.elements import U8, U64, Mask, order_of_lamport
from recon.marks import Arrived
from recon.session import Interest, SessionKey
from recon.view import View
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.digest import claim_id, entry_digest
from sdstore.sync.replica import NOT_CONTENT, Element, Loaded, LostPage, Prepared, Stored
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item

COMMITTED_AT_ONCE = 8_192  # a whole group of the committer: half the time of eight smaller ones
COMMITTED_BESIDE_OTHERS = 1_024  # where others publish: they wait for one group, which takes 0.05 s
ITEMS_PER_MESSAGE_MAX = 4_096  # claims are small: bounds the look-ups behind one message
_FIRST_CHUNK = 32  # frames loaded before their sizes are known: 32 MiB at worst
_FRAME_BYTES_GUESSED = 1024  # a guess, so that few frames are loaded in vain when room is short
_CHUNK_MAX = 512  # a few milliseconds of the event loop
_ITEM_OVERHEAD_BYTES = 16  # tags and lengths


class Message:
    """The claims in one message so far: none is sent both alone and inside its entry.

    `foldable`: the only claims that may be sent inside an entry; None: all.
    """

    def __init__(self, foldable: AbstractSet[bytes] | None = None) -> None:
        self.alone: set[bytes] = set()
        self.folded: set[bytes] = set()
        self.foldable = foldable


@dataclass(slots=True, kw_only=True)
class Received(Prepared):
    """A prepared item; `channel_id` of its message, or of the entry that a claim is about.

    `has_entry`: of a claim, its entry is in the store.
    """

    channel_id: str | None = None
    has_entry: bool = False


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
        self._who = ""
        self._store = store
        self._door = door
        self._index = index

    def for_peer(self, peer_id: str, way: Way, caller: str = "") -> NodeReplica:
        """This replica for a session with one peer, which commits name as their source.

        `peer_id`: of a peer, or the instance ID of a store that calls, or empty if it gave none; `way`: who
        started the session, for the policy; `caller`: its name, where the peer calls.
        """
        replica = copy(self)
        replica._source, replica._way, replica._who = peer_id, way, caller or peer_id  # noqa: SLF001 - of a copy
        return replica

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

    def holds(self, orders: U64, ids: U8) -> Mask:
        """See `Replica`."""
        return self._index.elements.holds(orders, ids)

    def root(
        self, interest: Interest, policy: int, added: U8 | None, removed: U8 | None
    ) -> bytes | None:
        """See `Replica`."""
        return self._index.root_of_ids(interest, policy, added, removed)

    def mark(self, interest: Interest) -> bytes:
        """See `ArrivalOrder`."""
        return self.marks.at_present(interest, self._policy())

    async def arrived_since(self, mark: bytes, interest: Interest) -> Arrived | None:
        """See `ArrivalOrder`."""
        return await self.marks.arrived_since(mark, interest, self._policy())

    # --- content that goes out -----------------------------------------------------------------

    async def load(
        self, elements: Sequence[Element], bytes_max: int, message: Message | None = None
    ) -> Loaded:
        """See `Replica`. `message`: the claims that earlier calls put into the same message."""
        message = message or Message()
        loaded = Loaded([], [], 0)
        room = bytes_max
        wanted = elements[:ITEMS_PER_MESSAGE_MAX]
        while loaded.covered < len(wanted):
            size = _chunk_size(len(loaded.items), bytes_max - room, room)
            chunk = wanted[loaded.covered :][:size]
            found = await self._items_by_element(chunk, message.foldable)
            for item in found.values():
                _leave_out(item, message.alone)
            open_ = [each for each in chunk if each.element_id not in message.folded]
            sizes = [_size(found[each.element_id]) for each in open_]
            fitting = _fitting_count(sizes, room, bool(loaded.items))
            # Fold claims only once the cut is known: everything below it is sent, in an entry or alone.
            for each in open_[:fitting]:
                hints = found[each.element_id].entry.hints
                message.folded.update(claim_id(each.element_id, hint) for hint in hints)
            sent = [each for each in open_[:fitting] if each.element_id not in message.folded]
            items = [found[each.element_id] for each in sent]
            message.alone.update(
                each.element_id
                for each, item in zip(sent, items, strict=True)
                if item.HasField("claim")
            )
            room -= items_size(items)
            loaded.items.extend(items)
            loaded.elements.extend(sent)
            covered = len(chunk) if fitting == len(open_) else chunk.index(open_[fitting])
            loaded = loaded._replace(covered=loaded.covered + covered)
            if fitting < len(open_):
                break
        return loaded

    async def _items_by_element(
        self, elements: Sequence[Element], foldable: AbstractSet[bytes] | None
    ) -> dict[bytes, Item]:
        store = self._store
        orders = {each.element_id: each.order for each in elements}
        entries = {entry.digest: entry for entry in await store.entries.by_digest(list(orders))}
        claims = await store.claims.by_element([each for each in orders if each not in entries])
        found: dict[bytes, Item] = {}
        for digest, hint in claims:
            element_id = claim_id(digest, hint)
            claim = Item.Claim(digest=digest, hint=hint)
            found[element_id] = Item(claim=claim, order=orders[element_id])
        hints = _published(await store.claims.of_entries(list(entries.values())))
        for digest, entry in entries.items():
            some = hints.get(digest, [])
            if foldable is not None:
                some = [each for each in some if claim_id(digest, each) in foldable]
            some = some[: self.limits.hints_per_publish_max]
            # Set in place: a message that is given to another one is copied.
            item = found[digest] = Item(order=orders[digest], id=digest)
            item.entry.frame = entry.frame
            if some:
                item.entry.hints.extend(some)
        for order, element_id in elements:
            if element_id not in found:
                absent = Item.Absent(reason=wire.LOST)
                found[element_id] = Item(absent=absent, order=order, id=element_id)
        return found

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """See `Replica`."""
        return claim_id(entry_id, hint)

    async def claims_on(self, entry_ids: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """See `Replica`."""
        hints = _published(await self._store.claims.of(entry_ids))
        return {digest: [claim_id(digest, each) for each in some] for digest, some in hints.items()}

    # --- content that comes in -----------------------------------------------------------------

    async def prepare(self, items: Sequence[Item]) -> list[Received]:
        """See `Replica`. Only the door decodes frames."""
        entries = [item.entry for item in items if item.HasField("entry")]
        publications = [
            Publication(each.frame, acceptable_hints(each.hints, self.limits) if each.hints else ())
            for each in entries
        ]
        from_door = iter(await self._door.prepare_many(publications))
        kept = iter([each.hints for each in publications])
        prepared: list[Received] = []
        for start in range(0, len(items), _CHUNK_MAX):
            for item in items[start : start + _CHUNK_MAX]:
                is_entry = item.HasField("entry")
                prepared.append(
                    _entry(item, next(from_door), next(kept)) if is_entry else _claim(item.claim)
                )
            await asyncio.sleep(0)
        came = {each.element_id: each for each in prepared if not each.entry_id}
        claims = [at for at, each in enumerate(prepared) if each.entry_id]
        for start in range(0, len(claims), _CHUNK_MAX):
            part = claims[start : start + _CHUNK_MAX]
            looked_up = await self._looked_up([prepared[at] for at in part], came)
            for at, claim in zip(part, looked_up, strict=True):
                prepared[at] = claim
        return prepared

    async def _looked_up(
        self, claims: Sequence[Received], came: Mapping[bytes, Received]
    ) -> list[Received]:
        """Claims with the channels of their entries, which came with them or are stored."""
        entry_ids = {each.entry_id for each in claims}
        here = await self._store.entries.outlines(list(entry_ids))
        held = await self._store.claims.by_element([each.element_id for each in claims])
        held_ids = {claim_id(*each) for each in held}
        known = []
        for claim in claims:
            is_held, entry_id = claim.element_id in held_ids, claim.entry_id
            if entry_id in here:
                entry = here[entry_id]
                order, channel_id = order_of_lamport(entry.lamport_timestamp), entry.channel_id
                claim = replace(claim, order=order, channel_id=channel_id, has_entry=True)
            elif entry_id in came:
                claim = replace(claim, order=came[entry_id].order)
            known.append(replace(claim, is_held=is_held) if is_held else claim)
        return known

    @property
    def stored_at_once(self) -> int:
        """See `Replica`."""
        return COMMITTED_BESIDE_OTHERS if self._door.is_busy_with_others else COMMITTED_AT_ONCE

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        """See `Replica`. A message without content is relayed to live readers, and refused."""
        stored = [Stored(wire.PUSH_REFUSED, each.refusal) for each in prepared]
        entries = [at for at, each in enumerate(prepared) if not each.entry_id]
        start = 0
        while part := entries[start : start + self.stored_at_once]:
            start += len(part)
            outcomes = await self._door.publish_prepared(
                [prepared[at].content for at in part], self._source, self._way, self._who
            )
            for at, outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, Problem):
                    stored[at] = _refusal(outcome)
                elif outcome.kind is not OutcomeKind.RELAYED:
                    is_new = outcome.kind is OutcomeKind.STORED
                    stored[at] = Stored(wire.STORED if is_new else wire.DUPLICATE)
        taken = (wire.STORED, wire.DUPLICATE)
        committed = {prepared[at].element_id for at in entries if stored[at].outcome in taken}
        claims = [at for at, each in enumerate(prepared) if each.entry_id]
        for start in range(0, len(claims), COMMITTED_BESIDE_OTHERS):
            part = claims[start : start + COMMITTED_BESIDE_OTHERS]
            results = await self._commit_claims([prepared[at] for at in part], committed)
            for at, result in zip(part, results, strict=True):
                stored[at] = result
        return stored

    async def _commit_claims(
        self, claims: Sequence[Prepared], committed: AbstractSet[bytes]
    ) -> list[Stored]:
        """Write claims without reading their entries, which can be large.

        The door reports faults of a claim's entry; the store shows whether the claim was kept. A claim
        beyond the maximum of an entry is refused as too many hints.
        """
        sure = {c.entry_id for c in claims if isinstance(c, Received) and c.has_entry} | committed
        unsure = {each.entry_id for each in claims} - sure
        here = sure | (await self._store.entries.outlines(list(unsure))).keys()
        written = [each for each in claims if each.entry_id in here]
        faults = await self._door.publish_claims([(c.entry_id, c.content) for c in written])
        rows = zip(written, faults, strict=True)
        taken = [claim.element_id for claim, fault in rows if fault is None]
        kept = {claim_id(*each) for each in await self._store.claims.by_element(taken)}
        rest = iter(faults)
        stored = []
        for claim in claims:
            if claim.entry_id not in here:
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


# --- elements to items -------------------------------------------------------------------------


def _published(claims: Mapping[bytes, Sequence[Claim]]) -> dict[bytes, list[bytes]]:
    """The published hints of each entry; claims of histories are not elements."""
    return {
        digest: [each.hint for each in some if each.source < ClaimSource.HISTORY]
        for digest, some in claims.items()
    }


# --- items to prepared items -------------------------------------------------------------------


def _entry(item: Item, content: FromDoor, hints: Sequence[bytes]) -> Received:
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
    return Received(
        order=None if message is None else order_of_lamport(message.lamport_timestamp or 0),
        element_id=digest,
        claims=tuple([claim_id(digest or item.id, hint) for hint in hints]) if hints else (),
        claims_dropped=len(item.entry.hints) - len(hints),
        refusal=refusal,
        content=content,
        channel_id=None if message is None else message.channel_id,
    )


def _claim(claim: Item.Claim) -> Received:
    return Received(
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


def _leave_out(item: Item, alone: set[bytes]) -> None:
    """Remove hints from an entry whose claims were sent alone in the same message."""
    if alone and item.HasField("entry"):
        digest = item.id
        kept = [hint for hint in item.entry.hints if claim_id(digest, hint) not in alone]
        item.entry.hints[:] = kept


def _chunk_size(items_count: int, items_bytes: int, room: int) -> int:
    """Elements to look up next: about as many as fit, by the average size so far."""
    if not items_count:
        return min(max(1, room // _FRAME_BYTES_GUESSED), _FIRST_CHUNK)
    return max(1, min(room * items_count // max(items_bytes, 1) + 1, _CHUNK_MAX))


def items_size(items: Iterable[Item]) -> int:
    """Bytes that items take in a message, at most."""
    return sum(map(_size, items))


def _size(item: Item) -> int:
    return item.ByteSize() + _ITEM_OVERHEAD_BYTES


def _fitting_count(sizes: Sequence[int], room: int, is_begun: bool) -> int:
    """The number of items that fit; at least one if the message is still empty."""
    fitting = sum(total <= room for total in accumulate(sizes))
    return fitting if is_begun else max(fitting, min(len(sizes), 1))
