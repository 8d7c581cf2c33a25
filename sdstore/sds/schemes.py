"""Message ID schemes: IDs computed from the message, made by writers and verified by readers.

docs/identity.md specifies them. The first one is the default of `Participant`.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sdstore.sds.model import Message

_SHA256_HEX_DIGITS = 64
_DOMAIN = b"sdstore message id v1"
_U32 = struct.Struct(">I").pack
_LAMPORT = struct.Struct(">Bq").pack


@dataclass(frozen=True)
class IdScheme:
    """A way to compute a message ID.

    `make(channel_id, sender_id, lamport_timestamp, content)` returns the ID of a new message. The
    sender is the one that the frame carries: "" in version 1, which has no field for it.
    `follows(message)` says whether the ID of a message is the one that the scheme gives it.
    """

    name: str
    make: Callable[[str, str, int | None, bytes], str]
    follows: Callable[[Message], bool]


def message_id_layout(
    channel_id: str, sender_id: str, lamport_timestamp: int | None, content: bytes
) -> bytes:
    """The bytes that the scheme `sha256-message` hashes; different arguments give different bytes."""
    channel, sender = channel_id.encode(), sender_id.encode()
    return b"".join(
        (
            _DOMAIN,
            _U32(len(channel)),
            channel,
            _U32(len(sender)),
            sender,
            _LAMPORT(0, 0) if lamport_timestamp is None else _LAMPORT(1, lamport_timestamp),
            _U32(len(content)),
            content,
        )
    )


# ---- sha256-message: channel, sender, timestamp and content


def _make_of_message(
    channel_id: str, sender_id: str, lamport_timestamp: int | None, content: bytes
) -> str:
    layout = message_id_layout(channel_id, sender_id, lamport_timestamp, content)
    return hashlib.sha256(layout).hexdigest()


def _is_of_message(message: Message) -> bool:
    message_id = message.message_id
    return len(message_id) == _SHA256_HEX_DIGITS and message_id == _make_of_message(
        message.channel_id, message.sender_id, message.lamport_timestamp, message.content
    )


# ---- sha256-content: js-waku's


def _make_of_content(_channel: str, _sender: str, _lamport: int | None, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_of_content(message: Message) -> bool:
    digest_hex = message.message_id.removeprefix("0x")
    return (
        len(digest_hex) == _SHA256_HEX_DIGITS
        and hashlib.sha256(message.content).hexdigest() == digest_hex
    )


SHA256_MESSAGE = IdScheme("sha256-message", _make_of_message, _is_of_message)
"""SHA-256 over channel, sender, Lamport timestamp and content."""

SHA256_CONTENT = IdScheme("sha256-content", _make_of_content, _is_of_content)
"""SHA-256 over the content alone. Equal contents have equal IDs, so the second one is lost."""

SCHEMES: Mapping[str, IdScheme] = {
    scheme.name: scheme for scheme in (SHA256_MESSAGE, SHA256_CONTENT)
}
"""All schemes by name."""


def verifies(message: Message) -> bool:
    """Whether the message ID follows any known scheme."""
    return _is_of_content(message) or _is_of_message(message)
