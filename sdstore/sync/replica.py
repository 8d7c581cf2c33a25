"""The set that a session makes equal, as its driver sees it: elements with opaque content.

An element is an entry, or a claim on one (the driver knows no more of them than that a claim names
its entry). Content travels as an `Item`, which both sides of the protocol read and write. A node's
store, a file and a participant's log are replicas. A method raises `SyncError` to end the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from recon.elements import U8, U64, Mask
from recon.limits import ID_BYTES
from recon.session import Interest, SessionKey
from recon.view import View
from sdstore.wire.recon_pb2 import Item, PushOutcome

NOT_CONTENT = "not_content"
"""A refusal: a message of another kind, though it has the digest that it was asked for by."""


class Element(NamedTuple):
    """Order value and 32-byte ID."""

    order: int
    element_id: bytes


def columns(elements: Iterable[tuple[int, bytes]]) -> tuple[U64, U8]:
    """orders u64[n] and ids u8[n, 32]."""
    rows = list(elements)
    ids = np.frombuffer(b"".join(each for _, each in rows), np.uint8).reshape(-1, ID_BYTES)
    return np.array([order for order, _ in rows], np.uint64), ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A received entry or claim, read once: which element it is, and whether it can be stored.

    `order` and `element_id` are computed from the content. An entry that cannot be read has
    neither; a claim has no order while its entry is not here. `entry_id`: of a claim, the entry that
    it is about. `claims`: of an entry, the IDs of the claims that it brings. `refusal`: why
    `commit` will not store it. `is_held`: a claim that is here already. `content` is the replica's.
    """

    order: int | None = None
    element_id: bytes = b""
    entry_id: bytes = b""
    claims: tuple[bytes, ...] = ()
    refusal: str = ""
    is_held: bool = False
    content: Any = None


class Stored(NamedTuple):
    """The outcome of a prepared item, in the words of the protocol; `code`: why it was refused."""

    outcome: PushOutcome
    code: str = ""


class Loaded(NamedTuple):
    """Items for a prefix of the elements asked for: `elements[i]` is that of `items[i]`.

    `covered` elements are dealt with: sent, or folded into an entry that is sent. An element whose
    content is gone has an `absent` item.
    """

    items: list[Item]
    elements: list[Element]
    covered: int


class LostPage(NamedTuple):
    """Some entries that are here without their content.

    `next`: after which place to read on, 0 after the last; `total`: how many there are in all.
    """

    elements: list[Element]
    next: int
    total: int


class Replica(Protocol):
    """A set of elements, and what is behind them."""

    @property
    def arrived_count(self) -> int:
        """How many elements have arrived so far; the newest are compared first."""

    async def catch_up(self) -> None:
        """Take in everything that is committed by now."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """The elements of an interest under a session key."""

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements are here, whatever their channel: bool[n]."""

    def root(
        self, interest: Interest, policy: int, added: U8 | None, removed: U8 | None
    ) -> bytes | None:
        """The unkeyed root of an interest's elements (`recon.hashing.idle_root`), if it has one.

        `added` and `removed`, u8[n, 32]: elements that the session sets aside.
        """

    async def load(self, elements: Sequence[Element], bytes_max: int) -> Loaded:
        """Items of as many elements as `bytes_max` holds; at least one, however large it is."""

    async def claims_on(self, entry_ids: Sequence[bytes]) -> Mapping[bytes, Sequence[bytes]]:
        """IDs of the claims on each of these entries."""

    async def prepare(self, items: Sequence[Item]) -> Sequence[Prepared]:
        """Read entries and claims; one result for each, in order. Stores nothing."""

    async def commit(self, prepared: Sequence[Prepared]) -> Sequence[Stored]:
        """Store what was prepared, entries first; one outcome for each, in order.

        When it returns, what it calls stored is on disk.
        """

    async def lost(self, interest: Interest, after: int, limit: int) -> LostPage:
        """Entries of an interest whose content is lost; about `limit` are looked at."""

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """Those of these entries that are here and cannot be read."""
