"""The range index on disk: a restart reads it instead of every row of the database.

It is a cache. Its stamp names the database and the places of the arrival chains up to which it was
read. Where the history of the database up to there is another one (another database, an older backup
put back, a copy that went its own way), the file is left aside and the index is read from SQL.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import NamedTuple

from app.entries import Token, Watermark
from app.store.store import Store
from recon.checkpoint import read_checkpoint, write_checkpoint
from recon.index import RangeIndex

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """An index that still fits the store, as far as it was read."""

    elements: RangeIndex
    read: Watermark


async def load_index(path: Path, store: Store) -> Saved | None:
    """The saved index, or None where there is none, it is damaged, or it does not fit."""
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        return None
    try:
        database, entries, claims = json.loads(checkpoint.stamp)
        read = Watermark(Token(*entries), Token(*claims))
    except (ValueError, TypeError):
        return None
    if database != store.database_id or not await store.holds(*read):
        _log.warning("%s does not fit the database: the index is read from SQL", path.name)
        return None
    return Saved(checkpoint.index, read)


async def save_index(path: Path, index: RangeIndex, store: Store, read: Watermark) -> None:
    """Write what was read up to `read`, and no element that is inserted meanwhile."""
    stamp = json.dumps([store.database_id, *read]).encode()
    # Taken here, on the thread that inserts: an element behind `read` is not covered by the stamp.
    snapshot = index.state.snapshot
    await asyncio.to_thread(write_checkpoint, path, snapshot, stamp)
