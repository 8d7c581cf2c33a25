"""Writes docs/vectors/recon.json: `python -m tests.recon.vectors`. A test compares it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from recon.bounds import pack_bounds
from recon.hashing import ElementHasher, short_ids_of, summary_hash
from recon.initiator import Initiator
from recon.interest import Interest
from recon.ranges import ALL_ORDERS
from recon.responder import respond
from recon.session import SessionHeader, interest_hash, responder_nonce
from recon.varint import pack_counts, pack_pairs_of_bits, pack_varints
from tests.support.recon_talk import columns_of, index_of

PATH = Path(__file__).resolve().parents[2] / "docs" / "vectors" / "recon.json"
INTEREST = Interest.make(
    channels=frozenset({"b", "a/1"}), prefixes=frozenset({"/x/", "a"}), lamport_from=-5
)


def elements(count: int) -> list[tuple[int, bytes]]:
    """Made-up elements: every third order is shared by three, ids are visible patterns."""
    return [
        ((1 << 63) + place // 3 * 1000, bytes((place * 7 + byte * 13) % 256 for byte in range(32)))
        for place in range(count)
    ]


def header() -> SessionHeader:
    """The vectors' session."""
    nonce = responder_nonce(b"node secret of 32 bytes or more..", b"pair", 19_000)
    return SessionHeader(bytes(range(16)), nonce, INTEREST.encode())


def session() -> list[dict[str, str]]:
    """All messages of one session."""
    everything = elements(4000)
    lacking = (everything[777::1000], everything[123::800])
    views = [
        index_of(e for e in everything if e not in some).view(header().key(), None, ALL_ORDERS)
        for some in lacking
    ]
    initiator = Initiator(views[0], header(), seed=1)
    said = []
    while (request := initiator.next_request()) is not None:
        response = respond(views[1], request.message)
        initiator.receive(request.request_id, response)
        raws = (request.message.SerializeToString(), response.SerializeToString())
        said.append({"request": raws[0].hex(), "response": raws[1].hex()})
    return said


def hashes() -> list[dict[str, str | int]]:
    """Hashes and short ids of some elements."""
    orders, ids = columns_of(elements(4))
    low, high = ElementHasher(header().key()).lanes(orders, ids)
    return [
        {
            "order": str(order),
            "id": raw.tobytes().hex(),
            "low": str(a),
            "high": str(b),
            "short_id": name.tobytes().hex(),
        }
        for order, raw, a, b, name in zip(
            orders.tolist(), ids, low.tolist(), high.tolist(), short_ids_of(low), strict=True
        )
    ]


def vectors() -> dict[str, object]:
    """Everything in the file."""
    rows = hashes()
    low, high = (sum(int(row[lane]) for row in rows) % 2**64 for lane in ("low", "high"))
    steps = [0, 1, 96 << 30, 5 << 28, 2**63]
    heads = [0, 0x4100000000000000, 0x4142000000000000, 0x4142430000000000, 0]
    counts = [250, 251, 250, 0, 1 << 20]
    return {
        "interest": {
            "bytes": INTEREST.encode().hex(),
            "hash": interest_hash(INTEREST.encode()).hex(),
        },
        "session": {
            "initiator_nonce": header().initiator_nonce.hex(),
            "responder_nonce": header().responder_nonce.hex(),
            "key": header().key().raw.hex(),
        },
        "elements": rows,
        "summary_of_the_elements": {"count": len(rows), "hash": summary_hash(low, high, 4).hex()},
        "varints": {
            "numbers": ["0", "127", "128", str(2**64 - 1)],
            "bytes": pack_varints(np.array([0, 127, 128, 2**64 - 1], np.uint64)).hex(),
        },
        "counts": {"counts": counts, "bytes": pack_counts(np.array(counts, np.int64)).hex()},
        "kinds": {
            "kinds": [0, 1, 2, 3, 2],
            "bytes": pack_pairs_of_bits(np.array([0, 1, 2, 3, 2], np.uint8)).hex(),
        },
        "bounds": {
            "steps": [str(step) for step in steps],
            "heads": [f"{head:016x}" for head in heads],
            "bytes": pack_bounds(np.array(steps, np.uint64), np.array(heads, np.uint64)).hex(),
        },
        "conversation": session(),
    }


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
