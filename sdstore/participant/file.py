"""`ParticipantFile`: the participants of a program, their logs and their state in one SQLite file.

    with ParticipantFile("chat.db") as file:
        participant = file.participant("general", "ada")
        effects = participant.receive(frame, now_ms)
        file.save("general", effects)  # before the other effects are carried out

Every channel has a log and a state. `save` writes the changes of both in one transaction that is on
the disk when it returns; a program that is killed finds all of a save or nothing of it. An application
can have tables of its own in the file and confirm deliveries in the same transaction (`transaction`),
so that each message takes effect exactly once.

Methods block, for some milliseconds when they write. A file belongs to one process, and to one thread
at a time. IDs are compared as UTF-8 bytes; U+0000 and all other characters are allowed in them.

A save that fails writes nothing, and what it should have written is kept for the next save: the
effects after the `Save` must wait until a save succeeds. If the kept rows reach `UNSAVED_BYTES_MAX`, or
the disk reports a fault other than being full, the file refuses every further use. Open it anew and
restore the participants then: they continue from the last save.
"""

from __future__ import annotations

import json
import os
import sqlite3
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from sdstore.participant.database import (
    HASH_BYTES,
    STAGED,
    ParticipantDatabase,
    ParticipantFileError,
)
from sdstore.participant.persistence import DRIVER_KEYS
from sdstore.sds.effects import Effect, Save
from sdstore.sds.framecodec import REFERENCES_MAX, References, difference, split
from sdstore.sds.log import ELEMENTS_PER_PIECE_MAX, LogEntry, Noted, Reference, Staged
from sdstore.sds.model import LAMPORT_MAX, HistoryEntry, Message, entry_digest, frame_hash
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.participant import Participant
from sdstore.sds.state import PROGRESS, seal, unseal
from sdstore.wire.participant_pb2 import Progress

UNSAVED_BYTES_MAX = 64 * 1024 * 1024
"""Frames and state appended since the last save: some hundred times what a backfill combines."""

RECENT_IDS_MAX = 16_384
"""Logged IDs of a channel kept in memory, 2 MB: causes are nearly always recent messages."""

TAIL_MAX = 128
"""The newest messages of a channel kept in memory: causal histories name at most ten."""

ROWS_PER_READ = 32
"""Rows with frames read at a time, of 1 MB each at most: a participant takes some hundred per turn."""

READ_BYTES_MAX = 8 << 20
"""Frames of staged messages, or of deliveries, returned at once: what a participant takes at once."""

IDS_PER_READ = 1_024
"""IDs looked up at once, some 20 kB of keys: a backfill asks about that many at a time."""


# Rows are limited by `fetchmany`. The + keeps SQLite from using an index of channels.
_FRAME = "sds_frames.hash, filter_no, data FROM sds_log JOIN sds_frames USING (log_no)"
_HAS_ID = "id_key = ? AND channel_no = ? AND message_id = ?"
_HAS_KEY = "id_key IN (SELECT value FROM json_each(?)) AND +channel_no = ?"


def id_bytes(value: str) -> bytes:
    """A string as its column holds it."""
    # Strings of a program can hold lone surrogates, which UTF-8 has no bytes for.
    return value.encode("utf-8", "surrogatepass")


def id_text(value: bytes) -> str:
    """The string of a column."""
    return value.decode("utf-8", "surrogatepass")


class _Offered(NamedTuple):
    """A row that `FileLog.staged` returned: the participant will append and unstage it."""

    log_no: int
    noted: Noted
    frame: bytes


class _Unsaved:
    """An appended entry until the next save; `staged_no`: the row of its frame, if that was staged."""

    __slots__ = ("digest", "entry", "raw_id", "staged_no")

    def __init__(self, entry: LogEntry, offered: _Offered | None) -> None:
        self.entry = entry
        self.raw_id = entry.message.message_id.encode()
        self.staged_no: int | None = None
        if offered is not None and offered.frame is entry.frame:
            self.digest, self.staged_no = offered.noted.element_id, offered.log_no
        else:
            self.digest = entry_digest(entry.message)


_Place = tuple[int, bytes, Reference]
_FIRST_PLACE = (-(2**63), b"")


