"""Message ID schemes: IDs computed from the message, made by writers and verified by readers.

docs/identity.md specifies them. The first one is the default of `Participant`.
"""

import enum
import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sdstore.sds.model import Message

_SHA256_HEX_DIGITS = 64
_HEX_DIGITS = frozenset("0123456789abcdef")
_DOMAIN = b"sdstore message id v2"
_U32 = struct.Struct(">I").pack
_LAMPORT = struct.Struct(">Bq").pack


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
