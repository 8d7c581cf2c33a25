"""From publications to rows, in worker processes: the most expensive step of a load.

A worker returns plain tuples, which pass between processes five times as fast as records. It hands
back items that need a look-up in the store (claims, references of frames, messages that are not
stored); those are written as by ingest.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.entries import NewEntry
from app.errors import Problem
from app.ingest.prepare import Publication, prepare
from app.limits import Limits
from app.store.frames import FramePacker, StoredFrame, is_referable
from app.store.keys import Keys


class MadeRows(NamedTuple):
    """The rows of a batch; positions count in the batch.

    `rows`: position, channel ID, ID key, Lamport timestamp, frame bytes, dialect, unverified, message ID, digest,
    frame hash, codec, data, and (message ID, hint) of each entry of the history. `refused`: codes.
    `unusual`: positions of the items to write as by ingest, with the digests of entries.
    """

    rows: list[tuple[Any, ...]]
    refused: list[str]
    unusual: list[tuple[int, bytes | None]]


DIGEST_COLUMN = 8
"""Columns of a row of `MadeRows`."""


class RowMaker:
    """Makes rows; one per worker."""

    def __init__(self, keys: Keys, limits: Limits) -> None:
        self._keys = keys
        self._limits = limits
        self._packer = FramePacker()

    def make(self, publications: Sequence[Publication]) -> MadeRows:
        """The rows of a batch."""
        made = MadeRows([], [], [])
        plain: list[tuple[int, NewEntry]] = []
        for position, publication in enumerate(publications):
            try:
                entry = prepare(publication, self._limits)
            except Problem as problem:
                made.refused.append(str(problem.code))
                continue
            if not isinstance(entry, NewEntry):
                made.unusual.append((position, None))
            elif entry.claims or is_referable(entry.frame):
                made.unusual.append((position, entry.digest))
            else:
                plain.append((position, entry))
        packed = self._packer.pack_small([entry.frame for _, entry in plain])
        made.rows.extend(
            self._row(*each, stored) for each, stored in zip(plain, packed, strict=True)
        )
        return made

    def _row(self, position: int, entry: NewEntry, stored: StoredFrame) -> tuple[Any, ...]:
        message = entry.message
        return (
            position,
            message.channel_id,
            self._keys.of_text(message.message_id),
            message.lamport_timestamp,
            len(entry.frame),
            int(entry.dialect),
            0 if entry.id_verifies else 1,
            message.message_id,
            entry.digest,
            entry.frame_hash,
            int(stored.codec),
            stored.data,
            tuple([(told.message_id, told.retrieval_hint) for told in message.causal_history]),
        )


_makers: list[RowMaker] = []


def start_here(keys: Keys, limits: Limits) -> None:
    """Prepare the process that calls `make_rows`; call once."""
    _makers[:] = [RowMaker(keys, limits)]


def start_worker(keys: Keys, limits: Limits) -> None:
    """Prepare a worker process; call once. Rows form no reference cycles, so it needs no collector."""
    gc.disable()
    start_here(keys, limits)


def make_rows(items: Sequence[tuple[int, bytes, tuple[bytes, ...]]]) -> MadeRows:
    """The rows of a batch of (place, frame, hints)."""
    return _makers[0].make([Publication(frame, hints) for _, frame, hints in items])