class FileLog:
    """A channel's log in a `ParticipantFile`: a `ParticipantLog` and a `BackfillLog`.

    What was appended and unstaged since the last save is in memory alone. The first methods are those
    of the two protocols; the last ones belong to the file.
    """

    keeps_variants = False

    def __init__(
        self, database: ParticipantDatabase, channel_no: int, logged_count: int, noted_count: int
    ) -> None:
        self.channel_no = channel_no
        self._database = database
        self._hasher = database.hasher.copy()
        self._hasher.update(channel_no.to_bytes(8, "big"))
        self._saved_count = logged_count
        self._saved_noted_count = noted_count
        self._unsaved: dict[str, _Unsaved] = {}
        self._unsaved_order: list[_Place] = []
        self._unsaved_numbers: list[LogEntry] = []
        self._unsaved_bytes = 0
        self._changes: dict[bytes, bytes | None] = {}
        self._unstaged: dict[str, int] = {}  # row numbers
        self._offered: dict[str, _Offered] = {}  # by the last call of `staged`
        self._not_logged: set[str] = set()  # of those
        self._absent: dict[str, int] = {}  # keys of IDs without a row, by the last `digests`
        self._superseded: dict[int, str] = {}  # rows to delete, and their IDs
        self._superseded_count = 0  # of those, logged ones
        self._new_noted: set[Noted] = set()
        self._staged_from = _FIRST_PLACE  # all staged rows before it are unstaged
        # Two generations of IDs: when the newer one is full it becomes the older one.
        self._recent: set[str] = set()
        self._less_recent: set[str] = set()
        self._references: References | None = None
        self._tail = self._newest_saved(TAIL_MAX // 2, LAMPORT_MAX)

    # --- ParticipantLog --------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._saved_count + len(self._unsaved) - self._superseded_count

    def contains(self, message_id: str) -> bool:
        """See `ParticipantLog`."""
        if (
            message_id in self._unsaved
            or message_id in self._recent
            or message_id in self._less_recent
        ):
            return True
        if message_id in self._not_logged:
            return False
        if self._find(message_id, "number >= 0") is None:
            return False
        self._remember(message_id)
        return True

    def newest(self, count: int, before_lamport: int) -> list[Reference]:
        """See `ParticipantLog`."""
        places = self._tail
        end = bisect_left(places, (before_lamport,))
        if end < count and len(places) < len(self):
            end = bisect_left(self._unsaved_order, (before_lamport,))
            places = self._unsaved_order[max(end - count, 0) : end]
            places += self._newest_saved(count, min(before_lamport - 1, LAMPORT_MAX))
            places.sort()
            end = len(places)
        return [reference for _, _, reference in places[max(end - count, 0) : end]]

    def frame(self, message_id: str) -> bytes | None:
        """See `ParticipantLog`."""
        if unsaved := self._unsaved.get(message_id):
            return unsaved.entry.frame
        row = self._database.row(
            f"SELECT {_FRAME} WHERE {_HAS_ID} AND number >= 0", self._of_id(message_id)
        )
        return None if row is None else self._database.frame(*row)

    def append(self, entry: LogEntry) -> None:
        """See `ParticipantLog`. It raises if too much was appended since the last save."""
        self._database.begin_reading()
        message = entry.message
        if entry.supersedes:
            self._supersede(message.message_id)
        offered = self._offered.get(message.message_id)
        unsaved = self._unsaved[message.message_id] = _Unsaved(entry, offered)
        self._not_logged.discard(message.message_id)
        lamport = message.lamport_timestamp or 0
        reference = Reference(
            lamport, HistoryEntry(message.message_id, entry.retrieval_hint, message.sender_id)
        )
        place = (lamport, unsaved.raw_id, reference)
        _insert(self._unsaved_order, place)
        tail = self._tail
        # The tail has the newest messages without a hole: an older one belongs there only if all do.
        if len(tail) == len(self) - 1 or place > tail[0]:
            _insert(tail, place)
            if len(tail) > TAIL_MAX:
                del tail[: TAIL_MAX // 2]
        if entry.number:
            self._unsaved_numbers.append(entry)
        self._count_unsaved(len(entry.frame))

    def _supersede(self, message_id: str) -> None:
        """Another message takes the place of this one, whose name is noted: a backfill leaves it alone."""
        if (unsaved := self._unsaved.pop(message_id, None)) is not None:
            self._unsaved_numbers.remove(unsaved.entry)
            lamport, digest = unsaved.entry.message.lamport_timestamp or 0, unsaved.digest
            if unsaved.staged_no is not None:
                self._superseded[unsaved.staged_no] = message_id
        elif row := self._find(message_id, "number >= 0"):
            log_no, lamport, digest = row
            self._superseded[log_no] = message_id
            self._superseded_count += 1
        else:
            return
        if not self._is_noted(noted := Noted(lamport, digest)):
            self._new_noted.add(noted)
        for places in (self._tail, self._unsaved_order):
            places[:] = [place for place in places if place[2].entry.message_id != message_id]

    def deliveries(self, after_number: int, count: int) -> list[LogEntry]:
        """See `ParticipantLog`."""
        statement = (
            f"SELECT number, hint, gap, {_FRAME}"
            " WHERE channel_no = ? AND number > 0 AND number > ? ORDER BY number"
        )
        found: list[LogEntry] = []
        room, last = READ_BYTES_MAX, after_number
        while len(found) < count and room > 0:
            wanted = min(count - len(found), ROWS_PER_READ)
            rows = self._database.rows(statement, (self.channel_no, last), wanted)
            if not rows:
                unsaved = [each for each in self._unsaved_numbers if each.number > after_number]
                return found + unsaved[: count - len(found)]
            entries = [self._entry(*row) for row in rows]
            last = entries[-1].number
            room -= sum(len(each.frame) for each in entries)
            gone = self._superseded.values()
            found += [each for each in entries if each.message.message_id not in gone]
        return found

    def staged(self, count: int) -> list[Staged]:
        """See `ParticipantLog`."""
        found: list[Staged] = []
        found_bytes = 0
        self._offered = {}
        for log_no, place, digest, hint, packed in self._staged_rows():
            if len(found) == count or found_bytes >= READ_BYTES_MAX:
                break
            message_id = id_text(place[1])
            if message_id in self._unstaged:
                if not found:
                    self._staged_from = (place[0], place[1] + b"\0")  # the next possible place
                continue
            frame = self._database.frame(*packed)
            found.append(Staged(self._database.message(frame), frame, digest, hint))
            found_bytes += len(frame)
            self._offered[message_id] = _Offered(log_no, Noted(place[0], digest), frame)
        rows = self._rows_of(self._keys(self._offered))
        self._not_logged = self._offered.keys() - {id_text(row[0]) for row in rows if row[3] >= 0}
        self._not_logged -= self._unsaved.keys()
        return found

    def unstage(self, message_ids: Sequence[str]) -> None:
        """See `ParticipantLog`."""
        for message_id in message_ids:
            if message_id in self._unstaged:
                continue
            if offered := self._offered.get(message_id):
                log_no, noted = offered.log_no, offered.noted
            elif row := self._find(message_id, "number < 0"):
                log_no, noted = row[0], Noted(*row[1:])
            else:
                continue
            self._unstaged[message_id] = log_no
            if not self.contains(message_id) and not self._is_noted(noted):
                self._new_noted.add(noted)

    # --- BackfillLog -----------------------------------------------------------------------------

    def elements(self) -> Iterator[tuple[list[int], bytes]]:
        """See `BackfillLog`. Messages that are appended or staged meanwhile can be missing."""
        # In the order in which a save moves elements, so that none is missed by moving.
        unsaved = [
            (each.entry.message.lamport_timestamp or 0, each.digest)
            for each in self._unsaved.values()
        ]
        unsaved += [(each.lamport_timestamp, each.element_id) for each in self._new_noted]
        for start in range(0, len(unsaved), ELEMENTS_PER_PIECE_MAX):
            piece = unsaved[start : start + ELEMENTS_PER_PIECE_MAX]
            yield [each[0] for each in piece], b"".join([each[1] for each in piece])
        read, channel_no, count = self._database.rows, self.channel_no, ELEMENTS_PER_PIECE_MAX
        for kind in ("number < 0", "number >= 0"):
            statement = (
                f"SELECT lamport, message_id, digest FROM sds_log WHERE channel_no = ? AND {kind}"
                " AND (lamport, message_id) > (?, ?) ORDER BY lamport, message_id"
            )
            place = _FIRST_PLACE
            while rows := read(statement, (channel_no, *place), count):
                place = rows[-1][:2]
                if kind == "number < 0":  # the unstaged ones are logged, or noted by now
                    rows = [row for row in rows if id_text(row[1]) not in self._unstaged]
                yield [row[0] for row in rows], b"".join([row[2] for row in rows])
        statement = (
            "SELECT lamport, element_id FROM sds_noted WHERE channel_no = ?"
            " AND (element_id, lamport) > (?, ?) ORDER BY element_id, lamport"
        )
        name = (b"", 0)
        while rows := read(statement, (channel_no, *name), count):
            name = (rows[-1][1], rows[-1][0])
            yield [row[0] for row in rows], b"".join([row[1] for row in rows])

    @property
    def noted_count(self) -> int:
        """See `BackfillLog`."""
        return self._saved_noted_count + len(self._new_noted)

    def digests(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        """See `BackfillLog`."""
        keys = self._keys(message_ids)
        found = {each: self._unsaved[each].digest for each in keys.keys() & self._unsaved.keys()}
        rows = self._rows_of(keys)
        rows.sort(key=itemgetter(3))  # staged ones first: a logged message counts
        ids = [id_text(row[0]) for row in rows]
        found = {
            message_id: row[1]
            for message_id, row in zip(ids, rows, strict=True)
            if row[3] >= 0 or message_id not in self._unstaged
        } | found
        self._absent = keys
        for message_id in ids:
            keys.pop(message_id, None)
        return found

    def frames(self, digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
        """See `BackfillLog`. The first call reads all digests: 1 s for a million messages."""
        database, channel_no = self._database, self.channel_no
        database.index_digests()
        statement = (
            f"SELECT log_no, hint, {_FRAME} WHERE digest = ? AND channel_no = ?"
            " AND log_no IN (SELECT log_no FROM sds_digests WHERE start = ?)"
        )
        unsaved = {each.digest: each.entry for each in self._unsaved.values()}
        unstaged = {*self._unstaged.values(), *self._superseded}
        found = {}
        for digest in digests:
            if entry := unsaved.get(digest):
                found[digest] = (entry.frame, entry.retrieval_hint)
                continue
            for log_no, hint, *packed in database.rows(statement, (digest, channel_no, digest[:8])):
                if log_no not in unstaged:
                    found[digest] = (database.frame(*packed), hint)
        return found

    def stage(self, messages: Sequence[Staged], noted: Sequence[Noted]) -> None:
        """See `BackfillLog`."""
        by_id = {each.message.message_id: each for each in messages}
        absent, self._absent = self._absent, {}
        keys = {each: absent[each] for each in by_id if each in absent}
        if len(keys) < len(by_id):
            keys = self._keys(by_id)
            stale = {row[2] for row in self._rows_of(keys) if row[3] == STAGED}
        else:
            stale = set()
        new_noted = {each for each in noted if not self._is_on_disk(each)}
        log_no = self._database.next_log_no
        rows, frames = [], []
        try:
            with self._database.writing() as raw:
                self._delete_rows(raw, stale)
                for message_id, each in by_id.items():
                    message, hint = each.message, each.retrieval_hint
                    entry = (keys[message_id], message, each.digest, hint, STAGED, None)
                    rows.append(self._log_row(log_no, *entry))
                    frames.append((log_no, *self._packed(raw, each.frame)))
                    log_no += 1
                self._insert_rows(raw, rows, frames)
                self._write_noted(raw, new_noted, self._saved_count)
        except BaseException:
            self.forget_references()
            raise
        self._database.next_log_no = log_no
        self._saved_noted_count += len(new_noted)
        self._new_noted -= new_noted
        for unsaved in self._unsaved.values():
            if unsaved.staged_no in stale:
                unsaved.staged_no = None
        for message_id in by_id:
            self._unstaged.pop(message_id, None)
            self._offered.pop(message_id, None)  # its row is another one now
        places = [(row[3], row[4]) for row in rows]
        self._staged_from = min([self._staged_from, *places])

    # --- for the file ----------------------------------------------------------------------------

    def take_changes(self, effects: Iterable[Effect]) -> None:
        """Keep the changes of `Save` effects for the next save."""
        for effect in effects:
            if isinstance(effect, Save):
                for key, value in effect.changes:
                    before = self._changes.get(id_bytes(key)) or b""
                    self._changes[id_bytes(key)] = value
                    self._count_unsaved(len(value or b"") - len(before))

    @property
    def has_unsaved(self) -> bool:
        """Whether a save has anything to write."""
        return bool(self._changes or self._unsaved or self._unstaged or self._new_noted)

    def write(self, raw: sqlite3.Connection) -> None:
        """Write what is unsaved, in a transaction."""
        channel_no = self.channel_no
        puts = [
            (channel_no, key, value) for key, value in self._changes.items() if value is not None
        ]
        raw.executemany("INSERT OR REPLACE INTO sds_state VALUES (?, ?, ?)", puts)
        deletions = [(channel_no, key) for key, value in self._changes.items() if value is None]
        raw.executemany("DELETE FROM sds_state WHERE channel_no = ? AND key = ?", deletions)
        log_no = self._database.next_log_no
        rows, frames, taken = [], [], []
        unstaged = {*self._unstaged.values(), *self._superseded}
        for message_id, unsaved in self._unsaved.items():
            entry = unsaved.entry
            message, hint, gap = entry.message, entry.retrieval_hint, _gap(entry)
            if unsaved.staged_no is not None:
                unstaged.discard(unsaved.staged_no)
                sender_id = message.sender_id.encode()
                taken.append((sender_id, hint, entry.number, gap, unsaved.staged_no))
                continue
            key = self._of_id(message_id)[0]
            rows.append(
                self._log_row(log_no, key, message, unsaved.digest, hint, entry.number, gap)
            )
            frames.append((log_no, *self._packed(raw, entry.frame)))
            log_no += 1
        update = "UPDATE sds_log SET sender_id = ?, hint = ?, number = ?, gap = ? WHERE log_no = ?"
        if taken and raw.executemany(update, taken).rowcount != len(taken):
            raise self._database.give_up("damaged", "rows of staged messages are gone")
        self._insert_rows(raw, rows, frames)
        self._delete_rows(raw, unstaged)
        self._write_noted(raw, self._new_noted, len(self))
        self._database.next_log_no = log_no

    def written(self) -> None:
        """The transaction is on the disk."""
        self._saved_count = len(self)
        for message_id in self._unsaved:
            self._remember(message_id)
        for message_id in self._unstaged:
            self._offered.pop(message_id, None)  # its row is gone, or logged
        self._saved_noted_count = self.noted_count
        self._unsaved.clear()
        self._unsaved_order.clear()
        self._unsaved_numbers.clear()
        self._unsaved_bytes = 0
        self._changes.clear()
        self._unstaged.clear()
        self._superseded.clear()
        self._superseded_count = 0
        self._new_noted.clear()

    def forget_references(self) -> None:
        """The transaction failed: references that it added are not in the file."""
        self._references = None

    # --- rows ------------------------------------------------------------------------------------

    def _of_id(self, message_id: str) -> tuple[int, int, bytes]:
        """The values that find a message by its ID: key, channel, ID."""
        raw_id = id_bytes(message_id)
        hasher = self._hasher.copy()
        hasher.update(raw_id)
        return int.from_bytes(hasher.digest(), "big", signed=True), self.channel_no, raw_id

    def _keys(self, message_ids: Iterable[str]) -> dict[str, int]:
        """The key of each ID."""
        start, to_number = self._hasher.copy, int.from_bytes
        keys = {}
        for message_id in message_ids:
            hasher = start()
            hasher.update(id_bytes(message_id))
            keys[message_id] = to_number(hasher.digest(), "big", signed=True)
        return keys

    def _find(self, message_id: str, kind: str) -> Any:
        """Row, Lamport timestamp and digest of the message with this ID, logged or staged; None without it."""
        statement = f"SELECT log_no, lamport, digest FROM sds_log WHERE {_HAS_ID} AND {kind}"
        return self._database.row(statement, self._of_id(message_id))

    def _rows_of(self, keys: Mapping[str, int]) -> list[Any]:
        """ID, digest, row and number of all rows with these IDs."""
        statement = f"SELECT message_id, digest, log_no, number FROM sds_log WHERE {_HAS_KEY}"
        found = []
        numbers = list(keys.values())
        for start in range(0, len(numbers), IDS_PER_READ):
            some = json.dumps(numbers[start : start + IDS_PER_READ])
            found += self._database.rows(statement, (some, self.channel_no))
        return [row for row in found if id_text(row[0]) in keys]

    def _log_row(
        self,
        log_no: int,
        key: int,
        message: Message,
        digest: bytes,
        hint: bytes,
        number: int,
        gap: str | None,
    ) -> tuple[Any, ...]:
        return (
            log_no,
            self.channel_no,
            key,
            message.lamport_timestamp or 0,
            message.message_id.encode(),
            message.sender_id.encode(),
            digest,
            hint,
            number,
            gap,
        )

    def _delete_rows(self, raw: sqlite3.Connection, log_nos: Iterable[int]) -> None:
        values = [(each,) for each in log_nos]
        raw.executemany("DELETE FROM sds_log WHERE log_no = ?", values)
        raw.executemany("DELETE FROM sds_frames WHERE log_no = ?", values)

    def _insert_rows(
        self, raw: sqlite3.Connection, rows: Sequence[Any], frames: Sequence[Any]
    ) -> None:
        raw.executemany("INSERT INTO sds_log VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        raw.executemany("INSERT INTO sds_frames VALUES (?, ?, ?, ?)", frames)

    def _remember(self, message_id: str) -> None:
        self._recent.add(message_id)
        if len(self._recent) >= RECENT_IDS_MAX // 2:
            self._less_recent, self._recent = self._recent, set()

    def _count_unsaved(self, size_bytes: int) -> None:
        self._unsaved_bytes += size_bytes
        if self._unsaved_bytes > UNSAVED_BYTES_MAX:
            raise self._database.give_up(
                "unsaved_full",
                f"more than {UNSAVED_BYTES_MAX:,} bytes were appended without a save",
            )

    def _newest_saved(self, count: int, last_lamport: int) -> list[_Place]:
        statement = (
            "SELECT lamport, message_id, hint, sender_id FROM sds_log"
            " WHERE channel_no = ? AND lamport <= ? AND number >= 0"
            " ORDER BY lamport DESC, message_id DESC"
        )
        values = (self.channel_no, max(last_lamport, -(2**63)))
        rows = self._database.rows(statement, values, count)
        return [
            (
                lamport,
                raw_id,
                Reference(lamport, HistoryEntry(id_text(raw_id), hint, id_text(sender))),
            )
            for lamport, raw_id, hint, sender in reversed(rows)
            if id_text(raw_id) not in self._superseded.values()
        ]

    def _entry(self, number: int, hint: bytes, gap: str | None, *packed: Any) -> LogEntry:
        frame = self._database.frame(*packed)
        after_gap, is_late, *supersedes = json.loads(gap) if gap else ((), False)
        message = self._database.message(frame)
        return LogEntry(message, frame, number, hint, tuple(after_gap), is_late, bool(supersedes))

    def _staged_rows(self) -> Iterator[tuple[int, tuple[int, bytes], bytes, bytes, Any]]:
        """Row number, place, digest, hint and packed frame of staged rows in log order.

        They begin at `_staged_from`.
        """
        statement = (
            f"SELECT log_no, lamport, message_id, digest, hint, {_FRAME} WHERE channel_no = ?"
            " AND (lamport, message_id) >= (?, ?) AND number < 0 ORDER BY lamport, message_id"
        )
        place, after = self._staged_from, b""
        while rows := self._database.rows(
            statement, (self.channel_no, place[0], place[1] + after), ROWS_PER_READ
        ):
            for log_no, lamport, raw_id, digest, hint, *packed in rows:
                place, after = (lamport, raw_id), b"\0"
                yield log_no, place, digest, hint, packed

    def _is_noted(self, noted: Noted) -> bool:
        return noted in self._new_noted or self._is_on_disk(noted)

    def _is_on_disk(self, noted: Noted) -> bool:
        statement = (
            "SELECT 1 FROM sds_noted WHERE channel_no = ? AND element_id = ? AND lamport = ?"
        )
        values = (self.channel_no, noted.element_id, noted.lamport_timestamp)
        return self._database.row(statement, values) is not None

    def _write_noted(self, raw: sqlite3.Connection, noted: set[Noted], logged_count: int) -> None:
        """Write noted names that are not on the disk, and the counts of the channel."""
        rows = [(self.channel_no, each.element_id, each.lamport_timestamp) for each in noted]
        raw.executemany("INSERT OR IGNORE INTO sds_noted VALUES (?, ?, ?)", rows)
        counts = (logged_count, self._saved_noted_count + len(noted), self.channel_no)
        raw.execute(
            "UPDATE sds_channels SET logged_count = ?, noted_count = ? WHERE channel_no = ?", counts
        )

    def _packed(self, raw: sqlite3.Connection, frame: bytes) -> tuple[bytes, int | None, bytes]:
        """The columns of a frame; a filter that becomes a reference is written first."""
        start = frame_hash(frame)[:HASH_BYTES]
        parts = split(frame)
        if parts is None:
            return start, None, frame
        references = self._references
        if references is None:
            references = self._references = References()
            rows = raw.execute(
                "SELECT filter_no, filter FROM sds_filters WHERE channel_no = ?"
                " ORDER BY filter_no DESC LIMIT ?",
                (self.channel_no, REFERENCES_MAX),
            ).fetchall()
            for filter_no, bloom_filter in reversed(rows):
                references.add(filter_no, bloom_filter, is_new=False)
        found = references.difference(parts)
        if found is None:
            added = raw.execute(
                "INSERT INTO sds_filters (channel_no, filter) VALUES (?, ?)",
                (self.channel_no, parts.bloom_filter),
            )
            found = added.lastrowid or 0, difference(parts, parts.bloom_filter)
            references.add(found[0], parts.bloom_filter)
        filter_no, written = found
        return start, filter_no, written + parts.rest


def _insert(places: list[_Place], place: _Place) -> None:
    if places and place < places[-1]:
        insort(places, place)
    else:
        places.append(place)


def _gap(entry: LogEntry) -> str | None:
    if not (entry.after_gap or entry.is_late or entry.supersedes):
        return None
    return json.dumps([entry.after_gap, entry.is_late, *[True] * entry.supersedes])


class ParticipantFile:
    """See the module. `path` is made if it does not exist; its directory must exist.

    Use it in a `with` statement, or `close` it. Every method raises `ParticipantFileError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database = ParticipantDatabase(self.path)
        self._logs: dict[str, FileLog] = {}
        self._is_confirming = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. What was appended after the last save is dropped."""
        self._database.close()

    def check(self) -> list[str]:
        """The faults of the file, in words; empty if it is whole. It reads all of the file.

        It compares what SQLite does not know: the counts of each channel, and rows of the log with their
        frames. The frames themselves are compared with their hashes whenever they are read.
        """
        rows = self._database.rows
        faults = [row[0] for row in rows("PRAGMA integrity_check", ()) if row[0] != "ok"]
        counts = """
            SELECT channel_id,
                logged_count, (SELECT count(*) FROM sds_log l WHERE l.channel_no = c.channel_no AND number >= 0),
                noted_count, (SELECT count(*) FROM sds_noted n WHERE n.channel_no = c.channel_no)
            FROM sds_channels c"""
        for channel_id, *found in rows(counts, ()):
            for what, counted, count in (
                ("logged messages", *found[:2]),
                ("names", *found[2:]),
            ):
                if count != counted:
                    channel = repr(id_text(channel_id))
                    faults.append(f"channel {channel} has {count} {what}, and counts {counted}")
        for what, table, other in (
            ("rows without a frame", "sds_log", "sds_frames"),
            ("frames without a row", "sds_frames", "sds_log"),
        ):
            alone = f"SELECT count(*) FROM {table} WHERE log_no NOT IN (SELECT log_no FROM {other})"
            if count := rows(alone, ())[0][0]:
                faults.append(f"the log has {count} {what}")
        return faults

    # --- participants ----------------------------------------------------------------------------

    def channels(self) -> list[str]:
        """The IDs of the channels in the file, ordered by their bytes."""
        rows = self._database.rows("SELECT channel_id FROM sds_channels", ())
        return sorted((id_text(each) for (each,) in rows), key=id_bytes)

    def log(self, channel_id: str) -> FileLog:
        """The log of a channel, the same object at every call."""
        log = self._logs.get(channel_id)
        if log is None:
            log = self._logs[channel_id] = self._make_log(channel_id)
        return log

    def _make_log(self, channel_id: str) -> FileLog:
        statement = (
            "SELECT channel_no, logged_count, noted_count FROM sds_channels WHERE channel_id = ?"
        )
        with self._database.writing() as raw:
            values = (id_bytes(channel_id),)
            row = raw.execute(statement, values).fetchone()
            if row is None:
                raw.execute(
                    "INSERT INTO sds_channels (channel_id, logged_count, noted_count, confirmed)"
                    " VALUES (?, 0, 0, 0)",
                    values,
                )
                row = raw.execute(statement, values).fetchone()
        return FileLog(self._database, *row)

    def participant(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> Participant:
        """The participant of a channel from where its last save left it, or a new one.

        Writes first what a failed save left, so that the state matches the log. Raises
        `LocalProtocolError` as `Participant.restore`: `state_of_another` if the channel's participant has
        another sender ID.
        """
        self.save(channel_id)
        state = self.state(channel_id)
        own = {key: value for key, value in state.items() if not key.startswith(DRIVER_KEYS)}
        return Participant.restore(
            channel_id, sender_id, own, self.log(channel_id), options=options
        )

    def state(self, channel_id: str) -> dict[str, bytes]:
        """The state of a channel as the saved `Save` effects and `confirm` left it."""
        channel_no = self.log(channel_id).channel_no
        statement = "SELECT key, value FROM sds_state WHERE channel_no = ?"
        rows = self._database.rows(statement, (channel_no,))
        state = {id_text(key): value for key, value in rows}
        confirmed = self.confirmed(channel_id)
        if confirmed and PROGRESS in state:
            progress = unseal(PROGRESS, state[PROGRESS], Progress)
            if progress.confirmed < confirmed:
                progress.confirmed = confirmed
                state[PROGRESS] = seal(PROGRESS, progress)
        return state

    def save(self, channel_id: str, *effects: Iterable[Effect]) -> None:
        """Carry out the `Save` effects of one or several lists, in one transaction with the log.

        Pass the effects of all calls of the participant since the last save. Without any, it writes
        what a failed save left.
        """
        self.save_all({channel_id: [each for part in effects for each in part]})

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        """`save` for several channels at once: the effects by channel ID, in one transaction."""
        logs = [self.log(channel_id) for channel_id in effects]
        for log, each in zip(logs, effects.values(), strict=True):
            log.take_changes(each)
        unsaved = [log for log in logs if log.has_unsaved]
        if not unsaved:
            return
        try:
            with self._database.writing() as raw:
                for log in unsaved:
                    log.write(raw)
        except BaseException:
            for log in unsaved:
                log.forget_references()
            raise
        for log in unsaved:
            log.written()

    # --- the application's transaction -----------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction for the application's own tables, on the disk at the end of the block.

        An exception in the block rolls it back. Nothing can be saved or staged inside of the block
        (`busy`): do not await in it if a driver uses the file.
        """
        with self._database.writing() as raw:
            self._is_confirming = True
            try:
                yield raw
            finally:
                self._is_confirming = False
            if not raw.in_transaction:
                raise ParticipantFileError(
                    "misuse", "the transaction was ended inside of its block"
                )

    def confirm(self, channel_id: str, number: int) -> None:
        """Confirm a channel's deliveries up to `number`, inside of a `transaction`.

        After a restart they are not delivered again. Call `Participant.confirm(number)` after the
        transaction, so that the running participant knows as well.
        """
        if not self._is_confirming:
            raise ParticipantFileError("misuse", "confirm is called inside of a `transaction`")
        update = "UPDATE sds_channels SET confirmed = max(confirmed, ?) WHERE channel_id = ?"
        if not self._database.raw.execute(update, (number, id_bytes(channel_id))).rowcount:
            raise ParticipantFileError("misuse", f"the file has no channel {channel_id!r}")

    def confirmed(self, channel_id: str) -> int:
        """The highest number given to `confirm`, 0 before the first."""
        statement = "SELECT confirmed FROM sds_channels WHERE channel_id = ?"
        row = self._database.row(statement, (id_bytes(channel_id),))
        return 0 if row is None else int(row[0])
