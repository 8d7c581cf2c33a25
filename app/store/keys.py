"""64-bit keys of strings and hints, which the store's indexes hold instead of long text.

The hash is keyed with a secret of the database, so no one can make values collide on purpose. Every
look-up compares the full value as well, so a collision costs time but never gives a wrong answer.
"""

from __future__ import annotations

from hashlib import blake2b

_KEY_BYTES = 8


class Keys:
    """The keyed hash of one database."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._hasher = blake2b(digest_size=_KEY_BYTES, key=secret)

    def __reduce__(self) -> tuple[type[Keys], tuple[bytes]]:
        # Hashers cannot be pickled.
        return Keys, (self.secret,)

    def of_text(self, text: str) -> int:
        """Signed 64-bit key of a string's UTF-8 bytes."""
        return self.of_bytes(text.encode())

    def of_met(self, channel_id: str, message_id: str) -> int:
        """Key of a row of `met_ids`; no ID holds U+0000, so the pair is unambiguous."""
        return self.of_text(f"{channel_id}\0{message_id}")

    def of_bytes(self, value: bytes) -> int:
        """Signed 64-bit key, as BIGINT columns hold it."""
        hasher = self._hasher.copy()
        hasher.update(value)
        return int.from_bytes(hasher.digest(), "big", signed=True)
