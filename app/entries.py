"""The records that travel between the ingest door, the store, the index and the HTTP layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from sdstore.sds.model import Dialect, Message


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


class Outcome(NamedTuple):
    """What became of one published message; `digest` is None for relayed messages."""

    kind: OutcomeKind
    message_id: str
    channel_id: str
    digest: bytes | None = None


class Entry(NamedTuple):
    """What the store keeps of a message. `received_at_ms`: this store's clock, since the epoch."""

    seq: int
    channel_id: str
    message_id: str
    lamport_timestamp: int
    digest: bytes
    frame_hash: bytes
    dialect: Dialect
    received_at_ms: int
    frame: bytes
