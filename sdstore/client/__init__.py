"""Clients of a store node's HTTP interface, blocking and asynchronous.

Requests are built (`calls`) and answers read (`replies`) by pure functions; `StoreClient` and
`AsyncStoreClient` only move bytes.
"""

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.blocking import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options
from sdstore.client.records import PublishItem, WakuEnvelope
from sdstore.client.retry import Retry

__all__ = [
    "AsyncStoreClient",
    "Options",
    "PublishItem",
    "Retry",
    "StoreClient",
    "StoreError",
    "WakuEnvelope",
]
