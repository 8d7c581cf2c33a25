"""What is done about damage: finding lost content, and making a SQLite file anew.

**Lost content.** Every process follows the marks that all of them make. One process of a node reads every frame
of the store about once a day, on a small share of one core. It trusts nothing in memory, and a frame that
cannot be read is marked as in any other reading. A pass begins at a random message and keeps no place, so a
node that restarts often reaches them all as well.

**A new SQLite file** has the rows of a damaged one, and indexes that are built from them. `copy_rows` copies
what can be read, table by table and without using an index. If a table is damaged, rows are missing or wrong,
so `publish_rows` makes a store of that copy: it writes the messages whose frames match their digests into an
empty store, as new ones. Everything that is derived from messages (keys, counts, gaps, hints of histories, the
arrival chain) is then right by construction. What cannot be read is not there, and the next sync with a peer
brings it.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, Integer, Select, Table, bindparam, select

from app.entries import Claim, ClaimSource, MetId, NewEntry
from app.errors import Problem
from app.server.limits import Limits
from app.server.supervisor import Supervisor
from app.store.database import Database, Row, UnusableFileError
from app.store.entryrows import IN_CHANNELS, EntryRow, FrameReader, Keys, select_entries_with_frames
from app.store.groupwriter import GroupWriter
from app.store.integrity import SQLITE_FAULTS
from app.store.schema import channels, messages, met_ids, metadata, published_claims, store_meta
from app.store.sqlite import SqliteDatabase, prepare_file, require_current
from app.store.store import Store
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.model import claim_id, entry_digest, frame_hash, verifies

# ---- lost content

MARKS_INTERVAL_S = 10.0
"""The maximum age of this process's knowledge of marks: other processes make marks too."""

LOST_RETRIED_COUNT = 256
"""Lost frames that are read again in each such interval, in case their rows were repaired."""

FRAMES_PER_STEP = 16
BYTES_PER_STEP = 256 * 1024
"""A step takes one to three milliseconds of the event loop: as long as a request."""

FIRST_PASS_S = 60.0
"""From the start of a node, which reads a lot anyway, to its first pass."""

PASS_REST_S_MIN = 1.0
"""Between two passes, where a pass takes longer than the interval."""


