"""The sets of the vectors, as data that any implementation can read."""

from __future__ import annotations

from typing import Any

import blake3

from recon.agreement import Interest, SessionHeader, responder_nonce
from recon.view import View
from tests.support.recon_talk import Element, index_of

INTEREST = Interest.make(
    channels=frozenset({"b", "a/1"}), prefixes=frozenset({"/x/", "a"}), lamport_from=-5
)
HEADER = SessionHeader(
    bytes(range(16)),
    responder_nonce(b"node secret of 32 bytes or more..", b"pair", 19_000),
    INTEREST.encode(),
)
Side = dict[str, Any]


def _twins() -> list[list[str]]:
    """One order value. The heads agree in sixes, so that not every cut is possible."""
    ids = [bytes([7, place // 6] + [0] * 29 + [place]) for place in range(24)]
    return [["5", raw.hex()] for raw in ids]


UNIVERSES: dict[str, Any] = {
    "many": {
        "count": 1200,
        "first_order": str(1 << 63),
        "order_step": 1000,
        "elements_per_order": 3,
        "id": "BLAKE3 of the element's number, 8 bytes little-endian",
    },
    "twins": {"elements": _twins()},
    "alike": {
        "count": 800,
        "first_order": "5",
        "order_step": 0,
        "elements_per_order": 1,
        "id": "8 zero bytes, then the first 24 bytes of such a BLAKE3: no bound separates any two",
        "head": 0,
    },
}


def side(universe: str, count: int, without: range | tuple[int, ...] = ()) -> Side:
    """A set: the first `count` elements of a universe but for some, by number."""
    return {"universe": universe, "count": count, "without": list(without)}


def universe_of(name: str) -> list[Element]:
    """All elements of a universe, by number."""
    rule = UNIVERSES[name]
    if "elements" in rule:
        return [(int(order), bytes.fromhex(raw)) for order, raw in rule["elements"]]
    first, step, alike = int(rule["first_order"]), rule["order_step"], rule["elements_per_order"]
    head = bytes(8) if "head" in rule else b""
    return [
        (first + n // alike * step, (head + blake3.blake3(n.to_bytes(8, "little")).digest())[:32])
        for n in range(rule["count"])
    ]


def elements_of(one: Side) -> list[Element]:
    """The elements of a set."""
    first = universe_of(one["universe"])[: one["count"]]
    return [each for n, each in enumerate(first) if n not in one["without"]]


def view_of(one: Side) -> View:
    """A set under the vectors' session key."""
    return View(index_of(elements_of(one)), HEADER.key())
