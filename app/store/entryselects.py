"""Selects of entries that the store's statements begin with: their columns, with frames or without."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, FromClause, Select, func, select

from app.store.database import Keyed, constant
from app.store.schema import channels, frames, messages

# The columns of `app.store.entryrows.EntryRow`, in its order.
_ENTRY_COLUMNS = (
    messages.c.seq,
    channels.c.channel_id,
    messages.c.message_id,
    messages.c.lamport,
    messages.c.digest,
    messages.c.frame_hash,
    messages.c.dialect,
    messages.c.received_at_ms,
    messages.c.arrival_sum,
    messages.c.frame_bytes,
)
SMALL_FRAME_BYTES_MAX = 2 * 1024
"""Stored bytes of frames that rows of entries bring along: a thousand make 2 MiB."""

FRAME_COLUMNS = (frames.c.codec, frames.c.reference_no, frames.c.data)

IN_CHANNELS = messages.c.channel_no == channels.c.channel_no
_ENTRIES = messages.join(channels, IN_CHANNELS)


def entries(joined: FromClause = _ENTRIES) -> Select[Any]:
    """Entries without their frames; `joined` holds `messages` and their `channels`."""
    return select(*_ENTRY_COLUMNS).select_from(joined)


def entries_with_frames(joined: FromClause = _ENTRIES) -> Select[Any]:
    """Entries, each with the columns of its frame where that is small, else with None for them.

    Most frames are, and asking for them by themselves would be a round trip. How many bytes a
    statement gives is bounded all the same: the others are asked for once it is known which fit.
    """
    small = (frames.c.seq == messages.c.seq) & (
        func.length(frames.c.data) <= constant(SMALL_FRAME_BYTES_MAX)
    )
    return select(*_ENTRY_COLUMNS, *FRAME_COLUMNS).select_from(joined.outerjoin(frames, small))


def with_id(key: Keyed) -> ColumnElement[bool]:
    """Messages that bear an ID."""
    return (messages.c.id_key == key["id_key"]) & (messages.c.message_id == key["message_id"])
