"""Hashes that identify an entry, a frame and a hint claim; docs/identity.md has the layouts."""

import struct

from blake3 import blake3

from sdstore.sds.model import Message

ENTRY_CONTEXT = "sdstore entry digest v1"
CLAIM_CONTEXT = "sdstore hint claim v1"

_ENTRY_HASHER = blake3(derive_key_context=ENTRY_CONTEXT)
_CLAIM_HASHER = blake3(derive_key_context=CLAIM_CONTEXT)
_U32 = struct.Struct(">I").pack
_LAMPORT = struct.Struct(">Bq").pack


def entry_digest(message: Message) -> bytes:
    """The 32-byte identity of the entry: a hash of what its author wrote for the log.

    Bloom filter, repair request, dialect and unknown fields are not hashed, so a rebroadcast with
    a newer filter is the same entry.
    """
    hasher = _ENTRY_HASHER.copy()
    hasher.update(entry_layout(message))
    return hasher.digest()


def entry_layout(message: Message) -> bytes:
    """The bytes that `entry_digest` hashes; different entries give different bytes."""
    message_id, channel_id = message.message_id.encode(), message.channel_id.encode()
    sender_id, lamport = message.sender_id.encode(), message.lamport_timestamp
    parts = [
        _U32(len(message_id)),
        message_id,
        _U32(len(channel_id)),
        channel_id,
        _U32(len(sender_id)),
        sender_id,
        _LAMPORT(0, 0) if lamport is None else _LAMPORT(1, lamport),
        _U32(len(message.causal_history)),
    ]
    for entry in message.causal_history:
        message_id, hint = entry.message_id.encode(), entry.retrieval_hint
        sender_id = entry.sender_id.encode()
        parts += _U32(len(message_id)), message_id, _U32(len(hint)), hint
        parts += _U32(len(sender_id)), sender_id
    parts += _U32(len(message.content)), message.content
    return b"".join(parts)


def frame_hash(frame: bytes) -> bytes:
    """BLAKE3 of a frame, 32 bytes. Equal digests do not mean equal frames."""
    return blake3(frame).digest()


def claim_id(digest: bytes, hint: bytes) -> bytes:
    """The 32-byte element under which "`hint` leads to the entry `digest`" is reconciled."""
    hasher = _CLAIM_HASHER.copy()
    hasher.update(digest)
    hasher.update(hint)
    return hasher.digest()
