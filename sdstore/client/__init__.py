"""Clients of a store node's HTTP interface, blocking and asynchronous, and participants on them.

Requests are built (`calls`) and answers read (`replies`) by pure functions; `StoreClient` and
`AsyncStoreClient` only move bytes. `ParticipantDriver` runs SDS participants on stores;
`ParticipantFile` keeps them in a SQLite file.
docs/python.md shows how they are used.
"""

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.blocking import StoreClient
from sdstore.client.channelevents import (
    BackfillProgress,
    ChannelEvent,
    Connection,
    EventsDropped,
    Refused,
)
from sdstore.client.driver import (
    DriverError,
    DriverOptions,
    MemoryPersistence,
    ParticipantChannel,
    ParticipantDriver,
    Persistence,
)
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options
from sdstore.client.live import AsyncLiveStream, LiveStream
from sdstore.client.mvds import AsyncMvdsSession, MvdsSession
from sdstore.client.participantdatabase import ParticipantFileError
from sdstore.client.participantfile import ParticipantFile
from sdstore.client.records import LiveMessage, PublishItem, PublishOutcome, WakuEnvelope
from sdstore.client.retry import Retry

__all__ = [
    "AsyncLiveStream",
    "AsyncMvdsSession",
    "AsyncStoreClient",
    "BackfillProgress",
    "ChannelEvent",
    "Connection",
    "DriverError",
    "DriverOptions",
    "EventsDropped",
    "LiveMessage",
    "LiveStream",
    "MemoryPersistence",
    "MvdsSession",
    "Options",
    "ParticipantChannel",
    "ParticipantDriver",
    "ParticipantFile",
    "ParticipantFileError",
    "Persistence",
    "PublishItem",
    "PublishOutcome",
    "Refused",
    "Retry",
    "StoreClient",
    "StoreError",
    "WakuEnvelope",
]
