"""The records that ingest, the store, the index and the HTTP layer exchange."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sdstore.sds.model import Dialect, Message

if TYPE_CHECKING:  # the verbs that talk to a node start without NumPy
    import numpy as np
    from numpy.typing import NDArray

Numbers = TypeVar("Numbers", int, "NDArray[np.uint32]")

# A channel has two groups of elements in the range index: its entries and the hint claims on them.


def group_of_entries(channel_no: Numbers) -> Numbers:
    """The group of a channel's entries, or of many channels'."""
    return 2 * channel_no


def group_of_claims(channel_no: Numbers) -> Numbers:
    """The group of the hint claims on a channel's entries, or of many channels'."""
    return 2 * channel_no + 1


def channel_of_group(group: int) -> int:
    """The number of the channel that a group belongs to."""
    return group // 2


class ClaimSource(IntEnum):
    """Where a hint claim was learned; smaller ranks first in a look-up (design: computed first)."""

    COMPUTED = 0
    PUBLISHER = 1
    HISTORY = 2


class OutcomeKind(StrEnum):
    """The outcome of an accepted message."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that a retrieval hint leads to the entry it is published with."""

    hint: bytes
    source: ClaimSource


class Outline(NamedTuple):
    """The columns of a stored entry that do not need its content."""

    channel_id: str
    message_id: str
    lamport_timestamp: int


class NewEntry(NamedTuple):
    """A content message that passed all checks, ready to be written.

    `digest` and `frame_hash` are 32 bytes; `id_verifies` says that the message ID matches the
    content under a known scheme, which ranks it first among variants. `without_quarantine` and
    `is_from_peer`: see `Publication`.
    """

    frame: bytes
    frame_hash: bytes
    digest: bytes
    message: Message
    dialect: Dialect
    id_verifies: bool
    claims: tuple[Claim, ...] = ()
    without_quarantine: bool = False
    is_from_peer: bool = False


class MetId(NamedTuple):
    """The ID of a sync message, which has no content. From now on a gap with this ID is marked.

    `named`: the IDs in its history, for which it may be the only witness.
    """

    channel_id: str
    message_id: str
    named: tuple[str, ...] = ()


class NewClaim(NamedTuple):
    """A hint claim that a write added; `element_id` is its 32-byte element."""

    claim_no: int
    hint: bytes
    element_id: bytes


class WriteResult(NamedTuple):
    """The outcome of writing one entry. `received_at_ms` is the arrival of the first copy.

    `is_mended`: the store had the entry with lost content, and now has the content again.
    `hints_dropped`: hints that came with it and were not kept, because the entry has the most. `is_retired`:
    the store keeps no content of it.
    """

    seq: int
    channel_no: int
    received_at_ms: int
    is_new: bool
    new_claims: tuple[NewClaim, ...] = ()
    is_mended: bool = False
    hints_dropped: int = 0
    is_retired: bool = False


class Outcome(NamedTuple):
    """The outcome of one published message; `digest` is None for relayed messages.

    `hints_dropped`: its hints that were not kept.
    """

    kind: OutcomeKind
    message_id: str
    channel_id: str
    digest: bytes | None = None
    hints_dropped: int = 0


class Token(NamedTuple):
    """A place in arrival order: a number, and the chain's sum of the last row up to it (signed 64 bits).

    It is valid in a database whose counter has reached the number and whose sum there is equal.
    """

    number: int
    sum: int


START = Token(0, 0)
"""Before the first row; valid in every database."""


class Watermark(NamedTuple):
    """The last number of each counter, with the sum there; all rows up to it are committed."""

    entries: Token
    claims: Token


NOTHING_ARRIVED = Watermark(START, START)


class Entry(NamedTuple):
    """A stored message. `received_at_ms`: this store's clock, since the epoch.

    `arrival_sum`: the sum of the arrival chain (`app.store.arrivals`). `filter_is_lost`: the frame is
    without the bloom filter that it came with, which could not be read from the disk.
    """

    seq: int
    channel_id: str
    message_id: str
    lamport_timestamp: int
    digest: bytes
    frame_hash: bytes
    dialect: Dialect
    received_at_ms: int
    frame: bytes
    arrival_sum: int
    filter_is_lost: bool = False

    @property
    def place(self) -> Token:
        """Its place in arrival order."""
        return Token(self.seq, self.arrival_sum)
