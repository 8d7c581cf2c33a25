"""MVDS, the Minimum Viable Data Synchronization protocol (2/MVDS): a node without I/O or clock."""

from sdstore.mvds.node import (
    Acknowledged,
    Deliver,
    Effect,
    GaveUp,
    Ignored,
    Messages,
    Node,
    Options,
    Send,
    StateFull,
)
from sdstore.mvds.state import MemoryState, Record, RecordType, State
from sdstore.mvds.wire import (
    ID_BYTES,
    LocalProtocolError,
    Message,
    MvdsError,
    Numbering,
    Payload,
    RemoteProtocolError,
    decode,
    encode,
)

__all__ = [
    "ID_BYTES",
    "Acknowledged",
    "Deliver",
    "Effect",
    "GaveUp",
    "Ignored",
    "LocalProtocolError",
    "MemoryState",
    "Message",
    "Messages",
    "MvdsError",
    "Node",
    "Numbering",
    "Options",
    "Payload",
    "Record",
    "RecordType",
    "RemoteProtocolError",
    "Send",
    "State",
    "StateFull",
    "decode",
    "encode",
]
