"""Writes docs/vectors/negentropy.json: `python -m tests.recon.negentropy.vectors`."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from recon.negentropy import Negentropy
from recon.negentropy.wire import encode_varint
from tests.support.negentropy import Record, records_of

PATH = Path(__file__).resolve().parents[3] / "docs" / "vectors" / "negentropy.json"
FRAME_BYTES = 4096
COUNT = 600


def record(number: int) -> Record:
    """Three records share a timestamp."""
    return number // 3 * 1000, sha256(number.to_bytes(8, "little")).digest()


def side(count: int, without: range = range(0)) -> dict[str, Any]:
    """The first `count` records but for some, by number."""
    return {"count": count, "without": list(without)}


def records_at(one: dict[str, Any]) -> list[Record]:
    """The records of a side."""
    return [record(number) for number in range(one["count"]) if number not in one["without"]]


def _talk(
    name: str, client: dict[str, Any], server: dict[str, Any], frame_bytes: int = 0
) -> dict[str, Any]:
    near = Negentropy(records_of(records_at(client)), frame_bytes)
    far = Negentropy(records_of(records_at(server)), frame_bytes)
    numbers = {record(number)[1]: number for number in range(COUNT)}
    messages, have, need = [], set(), set()
    message: bytes | None = near.initiate()
    while message is not None:
        messages += [message, far.respond(message)]
        message, have_ids, need_ids = near.reconcile(messages[-1])
        have |= {numbers[each] for each in have_ids}
        need |= {numbers[each] for each in need_ids}
    return {
        "name": name,
        "frame_limit": frame_bytes,
        "client": client,
        "server": server,
        "messages": [each.hex() for each in messages],
        "have": sorted(have),
        "need": sorted(need),
    }


def vectors() -> dict[str, Any]:
    """Everything in the file."""
    numbers = [0, 127, 128, 2**64 - 1]
    all_, half = side(COUNT), side(COUNT, range(0, COUNT, 2))
    return {
        "record": {
            "timestamp": "number // 3 * 1000",
            "id": "SHA-256 of the number, 8 bytes little-endian",
        },
        "varints": [[str(each), encode_varint(each).hex()] for each in numbers],
        "talks": [
            _talk("nothing here, nothing there", side(0), side(0)),
            _talk("an empty client", side(0), side(5)),
            _talk("equal", all_, all_),
            _talk("both lack a few", side(COUNT, range(7, COUNT, 200)), side(COUNT - 3)),
            _talk("frames of 4,096 bytes", half, all_, FRAME_BYTES),
        ],
        "refused": [
            {"why": why, "bytes": raw.hex(), "code": "negentropy_malformed"} for why, raw in _BAD
        ],
        "other_version": {"message": "62", "response": "61"},
    }


_BAD = (
    ("nothing", b""),
    ("a mode that does not exist", b"\x61\0\0\3"),
    ("a fingerprint cut off", b"\x61\0\0\1" + bytes(15)),
    ("a list cut off", b"\x61\0\0\2\2" + bytes(32)),
    ("a bound without its prefix", b"\x61\1\2\0"),
    ("a prefix of 33 bytes", b"\x61\1\x21" + bytes(33) + b"\0"),
    ("bounds that run backwards", b"\x61\x05\0\0\1\1\0\0\0"),
    ("a number with a leading zero digit", b"\x61\x80\1\0\0"),
    ("a number above 64 bits", b"\x61\x82" + b"\x80" * 8 + b"\0\0\0"),
)


def text() -> str:
    """The file."""
    return json.dumps(vectors(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
