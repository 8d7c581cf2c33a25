"""Loading an empty SQLite store: rows made by all cores, indexes built when all rows are there.

The store is loaded in a file of its own, which takes the place of the empty one when it is whole: a
load that is killed has not happened. Rows that need no look at the store (content messages without
published hints and without a filter to compress against) go straight into the tables; what their
histories tell, and every other message, is written afterwards, with the indexes there, by the same
code that writes groups. An entry's sequence number is its place among the items whichever way it takes,
because of the messages under one ID the first is served. So the outcome is that of the one door; only
what the histories of the second way claim comes after what those of the first do.
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
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN, Kind
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
        now_ms = time.time_ns() // 1_000_000  # all arrives at once, as it becomes visible at once
        with closing(_Tables(draft, now_ms)) as tables:
            _fill(tables, _made(items, keys, limits, workers), loaded, refused)
            tables.finish(loaded)
        _write_rest(draft, keys, limits, now_ms, loaded)
        _replace(path, draft)
    return loaded


class _Tables:
    """The tables without their indexes, and a spool of what is written afterwards."""

    def __init__(self, draft: Path, now_ms: int) -> None:
        self._now_ms = now_ms
        self._connection = sqlite3.connect(draft, isolation_level=None)
        # A draft that is not finished is thrown away: nothing needs to be durable before the end.
        for pragma in ("journal_mode = DELETE", "journal_mode = OFF", "synchronous = OFF"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(f"PRAGMA cache_size = -{LOADING_CACHE_KIB}")
        self._connection.execute(f"PRAGMA threads = {CPUS}")
        _attach_spool(self._connection, draft)
        self._indexes = self._drop_indexes()
        self._insert_messages = SQLITE.insert(schema.messages)
        self._insert_frames = SQLITE.insert(schema.frames)
        self._numbers: dict[str, int] = {}
        self._settled: dict[tuple[int, str, bytes], None] = {}
        self._rows_count = 0
        self._connection.execute("BEGIN")

    def insert(self, rows: Sequence[Row], first_seq: int) -> None:
        """Rows as `MadeRows` has them; `first_seq` belongs to position 0."""
        messages: list[Row] = []
        frames: list[Row] = []
        told: list[Row] = []
        for position, channel_id, id_key, lamport, size, dialect, unverified, *rest in rows:
            message_id, digest, frame_hash, codec, data, history = rest
            seq = first_seq + position
            number = self._numbers.setdefault(channel_id, len(self._numbers) + 1)
            self._settled[number, message_id, b""] = None
            numbers = (seq, id_key, lamport, self._now_ms, number, size, dialect, unverified)
            messages.append((*numbers, message_id, digest[:PREFIX_BYTES], digest, frame_hash))
            frames.append((seq, codec, None, data))
            told += [(number, *each) for each in history if (number, *each) not in self._settled]
            if history:
                self._settled.update(((number, *each), None) for each in history)
        insert_many(self._connection, self._insert_messages, messages)
        insert_many(self._connection, self._insert_frames, frames)
        self._connection.executemany("INSERT INTO spool.told VALUES (?, ?, ?)", told)
        self._rows_count += len(rows)
        if len(self._settled) > SETTLED_MAX:
            self._settled.clear()

    def spool(self, items: Iterable[tuple[int, bytes | None, Item]]) -> None:
        """(sequence number, digest, item) of what is written the usual way."""
        rows = [
            (seq, digest, PublishItem(frame=frame, retrieval_hints=hints).SerializeToString())
            for seq, digest, (frame, hints) in items
        ]
        self._connection.executemany("INSERT INTO spool.items VALUES (?, ?, ?)", rows)

    def finish(self, loaded: Loaded) -> None:
        """Build the indexes, drop later copies, count channels."""
        connection = self._connection
        connection.execute("COMMIT")
        for statement in self._indexes:
            connection.execute(statement)
        duplicates = self._drop_copies()
        loaded.counts[OutcomeKind.DUPLICATE] += duplicates
        loaded.counts[OutcomeKind.STORED] += self._rows_count - duplicates
        names = [(number, channel_id) for channel_id, number in self._numbers.items()]
        connection.execute("CREATE TEMP TABLE names (channel_no INTEGER PRIMARY KEY, channel_id)")
        connection.executemany("INSERT INTO names VALUES (?, ?)", names)
        connection.execute(_COUNT_CHANNELS, (LAMPORT_MAX, LAMPORT_MIN))

    def close(self) -> None:
        """Let go of the files."""
        self._connection.close()

    def _drop_indexes(self) -> list[str]:
        found = self._connection.execute(
            "SELECT name, sql FROM main.sqlite_master"
            " WHERE type = 'index' AND tbl_name = 'messages' AND sql IS NOT NULL"
        ).fetchall()
        for name, _ in found:
            self._connection.execute(f"DROP INDEX {name}")
        return [statement for _, statement in found]

    def _drop_copies(self) -> int:
        connection = self._connection
        connection.execute(_FIND_COPIES)
        connection.execute(_FIND_COPIES_OF_SPOOLED)
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
        first_seq = first + 1
        tables.insert(rows.rows, first_seq)
        tables.spool((first_seq + at, digest, items[at]) for at, digest in rows.unusual)
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


def _write_rest(draft: Path, keys: Keys, limits: Limits, now_ms: int, loaded: Loaded) -> None:
    """What the spool holds, in groups, as everything else is written."""
    database = SqliteDatabase(f"sqlite:///{draft}")
    try:
        database.begin_writing()
        writer = GroupWriter(database, keys, limits, lambda: now_ms)
        with (
            closing(sqlite3.connect(_spool_of(draft))) as spool,
            closing(sqlite3.connect(draft)) as c,
        ):
            numbers = dict(c.execute("SELECT channel_id, channel_no FROM channels").fetchall())
            told = spool.execute("SELECT channel_no, message_id, hint FROM told ORDER BY rowid")
            while references := told.fetchmany(limits.group_items_max):
                writer.settle(references, numbers)
            items = spool.execute("SELECT seq, item FROM items ORDER BY seq")
            while rows := items.fetchmany(BATCH_ITEMS):
                _write_group(writer, rows, limits, loaded)
    finally:
        database.close_now()


def _write_group(
    writer: GroupWriter, rows: Sequence[tuple[int, bytes]], limits: Limits, loaded: Loaded
) -> None:
    entries: list[NewEntry] = []
    seqs: list[int] = []
    met: list[MetId] = []
    for seq, raw in rows:
        item = PublishItem.FromString(raw)
        prepared = prepare(Publication(item.frame, tuple(item.retrieval_hints)), limits)
        if isinstance(prepared, NewEntry):
            entries.append(prepared)
            seqs.append(seq)
            continue
        loaded.counts[OutcomeKind.RELAYED] += 1
        if prepared.message.kind is Kind.SYNC:
            met.append(MetId(prepared.message.channel_id, prepared.message.message_id))
    for result in writer.write(entries, met, (), seqs):
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


def _attach_spool(connection: sqlite3.Connection, draft: Path) -> None:
    connection.execute("ATTACH ? AS spool", [str(_spool_of(draft))])
    connection.execute("PRAGMA spool.journal_mode = OFF")
    connection.execute("PRAGMA spool.synchronous = OFF")
    connection.execute("CREATE TABLE spool.told (channel_no INTEGER, message_id TEXT, hint BLOB)")
    connection.execute("CREATE TABLE spool.items (seq INTEGER PRIMARY KEY, digest BLOB, item BLOB)")


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

_FIND_COPIES_OF_SPOOLED = """
INSERT INTO copies
SELECT later.seq FROM spool.items AS first CROSS JOIN messages AS later
WHERE later.digest_prefix = substr(first.digest, 1, 8) AND later.digest = first.digest
AND later.seq > first.seq
"""

# A channel may have lost its only row to an earlier copy in the spool, which sets its bounds then.
_COUNT_CHANNELS = """
INSERT INTO channels
SELECT channel_no, channel_id, count(seq), coalesce(min(lamport), ?), coalesce(max(lamport), ?)
FROM names LEFT JOIN messages USING (channel_no) GROUP BY channel_no
"""
