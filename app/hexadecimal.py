"""Hexadecimal text in requests, files and arguments."""

from __future__ import annotations

from base64 import b64decode
from binascii import unhexlify

from app.errors import Code, Problem

_BASE64_CHARS_MAX = 344  # a hint of 256 bytes
_STANDARD_ALPHABET = str.maketrans("-_", "+/")


def hex_bytes(text: str, what: str) -> bytes:
    """The bytes of hexadecimal digits; `invalid_hex` for any other text."""
    try:
        return unhexlify(text)
    except ValueError:
        raise Problem(Code.INVALID_HEX, f"{what} must be hexadecimal, two digits a byte") from None


def hint_bytes(text: str, what: str) -> bytes:
    """The bytes of a retrieval hint; `invalid_hex`, which explains base64 hints, for any other text."""
    try:
        return unhexlify(text)
    except ValueError:
        raise Problem(Code.INVALID_HEX, f"{what} {not_a_hex_hint(text)}") from None


def not_a_hex_hint(text: str) -> str:
    """The error text for a hint; if it could be base64, the text contains the hexadecimal form."""
    wrong = "must be hexadecimal, two digits a byte; hints are base64 only inside a message in JSON"
    digits = text.translate(_STANDARD_ALPHABET).rstrip("=")
    try:
        if 0 < len(digits) <= _BASE64_CHARS_MAX:
            hint = b64decode(digits + "=" * (-len(digits) % 4), validate=True)
            return f"{wrong}; if this is base64, write {hint.hex()}"
    except ValueError:
        pass
    return wrong
