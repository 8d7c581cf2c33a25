"""SDS participants of programs: they talk through store nodes and live in a SQLite file. Import all from here.

`ParticipantDriver` runs participants (`sdstore.sds.Participant`) on stores; `ParticipantFile` keeps them.
docs/python.md shows how they are used.
"""

from sdstore.client.clients import AsyncStoreClient
from sdstore.client.exchange import ClientOptions, Retry
from sdstore.errors import LocalProtocolError, SdstoreError, StoreError
from sdstore.ordering import Change, OrderingError, Roles
from sdstore.participant.channelorder import ChannelOrder
from sdstore.participant.database import ParticipantFileError
from sdstore.participant.driver import DriverOptions, ParticipantChannel, ParticipantDriver
from sdstore.participant.events import (
    BackfillProgress,
    ChannelEvent,
    Connection,
    DriverError,
    EventsDropped,
    OrderChanged,
    PublishedAgain,
    SavedAgain,
    Unpublished,
    Unsaved,
)
from sdstore.participant.file import ParticipantFile
from sdstore.participant.mvds import AsyncMvdsSession, MvdsSession
from sdstore.participant.persistence import MemoryPersistence, Persistence
from sdstore.participant.stores import BackOff
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
from sdstore.sds.model import Message
from sdstore.sds.options import OnLost, ParticipantOptions
from sdstore.sds.outgoing import Acknowledgement
from sdstore.sds.repair import RepairOptions

__all__ = [
    "Acknowledged",
    "Acknowledgement",
    "AsyncMvdsSession",
    "AsyncStoreClient",
    "BackOff",
    "BackfillProgress",
    "Change",
    "ChannelEvent",
    "ChannelOrder",
    "ClientOptions",
    "Connection",
    "Deliver",
    "DriverError",
    "DriverOptions",
    "Ephemeral",
    "EventsDropped",
    "GaveUp",
    "LocalProtocolError",
    "Lost",
    "MemoryPersistence",
    "Message",
    "MvdsSession",
    "OnLost",
    "OrderChanged",
    "OrderingError",
    "ParticipantChannel",
    "ParticipantDriver",
    "ParticipantFile",
    "ParticipantFileError",
    "ParticipantOptions",
    "Persistence",
    "PossiblyAcknowledged",
    "PublishedAgain",
    "Rejected",
    "RepairOptions",
    "Retry",
    "Roles",
    "SavedAgain",
    "SdstoreError",
    "Status",
    "StoreError",
    "StoredRemotely",
    "Unpublished",
    "Unsaved",
]
