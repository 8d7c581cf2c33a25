"""Loading an empty SQLite store: rows made by all cores, indexes built when all rows are there.

The store is loaded in a file of its own, which takes the place of the empty one when it is whole: a
load that is killed has not happened. Rows that need no look at the store (content messages without
published hints and without a filter to compress against) go straight into the tables; what their
histories tell, and every other message, is written afterwards, with the indexes there, by the same
code that writes groups. So the outcome is that of the one door; only arrival order differs where a
message takes the second way.
"""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from app.entries import NewEntry, OutcomeKind
from app.errors import Code, Problem
from app.ingest.bulkrows import MadeRows, make_rows, start_here, start_worker
from app.ingest.prepare import prepare
from app.ingest.records import Publication
from app.limits import Limits
from app.store import schema
from app.store.groupwriter import PREFIX_BYTES, GroupWriter
from app.store.keys import Keys
from app.store.records import MetId
from app.store.sql import SQLITE, Row
from app.store.sqlite import SqliteDatabase, insert_many, prepare_file, writing_alone
from sdstore.sds.model import Kind
from sdstore.wire.store_pb2 import PublishItem

BATCH_ITEMS = 2_000
BATCHES_BEFORE_WORKERS = 10
"""Starting workers takes as long as making the rows of so many batches."""

BATCHES_IN_FLIGHT_PER_WORKER = 2
"""One being made, one ready: more would only be memory."""

CPUS = os.cpu_count() or 1

SETTLED_MAX = 262_144
"""References and names remembered: histories mostly name what came lately."""

LOADING_CACHE_KIB = 256 * 1024
"""Sorts 10^6 keys of each index in memory."""

Item = tuple[bytes, tuple[bytes, ...]]
"""(frame, retrieval hints)."""
Refused = Callable[[int, Problem], None]


@dataclass(slots=True)
class Loaded:
    """What became of the items."""

    counts: Counter[OutcomeKind] = field(default_factory=Counter)
    refused_count: int = 0


def load_empty_store(
    path: Path,
    items: Iterable[Item],
    limits: Limits,
    refused: Refused,
    *,
    workers: int = CPUS,
) -> Loaded:
    """Load a store that holds nothing yet. Calls `refused` with the number of an item from 0.

    `workers` are processes that make rows once the first 20,000 items are in; 0 for none.
    Raises `Problem` STORE_UNAVAILABLE where the store is not empty or somebody reads it,
    `StoreBusyError` where somebody writes to it. Nothing has happened if it raises.
    """
    prepare_file(path)
    draft = path.with_name(f"{path.name}.loading")
    with writing_alone(path), ExitStack() as stack:
        for leftover in (draft, _spool_of(draft)):
            _remove(leftover)
            stack.callback(_remove, leftover)
        keys = _copy_empty(path, draft)
        loaded = Loaded()
        with closing(_Tables(draft)) as tables:
            _fill(tables, _made(items, keys, limits, workers), loaded, refused)
            tables.finish(loaded)
        _write_rest(draft, keys, limits, loaded)
        _replace(path, draft)
    return loaded


