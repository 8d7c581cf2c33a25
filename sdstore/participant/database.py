"""The SQLite file under a `ParticipantFile`: its tables; opening, locking, transactions, faults.

IDs are BLOBs: SQLite compares them byte by byte and stores every character, U+0000 included. The names
begin with `sds_` because an application can have tables of its own in the file.

A random key slows inserts, so there is one index of IDs, of 64-bit keyed hashes; rows found by it are
compared with the ID. Frames have their own table, which scans of the log do not touch.

Staged messages are rows of the log with the number `STAGED`. A participant that takes one changes its
row, so its frame and its ID are written once. Each index in log order has rows of one kind only; a query
must repeat its condition for SQLite to use it.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sdstore.errors import SdstoreError
from sdstore.sds.codec import decode
from sdstore.sds.framecodec import read_difference
from sdstore.sds.model import Message, MessageError, frame_hash

SCHEMA_VERSION = 3
"""Files of another version are refused."""

STAGED = -1
"""The number of a row of the log that is staged."""

_TABLES = """
CREATE TABLE sds_meta (name TEXT PRIMARY KEY NOT NULL, value BLOB NOT NULL);

CREATE TABLE sds_channels (
    channel_no INTEGER PRIMARY KEY,
    channel_id BLOB NOT NULL UNIQUE,
    logged_count INTEGER NOT NULL,
    noted_count INTEGER NOT NULL,
    confirmed INTEGER NOT NULL  -- by `ParticipantFile.confirm`
);

CREATE TABLE sds_state (
    channel_no INTEGER NOT NULL,
    key BLOB NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (channel_no, key)
);

CREATE TABLE sds_log (
    log_no INTEGER PRIMARY KEY,
    channel_no INTEGER NOT NULL,
    id_key INTEGER NOT NULL,  -- keyed hash of channel and message ID
    lamport INTEGER NOT NULL,
    message_id BLOB NOT NULL,
    sender_id BLOB NOT NULL,
    digest BLOB NOT NULL,
    hint BLOB NOT NULL,
    number INTEGER NOT NULL,  -- of the delivery; 0 for our own; `STAGED`
    gap TEXT  -- JSON of after_gap, is_late (and true if it supersedes); NULL
);
CREATE INDEX sds_log_by_id ON sds_log (id_key, channel_no);
CREATE INDEX sds_log_in_order ON sds_log (channel_no, lamport, message_id) WHERE number >= 0;
CREATE INDEX sds_staged_in_order ON sds_log (channel_no, lamport, message_id) WHERE number < 0;
CREATE INDEX sds_log_by_number ON sds_log (channel_no, number) WHERE number > 0;

CREATE TABLE sds_frames (
    log_no INTEGER PRIMARY KEY,
    hash BLOB NOT NULL,
    filter_no INTEGER,
    data BLOB NOT NULL
);

CREATE TABLE sds_filters (
    filter_no INTEGER PRIMARY KEY,
    channel_no INTEGER NOT NULL,
    filter BLOB NOT NULL
);
CREATE INDEX sds_filters_by_channel ON sds_filters (channel_no);

CREATE TABLE sds_noted (
    channel_no INTEGER NOT NULL,
    element_id BLOB NOT NULL,
    lamport INTEGER NOT NULL,
    PRIMARY KEY (channel_no, element_id, lamport)
) WITHOUT ROWID;
"""

_TABLE_NAMES = re.compile(r"CREATE TABLE (\w+)")

HASH_BYTES = 8  # of a frame's hash: detects damage, identifies nothing

FILTERS_CACHED_MAX = 32
"""Reference filters kept for reading, 0.6 MB of js-waku's."""

BUSY_TIMEOUT_MS = 5_000
"""Other connections, such as a backup, can hold the file for a moment."""

CACHE_KIB = 32 * 1024
"""Holds the index of IDs of a million messages, which a new message touches at a random place."""

WAL_PAGES = 8_192
"""32 MiB of write-ahead log before a checkpoint, which writes each changed page once."""

_FULL = {sqlite3.SQLITE_FULL}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_READ_ONLY = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_BROKEN = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL}


