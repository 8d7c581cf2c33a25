"""Cursors: where to go on, as an opaque token that names its kind and its database.

A token is base64url over JSON `[kind, database, *position]`. It is no secret and carries no right;
it is read strictly, so that a token of another kind, database or maker is an error and never a
wrong place to go on.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from enum import StrEnum

import orjson

from app.errors import Code, Problem
from app.store.records import Position

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
TOKEN_CHARACTERS_MAX = 9_000
"""The longest token but one: a message ID of 1 KiB of control characters, escaped, in base64."""

ANCESTORS_TOKEN_CHARACTERS_MAX = 200_000
"""The longest of all: twice 4,096 differences of sequence numbers up to 2^63."""


class CursorKind(StrEnum):
    """What a position counts in; the value stands in the token."""

    LOG = "log"
    ARRIVAL = "arrival"
    CHANNELS = "channels"
    HINT = "hint"
    GAPS = "gaps"
    ANCESTORS = "ancestors"


_SHAPES: dict[CursorKind, tuple[type, ...]] = {
    # Lamport timestamp, message ID, digest in hex
    CursorKind.LOG: (int, str, str),
    # sequence number
    CursorKind.ARRIVAL: (int,),
    # channel ID
    CursorKind.CHANNELS: (str,),
    # rank, number within the rank, sequence number
    CursorKind.HINT: (int, int, int),
    # message ID
    CursorKind.GAPS: (str,),
    # Lamport timestamp, message ID, digest in hex, sequence numbers still to be taken, taken late
    CursorKind.ANCESTORS: (int, str, str, str, str),
}


class Cursors:
    """Reads and writes the cursors of one database."""

    def __init__(self, database_id: str) -> None:
        self._database = database_id

    def write(self, kind: CursorKind, *position: int | str) -> str:
        """The token of a position."""
        raw = orjson.dumps([kind, self._database, *position])
        return urlsafe_b64encode(raw).rstrip(b"=").decode()

    def read(self, kind: CursorKind, token: str | None) -> Position | None:
        """The position of a token; None for no token. `invalid_cursor`, `foreign_cursor`."""
        if token is None:
            return None
        is_walk = kind is CursorKind.ANCESTORS
        most = ANCESTORS_TOKEN_CHARACTERS_MAX if is_walk else TOKEN_CHARACTERS_MAX
        found_kind, database, *position = self._fields(token[:most])
        if found_kind != kind or not _fits(position, _SHAPES[kind]):
            raise Problem(Code.INVALID_CURSOR, f"this is no {kind} cursor")
        if database != self._database:
            raise Problem(Code.FOREIGN_CURSOR, "start again without a cursor")
        return tuple(position)

    def _fields(self, token: str) -> list[int | str]:
        try:
            raw = urlsafe_b64decode(token + "=" * (-len(token) % 4))
            fields = orjson.loads(raw)
        except (ValueError, Base64Error):
            fields = None
        if not isinstance(fields, list) or len(fields) < 2 or self._rewritten(fields) != token:
            raise Problem(Code.INVALID_CURSOR, "this token was not made by a store")
        return fields

    @staticmethod
    def _rewritten(fields: list[int | str]) -> str:
        return urlsafe_b64encode(orjson.dumps(fields)).rstrip(b"=").decode()


def _fits(position: list[int | str], shape: tuple[type, ...]) -> bool:
    if [type(value) for value in position] != list(shape):
        return False
    return all(
        INT64_MIN <= value <= INT64_MAX if isinstance(value, int) else "\0" not in value
        for value in position
    )