class _Tables:
    """The tables without their indexes, and a spool of what is written afterwards."""

    def __init__(self, draft: Path) -> None:
        self._connection = sqlite3.connect(draft, isolation_level=None)
        # A draft that is not finished is thrown away: nothing needs to be durable before the end.
        for pragma in ("journal_mode = DELETE", "journal_mode = OFF", "synchronous = OFF"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(f"PRAGMA cache_size = -{LOADING_CACHE_KIB}")
        self._connection.execute(f"PRAGMA threads = {CPUS}")
        self._spool = _open_spool(draft)
        self._indexes = self._drop_indexes()
        self._insert_messages = SQLITE.insert(schema.messages)
        self._insert_frames = SQLITE.insert(schema.frames)
        self._numbers: dict[str, int] = {}
        self._settled: dict[tuple[int, str, bytes], None] = {}
        self._last_seq = 0
        self._connection.execute("BEGIN")
        self._spool.execute("BEGIN")

    def insert(self, rows: Sequence[Row]) -> None:
        """Rows as `MadeRows` has them."""
        at_ms = _wall_clock_ms()
        messages: list[Row] = []
        frames: list[Row] = []
        told: list[Row] = []
        for channel_id, id_key, lamport, size, dialect, unverified, message_id, *rest in rows:
            digest, frame_hash, codec, data, history = rest
            self._last_seq += 1
            number = self._numbers.setdefault(channel_id, len(self._numbers) + 1)
            self._settled[number, message_id, b""] = None
            numbers = (self._last_seq, id_key, lamport, at_ms, number, size, dialect, unverified)
            messages.append((*numbers, message_id, digest[:PREFIX_BYTES], digest, frame_hash))
            frames.append((self._last_seq, codec, None, data))
            told += [(number, *each) for each in history if (number, *each) not in self._settled]
            if history:
                self._settled.update(((number, *each), None) for each in history)
        insert_many(self._connection, self._insert_messages, messages)
        insert_many(self._connection, self._insert_frames, frames)
        self._spool.executemany("INSERT INTO told VALUES (?, ?, ?)", told)
        if len(self._settled) > SETTLED_MAX:
            self._settled.clear()

    def spool(self, items: Sequence[Item]) -> None:
        """Items that are written the usual way."""
        rows = [
            (PublishItem(frame=frame, retrieval_hints=hints).SerializeToString(),)
            for frame, hints in items
        ]
        self._spool.executemany("INSERT INTO items VALUES (?)", rows)

    def finish(self, loaded: Loaded) -> None:
        """Build the indexes, drop later copies, count channels."""
        connection = self._connection
        connection.execute("COMMIT")
        self._spool.execute("COMMIT")
        for statement in self._indexes:
            connection.execute(statement)
        duplicates = self._drop_copies()
        loaded.counts[OutcomeKind.DUPLICATE] += duplicates
        loaded.counts[OutcomeKind.STORED] += self._last_seq - duplicates
        names = [(number, channel_id) for channel_id, number in self._numbers.items()]
        connection.execute("CREATE TEMP TABLE names (channel_no, channel_id)")
        connection.executemany("INSERT INTO names VALUES (?, ?)", names)
        connection.execute(_COUNT_CHANNELS)

    def close(self) -> None:
        """Let go of the files."""
        self._connection.close()
        self._spool.close()

    def _drop_indexes(self) -> list[str]:
        found = self._connection.execute(
            "SELECT name, sql FROM sqlite_master"
            " WHERE type = 'index' AND tbl_name = 'messages' AND sql IS NOT NULL"
        ).fetchall()
        for name, _ in found:
            self._connection.execute(f"DROP INDEX {name}")
        return [statement for _, statement in found]

    def _drop_copies(self) -> int:
        connection = self._connection
        connection.execute(_FIND_COPIES)
        connection.execute("DELETE FROM frames WHERE seq IN (SELECT seq FROM copies)")
        return connection.execute(
            "DELETE FROM messages WHERE seq IN (SELECT seq FROM copies)"
        ).rowcount


def _fill(
    tables: _Tables,
    made: Iterable[tuple[Sequence[Item], MadeRows]],
    loaded: Loaded,
    refused: Refused,
) -> None:
    first = 0
    for items, rows in made:
        tables.insert(rows.rows)
        tables.spool([items[position] for position in rows.unusual])
        for position, code, detail in rows.refused:
            refused(first + position, Problem(Code(code), detail))
        loaded.refused_count += len(rows.refused)
        first += len(items)


def _made(
    items: Iterable[Item], keys: Keys, limits: Limits, workers: int
) -> Iterator[tuple[Sequence[Item], MadeRows]]:
    """Batches with the rows made of them, in order: the first ones here, the rest by workers."""
    source = iter(items)
    start_here(keys, limits)
    made_here = 0
    while not workers or made_here < BATCHES_BEFORE_WORKERS:
        if not (batch := list(islice(source, BATCH_ITEMS))):
            return
        yield batch, make_rows(batch)
        made_here += 1
    under_way: deque[tuple[Sequence[Item], Future[MadeRows]]] = deque()
    # A fork of a process with threads may hang; workers begin afresh.
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


def _write_rest(draft: Path, keys: Keys, limits: Limits, loaded: Loaded) -> None:
    """What the spool holds, in groups, as everything else is written."""
    database = SqliteDatabase(f"sqlite:///{draft}")
    try:
        database.begin_writing()
        writer = GroupWriter(database, keys, limits, _wall_clock_ms)
        with (
            closing(sqlite3.connect(_spool_of(draft))) as spool,
            closing(sqlite3.connect(draft)) as c,
        ):
            numbers = dict(c.execute("SELECT channel_id, channel_no FROM channels").fetchall())
            told = spool.execute("SELECT channel_no, message_id, hint FROM told ORDER BY rowid")
            while references := told.fetchmany(limits.group_items_max):
                writer.settle(references, numbers)
            items = spool.execute("SELECT item FROM items ORDER BY rowid")
            while rows := items.fetchmany(BATCH_ITEMS):
                _write_group(
                    writer, [PublishItem.FromString(row[0]) for row in rows], limits, loaded
                )
    finally:
        database.close_now()


def _write_group(
    writer: GroupWriter, items: Sequence[PublishItem], limits: Limits, loaded: Loaded
) -> None:
    entries: list[NewEntry] = []
    met: list[MetId] = []
    for item in items:
        prepared = prepare(Publication(item.frame, tuple(item.retrieval_hints)), limits)
        if isinstance(prepared, NewEntry):
            entries.append(prepared)
            continue
        loaded.counts[OutcomeKind.RELAYED] += 1
        if prepared.message.kind is Kind.SYNC:
            met.append(MetId(prepared.message.channel_id, prepared.message.message_id))
    for result in writer.write(entries, met, ()):
        loaded.counts[OutcomeKind.STORED if result.is_new else OutcomeKind.DUPLICATE] += 1


def _copy_empty(path: Path, draft: Path) -> Keys:
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(draft)) as target:
        if any(source.execute(_IS_EMPTY).fetchone()):
            raise Problem(Code.STORE_UNAVAILABLE, "only an empty store can be loaded so")
        source.backup(target)
        secret = source.execute("SELECT value FROM store_meta WHERE name = 'key_secret'").fetchone()
    return Keys(secret[0])


