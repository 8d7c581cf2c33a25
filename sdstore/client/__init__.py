"""Clients of a store node's HTTP interface, blocking and asynchronous.

Requests are built (`calls`) and answers read (`replies`) by pure functions; `StoreClient` and
`AsyncStoreClient` only move bytes. docs/python.md shows how they are used.
"""

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.blocking import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options
from sdstore.client.live import AsyncLiveStream, LiveStream
from sdstore.client.mvds import AsyncMvdsSession, MvdsSession
from sdstore.client.records import LiveMessage, PublishItem, PublishOutcome, WakuEnvelope
from sdstore.client.retry import Retry

__all__ = [
    "AsyncLiveStream",
    "AsyncMvdsSession",
    "AsyncStoreClient",
    "LiveMessage",
    "LiveStream",
    "MvdsSession",
    "Options",
    "PublishItem",
    "PublishOutcome",
    "Retry",
    "StoreClient",
    "StoreError",
    "WakuEnvelope",
]