class LostContent:
    """See the module. `lost_count` is a recent number of entries that are marked as lost.

    `read_count`: frames that the passes of this process read. `pass_ended_s`: when the last whole pass
    ended, in seconds since the Unix epoch; 0 before the first.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self.lost_count = 0
        self.read_count = 0
        self.pass_ended_s = 0.0
        self._store = store
        self._limits = limits
        self._retried_seq = 0

    @asynccontextmanager
    async def followed(self, supervisor: Supervisor, *, reads_all: bool) -> AsyncIterator[None]:
        """Learn the marks, and follow them while the block runs.

        `reads_all`: read all frames as well; set by one process of a node.
        """
        await self._follow_marks()
        async with AsyncExitStack() as tasks:
            following = supervisor.repeating("lost content", self._follow_marks, MARKS_INTERVAL_S)
            await tasks.enter_async_context(following)
            if reads_all:
                await tasks.enter_async_context(supervisor.keeping("frames", self._keep_reading))
            yield

    async def count(self) -> int:
        """The number of entries marked as lost; the last known one if the database is unavailable."""
        with suppress(Problem):
            self.lost_count = await self._store.frames.lost_count()
        return self.lost_count

    async def _follow_marks(self) -> None:
        self.lost_count = await self._store.frames.follow_marks()
        if self.lost_count:
            self._retried_seq = await self._store.frames.retry_lost(
                self._retried_seq, LOST_RETRIED_COUNT
            )

    async def _keep_reading(self) -> None:
        await asyncio.sleep(FIRST_PASS_S)
        while True:
            began_s = time.monotonic()
            await self._read_all()
            self.pass_ended_s = time.time()
            passed_s = time.monotonic() - began_s
            await asyncio.sleep(
                max(PASS_REST_S_MIN, self._limits.frames_read_interval_s - passed_s)
            )

    async def _read_all(self) -> None:
        """Read the frame of every message that is there now.

        A fault of the database ends the pass: the supervisor reports it, and begins another one elsewhere.
        """
        last, _ = await self._store.arrivals.watermark()
        first = random.randrange(last + 1)
        for after, until in ((first, last), (0, first)):
            place = after
            while place < until:
                began_s = time.thread_time()
                read = await self._store.frames.verify(place, FRAMES_PER_STEP, BYTES_PER_STEP)
                spent_s = time.thread_time() - began_s
                self.read_count += read.frames_count
                place = read.last_seq if read.frames_count else until
                await asyncio.sleep(spent_s * (100 / self._limits.frames_read_percent_max - 1))


# ---- a new file

ROWS_PER_GROUP = 1_000
"""Messages that one transaction writes."""

_NUMBER_MAX = 2**63 - 1
_SOURCES = {int(each) for each in ClaimSource}


# ---- copying rows


def copy_rows(path: Path, copy: Path) -> set[str]:
    """Make `copy`, a file without damage, of the rows at `path` that can be read.

    Returns the tables and indexes that may not be whole in it. Raises UnusableFileError if nothing can be read.
    """
    require_current(path)
    prepare_file(copy)
    if not _has_schema(path):
        _restore_schema(path, copy)
    incomplete: set[str] = set()
    with (
        closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as old,
        closing(sqlite3.connect(copy, isolation_level=None)) as new,
    ):
        # Text from a damaged page may not be valid UTF-8.
        old.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            old.execute("SELECT * FROM sqlite_schema").fetchall()
        except SQLITE_FAULTS as error:
            raise UnusableFileError(f"{path}: nothing can be read: {error}") from error
        new.execute("PRAGMA synchronous = OFF")  # `replace_file` syncs it
        indexes = new.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall()
        for name, _ in indexes:
            new.execute(f"DROP INDEX {name}")
        for table in metadata.sorted_tables:
            if not _copy_table(old, new, table):
                incomplete.add(table.name)
        for name, statement in indexes:
            try:
                new.execute(statement)
            except sqlite3.IntegrityError:  # rows that are wrong: two of one name
                incomplete.add(name)
    return incomplete


def _has_schema(path: Path) -> bool:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as old:
        try:
            old.execute("SELECT * FROM sqlite_schema").fetchall()
        except SQLITE_FAULTS:
            return False
    return True


_FILE_HEADER_BYTES = 100
_INTERIOR_TABLE = 5  # the type of a b-tree page (https://www.sqlite.org/fileformat2.html)


def _restore_schema(path: Path, fresh: Path) -> None:
    """Write the leaf pages of the schema of an undamaged store over those of a damaged one.

    Without its schema nothing of a file can be read. All our files have theirs on the same pages and the same
    roots, because a migration makes them before any row. Where the first page shows another tree, the file
    stays as it is.
    """
    with closing(sqlite3.connect(fresh)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    whole = fresh.read_bytes()
    page_bytes = int.from_bytes(whole[16:18])
    tree = whole[_FILE_HEADER_BYTES:page_bytes]
    with path.open("r+b") as damaged:
        if damaged.read(page_bytes)[_FILE_HEADER_BYTES:] != tree or tree[0] != _INTERIOR_TABLE:
            return
        cells = [int.from_bytes(tree[12 + 2 * n :][:2]) for n in range(int.from_bytes(tree[3:5]))]
        leaves = [int.from_bytes(whole[at : at + 4]) for at in cells]
        for number in (*leaves, int.from_bytes(tree[8:12])):
            start = (number - 1) * page_bytes
            damaged.seek(start)
            damaged.write(whole[start : start + page_bytes])


def _copy_table(old: sqlite3.Connection, new: sqlite3.Connection, table: Table) -> bool:
    """Copy the readable rows of a table; False if that may not be all."""
    faults: list[Exception] = []
    rows = _readable_rows(old, table, faults)
    marks = ", ".join("?" for _ in table.columns)
    # A row that is wrong can lack values.
    insert = f"INSERT OR IGNORE INTO {table.name} VALUES ({marks})"  # noqa: S608 - of this schema
    read_count = copied_count = 0
    new.execute("BEGIN")
    new.execute(f"DELETE FROM {table.name}")  # noqa: S608 - of this schema
    while part := list(islice(rows, ROWS_PER_GROUP)):
        read_count += len(part)
        copied_count += new.executemany(insert, part).rowcount
    new.execute("COMMIT")
    return not faults and copied_count == read_count and _is_count(old, table, copied_count)


def _is_count(old: sqlite3.Connection, table: Table, rows_count: int) -> bool:
    """Whether an index has as many rows: a page that lost some of its cells can be read without a fault."""
    whole_indexes = [
        each for each in table.indexes if each.dialect_options["sqlite"]["where"] is None
    ]
    for index in whole_indexes:
        try:
            # count(*) would take whichever index is the smallest
            query = f"SELECT count(rowid) FROM {table.name} INDEXED BY {index.name}"  # noqa: S608
            if old.execute(query).fetchone() == (rows_count,):
                return True
        except SQLITE_FAULTS:
            continue
    return not whole_indexes


def _readable_rows(
    connection: sqlite3.Connection, table: Table, faults: list[Exception]
) -> Iterator[Row]:
    """The rows of a table, without those on pages that cannot be read; notes each fault."""
    names = ", ".join(each.name for each in table.columns)
    query = f"SELECT {names} FROM {table.name} NOT INDEXED"  # noqa: S608 - of this schema
    if not table.dialect_options["sqlite"]["with_rowid"]:
        try:
            yield from connection.execute(query)
        except SQLITE_FAULTS as error:
            faults.append(error)
        return
    query = f"SELECT rowid, {names} FROM {table.name} NOT INDEXED WHERE rowid >= ? ORDER BY rowid"  # noqa: S608
    least = skipped = 0
    while least < _NUMBER_MAX:
        try:
            for number, *row in connection.execute(query, [least]):
                if number < least:
                    raise sqlite3.DatabaseError("a page of rows is in the place of another")
                yield tuple(row)
                least, skipped = number + 1, 0
        except SQLITE_FAULTS as error:
            faults.append(error)
        else:
            return
        # One number at a time as far as a page reaches, then in growing steps: a damaged page can be the
        # last of the table, or lead to thousands of others.
        step = 1 + skipped // 1_000
        least, skipped = least + step, skipped + step


# ---- publishing what was copied


class Published(NamedTuple):
    """How many of the messages in a copy are in the new store, and how many are not."""

    messages_count: int
    unreadable_count: int


async def publish_rows(copy: Path, new: Path, limits: Limits) -> Published:
    """Make `new`, a store of the messages in `copy` whose frames match their digests, and of its peers.

    The messages keep their order and their times of arrival, and get new numbers where others are missing.
    The new store has the database ID and the secrets of the old one if they can be read: a place in the
    arrival order holds as far as both have the same history (docs/store.md).
    """
    prepare_file(new)
    _copy_settings(copy, new)
    source, target = SqliteDatabase(f"sqlite:///{copy}"), SqliteDatabase(f"sqlite:///{new}")
    try:
        target.begin_writing()
        of_secret = select(store_meta.c.value).where(store_meta.c.name == "key_secret")
        [[secret]] = await target.rows(target.sql.query(of_secret))
        writer = GroupWriter(target, Keys(secret), limits, lambda: 0)
        frames = FrameReader(source)
        read_count = written_count = 0
        async for rows in _chunks(source, _entries(), messages.c.seq):
            read_count += len(rows)
            whole = {row.seq: row for row in map(EntryRow._make, rows)}
            entries = {
                seq: entry for seq, row in whole.items() if (entry := await _proved(frames, row))
            }
            results = writer.write(list(entries.values()))
            writer.write_claims(await _claims(source, entries))
            # A damaged row can repeat another one.
            times = [
                (whole[seq].received_at_ms, result.seq)
                for seq, result in zip(entries, results, strict=True)
                if result.is_new
            ]
            with target.transaction() as transaction:
                transaction.many(target.sql.update_each(messages, "seq", "received_at_ms"), times)
            written_count += len(times)
        met = select(met_ids.c.met_no, met_ids.c.channel_id, met_ids.c.message_id)
        async for rows in _chunks(source, met, met_ids.c.met_no):
            writer.write([], [MetId(*row[1:]) for row in rows])
    finally:
        await source.close()
        await target.close()
    return Published(written_count, read_count - written_count)


def _copy_settings(copy: Path, new: Path) -> None:
    """Copy the database's ID, its secrets and the interest that an operator set, and the peers.

    Without their memories, so that the next session with each compares everything.
    """
    with closing(sqlite3.connect(new)) as connection, connection:
        connection.execute("ATTACH ? AS old", [str(copy)])
        meta = dict(connection.execute("SELECT name, value FROM old.store_meta").fetchall())
        if {"database_id", "key_secret"} <= meta.keys() and meta["database_id"].isalnum():
            connection.execute("REPLACE INTO main.store_meta SELECT * FROM old.store_meta")
        connection.execute("INSERT OR IGNORE INTO main.peers SELECT * FROM old.peers")
        connection.execute("UPDATE main.peers SET memory = NULL")
        # Retired entries are not published again. One that a peer brings is stored without its content.
        connection.execute(
            "INSERT OR IGNORE INTO main.retired_content "
            "SELECT digest, NULL, retired_at_ms, reason FROM old.retired_content"
        )


def _entries() -> Select[Any]:
    """`EntryRow`s with small frames. Their channels may be unknown: frames name them."""
    return select_entries_with_frames(messages.outerjoin(channels, IN_CHANNELS))


async def _chunks(
    source: Database, statement: Select[Any], number: Column[int]
) -> AsyncIterator[list[Row]]:
    """The rows of a statement that begin with a number, by that number."""
    after, most = bindparam("after", type_=BigInteger()), bindparam("most", type_=Integer())
    query = source.sql.query(statement.where(number > after).order_by(number).limit(most))
    last = -1
    while rows := await source.rows(query, after=last, most=ROWS_PER_GROUP):
        yield rows
        last = rows[-1][0]


async def _claims(source: Database, entries: Mapping[int, NewEntry]) -> list[tuple[bytes, Claim]]:
    """The hint claims on entries, each with its entry's digest, whose elements agree with both."""
    claim = published_claims.c
    found = select(claim.claim_no, claim.seq, claim.source, claim.hint, claim.element_id)
    rows = await source.among(source.sql.among(claim.seq, found.where), list(entries))
    return [
        (entries[seq].digest, Claim(hint, ClaimSource(kind)))
        for _, seq, kind, hint, element_id in sorted(rows, key=itemgetter(0))
        if isinstance(hint, bytes)
        and kind in _SOURCES
        and claim_id(entries[seq].digest, hint) == element_id
    ]


async def _proved(frames: FrameReader, row: EntryRow) -> NewEntry | None:
    """The entry of a row if its frame has the row's digest. No other column is used."""
    try:
        [entry] = await frames.entries([row])
        message, dialect = decode(entry.frame)
    except (MessageError, ValueError, TypeError, KeyError):  # no frame, or values that are damaged
        return None
    if entry_digest(message) != row.digest:
        return None
    frame = entry.frame
    return NewEntry(frame, frame_hash(frame), row.digest, message, dialect, verifies(message))
