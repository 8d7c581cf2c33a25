"""Cursors: where to go on, as an opaque token that names its kind and its database.

A token is base64url over JSON `[kind, database, *position]`. It is no secret and carries no right;
it is read strictly, so that a token of another kind, database or maker is an error and never a
wrong place to go on.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from enum import StrEnum

import orjson

from app.entries import START, Token
from app.errors import Code, Problem
from app.store.records import Position
from app.store.store import Store

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


_Check = Callable[[object], bool]
_IS_DIGEST = re.compile("[0-9a-f]{64}").fullmatch


def _number(value: object) -> bool:
    # A bool is an int too.
    return type(value) is int and INT64_MIN <= value <= INT64_MAX


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _digest(value: object) -> bool:
    return isinstance(value, str) and _IS_DIGEST(value) is not None


# Number and sum of the arrival chains of entries and of claims, when the token was made.
_WATERMARK = (_number,) * 4

_SHAPES: dict[CursorKind, tuple[_Check, ...]] = {
    # Lamport timestamp, message ID, digest in hex
    CursorKind.LOG: (_number, _text, _digest),
    # sequence number, sum of the arrival chain there
    CursorKind.ARRIVAL: (_number, _number),
    # channel ID
    CursorKind.CHANNELS: (_text,),
    # rank, number within the rank, sequence number; the watermark
    CursorKind.HINT: (_number, _number, _number, *_WATERMARK),
    # message ID
    CursorKind.GAPS: (_text,),
    # Lamport timestamp, message ID, digest in hex, sequence numbers still to be taken, taken late;
    # the watermark
    CursorKind.ANCESTORS: (_number, _text, _digest, _text, _text, *_WATERMARK),
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

    async def read_arrival(self, store: Store, token: str | None) -> Token | None:
        """The place of an ARRIVAL token; None for no token.

        `cursor_rolled_back` where the database's history up to it is not the one it was made from.
        """
        position = self.read(CursorKind.ARRIVAL, token)
        if position is None:
            return None
        place = Token(int(position[0]), int(position[1]))
        await _require_history(store, place)
        return place

    async def write_walk(self, kind: CursorKind, store: Store, position: Position) -> str:
        """The token of a position that holds numbers of rows: it names the history that numbered them."""
        entries, claims = await store.arrived()
        return self.write(kind, *position, *entries, *claims)

    async def read_walk(self, kind: CursorKind, store: Store, token: str | None) -> Position | None:
        """What `write_walk` wrote; None for no token. `cursor_rolled_back` as `read_arrival`."""
        fields = self.read(kind, token)
        if fields is None:
            return None
        position, numbers = fields[: -len(_WATERMARK)], map(int, fields[-len(_WATERMARK) :])
        seq, entry_sum, claim_no, claim_sum = numbers
        await _require_history(store, Token(seq, entry_sum), Token(claim_no, claim_sum))
        return position

    def _fields(self, token: str) -> list[int | str]:
        try:
            raw = urlsafe_b64decode(token + "=" * (-len(token) % 4))
            fields = orjson.loads(raw)
        except (ValueError, Base64Error):
            fields = None
        # Nothing deep is written again: nesting that can be read may be too deep to be written.
        if (
            not isinstance(fields, list)
            or len(fields) < 2
            or not all(isinstance(field, int | str) for field in fields)
            or self._rewritten(fields) != token
        ):
            raise Problem(Code.INVALID_CURSOR, "this token was not made by a store")
        return fields

    @staticmethod
    def _rewritten(fields: list[int | str]) -> str:
        return urlsafe_b64encode(orjson.dumps(fields)).rstrip(b"=").decode()


def _fits(position: list[int | str], shape: tuple[_Check, ...]) -> bool:
    return len(position) == len(shape) and all(
        fits(value) for fits, value in zip(shape, position, strict=True)
    )


async def _require_history(store: Store, entries: Token, claims: Token = START) -> None:
    if not await store.holds(entries, claims):
        raise Problem(
            Code.CURSOR_ROLLED_BACK,
            "this database went back to an older copy, or is another copy, and its history up to "
            "this cursor is not the one that was read: start again without a cursor, or with one "
            "from before that copy was made",
        )
