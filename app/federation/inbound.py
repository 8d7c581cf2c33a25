"""What a peer serves, checked before it enters: only what was asked for, by recomputing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import Code, Problem
from app.federation.local import ContentStore
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
    """The items of one answer. `elements[i]` belongs to `items[i]`.

    `folded` are claims that came inside entries, `orphans` claims whose entry is not here yet,
    `retired_count` elements whose content the peer no longer has.
    """

    items: list[Item] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    folded: list[Element] = field(default_factory=list)
    orphans: list[Item] = field(default_factory=list)
    retired_count: int = 0

    def columns(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """orders u64[n] and ids u8[n, 32] of `elements`."""
        orders = np.array([element.order for element in self.elements], dtype=np.uint64)
        ids = np.frombuffer(b"".join(e.element_id for e in self.elements), dtype=np.uint8)
        return orders, ids.reshape(-1, 32)

    @property
    def elements_count(self) -> int:
        """Elements that the items stand for, each once."""
        named = {element.element_id for element in (*self.elements, *self.folded)}
        return len(named) + len(self.orphans) + self.retired_count

    @property
    def content_bytes(self) -> int:
        """Bytes of the items."""
        return sum(item.ByteSize() for item in self.items)


async def read_items(store: ContentStore, items: Sequence[Item]) -> Arrived:
    """Recompute the element of every item. Raises Problem(PEER_MISBEHAVED) for one that has none."""
    arrived = Arrived()
    claims = [item for item in items if item.HasField("claim")]
    orders: dict[bytes, int] = {}
    for start in range(0, len(items), _DECODED_AT_ONCE):
        for item in items[start : start + _DECODED_AT_ONCE]:
            if item.HasField("entry"):
                _read_entry(item, arrived, orders)
        await asyncio.sleep(0)
    await _read_claims(store, claims, arrived, orders)
    arrived.retired_count = sum(item.HasField("retired") for item in items)
    return arrived


def _read_entry(item: Item, arrived: Arrived, orders: dict[bytes, int]) -> None:
    try:
        message, _ = decode(item.entry.frame)
    except MessageError as error:
        raise Problem(Code.PEER_MISBEHAVED, f"a served frame is damaged: {error}") from None
    if message.kind is not Kind.CONTENT or message.lamport_timestamp is None:
        raise Problem(Code.PEER_MISBEHAVED, f"a served frame is a {message.kind} message")
    digest, order = entry_digest(message), order_value(message.lamport_timestamp)
    orders[digest] = order
    arrived.items.append(item)
    arrived.elements.append(Element(order, digest))
    arrived.folded += [Element(order, claim_id(digest, hint)) for hint in item.entry.hints]


async def _read_claims(
    store: ContentStore, claims: Sequence[Item], arrived: Arrived, orders: dict[bytes, int]
) -> None:
    unknown = {item.claim.digest for item in claims} - orders.keys()
    for entry in await store.by_digest(list(unknown)):
        orders[entry.digest] = order_value(entry.lamport_timestamp)
    for item in claims:
        order = orders.get(item.claim.digest)
        if order is None:
            arrived.orphans.append(item)
            continue
        arrived.items.append(item)
        arrived.elements.append(Element(order, claim_id(item.claim.digest, item.claim.hint)))
