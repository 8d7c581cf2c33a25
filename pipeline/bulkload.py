"""Bulk loading of an empty SQLite store: all cores make rows; indexes are built last.

The load fills a draft file, which replaces the empty store once it is complete. Rows that need no
look-up in the store (content messages without published hints and without a filter to compress
against) go straight into the tables. The claims of their histories, and all other messages, are
written after the indexes exist, by the code that writes groups. On either path an entry's sequence
number is its place among the items, because the store serves the first message under an ID. So the
result equals that of normal ingest, except that history claims of the second path come after those of
the first.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from app.entries import MetId, NewEntry, OutcomeKind, Token
from app.ingest.prepare import Publication, prepare
from app.limits import Limits
from app.store.groupwriter import GroupWriter
from app.store.keys import Keys
from app.store.sqlite import SqliteDatabase, prepare_file, writing_alone
from pipeline.bulkdraft import CPUS, Draft, Item, remove_draft, replace_store
from pipeline.bulkrows import MadeRows, make_rows, start_here, start_worker
from sdstore.sds.model import Kind
from sdstore.wire.store_pb2 import PublishItem

BATCH_ITEMS = 2_000
BATCHES_BEFORE_WORKERS = 10
"""Starting the workers takes as long as making the rows of this many batches."""

BATCHES_IN_FLIGHT_PER_WORKER = 2
"""One in work and one ready: more would only use memory."""


@dataclass(slots=True)
class Loaded:
    """The outcomes of a load; `refused` counts by code."""

    counts: Counter[OutcomeKind] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


def load_empty_store(
    path: Path,
    items_after: Callable[[int], Iterable[Item]],
    limits: Limits,
    *,
    name: str | None = None,
    workers: int = CPUS,
) -> Loaded:
    """Load an empty store.

    `items_after(place)` gives the items with higher places in the source, in ascending order.
    `name` identifies the source: a stopped load of this name resumes after its last commit. A load
    without a name starts again. `workers` is the number of processes that make rows once the first
    20,000 items are in.
    Raises `Problem` STORE_UNAVAILABLE if the store is not empty or has a reader, and `StoreBusyError`
    if it has a writer. The store stays empty after an error.
    """
    prepare_file(path)
    now_ms = time.time_ns() // 1_000_000  # one arrival time: all entries become visible at once
    with writing_alone(path):
        try:
            loaded = _load(path, items_after, limits, name, workers, now_ms)
            replace_store(path)
        except BaseException:
            if name is None:
                remove_draft(path)
            raise
    return loaded


def forget_load(path: Path) -> None:
    """Remove the files of a stopped load. Raises `StoreBusyError` if the store has a writer."""
    with writing_alone(path):
        remove_draft(path)


def _load(
    path: Path,
    items_after: Callable[[int], Iterable[Item]],
    limits: Limits,
    name: str | None,
    workers: int,
    now_ms: int,
) -> Loaded:
    with closing(Draft(path, name, now_ms)) as draft:
        keys, progress = draft.keys, draft.progress
        if not progress.is_indexed:
            _fill(draft, _made(items_after(progress.place), keys, limits, workers))
        draft.finish()
    relayed_count = _write_rest(draft, keys, limits, now_ms)
    with closing(sqlite3.connect(draft.path, isolation_level=None)) as connection:
        connection.execute(
            "UPDATE watermark SET seq = (SELECT coalesce(max(seq), 0) FROM messages)"
        )
        [[stored_count]] = connection.execute("SELECT coalesce(sum(count), 0) FROM channels")
    passed_count = progress.items_count - progress.refused.total()
    counts = Counter(
        {
            OutcomeKind.STORED: stored_count,
            OutcomeKind.RELAYED: relayed_count,
            OutcomeKind.DUPLICATE: passed_count - stored_count - relayed_count,
        }
    )
    return Loaded(counts, progress.refused)


def _fill(draft: Draft, made: Iterable[tuple[Sequence[Item], MadeRows]]) -> None:
    for items, rows in made:
        draft.fill(items, rows)


def _made(
    items: Iterable[Item], keys: Keys, limits: Limits, workers: int
) -> Iterator[tuple[Sequence[Item], MadeRows]]:
    """Batches with their rows, in order: this process makes the first ones, workers the rest."""
    source = iter(items)
    start_here(keys, limits)
    made_here = 0
    while not workers or made_here < BATCHES_BEFORE_WORKERS:
        if not (batch := list(islice(source, BATCH_ITEMS))):
            return
        yield batch, make_rows(batch)
        made_here += 1
    under_way: deque[tuple[Sequence[Item], Future[MadeRows]]] = deque()
    # Spawn: a fork of a process with threads can hang.
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(keys, limits),
    ) as pool:
        while batch := list(islice(source, BATCH_ITEMS)):
            under_way.append((batch, pool.submit(make_rows, batch)))
            if len(under_way) > BATCHES_IN_FLIGHT_PER_WORKER * workers:
                first, rows = under_way.popleft()
                yield first, rows.result()
        for rest, rows in under_way:
            yield rest, rows.result()


def _write_rest(draft: Draft, keys: Keys, limits: Limits, now_ms: int) -> int:
    """Write the spool in groups, as ingest does; returns the number of relayed messages.

    Repeating the writes of a stopped load changes nothing.
    """
    relayed_count = 0
    database = SqliteDatabase(f"sqlite:///{draft.path}")
    try:
        database.begin_writing()
        writer = GroupWriter(database, keys, limits, lambda: now_ms)
        with (
            closing(sqlite3.connect(draft.spool_path)) as spool,
            closing(sqlite3.connect(draft.path)) as c,
        ):
            numbers = dict(c.execute("SELECT channel_id, channel_no FROM channels").fetchall())
            told = spool.execute("SELECT channel_no, message_id, hint FROM told ORDER BY rowid")
            while references := told.fetchmany(limits.group_items_max):
                writer.settle(references, numbers)
            items = spool.execute("SELECT seq, arrival_sum, item FROM items ORDER BY seq")
            while rows := items.fetchmany(BATCH_ITEMS):
                relayed_count += _write_group(writer, rows, limits)
    finally:
        database.close_now()
    return relayed_count


def _write_group(
    writer: GroupWriter, rows: Sequence[tuple[int, int, bytes]], limits: Limits
) -> int:
    entries: list[NewEntry] = []
    places: list[Token] = []
    met: list[MetId] = []
    for seq, arrival_sum, raw in rows:
        item = PublishItem.FromString(raw)
        prepared = prepare(Publication(item.frame, tuple(item.retrieval_hints)), limits)
        if isinstance(prepared, NewEntry):
            entries.append(prepared)
            places.append(Token(seq, arrival_sum))
        elif prepared.message.kind is Kind.SYNC:
            met.append(MetId(prepared.message.channel_id, prepared.message.message_id))
    writer.write(entries, met, (), places)
    return len(rows) - len(entries)
