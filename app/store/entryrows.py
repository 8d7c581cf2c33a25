"""Rows of entries, and how many of them fit a reply; `app.store.framereads` makes them records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from app.entries import Entry
from app.store.database import Row
from app.store.records import LeftOut
from sdstore.sds.model import Dialect


class EntryRow(NamedTuple):
    """The columns of an entry without its frame."""

    seq: int
    channel_id: str
    message_id: str
    lamport: int
    digest: bytes
    frame_hash: bytes
    dialect: int
    received_at_ms: int
    arrival_sum: int
    frame_bytes: int


ENTRY_WIDTH = len(EntryRow._fields)
"""Columns of an entry in a row; those of its frame may follow."""

# Looking a member up by value costs more than reading the row.
_DIALECTS = {int(dialect): dialect for dialect in Dialect}


def entry_row(row: Row) -> EntryRow:
    """The columns of `EntryRow` of a row that begins with them."""
    return EntryRow(*row[:ENTRY_WIDTH])


def left_out(rows: Sequence[Row], entries: Iterable[Entry]) -> tuple[LeftOut, ...]:
    """Those of the rows that gave no entry."""
    read = {entry.seq for entry in entries}
    return tuple(
        LeftOut(row[0], row[8], row[1], row[2], row[4]) for row in rows if row[0] not in read
    )


def entry_of(row: Row, frame: bytes) -> Entry:
    """The record of a row that begins with the columns of `EntryRow`."""
    seq, channel_id, message_id, lamport, digest, frame_hash, dialect, at_ms, arrival_sum = row[:9]
    return Entry(
        seq,
        channel_id,
        message_id,
        lamport,
        digest,
        frame_hash,
        _DIALECTS[dialect],
        at_ms,
        frame,
        arrival_sum,
    )


def fitting_count(rows: Sequence[Row], bytes_max: int) -> int:
    """How many rows' frames fit into `bytes_max`; at least one, so that every reader gets on."""
    sizes = accumulate(row[ENTRY_WIDTH - 1] for row in rows)
    return max(1, sum(1 for size in sizes if size <= bytes_max))
