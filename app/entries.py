"""The records that travel between the ingest door, the store, the index and the HTTP layer."""

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
    """What became of a message that no door refused."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class Claim:
    """A retrieval hint that is said to lead to the entry it is published with."""

    hint: bytes
    source: ClaimSource


class Outline(NamedTuple):
    """What a row tells of an entry that is here, whether its content is lost or not."""

    channel_id: str
    message_id: str
    lamport_timestamp: int


class NewEntry(NamedTuple):
    """A content message that passed the door, ready to be written.

    `digest` and `frame_hash` are 32 bytes; `id_verifies` says that the message ID matches the
    content under a known scheme, which ranks it first among variants.
    """

    frame: bytes
    frame_hash: bytes
    digest: bytes
    message: Message
    dialect: Dialect
    id_verifies: bool
    claims: tuple[Claim, ...] = ()


class MetId(NamedTuple):
    """The ID of a sync message: known, without content. A gap with this ID is marked from now on."""

    channel_id: str
    message_id: str


class NewClaim(NamedTuple):
    """A hint claim that a write made; `element_id` is its 32-byte element."""

    claim_no: int
    hint: bytes
    element_id: bytes


class WriteResult(NamedTuple):
    """The outcome of writing one entry. `received_at_ms` is that of the first copy.

    `is_mended`: the entry was known, its content was lost, and now the store has it again.
    """

    seq: int
    channel_no: int
    received_at_ms: int
    is_new: bool
    new_claims: tuple[NewClaim, ...] = ()
    is_mended: bool = False


class Outcome(NamedTuple):
    """What became of one published message; `digest` is None for relayed messages."""

    kind: OutcomeKind
    message_id: str
    channel_id: str
    digest: bytes | None = None


class Token(NamedTuple):
    """A place in arrival order: a number, and the chain's sum of the last row up to it (signed 64 bits).

    It holds in a database whose counter has reached the number and whose sum there is the same.
    """

    number: int
    sum: int


START = Token(0, 0)
"""Before the first row; holds everywhere."""


class Watermark(NamedTuple):
    """The last number that each counter gave, with the sum there; all rows up to it are committed."""

    entries: Token
    claims: Token


NOTHING_ARRIVED = Watermark(START, START)


class Entry(NamedTuple):
    """What the store keeps of a message. `received_at_ms`: this store's clock, since the epoch.

    `arrival_sum`: that of the arrival chain (`app.store.arrivals`).
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

    @property
    def place(self) -> Token:
        """Where it stands in arrival order."""
        return Token(self.seq, self.arrival_sum)
