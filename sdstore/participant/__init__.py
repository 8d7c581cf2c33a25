"""SDS participants of programs: they talk through store nodes and live in a SQLite file.

`ParticipantDriver` runs participants (`sdstore.sds.Participant`) on stores; `ParticipantFile` keeps them.
docs/python.md shows how they are used.
"""

from sdstore.client.errors import StoreError
from sdstore.errors import SdstoreError
from sdstore.participant.channelorder import ChannelOrder
from sdstore.participant.database import ParticipantFileError
from sdstore.participant.driver import ParticipantChannel, ParticipantDriver
from sdstore.participant.events import (
    BackfillProgress,
    ChannelEvent,
    Connection,
    EventsDropped,
    PublishedAgain,
    SavedAgain,
    Unpublished,
    Unsaved,
)
from sdstore.participant.file import ParticipantFile
from sdstore.participant.mvds import AsyncMvdsSession, MvdsSession
from sdstore.participant.options import DriverError, DriverOptions
from sdstore.participant.persistence import MemoryPersistence, Persistence
from sdstore.sds.effects import (
    Acknowledged,
    Deliver,
    Ephemeral,
    GaveUp,
    Lost,
    PossiblyAcknowledged,
    Rejected,
    Status,
    StoredRemotely,
)

__all__ = [
    "Acknowledged",
    "AsyncMvdsSession",
    "BackfillProgress",
    "ChannelEvent",
    "ChannelOrder",
    "Connection",
    "Deliver",
    "DriverError",
    "DriverOptions",
    "Ephemeral",
    "EventsDropped",
    "GaveUp",
    "Lost",
    "MemoryPersistence",
    "MvdsSession",
    "ParticipantChannel",
    "ParticipantDriver",
    "ParticipantFile",
    "ParticipantFileError",
    "Persistence",
    "PossiblyAcknowledged",
    "PublishedAgain",
    "Rejected",
    "SavedAgain",
    "SdstoreError",
    "Status",
    "StoreError",
    "StoredRemotely",
    "Unpublished",
    "Unsaved",
]
