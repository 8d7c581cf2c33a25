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

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, bindparam, func, insert, select, update

from sdstore.client.participantdatabase import ParticipantDatabase, ParticipantFileError
from sdstore.client.participantlog import FileLog
from sdstore.client.participanttables import (
    ALONE_FRAMES,
    ALONE_LOG,
    CHANNELS,
    COUNTS,
    STATE,
    id_bytes,
    id_text,
    sql,
)
from sdstore.client.persistence import DRIVER_KEYS
from sdstore.sds.effects import Effect
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.participant import Participant
from sdstore.sds.state import PROGRESS, seal, unseal
from sdstore.wire.participant_pb2 import Progress


class ParticipantFile:
    """See the module. `path` is made if it does not exist; its directory must exist.

    Use it in a `with` statement, or `close` it. Every method raises `ParticipantFileError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database = ParticipantDatabase(self.path)
        self._logs: dict[str, FileLog] = {}
        self._confirming: Connection | None = None

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
        for channel_id, logged, noted, found_logged, found_noted in rows(COUNTS, ()):
            counts = (("logged messages", logged, found_logged), ("names", noted, found_noted))
            faults += [
                f"channel {id_text(channel_id)!r} has {found} {what}, and counts {counted}"
                for what, counted, found in counts
                if found != counted
            ]
        for what, statement in (
            ("rows without a frame", ALONE_LOG),
            ("frames without a row", ALONE_FRAMES),
        ):
            if count := rows(statement, ())[0][0]:
                faults.append(f"the log has {count} {what}")
        return faults

    # --- participants ----------------------------------------------------------------------------

    def channels(self) -> list[str]:
        """The IDs of the channels in the file, ordered by their bytes."""
        rows = self._database.rows(sql(select(CHANNELS.c.channel_id)), ())
        return sorted((id_text(each) for (each,) in rows), key=id_bytes)

    def log(self, channel_id: str) -> FileLog:
        """The log of a channel, the same object at every call."""
        log = self._logs.get(channel_id)
        if log is None:
            log = self._logs[channel_id] = self._make_log(channel_id)
        return log

    def _make_log(self, channel_id: str) -> FileLog:
        of_channel = select(
            CHANNELS.c.channel_no, CHANNELS.c.logged_count, CHANNELS.c.noted_count
        ).where(CHANNELS.c.channel_id == id_bytes(channel_id))
        with self._database.transaction() as connection:
            row = connection.execute(of_channel).first()
            if row is None:
                connection.execute(
                    insert(CHANNELS).values(
                        channel_id=id_bytes(channel_id), logged_count=0, noted_count=0, confirmed=0
                    )
                )
                row = connection.execute(of_channel).one()
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
        wanted = select(STATE.c.key, STATE.c.value).where(STATE.c.channel_no == bindparam("no"))
        state = {
            id_text(key): value for key, value in self._database.rows(sql(wanted), (channel_no,))
        }
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
    def transaction(self) -> Iterator[Connection]:
        """A transaction for the application's own tables, on the disk at the end of the block.

        An exception in the block rolls it back. Nothing can be saved or staged inside of the block
        (`busy`): do not await in it if a driver uses the file.
        """
        with self._database.transaction() as connection:
            self._confirming = connection
            try:
                yield connection
            finally:
                self._confirming = None

    def confirm(self, connection: Connection, channel_id: str, number: int) -> None:
        """Confirm a channel's deliveries up to `number`, in the transaction of `connection`.

        After a restart they are not delivered again. Call `Participant.confirm(number)` after the
        transaction, so that the running participant knows as well.
        """
        if connection is not self._confirming:
            raise ParticipantFileError("misuse", "confirm takes the connection of `transaction`")
        higher = func.max(CHANNELS.c.confirmed, number)
        of_channel = CHANNELS.c.channel_id == id_bytes(channel_id)
        if not connection.execute(
            update(CHANNELS).where(of_channel).values(confirmed=higher)
        ).rowcount:
            raise ParticipantFileError("misuse", f"the file has no channel {channel_id!r}")

    def confirmed(self, channel_id: str) -> int:
        """The highest number given to `confirm`, 0 before the first."""
        wanted = select(CHANNELS.c.confirmed).where(CHANNELS.c.channel_id == bindparam("id"))
        row = self._database.row(sql(wanted), (id_bytes(channel_id),))
        return 0 if row is None else int(row[0])
