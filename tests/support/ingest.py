"""A door in front of a fresh store, as a node wires it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.ingest.door import Committed, Door, GroupCommitter
from app.ingest.prepare import Relayed
from app.server.limits import DEFAULT_LIMITS, Limits
from app.store.store import Store


@dataclass
class Ingest:
    """The objects that a test uses and inspects."""

    store: Store
    committer: GroupCommitter
    door: Door
    committed: list[Committed]
    relayed: list[Relayed]


@asynccontextmanager
async def open_ingest(url: str, limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[Ingest]:
    """Open everything, close everything."""
    store = await Store.open(url, limits)
    committer = GroupCommitter(store, limits)
    await committer.start()
    committed: list[Committed] = []
    relayed: list[Relayed] = []
    committer.listeners.append(committed.extend)
    door = Door(store, committer, limits)
    door.relay_listeners.append(relayed.append)
    try:
        yield Ingest(store, committer, door, committed, relayed)
    finally:
        await committer.close()
        await store.close()
