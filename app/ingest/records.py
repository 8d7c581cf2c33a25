"""What goes in at the door, and what listeners hear of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from app.entries import NewEntry
from sdstore.sds.model import Dialect, Message

if TYPE_CHECKING:
    # The command line reads publications too, and would wait for numpy.
    from app.store.records import WriteResult


@dataclass(frozen=True, slots=True)
class WakuEnvelope:
    """What a Waku transport wrapped around a frame, its payload. `timestamp_ns` is an int64."""

    pubsub_topic: str
    content_topic: str
    meta: bytes
    timestamp_ns: int


class Publication(NamedTuple):
    """A frame, the hints its publisher gives for it, and the envelope it came in."""

    frame: bytes
    hints: tuple[bytes, ...] = ()
    envelope: WakuEnvelope | None = None


@dataclass(frozen=True, slots=True)
class Relayed:
    """A sync or ephemeral message: passed on to live readers, not stored."""

    frame: bytes
    message: Message
    dialect: Dialect


class Committed(NamedTuple):
    """An entry that is new or has new claims, after its commit."""

    entry: NewEntry
    result: WriteResult
