"""An attacker's publications: real SDS messages, numbered, all at one Lamport timestamp.

One timestamp keeps the poison between two neighbouring cuts of the key space.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from sdstore.sds.model import ENTRY_CONTEXT, Message, entry_digest, entry_layout

POISON_LAMPORT = 1_700_000_000
_ID_DIGITS = 16


def message(number: int) -> Message:
    """The attacker's message with this number."""
    return Message(
        message_id=f"{number:0{_ID_DIGITS}x}",
        channel_id="town-square",
        sender_id="mallory",
        lamport_timestamp=POISON_LAMPORT,
        content=b"nothing to see here",
    )


def victim() -> Message:
    """The honest message that one store has and the other shall never learn of."""
    return Message(
        message_id="the-victim",
        channel_id="town-square",
        sender_id="alice",
        lamport_timestamp=POISON_LAMPORT,
        content=b"mallory is not to be trusted",
    )


def digests(numbers: range) -> NDArray[np.uint8]:
    """Entry digests u8[n, 32] of numbered messages: `entry_digest` without the objects."""
    blank = f"{0:0{_ID_DIGITS}x}".encode()
    head, _, tail = entry_layout(message(0)).partition(blank)
    start = blake3(head, derive_key_context=ENTRY_CONTEXT)
    raw = bytearray()
    for number in numbers:
        hasher = start.copy()
        hasher.update(b"%016x" % number + tail)
        raw += hasher.digest()
    return np.frombuffer(bytes(raw), dtype=np.uint8).reshape(-1, 32)


def digest_rows(messages: list[Message]) -> NDArray[np.uint8]:
    """Entry digests u8[n, 32] of any messages, by the library itself."""
    raw = b"".join(entry_digest(each) for each in messages)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)
