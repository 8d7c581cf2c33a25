"""Message ID schemes that a reader can verify: IDs computed from the message."""

import hashlib
from collections.abc import Callable, Mapping

from sdstore.sds.model import Message

_SHA256_HEX_DIGITS = 64


def _sha256_of_content(message: Message) -> bool:
    digest_hex = message.message_id.removeprefix("0x")
    return (
        len(digest_hex) == _SHA256_HEX_DIGITS
        and hashlib.sha256(message.content).hexdigest() == digest_hex
    )


SCHEMES: Mapping[str, Callable[[Message], bool]] = {
    # js-waku: lower-case hex of SHA-256 over the content alone, with or without "0x".
    "sha256-content": _sha256_of_content,
}
"""Scheme names, each with a check whether a message follows the scheme."""


def verifies(message: Message) -> bool:
    """Whether the message ID follows any known scheme."""
    return any(follows(message) for follows in SCHEMES.values())
