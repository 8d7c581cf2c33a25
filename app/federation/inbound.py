"""What a peer serves, checked before it enters: only what was asked for, by recomputing.

Each item names its element. A frame whose own digest is another one is a fault of the peer; a frame
that this node cannot decode has no digest, so the name stands for it and it is set aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import Code, Problem
from app.federation.aside import LOST, RETIRED, AsideElement, LackedBy
from app.federation.local import ContentStore
from recon.limits import ID_BYTES
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.digest import claim_id, entry_digest, order_value
from sdstore.sds.model import Kind
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Item

_DECODED_AT_ONCE = 512  # about 5 ms of the event loop
_NOT_CONTENT = "not_content"  # a message of another kind, though it has the digest it was asked by


class Element(NamedTuple):
    """Order value and 32-byte ID."""

    order: int
    element_id: bytes


class Row(NamedTuple):
    """An item that can be published, and the element it was checked to be."""

    item: Item
    element: Element


@dataclass(slots=True)
class Arrived:
    """The items of one answer, as they came. `named` are all elements that the items name.

    `rows` can be published, `orphans` are claims whose entry is not here yet, `aside` what cannot be
    had from this peer; `folded` are claims that came inside entries.
    """

    named: list[Element] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    orphans: list[Row] = field(default_factory=list)
    folded: list[Element] = field(default_factory=list)
    aside: list[AsideElement] = field(default_factory=list)


def columns(elements: Iterable[Element]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """orders u64[n] and ids u8[n, 32]."""
    rows = list(elements)
    ids = np.frombuffer(b"".join(row.element_id for row in rows), dtype=np.uint8)
    return np.array([row.order for row in rows], dtype=np.uint64), ids.reshape(-1, ID_BYTES)


def claims_of(item: Item, entry: Element) -> list[Element]:
    """The claims that travel inside an entry."""
    hints = item.entry.hints
    return [Element(entry.order, claim_id(entry.element_id, hint)) for hint in hints]


async def read_items(store: ContentStore, items: Sequence[Item]) -> Arrived:
    """Check every item against the element it names. Raises Problem(PEER_MISBEHAVED)."""
    arrived = Arrived()
    orders: dict[bytes, int] = {}
    for start in range(0, len(items), _DECODED_AT_ONCE):
        for item in items[start : start + _DECODED_AT_ONCE]:
            element = named_element(item)
            arrived.named.append(element)
            if item.HasField("entry"):
                _read_entry(arrived, item, element)
                orders[element.element_id] = element.order
            elif item.HasField("absent"):
                is_retired = item.absent.reason == recon_pb2.RETIRED
                code = RETIRED if is_retired else LOST
                arrived.aside.append(AsideElement(LackedBy.HERE, *element, code))
        await asyncio.sleep(0)
    claims = [
        Row(item, element)
        for item, element in zip(items, arrived.named, strict=True)
        if item.HasField("claim")
    ]
    await sort_claims(store, arrived, claims, orders)
    return arrived


def named_element(item: Item) -> Element:
    """The element that a served item names; that of a claim follows from its digest and hint."""
    element_id = item.id
    if item.HasField("claim"):
        if len(item.claim.digest) != ID_BYTES:
            raise Problem(Code.PEER_MISBEHAVED, f"a digest has {ID_BYTES} bytes")
        element_id = claim_id(item.claim.digest, item.claim.hint)
    if len(element_id) != ID_BYTES or item.WhichOneof("item") is None:
        raise Problem(Code.PEER_MISBEHAVED, "a served item names no element")
    return Element(item.order, element_id)


def _read_entry(arrived: Arrived, item: Item, element: Element) -> None:
    """A frame that decodes has to be the entry that the item names."""
    code = ""
    try:
        message, _ = decode(item.entry.frame)
    except MessageError as error:
        code = error.code
    else:
        order = order_value(message.lamport_timestamp or 0)
        if (order, entry_digest(message)) != element:
            detail = f"the frame served as {element.element_id.hex()} is another entry"
            raise Problem(Code.PEER_MISBEHAVED, detail)
        if message.kind is not Kind.CONTENT or message.lamport_timestamp is None:
            code = _NOT_CONTENT
    folded = claims_of(item, element)
    arrived.folded += folded
    if code:
        arrived.aside += refused_entry(element, folded, code)
    else:
        arrived.rows.append(Row(item, element))


def refused_entry(entry: Element, claims: Iterable[Element], code: str) -> list[AsideElement]:
    """An entry that this node does not take covers the claims on it."""
    covered = (AsideElement(LackedBy.HERE, *claim, code, entry.element_id) for claim in claims)
    return [AsideElement(LackedBy.HERE, *entry, code), *covered]


async def sort_claims(
    store: ContentStore, arrived: Arrived, claims: Sequence[Row], orders: Mapping[bytes, int]
) -> None:
    """Claims on entries that came along (`orders`, by digest) or are here, and the others."""
    unknown = list({row.item.claim.digest for row in claims} - orders.keys())
    known = dict(orders)
    for start in range(0, len(unknown), _DECODED_AT_ONCE):
        found = await store.outlines(unknown[start : start + _DECODED_AT_ONCE])
        known |= {digest: order_value(each.lamport_timestamp) for digest, each in found.items()}
    for row in claims:
        order = known.get(row.item.claim.digest)
        if order is not None and order != row.element.order:
            raise Problem(Code.PEER_MISBEHAVED, "a claim is served under another order")
        (arrived.orphans if order is None else arrived.rows).append(row)
