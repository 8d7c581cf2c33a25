"""Integrity: checks of rows and of the database's structure, and rebuilding its indexes.

`sdstore check` compares tables with each other; it cannot see that a look-up through an index misses a
row, because it reads through indexes itself. The database can: SQLite by `integrity_check`, PostgreSQL
by the extension `amcheck`. That check compares rows with indexes. `RowCheck` compares the remaining
columns with the values they were made of; docs/store.md names the columns that nothing can prove.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    LargeBinary,
    Text,
    bindparam,
    not_,
    or_,
    select,
    tuple_,
)

from app.entries import Entry
from app.store.arrivals import ArrivalChain
from app.store.database import Database, Query, Row, SqlDialect, highest
from app.store.entryrows import PREFIX_BYTES
from app.store.faults import UnusableFileError, missing_driver
from app.store.gaps import names_held
from app.store.keys import Keys
from app.store.schema import (
    ByteText,
    channels,
    history_claims,
    lost_content,
    messages,
    met_ids,
    metadata,
    missing_references,
    mvds_peers,
    mvds_positions,
    mvds_records,
    published_claims,
    watermark,
)
from app.store.sqlite import replace_file, writing_alone
from sdstore.mvds import RecordType
from sdstore.sds.codec import MessageError, decode
from sdstore.sds.digest import claim_id, entry_digest, frame_hash
from sdstore.sds.model import Message

_Made = TypeVar("_Made")

REPORTS_MAX = 1_000
"""Reports of a database's own check: enough to name every damaged part."""

ROWS_PER_READ = 4_096
"""Rows that are checked at a time."""

ROWS_PER_COPY = 4_096
"""Rows that one statement copies; it copies them in halves if they hold an unreadable page."""

DAMAGED_SUFFIX = ".damaged"
"""The suffix of the old file if not all of its rows could be copied."""

_WORD = 1 << 64
_FRAMES = ("frames", "frame_references")
# SQLITE_TOOBIG: a damaged row claims to be longer than any row that can be stored.
_DAMAGED_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG}
# An error's message can quote a damaged schema that is not valid UTF-8.
_FAULTS = (sqlite3.DatabaseError, UnicodeDecodeError)
_INDEX_NAMED = re.compile(r"\bindex (\w+)$")
_COLUMN_NAMED = re.compile(r"\bvalue in (\w+)\.\w+$")
_TREE_NAMED = re.compile(r"^Tree (\d+) ")
_PAGE_NAMED = re.compile(r"\b[Pp]age (\d+)\b")


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of the database that its own check finds damaged.

    `kind` is "index", "table" or "file" (neither, or unknown). `report` is the first report of the database,
    `reports_count` their number.
    """

    kind: str
    name: str
    report: str
    reports_count: int = 1

    def __str__(self) -> str:
        more = self.reports_count - 1
        return f"{self.kind} {self.name}: {self.report}" + (f" (and {more} more)" if more else "")


@dataclass(slots=True)
class Structure:
    """The findings of a database's own check; `unchecked` names the parts that were not checked, and why."""

    damages: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def is_mended_by_reindex(self) -> bool:
        """Whether new indexes mend all damage."""
        return all(each.kind == "index" for each in self.damages)


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


class RowStep(NamedTuple):
    """Some rows that were checked: their number, the place for the next step (None at the end of the
    table), and descriptions of what contradicts."""

    rows_count: int
    next: int | None
    faults: list[str]


class _Walk(NamedTuple):
    """Rows of a table by number: what one row is called, the statement, and the check of many rows."""

    what: str
    query: Query
    faults: Callable[[Sequence[Row]], Iterator[tuple[int, str]]]


