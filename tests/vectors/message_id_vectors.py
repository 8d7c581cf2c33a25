"""Writes docs/vectors/message_id.json: `python -m tests.vectors.message_id_vectors`."""

import json
from pathlib import Path
from typing import Any

from sdstore.sds.model import (
    SHA256_CONTENT,
    SHA256_MESSAGE,
    HistoryEntry,
    Message,
    message_id_layout,
)

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "vectors" / "message_id.json"

HISTORY = (HistoryEntry("before"), HistoryEntry("ü", b"\0hint", "bob"))

MESSAGES: list[tuple[str, str, str, int | None, bytes]] = [  # channel, sender, timestamp, content
    ("all fields", "chan", "alice", 1763000000123, b"hello"),
    ("another sender", "chan", "bob", 1763000000123, b"hello"),
    ("a later message", "chan", "alice", 1763000000124, b"hello"),
    ("another channel", "other", "alice", 1763000000123, b"hello"),
    ("other content", "chan", "alice", 1763000000123, b"hell"),
    ("the border between channel and sender moved", "chana", "lice", 1763000000123, b"hello"),
    ("no channel and no sender", "", "", 0, b"hello"),
    ("no timestamp", "chan", "alice", None, b"hello"),
    ("a negative timestamp", "chan", "alice", -899724011, b"hello"),
    ("the largest timestamp", "chan", "alice", 2**63 - 1, b"hello"),
    ("strings that are not ASCII", "Kanal ü", "αβγδε 😀", 1, "grüße".encode()),
    ("content of zeros", "chan", "alice", 1, bytes(300)),
]


def document() -> str:
    """The whole file."""
    vectors = [
        _vector(name, Message("", channel, sender, lamport, content=content))
        for name, channel, sender, lamport, content in MESSAGES
    ]
    message = Message("", "chan", "alice", 1763000000123, HISTORY, content=b"hello")
    vectors.append(_vector("a causal history", message))
    return json.dumps({"vectors": vectors}, indent=2, ensure_ascii=False) + "\n"


def _vector(name: str, message: Message) -> dict[str, Any]:
    lamport = message.lamport_timestamp
    return {
        "name": name,
        "channel_id": message.channel_id,
        "sender_id": message.sender_id,
        "lamport_timestamp": None if lamport is None else str(lamport),
        "causal_history": [
            {
                "message_id": entry.message_id,
                "retrieval_hint_hex": entry.retrieval_hint.hex(),
                "sender_id": entry.sender_id,
            }
            for entry in message.causal_history
        ],
        "content_hex": message.content.hex(),
        "layout_hex": message_id_layout(message).hex(),
        SHA256_MESSAGE.name: SHA256_MESSAGE.make(message),
        SHA256_CONTENT.name: SHA256_CONTENT.make(message),
    }


if __name__ == "__main__":
    DOCUMENTED.write_text(document(), encoding="utf-8")
