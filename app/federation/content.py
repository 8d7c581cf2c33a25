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
from app.federation.local import ContentStore, LocalSide
from app.ingest.door import Publication
from app.limits import Limits
from sdstore.sds.digest import claim_id
from sdstore.wire.recon_pb2 import (
    DUPLICATE,
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
    """Items for a prefix of the elements asked for: `ids[i]` is the element of `items[i]`.

    `covered` elements are dealt with: sent, folded into an entry that is sent, or gone.
    """

    items: list[Item]
    ids: list[bytes]
    covered: int


async def load_items(
    store: ContentStore, ids: Sequence[bytes], *, bytes_max: int, hints_max: int
) -> Loaded:
    """Items of as many elements as `bytes_max` holds; at least one, however large it is."""
    loaded = Loaded([], [], 0)
    room = bytes_max
    folded: set[bytes] = set()
    wanted = ids[:ITEMS_PER_MESSAGE_MAX]
    while loaded.covered < len(wanted):
        chunk = wanted[loaded.covered :][: _chunk_size(len(loaded.items), bytes_max - room, room)]
        found = await _items_by_element(store, chunk, hints_max)
        open_ = [each for each in chunk if each not in folded and each in found]
        fitting = _fitting_count([_size(found[each]) for each in open_], room, bool(loaded.items))
        # Folded once the cut is known: what lies below it is sent, in an entry or alone.
        for each in open_[:fitting]:
            folded.update(claim_id(each, hint) for hint in found[each].entry.hints)
        sent = [each for each in open_[:fitting] if each not in folded]
        room -= items_size(found[each] for each in sent)
        loaded.items.extend(found[each] for each in sent)
        loaded.ids.extend(sent)
        if fitting < len(open_):
            return loaded._replace(covered=loaded.covered + chunk.index(open_[fitting]))
        loaded = loaded._replace(covered=loaded.covered + len(chunk))
    return loaded


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
    store: ContentStore, ids: Sequence[bytes], hints_max: int
) -> dict[bytes, Item]:
    entries = {entry.digest: entry for entry in await store.by_digest(ids)}
    claims = await store.claims_by_element([each for each in ids if each not in entries])
    found = {
        claim_id(digest, hint): Item(claim=Item.Claim(digest=digest, hint=hint))
        for digest, hint in claims
    }
    known_hints = await store.hints_of(list(entries))
    for digest, entry in entries.items():
        published = [c.hint for c in known_hints.get(digest, ()) if c.source < ClaimSource.HISTORY]
        found[digest] = Item(entry=Item.Entry(frame=entry.frame, hints=published[:hints_max]))
    return found


async def take_items(local: LocalSide, items: Sequence[Item]) -> list[PushOutcome]:
    """Pass what a peer pushed through the one door; one outcome per item, in order.

    A claim whose entry is not here, and whatever the node has no room for now, is NOT_EXAMINED.
    Raises Problem where this node is at fault (disk full, database gone).
    """
    outcomes = await publish_items(local, items)
    return [_push_outcome(*each) for each in zip(items, outcomes, strict=True)]


async def publish_items(local: LocalSide, items: Sequence[Item]) -> list[Outcome | Problem | None]:
    """Entries first, then the claims on them; None for a claim whose entry is not here."""
    outcomes: list[Outcome | Problem | None] = [None] * len(items)
    for kind in ("entry", "claim"):
        positions = [at for at, item in enumerate(items) if item.HasField(kind)]
        for start in range(0, len(positions), _DOOR_ITEMS):
            await _publish_slice(local, items, positions[start : start + _DOOR_ITEMS], outcomes)
    return outcomes


async def _publish_slice(
    local: LocalSide,
    items: Sequence[Item],
    positions: Sequence[int],
    outcomes: list[Outcome | Problem | None],
) -> None:
    publications = await _publications(local, [items[at] for at in positions])
    taken = iter(await local.door.publish_many([each for each in publications if each]))
    for at, publication in zip(positions, publications, strict=True):
        outcomes[at] = next(taken) if publication else None


async def _publications(local: LocalSide, items: Sequence[Item]) -> list[Publication | None]:
    """A claim is published with the frame of its entry."""
    claimed = {item.claim.digest for item in items if item.HasField("claim")}
    frames = {entry.digest: entry.frame for entry in await local.store.by_digest(list(claimed))}
    return [_publication(item, frames, local.limits) for item in items]


def _publication(item: Item, frames: dict[bytes, bytes], limits: Limits) -> Publication | None:
    if item.HasField("entry"):
        return Publication(item.entry.frame, _acceptable_hints(item.entry.hints, limits))
    if item.HasField("claim") and item.claim.digest in frames:
        return Publication(frames[item.claim.digest], (item.claim.hint,))
    return None


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
        return NOT_EXAMINED
    if is_refusal(outcome):
        return PUSH_REFUSED
    if isinstance(outcome, Problem):
        return NOT_EXAMINED
    # Of a claim, the outcome tells that its entry was here, as it had to be.
    is_new = outcome.kind is OutcomeKind.STORED or item.HasField("claim")
    return STORED if is_new else DUPLICATE