class RowCheck:
    """Checks the rows of one open store."""

    def __init__(self, database: Database, keys: Keys) -> None:
        self._database = database
        self._keys = keys
        self._chain = ArrivalChain(keys.secret)

    @cached_property
    def _walks(self) -> dict[str, _Walk]:
        """The tables that hold keys or name other rows."""
        m, p, h, met = (each.c for each in (messages, published_claims, history_claims, met_ids))
        message = select(m.seq, m.digest, m.arrival_sum, m.digest_prefix, m.id_key, m.message_id)
        claim = select(
            p.claim_no,
            p.element_id,
            p.arrival_sum,
            p.element_prefix,
            p.hint_key,
            p.hint,
            p.channel_no,
            m.channel_no.label("its_channel_no"),
            m.digest,
        ).join_from(published_claims, messages, p.seq == m.seq, isouter=True)
        told = select(h.claim_no, h.hint_key, h.hint, h.id_key, h.message_id, channels.c.channel_no)
        told = told.join_from(
            history_claims, channels, h.channel_no == channels.c.channel_no, isouter=True
        )
        found_met = select(met.met_no, met.id_key, met.channel_id, met.message_id)
        least: Any = bindparam("least", type_=BigInteger())
        most: Any = bindparam("most", type_=Integer())
        return {
            number.table.name: _Walk(
                what,
                self._database.sql.query(
                    statement.where(number >= least).order_by(number).limit(most)
                ),
                faults,
            )
            for what, number, statement, faults in (
                ("message", m.seq, message, self._of_messages),
                ("hint claim", p.claim_no, claim, self._of_claims),
                ("hint of a history", h.claim_no, told, self._of_history),
                ("known sync message", met.met_no, found_met, self._of_met),
            )
        }

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that `step` checks."""
        return tuple(self._walks)

    async def faults(self) -> AsyncIterator[str]:
        """Descriptions of contradictions within rows and between tables, except those in messages' frames.

        Reads every row of the tables that hold keys or name other rows.
        """
        for table in self.tables:
            at: int | None = -1
            while at is not None:
                _, at, faults = await self.step(table, at, ROWS_PER_READ)
                for fault in faults:
                    yield fault
        place: tuple[int, str] | None = (-1, "")
        while place is not None:
            _, place, faults = await self.missing_step(place, ROWS_PER_READ)
            for fault in faults:
                yield fault
        for others in (self.counter_faults(), self._of_names()):
            async for fault in others:
                yield fault

    async def step(self, table: str, after: int, most: int) -> RowStep:
        """Check rows of a table with numbers above `after` (-1: from the start), up to `most`.

        Reads the row numbered `after` too: the chain goes on from it as it is now.
        """
        what, query, faults = self._walks[table]
        rows = await self._database.rows(query, least=after, most=most + 1)
        found = [
            f"{what} number {number}: {fault}" for number, fault in faults(rows) if number > after
        ]
        count = sum(row[0] > after for row in rows)
        return RowStep(count, rows[-1][0] if count else None, found)

    def _of_messages(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        yield from self._of_chain(rows)
        for seq, digest, _, prefix, key, message_id in rows:
            if bytes(prefix) != bytes(digest)[:PREFIX_BYTES]:
                yield seq, "its digest differs from the indexed one"
            if key != self._keys.of_text(message_id):
                yield seq, "its ID differs from the indexed one"

    def _of_claims(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        yield from self._of_chain(rows)
        for claim_no, element, _, prefix, key, hint, channel_no, its_channel_no, digest in rows:
            if digest is None:
                yield claim_no, "its entry is not in the table of messages"
            elif bytes(element) != claim_id(bytes(digest), bytes(hint)):
                yield claim_no, "its element is not the hash of its entry and hint"
            elif channel_no != its_channel_no:
                yield claim_no, "its channel differs from its entry's"
            if bytes(prefix) != bytes(element)[:PREFIX_BYTES]:
                yield claim_no, "its element differs from the indexed one"
            if key != self._keys.of_bytes(bytes(hint)):
                yield claim_no, "its hint is not the one that is indexed"

    def _of_history(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        for claim_no, hint_key, hint, id_key, message_id, channel_no in rows:
            if hint_key != self._keys.of_bytes(bytes(hint)):
                yield claim_no, "its hint is not the one that is indexed"
            if id_key != self._keys.of_text(message_id):
                yield claim_no, "its message ID differs from the indexed one"
            if channel_no is None:
                yield claim_no, "no channel has its number"

    def _of_met(self, rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
        for met_no, key, channel_id, message_id in rows:
            if key != self._keys.of_met(channel_id, message_id):
                yield met_no, "its ID differs from the indexed one"

    async def missing_step(
        self, after: tuple[int, str], most: int
    ) -> tuple[int, tuple[int, str] | None, list[str]]:
        """As `step`, for missing references after (channel number, message ID).

        Finds those of unknown channels, and those to entries that the store has. `Gaps.unrecorded` finds
        those that are not in the table, although a history names them.
        """
        faults: list[str] = []
        # One snapshot: an entry that arrives in between is not both missing and there.
        async with self._database.snapshot() as frozen:
            rows = await frozen.rows(
                _missing_after(frozen.sql), after_no=after[0], after_id=after[1], most=most
            )
            asked = [(self._keys.of_text(each), each, number) for number, each, _ in rows]
            held = {row[0] for row in await frozen.each(names_held(frozen.sql), asked)}
        for place, (channel_no, message_id, channel_id) in enumerate(rows):
            what = f"missing reference {message_id!r} of channel number {channel_no}"
            if channel_id is None:
                faults.append(f"{what}: no channel has its number")
            if place in held:
                faults.append(f"{what}: the store has this message")
        return len(rows), (rows[-1][0], rows[-1][1]) if rows else None, faults

    async def counter_faults(self) -> AsyncIterator[str]:
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

    async def _of_names(self) -> AsyncIterator[str]:
        """Lost content, MVDS positions and MVDS records that name rows which do not exist."""
        lost, place, record = lost_content.c, mvds_positions.c, mvds_records.c
        peers = select(mvds_peers.c.peer_no)
        lost_unknown = select(lost.seq).where(lost.seq.not_in(select(messages.c.seq)))
        places = select(place.peer_no, place.channel_no).where(
            or_(
                place.peer_no.not_in(peers),
                place.channel_no.not_in(select(channels.c.channel_no)),
                place.seq < 0,
                place.seq > select(watermark.c.seq).scalar_subquery(),
            )
        )
        is_request = record.type == int(RecordType.REQUEST)
        its_entry = (messages.c.seq == record.seq) & (messages.c.channel_no == record.channel_no)
        records = select(record.peer_no, record.message_id)
        records = records.join_from(mvds_records, messages, its_entry, isouter=True).where(
            or_(
                record.peer_no.not_in(peers),
                not_(or_(*(record.type == int(each) for each in RecordType))),
                is_request & ((record.seq != 0) | (record.channel_no != 0)),
                not_(is_request) & messages.c.seq.is_(None),
            )
        )
        most: Any = bindparam("most", type_=Integer())
        for statement, fault in (
            (lost_unknown, "lost content of message number {}: no message has this number"),
            (places, "MVDS position of peer number {} in channel number {}: {}"),
            (records, "MVDS record of peer number {} about message {}: {}"),
        ):
            query = self._database.sql.query(statement.limit(most))
            for row in await self._database.rows(query, most=REPORTS_MAX):
                values = [each.hex() if isinstance(each, bytes) else each for each in row]
                yield fault.format(*values, "it names a row that does not exist")

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
        wrong_types = [] if reports else list(_wrong_types(connection))
    except _FAULTS as error:
        if is_damage(error):
            return Structure([Damage("file", "store", str(error))])
        raise UnusableFileError(f"the database cannot be read: {error}") from error
    parts = _Parts(connection) if reports else None
    first: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for report in reports:
        assert parts is not None  # noqa: S101 - there are reports
        part = parts.of(report)
        first.setdefault(part, report)
        counts[part] += 1
    damages = [Damage(*part, report, counts[part]) for part, report in first.items()]
    return Structure(damages or wrong_types)


def _wrong_types(connection: sqlite3.Connection) -> Iterator[Damage]:
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
                yield Damage("table", table.name, f"rows with values of a wrong type: {count}")


def _type_names(column: Column[Any]) -> str:
    """The types, as SQLite names them, that the values of a column can have."""
    kinds = ((Integer, "'integer'"), (LargeBinary, "'blob'"), (Text, "'text'"))
    [name] = [name for kind, name in kinds if isinstance(column.type, kind)]
    return f"{name}, 'null'" if column.nullable else name


def _reports(connection: sqlite3.Connection) -> list[str]:
    """The findings of SQLite, a line each."""
    try:
        rows = connection.execute(f"PRAGMA integrity_check({REPORTS_MAX})").fetchall()
    except _FAULTS as error:
        if not is_damage(error):
            raise
        # It gave up at a page that it could not read. The pages themselves it checks first.
        first = "SELECT * FROM pragma_integrity_check(?) LIMIT 1"
        rows = [*connection.execute(first, [REPORTS_MAX]).fetchall(), (str(error),)]
    lines = [line for row in rows for line in row[0].splitlines()]
    return [line for line in lines if line != "ok" and not line.startswith("*** in database")]


class _Parts:
    """Finds the index or table that a report of SQLite is about."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._kinds: dict[str, str] = {}
        self._names_of_roots: dict[int, str] = {}
        self._names_of_pages: dict[int, str] = {}
        schema = "SELECT type, name, rootpage FROM sqlite_schema WHERE rootpage > 0"
        for kind, name, root in _rows_up_to_a_fault(connection, schema):
            self._kinds[name] = kind
            self._names_of_roots[root] = name
        # Older versions of SQLite name the page alone; this table is not part of every SQLite.
        for name, page in _rows_up_to_a_fault(connection, "SELECT name, pageno FROM dbstat"):
            self._names_of_pages[page] = name

    def of(self, report: str) -> tuple[str, str]:
        """(kind, name) of the part that is damaged."""
        name = None
        if found := _INDEX_NAMED.search(report) or _COLUMN_NAMED.search(report):
            name = found[1]
        elif found := _TREE_NAMED.search(report):
            name = self._names_of_roots.get(int(found[1]))
        elif found := _PAGE_NAMED.search(report):
            name = self._names_of_pages.get(int(found[1]))
        return ("file", "store") if name is None else (self._kinds.get(name, "table"), name)


