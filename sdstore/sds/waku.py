"""The deterministic message hash of 14/WAKU2-MESSAGE, js-waku's retrieval hint."""

import hashlib


def waku_message_hash(
    pubsub_topic: str,
    payload: bytes,
    content_topic: str,
    meta: bytes | None,
    timestamp_ns: int,
) -> bytes:
    """SHA-256 over the envelope, 32 bytes; `meta` absent and empty are the same.

    Raises `OverflowError` for a timestamp outside of int64, which Waku cannot carry.
    """
    envelope = (
        pubsub_topic.encode(),
        payload,
        content_topic.encode(),
        meta or b"",
        timestamp_ns.to_bytes(8, "big", signed=True),
    )
    return hashlib.sha256(b"".join(envelope)).digest()
