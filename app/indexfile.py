"""The range index on disk: a restart reads it instead of every row of the database.

It is a cache. Its stamp names the database and the position up to which it was read, with the
elements that stood there; where the database does not hold the very same elements at that position
(another database, an older backup put back), the file is left aside and the index is read from SQL.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import NamedTuple

from app.store.store import Store
from recon.checkpoint import read_checkpoint, write_checkpoint
from recon.index import RangeIndex

_BEYOND_ALL = 2**63 - 1

_log = logging.getLogger(__name__)


class Position(NamedTuple):
    """How far the store was read: the last sequence number, the last number of a claim."""

    seq: int
    claim_no: int


class Saved(NamedTuple):
    """An index that still fits the store, as far as `position`."""

    elements: RangeIndex
    position: Position


async def load_index(path: Path, store: Store) -> Saved | None:
    """The saved index, or None where there is none, it is damaged, or it does not fit."""
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        return None
    try:
        position = Position(*json.loads(checkpoint.stamp)["position"])
    except (ValueError, KeyError, TypeError):
        return None
    if checkpoint.stamp != await _stamp(store, position):
        _log.warning("%s does not fit the database: the index is read from SQL", path.name)
        return None
    return Saved(checkpoint.index, position)


async def save_index(path: Path, index: RangeIndex, store: Store, position: Position) -> None:
    """Write what was read up to `position`; elements inserted meanwhile may be in it as well."""
    stamp = await _stamp(store, position)
    await asyncio.to_thread(write_checkpoint, path, index, stamp)


async def _stamp(store: Store, position: Position) -> bytes:
    entry = await store.elements_after(position.seq - 1, _BEYOND_ALL, 1)
    claim = await store.elements_after(_BEYOND_ALL, position.claim_no - 1, 1)
    document = {
        "database": store.database_id,
        "position": position,
        "elements": [row.tobytes().hex() for columns in (entry, claim) for row in columns.ids],
    }
    return json.dumps(document).encode()
