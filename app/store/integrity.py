"""Integrity: whether a database is sound. The database checks its own structure; we check what it cannot know.

SQLite's `integrity_check` and PostgreSQL's extension `amcheck` compare rows with indexes, which no look-up
can do. `RowCheck` compares columns that no index holds with the values they were made of;
docs/store.md names the columns that nothing can prove. `app.store.recovery` makes a damaged file sound.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, Text, bindparam, select, tuple_

from app.entries import Entry
from app.store.arrivals import ArrivalChain
from app.store.database import (
    Database,
    Query,
    Row,
    SqlDialect,
    UnusableFileError,
    highest,
    missing_driver,
)
from app.store.entryrows import Keys
from app.store.histories import names_held
from app.store.schema import (
    ByteText,
    channels,
    history_claims,
    lost_content,
    messages,
    met_ids,
    metadata,
    missing_references,
    published_claims,
    watermark,
)
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.model import Message, claim_id, entry_digest, frame_hash

_Made = TypeVar("_Made")

REPORTS_MAX = 100
"""Reports of a database's own check for each table; the rest are only counted."""

ROWS_PER_READ = 4_096
"""Rows that are checked at a time."""

_WORD = 1 << 64
# SQLITE_TOOBIG: a damaged row claims to be longer than any row that can be stored.
_DAMAGED_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG}
# An error's message can quote a damaged schema that is not valid UTF-8.
SQLITE_FAULTS = (sqlite3.DatabaseError, UnicodeDecodeError)


@dataclass(slots=True)
class Structure:
    """The findings of a database's own check: damages by index or table, and parts that were not checked."""

    damages: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


async def check_structure(database_url: str) -> Structure:
    """Run the database's own check; the node can be running.

    Raises UnusableFileError for a SQLite file that cannot be read at all, DatabaseUnreachableError.
    """
    if database_url.startswith("sqlite:"):
        return await _interruptible(_read_only(_path_of(database_url)), _sqlite_structure)
    return await asyncio.to_thread(_postgres_structure, database_url)


def is_damage(error: BaseException | None) -> bool:
    """Whether a database refused a read because its pages are damaged."""
    while error is not None:
        if isinstance(error, UnicodeDecodeError):
            return True
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _DAMAGED_CODES:
            return True
        # XX001 data_corrupted, XX002 index_corrupted
        if getattr(error, "sqlstate", None) in ("XX001", "XX002"):
            return True
        error = error.__cause__
    return False


# ---- rows


