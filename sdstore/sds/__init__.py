"""SDS messages: the model, the wire dialects, identity. Sans-I/O: no clock, no network, no disk.

docs/python.md shows how to build messages; docs/identity.md specifies their meaning.
"""

from sdstore.sds.codec import DECODER_VERSION, decode, encode
from sdstore.sds.digest import claim_id, entry_digest, frame_hash
from sdstore.sds.jsonform import from_json, to_json
from sdstore.sds.model import (
    LAMPORT_MAX,
    LAMPORT_MIN,
    Dialect,
    HistoryEntry,
    Kind,
    Message,
    MessageError,
)
from sdstore.sds.schemes import verifies
from sdstore.sds.waku import waku_message_hash

__all__ = [
    "DECODER_VERSION",
    "LAMPORT_MAX",
    "LAMPORT_MIN",
    "Dialect",
    "HistoryEntry",
    "Kind",
    "Message",
    "MessageError",
    "claim_id",
    "decode",
    "encode",
    "entry_digest",
    "frame_hash",
    "from_json",
    "to_json",
    "verifies",
    "waku_message_hash",
]
