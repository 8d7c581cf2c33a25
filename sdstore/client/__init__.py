"""Clients of a store node's HTTP interface, blocking and asynchronous.

Requests are built (`calls`) and answers read (`replies`) by pure functions; `StoreClient` and
`AsyncStoreClient` only move bytes. docs/python.md shows how they are used.

`sdstore.participant` runs SDS participants on these clients. `ParticipantDriver` can be imported from here too.
"""

from typing import TYPE_CHECKING, Any

from sdstore.client.clients import AsyncStoreClient, StoreClient
from sdstore.client.exchange import ClientOptions, Retry
from sdstore.client.live import AsyncLiveStream, LiveStream
from sdstore.client.records import LiveMessage, PublishItem, PublishOutcome, WakuEnvelope
from sdstore.errors import SdstoreError, StoreError

if TYPE_CHECKING:
    from sdstore.participant.driver import ParticipantDriver

__all__ = [
    "AsyncLiveStream",
    "AsyncStoreClient",
    "ClientOptions",
    "LiveMessage",
    "LiveStream",
    "ParticipantDriver",
    "PublishItem",
    "PublishOutcome",
    "Retry",
    "SdstoreError",
    "StoreClient",
    "StoreError",
    "WakuEnvelope",
]


def __getattr__(name: str) -> Any:
    """`ParticipantDriver` on first use: its package imports this one."""
    if name == "ParticipantDriver":
        from sdstore.participant.driver import ParticipantDriver  # noqa: PLC0415

        return ParticipantDriver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