class RowCheck:
    """Checks the rows of one open store: what neither a frame nor the database's own check proves."""

    def __init__(self, database: Database, keys: Keys) -> None:
        self._database = database
        self._keys = keys
        self._chain = ArrivalChain(keys.secret)

    async def faults(self) -> AsyncIterator[str]:
        """Descriptions of contradictions within rows and between tables, except those in messages' frames.

        Reads every row of the tables that hold keys or name other rows.
        """
        m, p, h, met = (each.c for each in (messages, published_claims, history_claims, met_ids))
        entry = select(m.seq, m.digest, m.arrival_sum, m.id_key, m.message_id)
        claim = select(p.claim_no, p.element_id, p.arrival_sum, p.hint, p.channel_no)
        claim = claim.add_columns(m.channel_no.label("its_channel_no"), m.digest)
        claim = claim.join_from(published_claims, messages, p.seq == m.seq, isouter=True)
        told = select(h.claim_no, h.hint_key, h.hint, h.id_key, h.message_id)
        known = select(met.met_no, met.id_key, met.channel_id, met.message_id)
        least: Any = bindparam("least", type_=BigInteger())
        most: Any = bindparam("most", type_=Integer())
        for what, number, statement, check in (
            ("message", m.seq, entry, self._of_messages),
            ("hint claim", p.claim_no, claim, self._of_claims),
            ("hint of a history", h.claim_no, told, self._of_history),
            ("known sync message", met.met_no, known, self._of_met),
        ):
            query = self._database.sql.query(
                statement.where(number >= least).order_by(number).limit(most)
            )
            after = -1
            # Reads the row numbered `after` again: the chain goes on from it as it is now.
            while rows := await self._database.rows(query, least=after, most=ROWS_PER_READ + 1):
                for place, fault in check(rows):
                    if place > after:
                        yield f"{what} number {place}: {fault}"
                if rows[-1][0] == after:
                    break
                after = rows[-1][0]
        for others in (self._of_missing(), self._of_counters(), self._of_lost()):
            async for fault in others:
                yield fault

    def _of_messages(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        yield from self._of_chain(rows)
        for seq, _, _, key, message_id in rows:
            if key != self._keys.of_text(message_id):
                yield seq, "its ID differs from the indexed one"

    def _of_claims(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        yield from self._of_chain(rows)
        for claim_no, element, _, hint, channel_no, its_channel_no, digest in rows:
            if digest is None:
                yield claim_no, "its entry is not in the table of messages"
            elif hint and bytes(element) != claim_id(bytes(digest), bytes(hint)):
                yield claim_no, "its element is not the hash of its entry and hint"
            elif channel_no != its_channel_no:
                yield claim_no, "its channel differs from its entry's"

    def _of_history(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        for claim_no, hint_key, hint, id_key, message_id in rows:
            if hint_key != self._keys.of_bytes(bytes(hint)):
                yield claim_no, "its hint is not the one that is indexed"
            if id_key != self._keys.of_text(message_id):
                yield claim_no, "its message ID differs from the indexed one"

    def _of_met(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        for met_no, key, channel_id, message_id in rows:
            if key != self._keys.of_met(channel_id, message_id):
                yield met_no, "its ID differs from the indexed one"

    async def _of_missing(self) -> AsyncIterator[str]:
        """Missing references of unknown channels, and those to entries that the store has.

        `Gaps.unrecorded` finds those that are not in the table, although a history names them.
        """
        after = (-1, "")
        while True:
            # One snapshot: an entry that arrives in between is not both missing and there.
            async with self._database.snapshot() as frozen:
                query = _missing_after(frozen.sql)
                rows = await frozen.rows(
                    query, after_no=after[0], after_id=after[1], most=ROWS_PER_READ
                )
                asked = [(self._keys.of_text(each), each, number) for number, each, _ in rows]
                held = {row[0] for row in await frozen.each(names_held(frozen.sql), asked)}
            for place, (channel_no, message_id, channel_id) in enumerate(rows):
                what = f"missing reference {message_id!r} of channel number {channel_no}"
                if channel_id is None:
                    yield f"{what}: no channel has its number"
                if place in held:
                    yield f"{what}: the store has this message"
            if not rows:
                return
            after = rows[-1][0], rows[-1][1]

    async def _of_counters(self) -> AsyncIterator[str]:
        """Counters below the numbers that they assigned. Higher ones can be right: rows can be deleted."""
        counters = select(
            watermark.c.seq,
            highest(messages.c.seq),
            watermark.c.claim_no,
            highest(published_claims.c.claim_no),
        )
        [row] = await self._database.rows(self._database.sql.query(counters))
        seq, last_seq, claim_no, last_claim_no = row
        if seq < last_seq or claim_no < last_claim_no:
            yield (
                f"the counters ({seq}, {claim_no}) are below the last numbers of a message and a hint "
                f"claim ({last_seq}, {last_claim_no})"
            )

    async def _of_lost(self) -> AsyncIterator[str]:
        unknown = select(lost_content.c.seq).where(
            lost_content.c.seq.not_in(select(messages.c.seq))
        )
        for (seq,) in await self._database.rows(self._database.sql.query(unknown)):
            yield f"lost content of message number {seq}: no message has this number"

    def _of_chain(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        """Rows of (number, element, sum …) whose sum is not that of the row before and their own term.

        After a gap in the numbers, and in the first of these rows, the sum cannot be checked.
        """
        if not rows:
            return
        numbers, elements, sums, *_ = zip(*rows, strict=True)
        elements = tuple(map(bytes, elements))
        if any(len(each) != 32 for each in elements):
            yield (
                numbers[-1],
                "it or a row shortly before it has an element whose length is not 32 bytes",
            )
            return
        own = [0, *self._chain.sums(0, numbers, elements)]
        before_number, before_sum = 0, 0
        for place, (number, arrival_sum) in enumerate(zip(numbers, sums, strict=True)):
            term = own[place + 1] - own[place]
            if number == before_number + 1 and (arrival_sum - before_sum - term) % _WORD:
                yield number, "its sum or that of the row before differs from the arrival chain"
            before_number, before_sum = number, arrival_sum


@cache
def _missing_after(sql: SqlDialect) -> Query:
    """(channel number, message ID, the channel's name if there is one), after a pair."""
    missing = missing_references.c
    named = select(missing.channel_no, missing.message_id, channels.c.channel_id)
    named = named.join_from(
        missing_references, channels, missing.channel_no == channels.c.channel_no, isouter=True
    )
    after = bindparam("after_no", type_=BigInteger()), bindparam("after_id", type_=ByteText)
    named = named.where(tuple_(missing.channel_no, missing.message_id) > tuple_(*after))
    most: Any = bindparam("most", type_=Integer())
    return sql.query(named.order_by(missing.channel_no, missing.message_id).limit(most))


def message_or_fault(entry: Entry) -> Message | str:
    """The message of an entry's frame, or how the entry's row differs from it."""
    if frame_hash(entry.frame) != entry.frame_hash:
        return "the frame is damaged"
    try:
        message, dialect = decode(entry.frame)
    except MessageError as error:
        return f"the frame does not decode: {error}"
    if entry_digest(message) != entry.digest:
        return "its row has the digest of another message"
    named = (message.channel_id, message.message_id, message.lamport_timestamp, dialect)
    if named != (entry.channel_id, entry.message_id, entry.lamport_timestamp, entry.dialect):
        return "its row names another message"
    return message


# ---- SQLite


def _path_of(database_url: str) -> Path:
    return Path(database_url.removeprefix("sqlite:///"))


def _read_only(path: Path) -> sqlite3.Connection:
    url = f"{path.resolve().as_uri()}?mode=ro"
    try:
        connection = sqlite3.connect(url, uri=True, check_same_thread=False)
    except sqlite3.Error as error:
        raise UnusableFileError(f"{path} cannot be opened: {error}") from error
    # Text from a damaged page may not be valid UTF-8.
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


async def _interruptible(
    connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], _Made]
) -> _Made:
    """Run `work` in a thread. A cancelled caller does not wait for the end of a long statement."""
    with closing(connection):
        working = asyncio.ensure_future(asyncio.to_thread(work, connection))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            connection.interrupt()
            await asyncio.wait([working])
            working.exception()  # it was interrupted, which nobody needs to hear
            raise


def _sqlite_structure(connection: sqlite3.Connection) -> Structure:
    try:
        reports = _reports(connection)
        if reports:
            tables = [row[0] for row in connection.execute(_TABLES)]
            damages = [each for table in tables for each in _damages_of(connection, table)]
            return Structure(damages or [_counted("file store", reports)])
        return Structure(list(_wrong_types(connection)))
    except SQLITE_FAULTS as error:
        if is_damage(error):
            return Structure([f"file store: {error}"])
        raise UnusableFileError(f"the database cannot be read: {error}") from error


_TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name"


def _damages_of(connection: sqlite3.Connection, table: str) -> Iterator[str]:
    """The damage to a table, and to its indexes as far as SQLite names them."""
    parts: dict[str, list[str]] = {}
    for report in _reports(connection, table):
        _, _, index = report.rpartition(" missing from index ")
        parts.setdefault(f"index {index}" if index != report else f"table {table}", []).append(
            report
        )
    yield from (_counted(part, reports) for part, reports in parts.items())


def _counted(part: str, reports: Sequence[str]) -> str:
    more = len(reports) - 1
    return f"{part}: {reports[0]}" + (f" (and {more} more)" if more else "")


def _reports(connection: sqlite3.Connection, table: str = "") -> list[str]:
    """The findings of SQLite about a table and its indexes, or about the whole file, a line each."""
    try:
        check = f"PRAGMA integrity_check({table or REPORTS_MAX})"
        rows = connection.execute(check).fetchmany(REPORTS_MAX)
    except SQLITE_FAULTS as error:
        if not is_damage(error):
            raise
        return [str(error)]  # it gave up at a page that it could not read
    lines = [line for row in rows for line in row[0].splitlines()]
    return [line for line in lines if line != "ok" and not line.startswith("*** in database")]


def _wrong_types(connection: sqlite3.Connection) -> Iterator[str]:
    """Tables with values of another type than their column's.

    SQLite takes a REAL for sound in a column of integers. One flipped bit makes it of an integer.
    """
    for table in metadata.sorted_tables:
        present = {row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")}
        wrong = [
            f"typeof({each.name}) NOT IN ({_type_names(each)})"
            for each in table.columns
            if each.name in present
        ]
        if wrong:
            condition = " OR ".join(wrong)
            query = f"SELECT count(*) FROM {table.name} NOT INDEXED WHERE {condition}"  # noqa: S608 - of this schema
            [[count]] = connection.execute(query)
            if count:
                yield f"table {table.name}: rows with values of a wrong type: {count}"


def _type_names(column: Column[Any]) -> str:
    """The types, as SQLite names them, that the values of a column can have."""
    kinds = ((Integer, "'integer'"), (LargeBinary, "'blob'"), (Text, "'text'"))
    [name] = [name for kind, name in kinds if isinstance(column.type, kind)]
    return f"{name}, 'null'" if column.nullable else name


# ---- PostgreSQL

_AMCHECK_SCHEMA = """
SELECT quote_ident(nspname) FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace
WHERE extname = 'amcheck'
"""
_OUR_TABLES = """
SELECT c.oid, c.relname FROM pg_class c
WHERE c.relname = ANY(%s) AND c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace
ORDER BY c.relname
"""
_OUR_INDEXES = """
SELECT c.oid, c.relname FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid
JOIN pg_am a ON a.oid = c.relam
WHERE t.relname = ANY(%s) AND t.relnamespace = current_schema()::regnamespace
AND a.amname = 'btree' ORDER BY c.relname
"""
_NO_AMCHECK = (
    "the structure of indexes and tables was not checked: the extension amcheck is not installed in "
    "this database; a superuser can: CREATE EXTENSION amcheck"
)


@contextmanager
def _connected(database_url: str) -> Iterator[Any]:
    """A connection to PostgreSQL. Raises UnsupportedDatabaseError, DatabaseUnreachableError."""
    try:
        import psycopg  # noqa: PLC0415 - an extra

        from app.store.postgres import parameters_of, unreachable  # noqa: PLC0415
    except ImportError as error:
        raise missing_driver(error) from error
    try:
        with psycopg.connect(**parameters_of(database_url)) as connection:
            yield connection
    except psycopg.OperationalError as error:
        raise unreachable(error) from error


def _postgres_structure(database_url: str) -> Structure:
    structure = Structure()
    tables = list(metadata.tables)
    with _connected(database_url) as connection:
        import psycopg  # noqa: PLC0415 - it is there by now

        found = connection.execute(_AMCHECK_SCHEMA).fetchone()
        if found is None:
            return Structure(unchecked=[_NO_AMCHECK])
        checks = [
            ("table", _OUR_TABLES, f"SELECT msg FROM {found[0]}.verify_heapam(%s::oid)"),  # noqa: S608
            ("index", _OUR_INDEXES, f"SELECT {found[0]}.bt_index_check(%s::oid, true)::text"),
        ]
        for kind, listing, check in checks:
            for oid, name in connection.execute(listing, [tables]).fetchall():
                try:
                    rows = connection.execute(check, [oid]).fetchall()
                except psycopg.errors.InsufficientPrivilege as error:
                    structure.unchecked.append(f"{kind} {name} was not checked: {error}")
                    continue
                except psycopg.InternalError as error:
                    rows = [(str(error).strip(),)]
                reports = [row[0] for row in rows if row[0]]
                if reports:
                    structure.damages.append(_counted(f"{kind} {name}", reports))
    return structure


def rebuild_postgres(database_url: str) -> None:
    """Rebuild every index of the store; nodes can keep running. Raises DatabaseUnreachableError."""
    with _connected(database_url) as connection:
        for _, name in connection.execute(_OUR_TABLES, [list(metadata.tables)]).fetchall():
            connection.execute(f"REINDEX TABLE CONCURRENTLY {name}")
