"""SDS messages and participants. Sans-I/O: no clock, no network, no disk.

docs/python.md shows how to build messages; docs/identity.md specifies their meaning;
docs/participant.md describes the participant.
"""

from sdstore.errors import LocalProtocolError, WrongTypeError
from sdstore.sds.bloom import Form
from sdstore.sds.codec import DECODER_VERSION, decode, encode, from_json, to_json
from sdstore.sds.effects import (
    Acknowledged,
    Broadcast,
    Deliver,
    Effect,
    Ephemeral,
    GaveUp,
    Lost,
    Missing,
    PossiblyAcknowledged,
    Publish,
    Rejected,
    Save,
    Status,
    StoredRemotely,
)
from sdstore.sds.log import LogEntry, MemoryLog, ParticipantLog, Reference, Staged
from sdstore.sds.model import (
    LAMPORT_MAX,
    LAMPORT_MIN,
    SHA256_CONTENT,
    SHA256_MESSAGE,
    Dialect,
    HistoryEntry,
    IdScheme,
    Kind,
    Message,
    MessageError,
    Rank,
    claim_id,
    entry_digest,
    frame_hash,
    rank,
    verifies,
    waku_message_hash,
)
from sdstore.sds.options import LamportUnit, OnLost, ParticipantOptions
from sdstore.sds.outgoing import Acknowledgement, SentState
from sdstore.sds.participant import Participant
from sdstore.sds.repair import RepairOptions

__all__ = [
    "DECODER_VERSION",
    "LAMPORT_MAX",
    "LAMPORT_MIN",
    "SHA256_CONTENT",
    "SHA256_MESSAGE",
    "Acknowledged",
    "Acknowledgement",
    "Broadcast",
    "Deliver",
    "Dialect",
    "Effect",
    "Ephemeral",
    "Form",
    "GaveUp",
    "HistoryEntry",
    "IdScheme",
    "Kind",
    "LamportUnit",
    "LocalProtocolError",
    "LogEntry",
    "Lost",
    "MemoryLog",
    "Message",
    "MessageError",
    "Missing",
    "OnLost",
    "Participant",
    "ParticipantLog",
    "ParticipantOptions",
    "PossiblyAcknowledged",
    "Publish",
    "Rank",
    "Reference",
    "Rejected",
    "RepairOptions",
    "Save",
    "SentState",
    "Staged",
    "Status",
    "StoredRemotely",
    "WrongTypeError",
    "claim_id",
    "decode",
    "encode",
    "entry_digest",
    "frame_hash",
    "from_json",
    "rank",
    "to_json",
    "verifies",
    "waku_message_hash",
]