class ParticipantFileError(SdstoreError):
    """The file cannot be used, or not in this way.

    `code` is stable and meant for programs, `detail` for people:

    - `in_use`: another process, or another `ParticipantFile`, has the file open
    - `other_version`: another version of sdstore wrote the file
    - `damaged`: the file is damaged, or is not a SQLite database
    - `read_only`, `disk_full`, `busy`: nothing was written; the next save writes it. `busy`: another
      connection holds the file, or a transaction of this one is open
    - `unavailable`: the file cannot be opened, read or written
    - `file_gone`: the file was deleted or replaced while it was open
    - `unsaved_full`: too much was appended without a save
    - `closed`: the file was closed
    - `misuse`: the call is not allowed now
    """


class ParticipantDatabase:
    """One open file. `hasher` is the keyed hash of IDs, `next_log_no` the next row of the log.

    After a fault that leaves the file's content unknown, every use raises that fault again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.next_log_no = 1
        self._fault: ParticipantFileError | None = None
        self._filters: OrderedDict[int, bytes] = OrderedDict()
        self._is_writing = False
        self._is_open = False
        self._digests_through = 0  # log numbers of the index of digests
        self._lock = _lock(path)
        try:
            with self.faults():
                self._open()
            self._is_open = True
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # An absolute path is a file even if it ends with ":memory:". Threads may take turns.
        self.raw = sqlite3.connect(
            self.path.absolute(), isolation_level=None, check_same_thread=False
        )
        self.raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        self.raw.execute("PRAGMA journal_mode = WAL")
        self.raw.execute("PRAGMA synchronous = FULL")
        self.raw.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self.raw.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        self._inode = _inode(self.path)
        with self.writing() as raw:
            names = {name for (name,) in raw.execute("SELECT name FROM sqlite_schema")}
            if "sds_meta" not in names:
                for statement in _TABLES.split(";\n"):
                    raw.execute(statement)
                meta = [("version", bytes([SCHEMA_VERSION])), ("secret", os.urandom(16))]
                raw.executemany("INSERT INTO sds_meta VALUES (?, ?)", meta)
            elif lacking := set(_TABLE_NAMES.findall(_TABLES)) - names:
                raise ParticipantFileError("damaged", f"{self.path} lacks tables: {lacking}")
            meta_of = dict(raw.execute("SELECT name, value FROM sds_meta").fetchall())
            version = int.from_bytes(meta_of.get("version", b""), "big")
            if version != SCHEMA_VERSION:
                raise ParticipantFileError(
                    "other_version",
                    f"{self.path} has schema version {version}, this version of sdstore reads "
                    f"{SCHEMA_VERSION}; install the version that wrote it",
                )
            (last_no,) = raw.execute("SELECT coalesce(max(log_no), 0) FROM sds_log").fetchone()
        self.next_log_no = last_no + 1
        self.hasher = blake2b(digest_size=8, key=meta_of["secret"])

    def close(self) -> None:
        """Close the file."""
        self._fault = self._fault or ParticipantFileError("closed", f"{self.path} is closed")
        if hasattr(self, "raw"):
            self.raw.close()
        self._lock.close()

    def row(self, statement: str, values: Sequence[Any]) -> Any:
        """The first row, or None."""
        try:
            return self.raw.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    def rows(self, statement: str, values: Sequence[Any], count: int = -1) -> list[Any]:
        """The first `count` rows, or all."""
        try:
            cursor = self.raw.execute(statement, values)
            return cursor.fetchall() if count < 0 else cursor.fetchmany(count)
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, on the disk at the end of the block."""
        self.check()
        raw = self.raw
        if self._is_writing:
            raise ParticipantFileError("busy", "a transaction of this file is open; end it first")
        if _inode(self.path) != self._inode:
            # SQLite goes on writing to a file that was deleted, and its content ends with the process.
            self._fault = ParticipantFileError(
                "file_gone", f"{self.path} was deleted or replaced while it was open"
            )
            raise self._fault
        self._is_writing = True
        try:
            if raw.in_transaction:
                raw.execute("COMMIT")  # of `begin_reading`
            raw.execute("BEGIN IMMEDIATE")
            yield raw
            raw.execute("COMMIT")
        except BaseException as error:
            if raw.in_transaction:
                with suppress(sqlite3.Error):
                    raw.execute("ROLLBACK")
            self._refuse(error)
            raise
        finally:
            self._is_writing = False

    def begin_reading(self) -> None:
        """Keep one transaction for all reads until the next write: the locks of each are half its cost.

        Meanwhile SQLite cannot shorten the write-ahead log, so a write must follow soon.
        """
        self.check()
        if not self.raw.in_transaction:
            with self.faults():
                self.raw.execute("BEGIN")

    def check(self) -> None:
        """Raises the error for which the file refuses further use."""
        if self._fault is not None:
            raise self._fault

    def give_up(self, code: str, detail: str) -> ParticipantFileError:
        """Refuse further use; the error to raise."""
        advice = "; open the file anew and restore its participants" if self._is_open else ""
        self._fault = self._fault or ParticipantFileError(code, detail + advice)
        return self._fault

    def filter(self, filter_no: int) -> bytes:
        """A stored reference filter."""
        found = self._filters.get(filter_no)
        if found is None:
            row = self.row("SELECT filter FROM sds_filters WHERE filter_no = ?", (filter_no,))
            if row is None:
                raise ParticipantFileError("damaged", f"{self.path} lacks filter {filter_no}")
            found = self._filters[filter_no] = row[0]
            if len(self._filters) > FILTERS_CACHED_MAX:
                self._filters.popitem(last=False)
        return found

    def index_digests(self) -> None:
        """Bring the index of digests up to date, which lasts as long as the file is open.

        In the file it would slow every append by a third, and only a backfill that offers messages to a
        store needs it.
        """
        if self._digests_through + 1 < self.next_log_no:
            with self.writing() as raw:
                if not self._digests_through:
                    raw.execute(
                        "CREATE TEMP TABLE sds_digests (start BLOB NOT NULL, log_no INTEGER NOT NULL,"
                        " PRIMARY KEY (start, log_no)) WITHOUT ROWID"
                    )
                raw.execute(
                    "INSERT INTO sds_digests SELECT substr(digest, 1, 8), log_no FROM sds_log"
                    " WHERE log_no > ? ORDER BY 1",
                    (self._digests_through,),
                )
            self._digests_through = self.next_log_no - 1

    def frame(self, frame_hash_start: bytes, filter_no: int | None, data: bytes) -> bytes:
        """The frame of a row, checked."""
        try:
            frame = data
            if filter_no is not None:
                difference = read_difference(data)
                frame = difference.applied(data[difference.end :], self.filter(filter_no))
        except ValueError:
            frame = b""
        if frame_hash(frame)[:HASH_BYTES] != frame_hash_start:
            raise ParticipantFileError(
                "damaged", f"{self.path} has a frame that does not match its hash"
            )
        return frame

    def message(self, frame: bytes) -> Message:
        """The message of a checked frame."""
        try:
            return decode(frame)[0]
        except MessageError as error:
            raise ParticipantFileError(
                "damaged", f"{self.path} has a frame that is not a message: {error}"
            ) from error

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Raise the `ParticipantFileError` for SQLite's errors in the block."""
        try:
            yield
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        """Raise the `ParticipantFileError` for an error of SQLite; return for others."""
        if not isinstance(error, sqlite3.Error):
            return
        self.check()
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            raise self.give_up(
                "damaged", f"{self.path} is damaged, or is not a SQLite database ({error})"
            ) from error
        if code in _FULL:
            raise ParticipantFileError(
                "disk_full", f"{self.path} could not be written ({error}); make room and save again"
            ) from error
        if code in _READ_ONLY:
            raise ParticipantFileError(
                "read_only", f"{self.path} cannot be written ({error})"
            ) from error
        if code in _BUSY:
            raise ParticipantFileError(
                "busy", f"another connection kept {self.path} for {BUSY_TIMEOUT_MS} ms; save again"
            ) from error
        if code in _BROKEN:
            raise self.give_up("unavailable", f"{self.path} could not be used ({error})") from error


def _inode(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None without one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lock(path: Path) -> sqlite3.Connection:
    """Lock a second SQLite file until the connection is closed: works wherever SQLite does."""
    lock = None
    try:
        lock = sqlite3.connect(
            f"{path}-lock", timeout=0, isolation_level=None, check_same_thread=False
        )
        lock.execute("PRAGMA locking_mode = EXCLUSIVE")
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if lock is not None:
            lock.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise ParticipantFileError(
                "in_use", f"another process has {path} open; stop it first"
            ) from error
        if error.sqlite_errorcode & 0xFF in _FULL:
            raise ParticipantFileError(
                "disk_full", f"{path}-lock could not be written ({error}); make room"
            ) from error
        raise ParticipantFileError(
            "unavailable",
            f"{path}-lock cannot be locked ({error}): does its folder exist, and can you write there?",
        ) from error
    return lock
