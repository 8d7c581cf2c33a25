"""The published negentropy vectors, held against the engine and read without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from recon.errors import RemoteProtocolError
from recon.negentropy import Negentropy
from tests.recon.negentropy.vectors import PATH, records_at, text
from tests.support.negentropy import Record, records_of

VECTORS = json.loads(PATH.read_text(encoding="utf-8"))
Place = tuple[int, bytes]
INFINITY: Place = (2**64, b"")


def test_the_file_holds_what_the_engine_speaks() -> None:
    assert PATH.read_text(encoding="utf-8") == text()


def test_another_version_is_answered_by_ours() -> None:
    row = VECTORS["other_version"]
    answer = Negentropy(records_of([])).respond(bytes.fromhex(row["message"]))
    assert answer.hex() == row["response"]


@pytest.mark.parametrize("row", VECTORS["refused"], ids=[row["why"] for row in VECTORS["refused"]])
def test_what_breaks_the_format_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        Negentropy(records_of(records_at({"count": 9, "without": []}))).respond(
            bytes.fromhex(row["bytes"])
        )
    assert refusal.value.code == row["code"]


@pytest.mark.parametrize("row", VECTORS["talks"], ids=[row["name"] for row in VECTORS["talks"]])
def test_every_range_says_what_its_sender_holds(row: dict[str, Any]) -> None:
    sides = [sorted(records_at(row[name])) for name in ("client", "server")]
    for turn, raw in enumerate(row["messages"]):
        message, mine = bytes.fromhex(raw), sides[turn % 2]
        assert len(message) <= (row["frame_limit"] or len(message))
        for lower, upper, mode, said in ranges_of(message):
            some = [each for each in mine if lower <= each < upper]
            if mode == 1:
                assert said == fingerprint(some)
            elif mode == 2:
                assert said == b"".join(raw for _, raw in some)


def test_what_is_learned_is_what_differs() -> None:
    for row in VECTORS["talks"]:
        client, server = (
            set(range(row[name]["count"])) - set(row[name]["without"])
            for name in ("client", "server")
        )
        assert row["have"] == sorted(client - server)
        assert row["need"] == sorted(server - client)


def fingerprint(some: list[Record]) -> bytes:
    total = sum(int.from_bytes(raw, "little") for _, raw in some) % 2**256
    return sha256(total.to_bytes(32, "little") + varint(len(some))).digest()[:16]


def varint(number: int) -> bytes:
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.append(number & 0x7F | 0x80)
    return bytes(reversed(digits))


def test_numbers_have_the_most_significant_digit_first() -> None:
    assert all(varint(int(number)).hex() == raw for number, raw in VECTORS["varints"])


def ranges_of(message: bytes) -> Iterator[tuple[Place, Place, int, bytes]]:
    """(lower, upper, mode, payload): timestamps are steps plus one, 0 stands for infinity."""
    at, timestamp, lower = 1, 0, (0, b"")
    while at < len(message):
        step, at = read_varint(message, at)
        size, at = read_varint(message, at)
        timestamp += step - 1
        upper = (timestamp, message[at : at + size]) if step else INFINITY
        mode, at = read_varint(message, at + size)
        length = 16 if mode == 1 else 0
        if mode == 2:
            count, at = read_varint(message, at)
            length = 32 * count
        yield lower, upper, mode, message[at : at + length]
        at, lower = at + length, upper


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    while True:
        byte, at = message[at], at + 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