def _rows_up_to_a_fault(connection: sqlite3.Connection, query: str) -> Iterator[Any]:
    try:
        yield from connection.execute(query)
    except _FAULTS:
        return


def rebuild_sqlite(path: Path) -> Counter[str]:
    """Copy the rows of every table into a new file, build its indexes, and replace the old file.

    Returns the number of rows per table that could not be read and were left out. Only frames are ever
    left out: a message without its frame has lost content, which the next sync with a peer mends. The old
    file then stays beside the new one (`DAMAGED_SUFFIX`).
    Raises UnusableFileError, and leaves the store unchanged, if rows of another table cannot be read;
    StoreBusyError if the store has a writer; `Problem` if it has a reader.
    """
    draft = path.with_name(f"{path.name}.rebuilding")
    with writing_alone(path):
        draft.unlink(missing_ok=True)
        try:
            left_out = _copy_store(path, draft)
            kept = path.with_name(f"{path.name}{DAMAGED_SUFFIX}") if left_out else None
            replace_file(path, draft, kept)
        finally:
            draft.unlink(missing_ok=True)
    return left_out


def _copy_store(path: Path, draft: Path) -> Counter[str]:
    left_out: Counter[str] = Counter()
    what = "its schema"
    with closing(sqlite3.connect(draft, isolation_level=None, uri=True)) as connection:
        try:
            # A crash may destroy the draft; it is synced before it gets the store's name.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("ATTACH ? AS old", [f"{path.resolve().as_uri()}?mode=ro"])
            parts = connection.execute(
                "SELECT type, name, sql FROM old.sqlite_schema WHERE sql IS NOT NULL"
                " AND name NOT LIKE 'sqlite_%' ORDER BY type <> 'table'"
            ).fetchall()
            for kind, name, statement in parts:
                what = f"{kind} {name}"
                connection.execute(statement)
                if kind == "table" and name in _FRAMES:
                    left_out += _copy_frames(connection, name)
                elif kind == "table":
                    # The condition keeps SQLite from copying the pages of indexes as they are.
                    connection.execute(
                        f"INSERT INTO main.{name} SELECT * FROM old.{name} NOT INDEXED WHERE true"  # noqa: S608 - of this schema
                    )
            what = "the copy"
            verdict = connection.execute("PRAGMA main.integrity_check(1)").fetchone()[0]
        except _FAULTS as error:
            raise UnusableFileError(f"{path}: {what} cannot be rebuilt: {error}") from error
    if verdict != "ok":
        raise UnusableFileError(f"{path}: the copy is damaged: {verdict}")
    return left_out


