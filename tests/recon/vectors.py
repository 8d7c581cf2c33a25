"""Writes docs/vectors/recon.json: `python -m tests.recon.vectors`. A test compares it.

What the engine says is written down; tests/recon/plain.py reads it without the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from recon.agreement import Interest, interest_hash
from recon.codec import (
    implied_counts,
    pack_bounds,
    pack_counts,
    pack_pairs_of_bits,
    pack_varints,
    part_sizes,
)
from recon.hashing import ElementHasher, short_ids_of, summary_hashes
from tests.recon.vector_content import content, refused_items
from tests.recon.vector_news import news
from tests.recon.vector_refusals import refused_interests, refused_requests, refused_responses
from tests.recon.vector_sets import HEADER, INTEREST, UNIVERSES, elements_of, side
from tests.recon.vector_talks import fetches, talks
from tests.support.recon_talk import columns_of

PATH = Path(__file__).resolve().parents[2] / "docs" / "vectors" / "recon.json"
INTERESTS = (
    INTEREST,
    Interest.make(everything=True),
    Interest.make(everything=True, lamport_from=0, lamport_to=100),
    Interest.make(channels=frozenset({"", "a", "b", "é"}), prefixes=frozenset({"/x/y"})),
    Interest.make(channels=frozenset({"c"}), lamport_to=-5),
)


def interests() -> dict[str, Any]:
    """Canonical bytes and names, what two have in common, and what is not canonical."""
    return {
        "canonical": [
            {
                "all": one.everything,
                "channels": one.channels,
                "prefixes": one.prefixes,
                "lamport_from": one.lamport_from,
                "lamport_to": one.lamport_to,
                "bytes": one.encode().hex(),
                "name": interest_hash(one.encode()).hex(),
            }
            for one in INTERESTS
        ],
        "mutual": [
            {
                "ours": one.encode().hex(),
                "theirs": other.encode().hex(),
                "mutual": one.intersect(other).encode().hex(),
                "is_empty": one.intersect(other).is_empty,
            }
            for place, one in enumerate(INTERESTS)
            for other in INTERESTS[place + 1 :]
        ],
        "refused": refused_interests(),
    }


def hashes() -> dict[str, Any]:
    """Hashes and short ids of some elements, and their summary."""
    orders, ids = columns_of(elements_of(side("many", 4)))
    low, high = ElementHasher(HEADER.key()).lanes(orders, ids)
    rows = [
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
    sums = (lane.sum(keepdims=True, dtype=np.uint64) for lane in (low, high))
    whole = summary_hashes(*sums, np.array([len(rows)]))
    return {"elements": rows, "count": len(rows), "hash": whole.tobytes().hex()}


def columns() -> dict[str, Any]:
    """One column of each sort, and the counts that splits imply."""
    numbers, kinds = [0, 127, 128, 2**64 - 1], [0, 1, 2, 3, 2]
    counts = [250, 251, 250, 0, 1 << 20]
    steps = [0, 1, 96 << 30, 5 << 28, 2**63]
    heads = [0, 0x4100000000000000, 0x4142000000000000, 0x4142430000000000, 0]
    return {
        "varints": {
            "numbers": [str(number) for number in numbers],
            "bytes": pack_varints(np.array(numbers, np.uint64)).hex(),
        },
        "counts": {"counts": counts, "bytes": pack_counts(np.array(counts)).hex()},
        "kinds": {"kinds": kinds, "bytes": pack_pairs_of_bits(np.array(kinds, np.uint8)).hex()},
        "bounds": {
            "steps": [str(step) for step in steps],
            "heads": [f"{head:016x}" for head in heads],
            "bytes": pack_bounds(np.array(steps, np.uint64), np.array(heads, np.uint64)).hex(),
        },
        "bounds_without_steps": {
            "steps": ["0"] * 17,
            "heads": [*["0" * 16] * 16, "8000000000000000"],
            "bytes": pack_bounds(
                np.zeros(17, np.uint64), np.array([0] * 16 + [1 << 63], np.uint64)
            ).hex(),
        },
        "implied_counts": [
            {"count": count, "parts": parts, "phase": phase, "counts": _implied(*case)}
            for case in ((4, 64, 0), (9, 4, 64), (9, 4, 128), (1000, 7, 13))
            for count, parts, phase in (case,)
        ],
    }


def _implied(count: int, parts: int, phase: int) -> list[int]:
    counts = np.array([count])
    return implied_counts(counts, part_sizes(counts, parts), phase).tolist()


def vectors() -> dict[str, Any]:
    """Everything in the file."""
    said = talks()
    return {
        "interests": interests(),
        "session": {
            "initiator_nonce": HEADER.initiator_nonce.hex(),
            "responder_nonce": HEADER.responder_nonce.hex(),
            "interest": HEADER.interest.hex(),
            "key": HEADER.key().raw.hex(),
        },
        "summary": hashes(),
        "columns": columns(),
        "universes": UNIVERSES,
        "talks": said,
        "fetches": fetches(),
        "news": news(),
        "content": content(),
        "refused_items": refused_items(),
        "refused_requests": refused_requests(),
        "refused_responses": {"to": said[0]["name"], "responses": refused_responses(said[0])},
    }


def text() -> str:
    """The file."""
    return json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
