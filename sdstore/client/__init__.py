"""Clients of a store node's HTTP interface, blocking and asynchronous, and participants on them.

Requests are built (`calls`) and answers read (`replies`) by pure functions; `StoreClient` and
`AsyncStoreClient` only move bytes. `ParticipantDriver` runs SDS participants on stores;
`ParticipantFile` keeps them in a SQLite file.
docs/python.md shows how they are used.
"""

from typing import TYPE_CHECKING, Any

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.blocking import StoreClient
from sdstore.client.channelevents import (
    BackfillProgress,
    ChannelEvent,
    Connection,
    EventsDropped,
    PublishedAgain,
    SavedAgain,
    Unpublished,
    Unsaved,
)
from sdstore.client.channelorder import ChannelOrder
from sdstore.client.driver import ParticipantChannel, ParticipantDriver
from sdstore.client.driveroptions import DriverError, DriverOptions
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options
from sdstore.client.live import AsyncLiveStream, LiveStream
from sdstore.client.mvds import AsyncMvdsSession, MvdsSession
from sdstore.client.persistence import MemoryPersistence, Persistence
from sdstore.client.records import LiveMessage, PublishItem, PublishOutcome, WakuEnvelope
from sdstore.client.retry import Retry
from sdstore.errors import SdstoreError
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

if TYPE_CHECKING:
    from sdstore.client.participantdatabase import ParticipantFileError
    from sdstore.client.participantfile import ParticipantFile

__all__ = [
    "Acknowledged",
    "AsyncLiveStream",
    "AsyncMvdsSession",
    "AsyncStoreClient",
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
    "LiveMessage",
    "LiveStream",
    "Lost",
    "MemoryPersistence",
    "MvdsSession",
    "Options",
    "ParticipantChannel",
    "ParticipantDriver",
    "ParticipantFile",
    "ParticipantFileError",
    "Persistence",
    "PossiblyAcknowledged",
    "PublishItem",
    "PublishOutcome",
    "PublishedAgain",
    "Rejected",
    "Retry",
    "SavedAgain",
    "SdstoreError",
    "Status",
    "StoreClient",
    "StoreError",
    "StoredRemotely",
    "Unpublished",
    "Unsaved",
    "WakuEnvelope",
]


def __getattr__(name: str) -> Any:
    """`ParticipantFile` on first use: it brings SQLAlchemy and numpy, half a second of imports."""
    if name == "ParticipantFile":
        from sdstore.client.participantfile import ParticipantFile  # noqa: PLC0415

        return ParticipantFile
    if name == "ParticipantFileError":
        from sdstore.client.participantdatabase import ParticipantFileError  # noqa: PLC0415

        return ParticipantFileError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