def _copy_frames(connection: sqlite3.Connection, table: str) -> Counter[str]:
    """Copy the readable rows of a table of frames; returns how many rows of messages have none now."""
    [[first, last]] = connection.execute("SELECT min(seq), max(seq) FROM old.messages NOT INDEXED")
    starts = range(first, last + 1, ROWS_PER_COPY) if first is not None else range(0)
    ranges = [(start, min(start + ROWS_PER_COPY - 1, last)) for start in reversed(starts)]
    left_out: Counter[str] = Counter()
    while ranges:
        low, high = ranges.pop()
        try:
            connection.execute(
                f"INSERT OR IGNORE INTO main.{table} SELECT * FROM old.{table}"  # noqa: S608
                " WHERE seq BETWEEN ? AND ?",
                (low, high),
            )
        except _FAULTS as error:
            if not is_damage(error):
                raise
            if low == high:
                left_out[table] += 1
            else:
                middle = (low + high) // 2
                ranges += [(middle + 1, high), (low, middle)]
    return left_out


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
                    structure.damages.append(Damage(kind, name, reports[0], len(reports)))
    return structure


def rebuild_postgres(database_url: str) -> None:
    """Rebuild every index of the store; nodes can keep running. Raises DatabaseUnreachableError."""
    with _connected(database_url) as connection:
        for _, name in connection.execute(_OUR_TABLES, [list(metadata.tables)]).fetchall():
            connection.execute(f"REINDEX TABLE CONCURRENTLY {name}")
