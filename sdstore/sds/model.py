"""The SDS message that every dialect decodes into, its rules, and what identifies it: digests, hashes, ID schemes.

docs/identity.md has the layouts of what is hashed, and specifies the schemes of message IDs, which are computed
from the message, made by writers and verified by readers.
"""

import enum
import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from blake3 import blake3

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


VOTE = b"\0sds-vote\0"
"""What the content of a vote begins with. Its sender and its time follow, for IDs that hash the content alone."""


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

    @property
    def is_vote(self) -> bool:
        """Whether an indexer wrote it only to show what it has seen (docs/ordering.md): do not show it to people."""
        return self.content.startswith(VOTE)


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


# ---- digests and hashes

ENTRY_CONTEXT = "sdstore entry digest v1"
CLAIM_CONTEXT = "sdstore hint claim v1"

_ENTRY_HASHER = blake3(derive_key_context=ENTRY_CONTEXT)
_CLAIM_HASHER = blake3(derive_key_context=CLAIM_CONTEXT)
_U32 = struct.Struct(">I").pack
_LAMPORT = struct.Struct(">Bq").pack


def entry_digest(message: Message) -> bytes:
    """The 32-byte identity of the entry: a hash of what its author wrote for the log.

    Bloom filter, repair request, dialect and unknown fields are not hashed, so a rebroadcast with
    a newer filter is the same entry.
    """
    hasher = _ENTRY_HASHER.copy()
    hasher.update(entry_layout(message))
    return hasher.digest()


def entry_layout(message: Message) -> bytes:
    """The bytes that `entry_digest` hashes; different entries give different bytes."""
    message_id, channel_id = message.message_id.encode(), message.channel_id.encode()
    sender_id, lamport = message.sender_id.encode(), message.lamport_timestamp
    parts = [
        _U32(len(message_id)),
        message_id,
        _U32(len(channel_id)),
        channel_id,
        _U32(len(sender_id)),
        sender_id,
        _LAMPORT(0, 0) if lamport is None else _LAMPORT(1, lamport),
        _U32(len(message.causal_history)),
    ]
    for entry in message.causal_history:
        message_id, hint = entry.message_id.encode(), entry.retrieval_hint
        sender_id = entry.sender_id.encode()
        parts += _U32(len(message_id)), message_id, _U32(len(hint)), hint
        parts += _U32(len(sender_id)), sender_id
    parts += _U32(len(message.content)), message.content
    return b"".join(parts)


def frame_hash(frame: bytes) -> bytes:
    """BLAKE3 of a frame, 32 bytes. Equal digests do not mean equal frames."""
    return blake3(frame).digest()


def claim_id(digest: bytes, hint: bytes) -> bytes:
    """The 32-byte element under which "`hint` leads to the entry `digest`" is reconciled."""
    hasher = _CLAIM_HASHER.copy()
    hasher.update(digest)
    hasher.update(hint)
    return hasher.digest()


# ---- message ID schemes

_SHA256_HEX_DIGITS = 64
_HEX_DIGITS = frozenset("0123456789abcdef")
_DOMAIN = b"sdstore message id v2"


@dataclass(frozen=True)
class IdScheme:
    """A way to compute a message ID.

    `make(message)` returns the ID for a message, whose present ID it ignores. The sender must be the
    one that the frame carries: "" in version 1, which has no field for it. `follows(message)` says
    whether the message has the ID that the scheme gives it.
    """

    name: str
    make: Callable[[Message], str]
    follows: Callable[[Message], bool]


# ---- sha256-message: channel, sender, timestamp, content and causal history


def message_id_layout(message: Message) -> bytes:
    """The bytes that `sha256-message` hashes: different for messages that differ in these fields."""
    channel, sender = message.channel_id.encode(), message.sender_id.encode()
    lamport, content = message.lamport_timestamp, message.content
    parts = [
        _DOMAIN,
        _U32(len(channel)),
        channel,
        _U32(len(sender)),
        sender,
        _LAMPORT(0, 0) if lamport is None else _LAMPORT(1, lamport),
        _U32(len(content)),
        content,
        _U32(len(message.causal_history)),
    ]
    for entry in message.causal_history:
        message_id, hint = entry.message_id.encode(), entry.retrieval_hint
        sender = entry.sender_id.encode()
        parts += _U32(len(message_id)), message_id, _U32(len(hint)), hint
        parts += _U32(len(sender)), sender
    return b"".join(parts)


def _make_of_message(message: Message) -> str:
    return hashlib.sha256(message_id_layout(message)).hexdigest()


def _is_of_message(message: Message) -> bool:
    message_id = message.message_id
    return len(message_id) == _SHA256_HEX_DIGITS and message_id == _make_of_message(message)


# ---- sha256-content: js-waku's


def _make_of_content(message: Message) -> str:
    return hashlib.sha256(message.content).hexdigest()


def _is_of_content(message: Message) -> bool:
    digest_hex = message.message_id.removeprefix("0x")
    return len(digest_hex) == _SHA256_HEX_DIGITS and digest_hex == _make_of_content(message)


SHA256_MESSAGE = IdScheme("sha256-message", _make_of_message, _is_of_message)
"""SHA-256 over channel, sender, Lamport timestamp, content and causal history."""

SHA256_CONTENT = IdScheme("sha256-content", _make_of_content, _is_of_content)
"""SHA-256 over the content alone. Equal contents have equal IDs, so the second one is lost."""

SCHEMES: Mapping[str, IdScheme] = {
    scheme.name: scheme for scheme in (SHA256_MESSAGE, SHA256_CONTENT)
}
"""All schemes by name."""


class Rank(enum.IntEnum):
    """What the ID of a message proves about it. Of two messages with one ID the higher one counts."""

    UNKNOWN = 0
    """Nothing: the ID follows no known scheme. It can be that of any message."""
    CONTENT = 1
    """The content, but not who wrote it, when, and after which messages."""
    WHOLE = 2
    """Content, sender, timestamp and causal history are those that the ID was made for."""


def rank(message: Message) -> Rank:
    """What the message ID proves. An ID does not show its scheme, so all known ones are tried."""
    if _is_of_content(message):
        return Rank.CONTENT
    return Rank.WHOLE if _is_of_message(message) else Rank.UNKNOWN


def is_disproved(message: Message) -> bool:
    """Whether the ID has the form of `sha256-message` and is not the ID of this message: a copy of another one.

    The order of a channel ignores it, and indexers do not name it. The bytes that an ID of ours is made from
    are no content of a message with the other scheme: that would be a copy that verifies.
    """
    message_id = message.message_id
    if len(message_id) != _SHA256_HEX_DIGITS or not _HEX_DIGITS.issuperset(message_id):
        return False
    proves = rank(message)
    return proves is Rank.UNKNOWN or (
        proves is Rank.CONTENT and message.content.startswith(_DOMAIN)
    )


def verifies(message: Message) -> bool:
    """Whether the message ID follows any known scheme."""
    return rank(message) is not Rank.UNKNOWN


# ---- Waku's hash


def waku_message_hash(
    pubsub_topic: str,
    payload: bytes,
    content_topic: str,
    meta: bytes | None,
    timestamp_ns: int,
) -> bytes:
    """SHA-256 over the envelope, 32 bytes; `meta` absent and empty are the same.

    Raises `OverflowError` for a timestamp outside of int64, which Waku cannot carry.
    """
    envelope = (
        pubsub_topic.encode(),
        payload,
        content_topic.encode(),
        meta or b"",
        timestamp_ns.to_bytes(8, "big", signed=True),
    )
    return hashlib.sha256(b"".join(envelope)).digest()
