"""What a peer serves, checked before it enters: only what was asked for, by recomputing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import Code, Problem
from app.federation.local import ContentStore
from recon.limits import ID_BYTES
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.digest import claim_id, entry_digest, order_value
from sdstore.sds.model import Kind
from sdstore.wire.recon_pb2 import Item

_DECODED_AT_ONCE = 512  # about 5 ms of the event loop


class Element(NamedTuple):
    """Order value and 32-byte ID."""

    order: int
    element_id: bytes


@dataclass(slots=True)
class Arrived:
    """The items of one answer, as they came. `elements[i]` belongs to `items[i]`.

    `folded` are claims that came inside entries, `orphans` claims whose entry is not here yet,
    `retired_count` elements whose content the peer no longer has.
    """

    items: list[Item] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    folded: list[Element] = field(default_factory=list)
    orphans: list[Item] = field(default_factory=list)
    retired_count: int = 0

    @property
    def content_bytes(self) -> int:
        """Bytes of the items."""
        return sum(item.ByteSize() for item in self.items)


def columns(elements: Iterable[Element]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """orders u64[n] and ids u8[n, 32]."""
    rows = list(elements)
    ids = np.frombuffer(b"".join(row.element_id for row in rows), dtype=np.uint8)
    return np.array([row.order for row in rows], dtype=np.uint64), ids.reshape(-1, ID_BYTES)


async def read_items(store: ContentStore, items: Sequence[Item]) -> Arrived:
    """Recompute the element of every item. Raises Problem(PEER_MISBEHAVED) for one that has none."""
    entries: dict[int, Element] = {}
    arrived = Arrived()
    for start in range(0, len(items), _DECODED_AT_ONCE):
        for at, item in enumerate(items[start : start + _DECODED_AT_ONCE], start):
            if item.HasField("entry"):
                order, digest = entries[at] = _element_of(item.entry.frame)
                claims = (claim_id(digest, hint) for hint in item.entry.hints)
                arrived.folded += [Element(order, each) for each in claims]
        await asyncio.sleep(0)
    orders = await _orders_of_claimed(store, items, entries.values())
    for at, item in enumerate(items):
        element = entries.get(at) or _claim_of(item, orders)
        if element is not None:
            arrived.items.append(item)
            arrived.elements.append(element)
        elif item.HasField("claim"):
            arrived.orphans.append(item)
        else:
            arrived.retired_count += item.HasField("retired")
    return arrived


def _element_of(frame: bytes) -> Element:
    try:
        message, _ = decode(frame)
    except MessageError as error:
        raise Problem(Code.PEER_MISBEHAVED, f"a served frame is damaged: {error}") from None
    if message.kind is not Kind.CONTENT or message.lamport_timestamp is None:
        raise Problem(Code.PEER_MISBEHAVED, f"a served frame is a {message.kind} message")
    return Element(order_value(message.lamport_timestamp), entry_digest(message))


async def _orders_of_claimed(
    store: ContentStore, items: Sequence[Item], entries: Iterable[Element]
) -> dict[bytes, int]:
    """By digest, of the entries that came along and of those that are here."""
    orders = {digest: order for order, digest in entries}
    claimed = {item.claim.digest for item in items if item.HasField("claim")}
    if any(len(digest) != ID_BYTES for digest in claimed):
        raise Problem(Code.PEER_MISBEHAVED, f"a digest has {ID_BYTES} bytes")
    unknown = list(claimed - orders.keys())
    for start in range(0, len(unknown), _DECODED_AT_ONCE):
        for entry in await store.by_digest(unknown[start : start + _DECODED_AT_ONCE]):
            orders[entry.digest] = order_value(entry.lamport_timestamp)
    return orders


def _claim_of(item: Item, orders: Mapping[bytes, int]) -> Element | None:
    """The element of a claim whose entry is known."""
    digest, hint = item.claim.digest, item.claim.hint
    is_known = item.HasField("claim") and digest in orders
    return Element(orders[digest], claim_id(digest, hint)) if is_known else None
