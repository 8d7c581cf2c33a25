"""What a session needs of its own node; `app.node.Node` has it, and so has any stand-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

from app.entries import Claim, Entry, Outcome, Outline
from app.errors import Problem
from app.limits import Limits
from recon.elements import U8, U64, Mask
from recon.session import Interest, SessionKey
from recon.view import View

if TYPE_CHECKING:
    from app.ingest.prepare import Publication


class LostElement(Protocol):
    """An entry that is here, whose content is lost."""

    @property
    def order(self) -> int:
        """Its order value."""

    @property
    def digest(self) -> bytes:
        """Its ID."""

    @property
    def channel_no(self) -> int:
        """The number of its channel."""

    @property
    def seq(self) -> int:
        """Its place in the sequence of lost elements."""


class ContentStore(Protocol):
    """Reads of content by element."""

    async def by_digest(self, digests: Sequence[bytes]) -> list[Entry]:
        """The entries of those digests the store has, in any order."""

    async def outlines(self, digests: Sequence[bytes]) -> Mapping[bytes, Outline]:
        """What is known without their frames of those entries that are here, lost or not."""

    async def hints_of(self, digests: Sequence[bytes]) -> dict[bytes, list[Claim]]:
        """The hint claims of each entry."""

    async def claims_by_element(self, ids: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """(digest, hint) of those claim elements the store has, in any order."""

    async def content_states(self, digests: Sequence[bytes]) -> Mapping[bytes, object]:
        """Those of these digests that are here and cannot be served, each with the reason."""

    async def lost_count(self) -> int:
        """How many entries have lost content."""

    async def lost_elements(self, limit: int, after: int = 0) -> Sequence[LostElement]:
        """Entries with lost content, in the order of their sequence numbers above `after`."""


class ContentDoor(Protocol):
    """The one door."""

    async def publish_many(self, items: Sequence[Publication]) -> list[Outcome | Problem]:
        """One outcome per item, in order."""

    async def publish_claims(self, claims: Sequence[tuple[bytes, bytes]]) -> list[Problem | None]:
        """Write (digest, hint) on entries that are here; the fault of each, if it has one."""


class ElementIndex(Protocol):
    """The range index of the node."""

    @property
    def elements(self) -> Sized:
        """Everything inserted so far."""

    async def catch_up(self) -> None:
        """Take in everything that is committed."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """The elements of an interest under a session key."""

    def covers(self, interest: Interest, channel_no: int) -> bool:
        """Whether the entries of a channel belong to an interest, but for its window."""

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements are here, whatever their channel: bool[n]."""

    def root_of_ids(
        self,
        interest: Interest,
        policy: int = 0,
        added: U8 | None = None,
        removed: U8 | None = None,
    ) -> bytes | None:
        """The unkeyed root of an interest's elements, where there is one.

        `added` and `removed`, u8[n, 32]: elements that one session sets aside.
        """


class LocalSide(Protocol):
    """This node, as a session sees it."""

    @property
    def store(self) -> ContentStore:
        """Where content is read."""

    @property
    def door(self) -> ContentDoor:
        """Where content enters."""

    @property
    def index(self) -> ElementIndex:
        """Where elements are compared."""

    @property
    def nonce_secret(self) -> bytes:
        """By this a node recognises the nonces of its own sessions."""

    @property
    def limits(self) -> Limits:
        """The bounds of this node."""
