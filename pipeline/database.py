"""Read a store's database from any number of processes at once, as Arrow.

Connections are read-only, and neither this module nor the node waits for the other. A scan bounds
entries by sequence number and claims by claim number. Both numbers rise in commit order, so the set
below a watermark never grows.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sqlalchemy.engine import make_url

from app.roots import DIGEST_BYTES
from app.store.database import missing_driver
from app.store.entryrows import FrameUnpacker, PackedFrame, Unpacked
from app.store.schema import SCHEMA_REVISION
from pipeline.columns import CLAIMS, ENTRY_KEYS, entries_batch
from pipeline.manifest import ExportEnd, PipelineError
from sdstore.sds.model import frame_hash

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DAY_MS = 86_400_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """The integers from `first` to `last`, both inside; empty when `first` > `last`."""

    first: int = INT64_MIN
    last: int = INT64_MAX

    def at_least(self, first: int) -> Interval:
        """The part from `first` on."""
        return Interval(max(self.first, first), self.last)

    def at_most(self, last: int) -> Interval:
        """The part up to `last`."""
        return Interval(self.first, min(self.last, last))

    @property
    def is_empty(self) -> bool:
        """Whether no integer is inside."""
        return self.first > self.last


@dataclass(frozen=True, slots=True)
class Scan:
    """The entries whose sequence number, Lamport timestamp, arrival and channel are inside.

    `channel_ids` None means every channel; `received_ms` counts from the epoch.
    """

    seq: Interval = Interval()
    lamport: Interval = Interval()
    received_ms: Interval = Interval()
    channel_ids: frozenset[str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the bounds alone exclude every entry."""
        intervals = (self.seq, self.lamport, self.received_ms)
        return self.channel_ids == frozenset() or any(each.is_empty for each in intervals)

    def of_channels(self, channel_ids: Sequence[str] | frozenset[str]) -> Self:
        """The part of it in `channel_ids`."""
        wanted = frozenset(channel_ids)
        known = self.channel_ids
        return replace(self, channel_ids=wanted if known is None else wanted & known)

    def of_seq(self, first: int, last: int) -> Self:
        """The part of it with sequence numbers from `first` to `last`."""
        return replace(self, seq=self.seq.at_least(first).at_most(last))

    def of_day(self, day: str) -> Self:
        """The part of it that arrived on the UTC day `day` (ISO 8601)."""
        start = day_start_ms(day)
        window = self.received_ms.at_least(start).at_most(start + DAY_MS - 1)
        return replace(self, received_ms=window)


def day_of(received_at_ms: int) -> str:
    """The UTC day of an arrival, ISO 8601."""
    return (_EPOCH + timedelta(milliseconds=received_at_ms)).date().isoformat()


