"""Writes docs/vectors/digest.json: `python -m tests.vectors.digest_vectors`."""

import json
import random
from pathlib import Path
from typing import Any

from sdstore.sds.codec import DECODER_VERSION, decode, encode
from sdstore.sds.digest import (
    CLAIM_CONTEXT,
    ENTRY_CONTEXT,
    claim_id,
    entry_digest,
    entry_layout,
    frame_hash,
    order_value,
)
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN, Dialect, HistoryEntry, Message

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "vectors" / "digest.json"
SEED = 109
RANDOM_ENTRIES = 12


def document() -> str:
    """The whole file."""
    digests = [entry_digest(message) for _, message, _ in _named_messages()]
    vectors = {
        "decoder_version": DECODER_VERSION,
        "entry_context": ENTRY_CONTEXT,
        "claim_context": CLAIM_CONTEXT,
        "entries": [_entry_vector(*named) for named in _named_messages()],
        "claims": [_claim_vector(digests[0], hint) for hint in (b"", b"\0", b"hint", bytes(32))],
        "order_values": [
            {"lamport": str(lamport), "order_value": str(order_value(lamport))}
            for lamport in (LAMPORT_MIN, -1, 0, 1, LAMPORT_MAX)
        ],
    }
    return json.dumps(vectors, indent=2, ensure_ascii=False) + "\n"


def _named_messages() -> list[tuple[str, Message, Dialect]]:
    first = Message("id", "chan", "alice", 7, content=b"hello")
    history = (HistoryEntry("before", b"\x01\x02", "bob"), HistoryEntry("earlier"))
    plain = (HistoryEntry("before"), HistoryEntry("earlier"))
    return [
        ("no history", first, Dialect.V2),
        ("history with hint and sender", Message("id", "chan", "alice", 7, history), Dialect.V2),
        ("bloom and repair do not enter", _rebroadcast(first), Dialect.V2),
        ("chat_proto, the same entry", first, Dialect.CHAT_PROTO),
        ("nim, the same entry", first, Dialect.NIM),
        ("plain IDs as history", Message("id", "", "", -5, plain, content=b"x"), Dialect.V1),
        ("ephemeral", Message("идент-→★", "0", content=b"x"), Dialect.V2),
        ("timestamp 0", Message("id", "0", lamport_timestamp=0, content=b"x"), Dialect.V2),
        *(_random_message(number) for number in range(RANDOM_ENTRIES)),
    ]


def _rebroadcast(message: Message) -> Message:
    return Message(
        message.message_id,
        message.channel_id,
        message.sender_id,
        message.lamport_timestamp,
        bloom_filter=b"\xff" * 8,
        repair_request=(HistoryEntry("wanted"),),
        content=message.content,
    )


def _random_message(number: int) -> tuple[str, Message, Dialect]:
    rng = random.Random(SEED + number)
    history = tuple(
        HistoryEntry(rng.randbytes(32).hex(), rng.randbytes(rng.choice([0, 32])), f"p{i}")
        for i in range(rng.randrange(4))
    )
    message = Message(
        rng.randbytes(32).hex(),
        f"/app/{number}/chat/proto",
        rng.choice(["", "alice"]),
        rng.choice([LAMPORT_MIN, LAMPORT_MAX, rng.getrandbits(63)]),
        history,
        content=rng.randbytes(rng.randrange(1, 40)),
    )
    return f"random {number}", message, rng.choice([Dialect.V2, Dialect.NIM])


def _entry_vector(name: str, message: Message, dialect: Dialect) -> dict[str, Any]:
    frame = encode(message, dialect)
    return {
        "name": name,
        "dialect": decode(frame)[1].label,
        "frame_hex": frame.hex(),
        "layout_hex": entry_layout(message).hex(),
        "digest": entry_digest(message).hex(),
        "frame_hash": frame_hash(frame).hex(),
    }


def _claim_vector(digest: bytes, hint: bytes) -> dict[str, str]:
    return {
        "digest": digest.hex(),
        "hint_hex": hint.hex(),
        "claim_id": claim_id(digest, hint).hex(),
    }


if __name__ == "__main__":
    DOCUMENTED.write_text(document(), encoding="utf-8")
