"""The driver's interface to the set that a session makes equal: elements with opaque content.

An element is an entry, or a claim on one; the driver knows only that a claim names its entry. Content
is transferred as an `Item`. A node's store, a file and a participant's log can be replicas. A method
raises `SyncError` to end the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from recon.elements import U8, U64, Mask
from recon.limits import ID_BYTES
from recon.marks import Arrived
from recon.session import Interest, SessionKey
from recon.view import View
from sdstore.wire.recon_pb2 import Item, PushOutcome

NOT_CONTENT = "not_content"
"""A refusal: a message without content, although it has the requested digest."""


class Element(NamedTuple):
    """Order value and 32-byte ID."""

    order: int
    element_id: bytes


def columns(elements: Iterable[tuple[int, bytes]]) -> tuple[U64, U8]:
    """orders u64[n] and ids u8[n, 32]."""
    rows = list(elements)
    ids = np.frombuffer(b"".join(each for _, each in rows), np.uint8).reshape(-1, ID_BYTES)
    return np.array([order for order, _ in rows], np.uint64), ids


# Not frozen: there is one for each message, and frozen ones take longer to make.
@dataclass(slots=True, kw_only=True)
class Prepared:
    """A received entry or claim, decoded once: its element, and whether it can be stored.

    `order` and `element_id` are computed from the content. An entry that cannot be decoded has
    neither; a claim has no order while its entry is not here. `entry_id`: for a claim, its entry.
    `claims`: for an entry, the IDs of the claims inside it that can be stored with it. `refusal`: why
    `commit` will not store it.
    `is_held`: the claim is here already. `content` belongs to the replica.
    """

    order: int | None = None
    element_id: bytes = b""
    entry_id: bytes = b""
    claims: tuple[bytes, ...] = ()
    refusal: str = ""
    is_held: bool = False
    content: Any = None


class Stored(NamedTuple):
    """The outcome of a prepared item, as a protocol status; `code`: why it was refused.

    `claims_dropped`: for a stored entry, the IDs of the claims inside it that were not kept.
    """

    outcome: PushOutcome
    code: str = ""
    claims_dropped: tuple[bytes, ...] = ()


class LostPage(NamedTuple):
    """A page of entries that are here without their content.

    `next`: the place after which to continue, 0 at the end; `total`: the number of all such entries.
    """

    elements: list[Element]
    next: int
    total: int


class Replica(Protocol):
    """A set of elements and their content."""

    @property
    def arrived_count(self) -> int:
        """The number of elements that have arrived so far; the newest are compared first."""

    async def catch_up(self) -> None:
        """Add all elements that are committed by now."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """The elements of an interest under a session key."""

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements are here, in any channel: bool[n]."""

    async def load(self, elements: Sequence[Element], bytes_max: int) -> list[Item]:
        """Items of the first elements, as many as fit into `bytes_max`; at least one of any size.

        That of an entry has all claims on it, also if its content is gone: then it is `absent`.
        """

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """The ID of the claim that this hint leads to this entry."""

    async def prepare(self, items: Sequence[Item]) -> Sequence[Prepared]:
        """Decode entries and claims; one result for each, in order. Stores nothing."""

    @property
    def stored_at_once(self) -> int:
        """How many items one call of `commit` should get, if there are as many.

        The more it gets, the longer it takes, and the less each item costs. 1: each answer is committed
        as it comes.
        """

    async def commit(self, prepared: Sequence[Prepared]) -> Sequence[Stored]:
        """Store prepared items, entries first; one outcome for each, in order.

        When it returns, the items with the outcome STORED are on disk.
        """

    async def lost(self, interest: Interest, after: int, limit: int) -> LostPage:
        """Entries of an interest whose content is lost; examines about `limit` of them."""

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """The entries among these that are here and cannot be read."""


class ArrivalOrder(Protocol):
    """A replica that numbers its elements as they arrive, so that it can tell what is new.

    Only such a replica gets baselines (`sdstore.sync.memory.Baseline`).
    """

    def mark(self, interest: Interest) -> bytes:
        """The mark of everything that `Replica.view` has now."""

    async def arrived_since(self, mark: bytes, interest: Interest) -> Arrived | None:
        """The elements of an interest that arrived after a mark, up to what `Replica.view` has now.

        None if the mark is not of this history, if an element before it was lost or a rule changed
        since, or if more arrived than `recon.marks.NEWS_MAX`.
        """
