"""Message IDs that can be checked, and the Waku message hash."""

import hashlib
from typing import Any

import pytest

from sdstore.sds.model import Message
from sdstore.sds.schemes import SCHEMES, verifies
from sdstore.sds.waku import waku_message_hash
from tests.support.sds_vectors import load

CONTENT_HASH = hashlib.sha256(b"hello").hexdigest()


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
    assert SCHEMES["sha256-content"](message) is expected


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
