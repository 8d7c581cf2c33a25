"""Cursors are read strictly: another kind, database or maker is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Code, Problem
from app.http.channels import INT64_MAX, INT64_MIN, CursorKind, Cursors

SECRET = bytes(32)
OURS = Cursors("database-one", SECRET)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=100)


def outcome(kind: CursorKind, token: str) -> Code | None:
    try:
        OURS.read(kind, token)
    except Problem as problem:
        return problem.code
    return None


def refusal(kind: CursorKind, token: str) -> Code:
    code = outcome(kind, token)
    assert code is not None, "the token was taken"
    return code


@given(st.integers(INT64_MIN, INT64_MAX), TEXT, st.binary(min_size=32, max_size=32))
def test_a_position_comes_back_from_its_token(lamport: int, message_id: str, digest: bytes) -> None:
    position = lamport, message_id, digest.hex()
    token = OURS.write(CursorKind.LOG, *position)
    assert OURS.read(CursorKind.LOG, token) == position
    assert refusal(CursorKind.ARRIVAL, token) is Code.INVALID_CURSOR


def test_the_longest_position_fits_a_token() -> None:
    longest = "\x01" * 1_024
    token = OURS.write(CursorKind.GAPS, longest)
    assert OURS.read(CursorKind.GAPS, token) == (longest,)


def test_a_cursor_of_another_database_is_foreign() -> None:
    token = Cursors("database-two", bytes(31) + b"x").write(CursorKind.ARRIVAL, 7, 8)
    assert refusal(CursorKind.ARRIVAL, token) is Code.FOREIGN_CURSOR


@given(st.text(max_size=60))
def test_any_other_text_is_invalid(text: str) -> None:
    assert refusal(CursorKind.ARRIVAL, text) is Code.INVALID_CURSOR


@given(st.data())
def test_a_changed_character_never_gives_another_kind_of_fault(data: st.DataObject) -> None:
    token = OURS.write(CursorKind.LOG, 5, "id", "ab" * 32)
    at = data.draw(st.integers(0, len(token) - 1))
    changed = token[:at] + data.draw(st.characters()) + token[at + 1 :]
    assert outcome(CursorKind.LOG, changed) in (None, Code.INVALID_CURSOR, Code.FOREIGN_CURSOR)


@pytest.mark.parametrize(
    "position",
    [
        (),
        (1, "id"),
        (2**63, "id", "ab"),
        ("1", "id", "ab"),
        (1, "id", "ab", 3),
        (True, "id", "ab"),
        (None, "id", "ab"),
        (1, ["id"], "ab"),
    ],
)
def test_a_position_of_another_shape_is_invalid(position: tuple[object, ...]) -> None:
    token = OURS.write(CursorKind.LOG, *position)  # type: ignore[arg-type]
    assert refusal(CursorKind.LOG, token) is Code.INVALID_CURSOR
