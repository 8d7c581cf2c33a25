"""The SDS message that every dialect decodes into, and the rules for messages."""

import enum
from dataclasses import dataclass

from sdstore.errors import SdstoreError

LAMPORT_MIN = -(2**31)
"""The lowest sign-extended int32, which version 1 and 2 senders produce on overflow."""

LAMPORT_MAX = 2**63 - 1


class MessageError(SdstoreError, ValueError):
    """A frame, a JSON object or a `Message` that is not a valid SDS message."""


class Kind(enum.Enum):
    """The kind of a message; presence of content and of a Lamport timestamp determines it."""

    CONTENT = "content"
    SYNC = "sync"
    EPHEMERAL = "ephemeral"


class Dialect(enum.IntEnum):
    """The encoding of a frame. The numbers are stored; they never change.

    `V2` is version 2 and the latest specification, which share their wire format.
    """

    V1 = 1
    V2 = 2
    CHAT_PROTO = 3
    NIM = 4

    @property
    def label(self) -> str:
        """The name used in JSON and in headers."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A reference to another message; empty hint or sender means unknown."""

    message_id: str
    retrieval_hint: bytes = b""
    sender_id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One SDS message; unset fields are empty bytes and strings.

    `lamport_timestamp` is `None` or from `LAMPORT_MIN` to `LAMPORT_MAX`; 0 is a value.
    """

    message_id: str
    channel_id: str
    sender_id: str = ""
    lamport_timestamp: int | None = None
    causal_history: tuple[HistoryEntry, ...] = ()
    bloom_filter: bytes = b""
    repair_request: tuple[HistoryEntry, ...] = ()
    content: bytes = b""

    @property
    def kind(self) -> Kind:
        """The four-way rule; `MessageError` for a message with neither content nor timestamp."""
        if self.lamport_timestamp is None:
            if self.content:
                return Kind.EPHEMERAL
            raise MessageError(
                "no_content_no_lamport", "the message has neither content nor a Lamport timestamp"
            )
        return Kind.CONTENT if self.content else Kind.SYNC


def validated(message: Message) -> Message:
    """`message` itself if it keeps the rules of every dialect; else raises `MessageError`."""
    if not message.message_id:
        raise MessageError("missing_message_id", "the message has no ID")
    if "\0" in f"{message.message_id}{message.channel_id}{message.sender_id}":
        raise MessageError("nul_character", "a message, channel or sender ID contains U+0000")
    lamport = message.lamport_timestamp
    if lamport is None:
        _ = message.kind  # raises for a message without content and timestamp
    elif not LAMPORT_MIN <= lamport <= LAMPORT_MAX:
        raise MessageError(
            "lamport_out_of_range", f"lamport_timestamp {lamport} is not in -2^31 to 2^63-1"
        )
    if message.causal_history:
        _check_entries(message.causal_history)
    if message.repair_request:
        _check_entries(message.repair_request)
    return message


def _check_entries(entries: tuple[HistoryEntry, ...]) -> None:
    for entry in entries:
        message_id = entry.message_id
        if not message_id:
            raise MessageError("missing_message_id", "a history entry has no message ID")
        if "\0" in message_id or "\0" in entry.sender_id:
            raise MessageError("nul_character", "an ID in a history entry contains U+0000")