def _replace(path: Path, draft: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        # A log that somebody still reads would be taken for the new file's.
        if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise Problem(Code.STORE_UNAVAILABLE, "the store is being read: try again")
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


def _open_spool(draft: Path) -> sqlite3.Connection:
    spool = sqlite3.connect(_spool_of(draft), isolation_level=None)
    spool.execute("PRAGMA journal_mode = OFF")
    spool.execute("PRAGMA synchronous = OFF")
    spool.execute("CREATE TABLE told (channel_no INTEGER, message_id TEXT, hint BLOB)")
    spool.execute("CREATE TABLE items (item BLOB)")
    return spool


def _spool_of(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}-spool")


def _remove(draft: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-writer"):
        draft.with_name(f"{draft.name}{suffix}").unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


_IS_EMPTY = """
SELECT EXISTS (SELECT 1 FROM messages), EXISTS (SELECT 1 FROM met_ids),
EXISTS (SELECT 1 FROM refused_digests)
"""

_FIND_COPIES = """
CREATE TEMP TABLE copies AS
SELECT later.seq FROM messages AS later
JOIN (SELECT digest_prefix FROM messages GROUP BY digest_prefix HAVING count(*) > 1)
USING (digest_prefix)
WHERE EXISTS (
    SELECT 1 FROM messages AS first
    WHERE first.digest_prefix = later.digest_prefix AND first.digest = later.digest
    AND first.seq < later.seq
)
"""

_COUNT_CHANNELS = """
INSERT INTO channels
SELECT channel_no, channel_id, count(*), min(lamport), max(lamport)
FROM messages JOIN names USING (channel_no) GROUP BY channel_no
"""
