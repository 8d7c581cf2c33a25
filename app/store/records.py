"""What the store gives and takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.entries import Entry, Token, Watermark

Position = tuple[int | str, ...]
"""Where a reader is: log `(lamport, message ID, digest in hex)`, arrival and feed a `Token`,
hint `(rank, number, seq)`, gaps `(message ID,)`, ancestors `(lamport, message ID, digest in hex,
waiting, late)` with sets of sequence numbers in the form that `app.store.ancestors` writes."""


@dataclass(frozen=True, slots=True)
class MetId:
    """The ID of a sync message: met, without content. A gap of this ID is marked from now on."""

    channel_id: str
    message_id: str


@dataclass(frozen=True, slots=True)
class NewClaim:
    """A hint claim that this write made; `element_id` is its 32-byte element."""

    claim_no: int
    hint: bytes
    element_id: bytes


class ContentState(Enum):
    """Why the content of an entry that is here cannot be served."""

    LOST = "lost"
    """Its frame was read twice and was wrong each time, or is gone."""


class LostElement(NamedTuple):
    """An entry whose content is lost, as reconciliation knows it: its order value and digest."""

    order: int
    digest: bytes
    channel_no: int
    seq: int


class Rechecked(NamedTuple):
    """Sequence numbers of frames that were read again: those that are lost, and those that are not."""

    lost: frozenset[int]
    whole: frozenset[int]


class Verified(NamedTuple):
    """Frames that were read to see whether they are whole: how many, the last one's sequence number."""

    frames_count: int
    lost_count: int
    last_seq: int


class WriteResult(NamedTuple):
    """What became of one entry of a group. `received_at_ms` is that of the first copy.

    `is_mended`: the entry was here, its content was lost, and is here again.
    """

    seq: int
    channel_no: int
    received_at_ms: int
    is_new: bool
    new_claims: tuple[NewClaim, ...] = ()
    is_mended: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The entry served by ID, and the digests of all matches, the served one first (capped)."""

    entry: Entry
    variants: tuple[bytes, ...]

    @property
    def variants_count(self) -> int:
        """How many matches are listed."""
        return len(self.variants)


class LeftOut(NamedTuple):
    """An entry that belongs into an answer and is not in it, because its content is lost."""

    seq: int
    arrival_sum: int
    channel_id: str
    message_id: str
    digest: bytes

    @property
    def place(self) -> Token:
        """The entry's place in arrival order."""
        return Token(self.seq, self.arrival_sum)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Answers to many keys (IDs as str, hints as bytes). A key with several matches has several
    rows; `not_examined` keys did not fit the reply; `left_out` are matches whose content is lost."""

    found: list[tuple[str | bytes, Entry | bytes]]
    missing: list[str | bytes]
    not_examined: list[str | bytes]
    left_out: list[tuple[str | bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in order; `next` is None at the end.

    `last`: the place of the last entry of the page, left out or not; None where there is none.
    """

    entries: list[Entry]
    next: Position | None
    left_out: tuple[LeftOut, ...] = ()
    last: Token | None = None

    @property
    def last_seq(self) -> int | None:
        """The sequence number of `last`."""
        return None if self.last is None else self.last.number


@dataclass(frozen=True, slots=True)
class AncestorPage:
    """Part of a causal closure, every message after its causes; `next` is None at the end.

    `missing`: IDs that it names and that are not here, cannot be read (`left_out` has the digests of
    those), or did not fit into `next`: what comes before them is not followed. `met_as_sync`: those of
    them that sync messages bore.
    """

    entries: list[Entry]
    missing: list[str]
    next: Position | None
    left_out: tuple[bytes, ...] = ()
    met_as_sync: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HintPage:
    """Ranked candidates. Under claim spam a page may be short, even empty, and go on."""

    entries: list[Entry]
    next: Position | None
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """A channel and what it holds."""

    channel_id: str
    channel_no: int
    count: int
    lamport_first: int
    lamport_last: int


@dataclass(frozen=True, slots=True)
class Gap:
    """A message that histories name and the store lacks, with the hints they give (capped).

    `met_as_sync`: a sync message with this ID came by. Version 1 participants name theirs in later
    histories; but anybody can send one with any ID, so that the gap stays.
    """

    message_id: str
    hints: tuple[bytes, ...]
    met_as_sync: bool = False

    @property
    def shown_bytes(self) -> int:
        """What it takes in an answer: the ID, and hints in hexadecimal and quotes."""
        return len(self.message_id.encode()) + sum(2 * len(hint) + 3 for hint in self.hints)


@dataclass(frozen=True, slots=True)
class GapPage:
    """Gaps by message ID as UTF-8 bytes."""

    gaps: list[Gap]
    next: Position | None


@dataclass(frozen=True, slots=True)
class ElementColumns:
    """Elements in the order they were committed: orders u64[n], ids u8[n, 32], groups u32[n].

    The sums are those of the arrival chains at `seq` and `claim_no`; None without rows of that kind.
    """

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]
    groups: NDArray[np.uint32]
    seq: int
    claim_no: int
    entry_sum: int | None
    claim_sum: int | None

    def read_up_to(self, before: Watermark) -> Watermark:
        """The places up to which a reader got who had read up to `before`."""
        entries, claims = before
        if self.entry_sum is not None:
            entries = Token(self.seq, self.entry_sum)
        if self.claim_sum is not None:
            claims = Token(self.claim_no, self.claim_sum)
        return Watermark(entries, claims)

    @property
    def next(self) -> tuple[int, int]:
        """What to go on with."""
        return self.seq, self.claim_no
