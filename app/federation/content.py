"""Content on its way between two stores: elements to items, and items through the one door.

An element is an entry or a published hint claim. An entry travels with its claims where they are
few, so that a message and its hints are written once; a claim travels alone where the other side
has the entry already. Both sides of the protocol use these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from app.entries import ClaimSource, Outcome, OutcomeKind
from app.errors import Code, Problem
from app.federation.inbound import Element
from app.federation.local import ContentStore, LocalSide
from app.ingest.prepare import Publication
from app.limits import Limits
from sdstore.sds.digest import claim_id
from sdstore.wire.recon_pb2 import (
    DUPLICATE,
    LOST,
    NO_ENTRY,
    NOT_EXAMINED,
    PUSH_REFUSED,
    STORED,
    Item,
    PushOutcome,
)

ITEMS_PER_MESSAGE_MAX = 4_096  # claims are small: bounds the look-ups behind one message
_FIRST_CHUNK = 32  # frames loaded before their sizes are known: 32 MiB at worst
_FRAME_BYTES_GUESSED = 1024  # where little room is left, fewer are loaded in vain
_CHUNK_MAX = 512  # a few milliseconds of the event loop
_DOOR_ITEMS = 1_024  # one group of the committer; the door itself yields to other callers
_ITEM_OVERHEAD_BYTES = 16  # tags and lengths


class Loaded(NamedTuple):
    """Items for a prefix of the elements asked for: `elements[i]` is that of `items[i]`.

    `covered` elements are dealt with: sent, or folded into an entry that is sent. An element whose
    content is gone has an item that says so.
    """

    items: list[Item]
    elements: list[Element]
    covered: int


class Message:
    """What one message holds already: no claim goes both alone and inside its entry."""

    def __init__(self) -> None:
        self.alone: set[bytes] = set()
        self.folded: set[bytes] = set()


async def load_items(
    store: ContentStore,
    elements: Sequence[Element],
    *,
    bytes_max: int,
    hints_max: int,
    message: Message | None = None,
) -> Loaded:
    """Items of as many elements as `bytes_max` holds; at least one, however large it is.

    `message`: what earlier calls put into the same message.
    """
    message = message or Message()
    loaded = Loaded([], [], 0)
    room = bytes_max
    wanted = elements[:ITEMS_PER_MESSAGE_MAX]
    while loaded.covered < len(wanted):
        chunk = wanted[loaded.covered :][: _chunk_size(len(loaded.items), bytes_max - room, room)]
        found = await _items_by_element(store, chunk, hints_max)
        for item in found.values():
            _leave_out(item, message.alone)
        open_ = [each for each in chunk if each.element_id not in message.folded]
        sizes = [_size(found[each.element_id]) for each in open_]
        fitting = _fitting_count(sizes, room, bool(loaded.items))
        # Folded once the cut is known: what lies below it is sent, in an entry or alone.
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


def _leave_out(item: Item, alone: set[bytes]) -> None:
    """Take hints out of an entry whose claims have been sent alone in the same message."""
    if alone and item.HasField("entry"):
        digest = item.id
        kept = [hint for hint in item.entry.hints if claim_id(digest, hint) not in alone]
        item.entry.hints[:] = kept


def _chunk_size(items_count: int, items_bytes: int, room: int) -> int:
    """Elements to look up next: about as many as the room holds, going by those so far."""
    if not items_count:
        return min(max(1, room // _FRAME_BYTES_GUESSED), _FIRST_CHUNK)
    return max(1, min(room * items_count // max(items_bytes, 1) + 1, _CHUNK_MAX))


def items_size(items: Iterable[Item]) -> int:
    """Bytes that items take in a message, at most."""
    return sum(map(_size, items))


def _size(item: Item) -> int:
    return item.ByteSize() + _ITEM_OVERHEAD_BYTES


def _fitting_count(sizes: Sequence[int], room: int, is_begun: bool) -> int:
    """How many items fit; one at least, unless the message has begun."""
    fitting = sum(total <= room for total in accumulate(sizes))
    return fitting if is_begun else max(fitting, min(len(sizes), 1))


async def _items_by_element(
    store: ContentStore, elements: Sequence[Element], hints_max: int
) -> dict[bytes, Item]:
    orders = {each.element_id: each.order for each in elements}
    entries = {entry.digest: entry for entry in await store.by_digest(list(orders))}
    claims = await store.claims_by_element([each for each in orders if each not in entries])
    found: dict[bytes, Item] = {}
    for digest, hint in claims:
        element_id = claim_id(digest, hint)
        claim = Item.Claim(digest=digest, hint=hint)
        found[element_id] = Item(claim=claim, order=orders[element_id])
    known_hints = await store.hints_of(list(entries))
    for digest, entry in entries.items():
        published = [c.hint for c in known_hints.get(digest, ()) if c.source < ClaimSource.HISTORY]
        content = Item.Entry(frame=entry.frame, hints=published[:hints_max])
        found[digest] = Item(entry=content, order=orders[digest], id=digest)
    for order, element_id in elements:
        if element_id not in found:
            absent = Item.Absent(reason=LOST)
            found[element_id] = Item(absent=absent, order=order, id=element_id)
    return found


def pushed(items: Iterable[Item]) -> list[Item]:
    """The same items without the names of their elements, which only an answer needs."""
    return [
        Item(entry=item.entry) if item.HasField("entry") else Item(claim=item.claim)
        for item in items
    ]


async def take_items(local: LocalSide, items: Sequence[Item]) -> list[PushOutcome]:
    """Pass what a peer pushed through the one door; one outcome per item, in order.

    A claim whose entry is not here is NO_ENTRY, what the node has no room for now NOT_EXAMINED.
    Raises Problem where this node is at fault (disk full, database gone).
    """
    outcomes = await publish_items(local, items)
    return [_push_outcome(*each) for each in zip(items, outcomes, strict=True)]


async def publish_items(local: LocalSide, items: Sequence[Item]) -> list[Outcome | Problem | None]:
    """Entries first, then the claims on them; None for a claim whose entry is not here.

    A claim beyond the number that an entry may have is refused as too many hints.
    """
    outcomes: list[Outcome | Problem | None] = [None] * len(items)
    for kind, publish in (("entry", _publish_entries), ("claim", _publish_claims)):
        positions = [at for at, item in enumerate(items) if item.HasField(kind)]
        for start in range(0, len(positions), _DOOR_ITEMS):
            part = positions[start : start + _DOOR_ITEMS]
            found = await publish(local, [items[at] for at in part])
            for at, outcome in zip(part, found, strict=True):
                outcomes[at] = outcome
    await _refuse_dropped_claims(local.store, items, outcomes)
    return outcomes


async def _refuse_dropped_claims(
    store: ContentStore, items: Sequence[Item], outcomes: list[Outcome | Problem | None]
) -> None:
    """The door answers for the entry of a claim; whether the claim was kept shows in the store."""
    taken = {
        at: claim_id(item.claim.digest, item.claim.hint)
        for at, item in enumerate(items)
        if item.HasField("claim") and isinstance(outcomes[at], Outcome)
    }
    if not taken:
        return
    kept = {claim_id(*each) for each in await store.claims_by_element(list(taken.values()))}
    for at, element_id in taken.items():
        if element_id not in kept:
            outcomes[at] = Problem(Code.TOO_MANY_HINTS, "the entry has as many claims as it may")


async def _publish_entries(
    local: LocalSide, items: Sequence[Item]
) -> Sequence[Outcome | Problem | None]:
    return await local.door.publish_many(
        [
            Publication(item.entry.frame, _acceptable_hints(item.entry.hints, local.limits))
            for item in items
        ]
    )


async def _publish_claims(
    local: LocalSide, items: Sequence[Item]
) -> Sequence[Outcome | Problem | None]:
    """Claims are small and may be about long entries: these are not read."""
    here = await local.store.outlines(list({item.claim.digest for item in items}))
    claims = [item.claim for item in items if item.claim.digest in here]
    faults = iter(await local.door.publish_claims([(each.digest, each.hint) for each in claims]))
    outcomes: list[Outcome | Problem | None] = []
    for item in items:
        digest = item.claim.digest
        if digest not in here:
            outcomes.append(None)
            continue
        entry = here[digest]
        taken = Outcome(OutcomeKind.DUPLICATE, entry.message_id, entry.channel_id, digest)
        outcomes.append(next(faults) or taken)
    return outcomes


def _acceptable_hints(hints: Iterable[bytes], limits: Limits) -> tuple[bytes, ...]:
    """The hints the door takes: a bad hint that a peer adds must not cost the message."""
    good = [hint for hint in hints if 0 < len(hint) <= limits.hint_bytes_max]
    return tuple(good[: limits.hints_per_publish_max])


def is_refusal(outcome: Outcome | Problem) -> bool:
    """Whether local policy turned the item away for good. Raises what is this node's own fault."""
    if not isinstance(outcome, Problem):
        return outcome.kind is OutcomeKind.RELAYED
    if outcome.status >= 500 and outcome.code is not Code.OVERLOADED:
        raise outcome
    return outcome.code is not Code.OVERLOADED


def _push_outcome(item: Item, outcome: Outcome | Problem | None) -> PushOutcome:
    if outcome is None:
        return NO_ENTRY if item.HasField("claim") else PUSH_REFUSED
    if is_refusal(outcome):
        return PUSH_REFUSED
    if isinstance(outcome, Problem):
        return NOT_EXAMINED
    # Of a claim, the outcome tells that its entry was here, as it had to be.
    is_new = outcome.kind is OutcomeKind.STORED or item.HasField("claim")
    return STORED if is_new else DUPLICATE
