"""Message IDs that can be made and checked, and the Waku message hash."""

import hashlib
import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from sdstore.sds.codec import decode, encode
from sdstore.sds.model import (
    SCHEMES,
    SHA256_MESSAGE,
    Dialect,
    HistoryEntry,
    Message,
    Rank,
    rank,
    verifies,
    waku_message_hash,
)
from tests.support.sds_vectors import load
from tests.vectors.message_id_vectors import DOCUMENTED, document

CONTENT_HASH = hashlib.sha256(b"hello").hexdigest()
VECTORS = json.loads(DOCUMENTED.read_text(encoding="utf-8"))["vectors"]


@pytest.mark.parametrize(
    ("message_id", "expected"),
    [
        (CONTENT_HASH, True),
        ("0x" + CONTENT_HASH, True),
        ("0x0x" + CONTENT_HASH, False),
        (CONTENT_HASH.upper(), False),
        (CONTENT_HASH[:-1], False),
        (hashlib.sha256(b"other").hexdigest(), False),
        ("msg1", False),
    ],
)
def test_an_id_verifies_if_it_is_the_hash_of_the_content(message_id: str, expected: bool) -> None:
    message = Message(message_id, "c", lamport_timestamp=1, content=b"hello")
    assert verifies(message) is expected
    assert SCHEMES["sha256-content"].follows(message) is expected


def our_message() -> Message:
    message = Message("", "chan", "alice", 7, (HistoryEntry("before"),), content=b"ok")
    return replace(message, message_id=SHA256_MESSAGE.make(message))


@pytest.mark.parametrize(
    "change",
    [
        {"channel_id": "chan2"},
        {"sender_id": "bob"},
        {"lamport_timestamp": 8},
        {"lamport_timestamp": None},
        {"content": b"OK"},
        {"causal_history": ()},
        {"causal_history": (HistoryEntry("before", b"hint"),)},
        {"causal_history": (HistoryEntry("before", b"", "bob"),)},
    ],
    ids=str,
)
def test_an_id_of_ours_verifies_only_for_the_message_it_was_made_for(
    change: dict[str, Any],
) -> None:
    message = our_message()
    assert SHA256_MESSAGE.follows(message)
    assert verifies(message)
    assert not verifies(replace(message, **change))


def test_an_id_of_ours_verifies_in_lower_case_and_without_a_prefix_only() -> None:
    message = our_message()
    assert not verifies(replace(message, message_id=message.message_id.upper()))
    assert not verifies(replace(message, message_id="0x" + message.message_id))


def test_an_id_proves_all_of_a_message_or_its_content_or_nothing() -> None:
    message = our_message()
    assert rank(message) is Rank.WHOLE
    assert rank(replace(message, message_id=hashlib.sha256(b"ok").hexdigest())) is Rank.CONTENT
    assert rank(replace(message, message_id="m1")) is Rank.UNKNOWN


def test_the_same_content_said_twice_has_two_ids_in_our_scheme_and_one_in_js_wakus() -> None:
    ids = {
        name: {scheme.make(Message("", "chan", "alice", at, content=b"ok")) for at in (1, 2)}
        for name, scheme in SCHEMES.items()
    }
    assert {name: len(found) for name, found in ids.items()} == {
        "sha256-message": 2,
        "sha256-content": 1,
    }


@pytest.mark.parametrize("dialect", [Dialect.V2, Dialect.NIM, Dialect.CHAT_PROTO])
def test_an_id_of_ours_verifies_after_a_frame_in_each_dialect_that_has_senders(
    dialect: Dialect,
) -> None:
    assert verifies(decode(encode(our_message(), dialect))[0])


def test_the_published_vectors_are_what_their_script_writes() -> None:
    assert DOCUMENTED.read_text(encoding="utf-8") == document()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_published_ids_follow_from_the_documented_layout(vector: dict[str, Any]) -> None:
    """Computed from docs/identity.md alone, without the code under test."""
    layout = b"sdstore message id v2"
    for field in ("channel_id", "sender_id"):
        layout += struct.pack(">I", len(vector[field].encode())) + vector[field].encode()
    lamport, content = vector["lamport_timestamp"], bytes.fromhex(vector["content_hex"])
    layout += bytes(9) if lamport is None else b"\1" + struct.pack(">q", int(lamport))
    layout += struct.pack(">I", len(content)) + content
    layout += struct.pack(">I", len(vector["causal_history"]))
    for entry in vector["causal_history"]:
        hint = bytes.fromhex(entry["retrieval_hint_hex"])
        for value in (entry["message_id"].encode(), hint, entry["sender_id"].encode()):
            layout += struct.pack(">I", len(value)) + value
    assert vector["layout_hex"] == layout.hex()
    assert vector["sha256-message"] == hashlib.sha256(layout).hexdigest()
    assert vector["sha256-content"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("vector", load("waku_message_hash")["vectors"], ids=lambda v: v["name"])
def test_the_waku_hash_agrees_with_the_published_vectors(vector: dict[str, Any]) -> None:
    meta = vector["meta_hex"]
    found = waku_message_hash(
        vector["pubsub_topic"],
        bytes.fromhex(vector["payload_hex"]),
        vector["content_topic"],
        None if meta is None else bytes.fromhex(meta),
        vector["timestamp_ns"],
    )
    assert found.hex() == vector["message_hash"]


def test_a_timestamp_beyond_int64_is_refused() -> None:
    with pytest.raises(OverflowError):
        waku_message_hash("p", b"", "c", None, 2**63)
