"""Hexadecimal text in requests and files."""

from __future__ import annotations

from binascii import unhexlify

from app.errors import Code, Problem


def hex_bytes(text: str, what: str) -> bytes:
    """The bytes that hexadecimal digits stand for, else `invalid_hex`."""
    try:
        return unhexlify(text)
    except ValueError:
        raise Problem(Code.INVALID_HEX, f"{what} is hexadecimal, two digits a byte") from None