def day_start_ms(day: str) -> int:
    """Milliseconds from the epoch to the start of the UTC day `day`."""
    return (datetime.fromisoformat(day).replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND


def floor_ms(moment: datetime) -> int:
    """Whole milliseconds from the epoch to `moment`; without a zone it is taken as UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // _MILLISECOND


def ceil_ms(moment: datetime) -> int:
    """As `floor_ms`, rounded up."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return -((_EPOCH - aware) // _MILLISECOND)


# ---- databases

_SQLITE, _POSTGRES = "sqlite:///", "postgresql://"

_FETCH_ROWS = 256  # a row can take 1 MiB
_BATCH_ROWS = 4_096
_PORTION_ROWS = 4_096  # rows with frames that are decoded together
_PORTION_BYTES = 16 * 1024 * 1024
_BINS_PER_PARTITION = 8  # partitions differ in size by at most one eighth
_KEYS_PER_QUERY = 500
_STORED_COLUMNS = 9  # of a row with its frame: those from the table of entries
_DIGEST = 5
_SEQ = 6
_FRAME_BYTES = 7
_FRAME_HASH = 8


_WITH_FRAMES = (
    "SELECT m.received_at_ms, c.channel_id, m.message_id, m.lamport, m.dialect, m.digest,"
    " m.seq, m.frame_bytes, m.frame_hash, f.codec, f.reference_no, f.data"
    " FROM messages m JOIN channels c ON c.channel_no = m.channel_no"
    " LEFT JOIN frames f ON f.seq = m.seq"
)


class DatabaseError(PipelineError):
    """The URL leads to no store that this software can read."""

    code = "not_found"


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite store; None for any other URL."""
    return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else None


def absolute_url(url: str) -> str:
    """`url` with an absolute file path."""
    path = sqlite_path(url)
    return url if path is None else f"{_SQLITE}{path.absolute()}"


def shown(url: str) -> str:
    """`url` without its password."""
    return make_url(url).render_as_string(hide_password=True)


def open_database(url: str) -> Database:
    """A read-only connection to the store at `url`; close it, or use it as a context manager.

    Raises DatabaseError if there is no store.
    """
    database = connected(url)
    try:
        database.database_id()
        database.require_schema()
    except DatabaseError:
        database.close()
        raise
    except database.faults as error:
        database.close()
        raise DatabaseError(f"{shown(url)} is not a store: {error}") from error
    return database


def connected(url: str) -> Database:
    """A connection to the database at `url`, which need not be a store."""
    path = sqlite_path(url)
    if path is not None:
        return SqliteDatabase(path)
    if url.startswith(_POSTGRES):
        return PostgresDatabase(url)
    raise DatabaseError(f"a database is {_SQLITE}PATH or {_POSTGRES}…")


class Database(ABC):
    """One connection; the subclasses implement what differs between the two databases."""

    _mark: str  # placeholder of a parameter
    faults: type[Exception]
    """The driver's base error."""

    @abstractmethod
    def _rows(self, sql: str, parameters: Sequence[Any], rows: int) -> Iterator[list[Any]]:
        """The rows of a query in lists of at most `rows`, fetched on demand."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query; another query may be in progress."""

    # --- the store ---------------------------------------------------------------------------

    def database_id(self) -> str:
        """The random name that the database got at creation."""
        found = self._all(
            f"SELECT value FROM store_meta WHERE name = {self._mark}", ["database_id"]
        )
        if not found:
            raise DatabaseError("the database is not a store")
        return bytes(found[0][0]).decode()

    def watermark(self) -> ExportEnd:
        """The highest committed numbers with their sums, from one read transaction."""
        return self._watermark_at(INT64_MAX, INT64_MAX)

    def holds(self, read: ExportEnd) -> bool:
        """Whether the history up to `read` is unchanged; False if the store was rolled back since, or
        is another copy."""
        return self._watermark_at(read.seq, read.claim_no) == read

    def _watermark_at(self, seq: int, claim_no: int) -> ExportEnd:
        """The watermark at these numbers, capped at the committed ones."""
        found = self._all("SELECT seq, claim_no FROM watermark")
        if not found:
            raise DatabaseError("the database has lost its counters: restore a backup")
        numbers = min(seq, found[0][0]), min(claim_no, found[0][1])
        claim_sum = self._sum_at("published_claims", "claim_no", numbers[1])
        return ExportEnd(*numbers, self.entry_sum_at(numbers[0]), claim_sum)

    def entry_sum_at(self, seq: int) -> str:
        """The sum of the arrival chain of entries at a sequence number, 64 bits as hex."""
        return self._sum_at("messages", "seq", seq)

    def _sum_at(self, table: str, number: str, up_to: int) -> str:
        rows = self._all(
            f"SELECT arrival_sum FROM {table} WHERE {number} <= {self._mark}"
            f" ORDER BY {number} DESC LIMIT 1",
            [up_to],
        )
        return f"{rows[0][0] % 2**64 if rows else 0:016x}"

    def require_schema(self) -> None:
        """Raises DatabaseError unless this software reads the database's schema revision."""
        [[revision]] = self._all("SELECT version_num FROM alembic_version")
        if revision != SCHEMA_REVISION:
            raise DatabaseError(
                f"the database is at schema revision {revision} and this software reads "
                f"{SCHEMA_REVISION}: run `sdstore migrate`, or use the sdstore that wrote it"
            )

    def seq_after(self, start: int, end: int, count: int) -> int:
        """The sequence number `count` entries after `start`, at most `end`."""
        [[seq]] = self._all(
            "SELECT max(seq) FROM (SELECT seq FROM messages"
            f" WHERE seq > {self._mark} AND seq <= {self._mark} ORDER BY seq LIMIT {self._mark}"
            ") AS next",
            [start, end, count],
        )
        return end if seq is None else int(seq)

    # --- entries -----------------------------------------------------------------------------

    def entries(self, scan: Scan) -> Iterator[pa.RecordBatch]:
        """The entries in `scan` in arrival order, in the columns of `ENTRIES`."""
        where, parameters = self._entry_condition(scan)
        rows = self._rows(f"{_WITH_FRAMES} WHERE {where} ORDER BY m.seq", parameters, _FETCH_ROWS)
        unpacker = FrameUnpacker()
        for portion in _portions(row for fetched in rows for row in fetched):
            whole, without_filter = self._unpacked(unpacker, portion)
            stored = list(zip(*portion, strict=True))[:_STORED_COLUMNS]
            for at, row in enumerate(portion) if without_filter else ():
                if (frame := without_filter.get(row[_SEQ])) is not None:
                    whole[row[_SEQ]] = frame
                    hashes = list(stored[_FRAME_HASH])
                    hashes[at] = frame_hash(frame)
                    stored[_FRAME_HASH] = tuple(hashes)
            yield entries_batch(stored, [whole.get(row[_SEQ]) for row in portion])

    def keys(self, scan: Scan) -> Iterator[pa.RecordBatch]:
        """The entries in `scan` in arrival order, in the columns of `ENTRY_KEYS`."""
        where, parameters = self._entry_condition(scan)
        names = "m.seq, m.received_at_ms * 1000, c.channel_id, m.message_id, m.lamport"
        yield from self._batches(
            f"SELECT {names}, m.digest, m.frame_hash"
            " FROM messages m JOIN channels c ON c.channel_no = m.channel_no"
            f" WHERE {where} ORDER BY m.seq",
            parameters,
            ENTRY_KEYS,
        )

    def entry_digests(self, scan: Scan) -> tuple[NDArray[np.uint8], int]:
        """(n, 32) digests of the entries in `scan`, and the total bytes of their frames here."""
        where, parameters = self._entry_condition(scan)
        rows = self._all(
            f"SELECT m.digest, m.frame_bytes FROM messages m WHERE {where}", parameters
        )
        return _as_array([row[0] for row in rows]), sum(row[1] for row in rows)

    def entry_partitions(self, scan: Scan, size: int) -> list[tuple[Scan, int]]:
        """`scan` cut into parts of about `size` entries, each with its count."""
        where, parameters = self._entry_condition(scan)
        return self._cut("m.seq", f"messages m WHERE {where}", parameters, scan, size)

    # --- hint claims that histories do not carry ---------------------------------------------

    def claims(self, scan: Scan) -> Iterator[pa.RecordBatch]:
        """The claims in `scan` in the order of their numbers, in the columns of `CLAIMS`."""
        where, parameters = self._claim_condition(scan)
        yield from self._batches(
            "SELECT p.claim_no, c.channel_id, m.digest, p.hint, p.element_id"
            " FROM published_claims p JOIN messages m ON m.seq = p.seq"
            f" JOIN channels c ON c.channel_no = m.channel_no WHERE {where} ORDER BY p.claim_no",
            parameters,
            CLAIMS,
        )

    def claim_ids(self, scan: Scan) -> tuple[NDArray[np.uint8], int]:
        """(n, 32) elements of the claims in `scan`; claims have no frames, so always 0 bytes."""
        where, parameters = self._claim_condition(scan)
        rows = self._all(
            "SELECT p.element_id FROM published_claims p JOIN messages m ON m.seq = p.seq"
            f" WHERE {where}",
            parameters,
        )
        return _as_array([row[0] for row in rows]), 0

    def claim_partitions(self, scan: Scan, size: int) -> list[tuple[Scan, int]]:
        """`scan` cut into parts of about `size` claims, each with its count."""
        where, parameters = self._claim_condition(scan)
        source = f"published_claims p JOIN messages m ON m.seq = p.seq WHERE {where}"
        return self._cut("p.claim_no", source, parameters, scan, size)

    # --- internals ---------------------------------------------------------------------------

    def _entry_condition(self, scan: Scan) -> tuple[str, list[int]]:
        return self._condition(
            scan,
            {
                "m.seq": scan.seq,
                "m.lamport": scan.lamport,
                "m.received_at_ms": scan.received_ms,
            },
        )

    def _claim_condition(self, scan: Scan) -> tuple[str, list[int]]:
        return self._condition(scan, {"p.claim_no": scan.seq})

    def _unpacked(self, unpacker: FrameUnpacker, rows: Sequence[Any]) -> Unpacked:
        """Frames by sequence number; the unpacker requests the references they need."""
        asking = unpacker.unpack(
            [
                PackedFrame._make((*row[_SEQ : _FRAME_HASH + 1], row[_DIGEST], *row[-3:]))
                for row in rows
            ]
        )
        try:
            asked = next(asking)
            while True:
                numbers = ", ".join(map(str, asked))
                found = self._all(
                    "SELECT reference_no, data FROM filter_references"
                    f" WHERE reference_no IN ({numbers})"
                )
                asked = asking.send(found)
        except StopIteration as done:
            frames: Unpacked = done.value
            return frames

    def _condition(self, scan: Scan, bounds: dict[str, Interval]) -> tuple[str, list[int]]:
        terms, parameters = ["1 = 1"], []
        for column, interval in bounds.items():
            if interval.first > INT64_MIN:
                terms.append(f"{column} >= {self._mark}")
                parameters.append(interval.first)
            if interval.last < INT64_MAX:
                terms.append(f"{column} <= {self._mark}")
                parameters.append(interval.last)
        if scan.channel_ids is not None:
            numbers = ", ".join(map(str, self._channel_numbers(sorted(scan.channel_ids))))
            terms.append(f"m.channel_no IN ({numbers or 'NULL'})")
        return " AND ".join(terms), parameters

    def _channel_numbers(self, channel_ids: Sequence[str]) -> list[int]:
        numbers: list[int] = []
        for start in range(0, len(channel_ids), _KEYS_PER_QUERY):
            portion = channel_ids[start : start + _KEYS_PER_QUERY]
            marks = ", ".join([self._mark] * len(portion))
            found = self._all(
                f"SELECT channel_no FROM channels WHERE channel_id IN ({marks})", portion
            )
            numbers += [row[0] for row in found]
        return numbers

    def _batches(
        self, sql: str, parameters: Sequence[Any], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        for rows in self._rows(sql, parameters, _BATCH_ROWS):
            columns = zip(*rows, strict=True)
            arrays = [
                pa.array(each, type_) for each, type_ in zip(columns, schema.types, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _cut(
        self, number: str, source: str, parameters: Sequence[Any], scan: Scan, size: int
    ) -> list[tuple[Scan, int]]:
        if scan.is_empty:
            return []
        stride = max(1, size // _BINS_PER_PARTITION)
        bins = self._all(
            f"SELECT {number} / {stride} AS bin, count(*), max({number}) FROM {source}"
            " GROUP BY bin ORDER BY bin",
            parameters,
        )
        parts: list[tuple[Scan, int]] = []
        first, count = scan.seq.first, 0
        for _, bin_count, last in bins:
            count += bin_count
            if count + stride > size:
                parts.append((replace(scan, seq=Interval(first, last)), count))
                first, count = last + 1, 0
        if count:
            parts.append((replace(scan, seq=Interval(first, scan.seq.last)), count))
        return parts


class SqliteDatabase(Database):
    """A store in an SQLite file."""

    _mark = "?"
    faults = sqlite3.Error

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DatabaseError(f"there is no database at {path}")
        self._connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)

    def _rows(self, sql: str, parameters: Sequence[Any], rows: int) -> Iterator[list[Any]]:
        cursor = self._connection.execute(sql, parameters)
        while fetched := cursor.fetchmany(rows):
            yield fetched

    def _all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._connection.execute(sql, parameters).fetchall()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class PostgresDatabase(Database):
    """A store on a PostgreSQL server."""

    _mark = "%s"

    def __init__(self, url: str) -> None:
        try:
            import psycopg  # noqa: PLC0415 - of the `postgres` extra
        except ImportError as error:
            raise missing_driver(error) from error

        self.faults = psycopg.Error
        try:
            self._connection = psycopg.connect(url)
        except psycopg.Error as error:
            raise DatabaseError(f"PostgreSQL cannot be reached: {error}") from error
        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        self._connection.read_only = True

    def _rows(self, sql: str, parameters: Sequence[Any], rows: int) -> Iterator[list[Any]]:
        # A named cursor keeps the result on the server, so memory here stays bounded.
        with self._connection.cursor(name="scan", binary=True) as cursor:
            cursor.execute(sql.encode(), parameters, binary=True)
            while fetched := cursor.fetchmany(rows):
                yield fetched

    def _all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._connection.execute(sql.encode(), parameters, binary=True).fetchall()

    def close(self) -> None:
        """End the transaction and the connection."""
        self._connection.close()


def _as_array(values: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, DIGEST_BYTES)


def _portions(rows: Iterator[Any]) -> Iterator[list[Any]]:
    """Rows of entries in lists bounded by row count and by bytes of frames."""
    held: list[Any] = []
    bytes_count = 0
    for row in rows:
        held.append(row)
        bytes_count += row[_FRAME_BYTES]
        if len(held) >= _PORTION_ROWS or bytes_count >= _PORTION_BYTES:
            yield held
            held, bytes_count = [], 0
    if held:
        yield held
