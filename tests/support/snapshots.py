"""Stores with made-up conversations to take snapshots of, and a Spark session per test run."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice

from app.ingest.prepare import Publication, prepare
from app.server.limits import DEFAULT_LIMITS
from app.store.store import Store
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message

CHANNELS = ("", "/app/1/chat/proto", "é", "general", "zz")
DAY_MS = 86_400_000
FIRST_DAY_MS = 1_767_225_600_000  # 2026-01-01
_DIALECTS = (Dialect.V2, Dialect.NIM, Dialect.CHAT_PROTO)
_WRITE_ROWS = 2_000


def conversation(seed: int, content_bytes: int = 120) -> Iterator[Publication]:
    """Messages without end: several channels, senders and dialects, hints on some of them."""
    world = random.Random(seed)
    heads: dict[str, list[str]] = {channel: [] for channel in CHANNELS}
    lamport = 0
    while True:
        channel = world.choice(CHANNELS)
        lamport += world.randrange(1, 4)
        content = world.randbytes(content_bytes)
        message = Message(
            message_id=hashlib.sha256(content).hexdigest(),
            channel_id=channel,
            sender_id=world.choice(("alice", "bob", "carol")),
            lamport_timestamp=lamport,
            causal_history=tuple(HistoryEntry(each) for each in heads[channel][-2:]),
            content=content,
        )
        heads[channel] = [*heads[channel][-4:], message.message_id]
        hints = (world.randbytes(32),) if world.random() < 0.1 else ()
        yield Publication(encode(message, world.choice(_DIALECTS)), hints)


def fill_store(url: str, publications: Iterator[Publication], count: int, *, days: int = 1) -> None:
    """Write the next `count` of `publications` into a store, spread over `days` of arrival."""
    asyncio.run(_fill(url, list(islice(publications, count)), days))


async def _fill(url: str, publications: Sequence[Publication], days: int) -> None:
    clock = FIRST_DAY_MS
    store = await Store.open(url, DEFAULT_LIMITS, now_ms=lambda: clock)
    store.begin_writing()
    try:
        rows = max(1, min(_WRITE_ROWS, len(publications) // days))
        for start in range(0, len(publications), rows):
            clock = FIRST_DAY_MS + start * days // len(publications) * DAY_MS
            portion = publications[start : start + rows]
            store.writer.write([prepare(each, DEFAULT_LIMITS) for each in portion], ())
    finally:
        await store.close()
