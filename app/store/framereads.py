"""Reading frames of the database, and the rows of entries that become records with them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from app.entries import Entry
from app.errors import Code, Problem
from app.store.database import Database, Row
from app.store.entryrows import ENTRY_WIDTH, entry_of, entry_row, fitting_count
from app.store.frames import DAMAGES_TOLD_MAX, FrameUnpacker, PackedFrame
from app.store.records import Rechecked, Verified
from app.store.statements import ReadStatements

Recheck = Callable[[Sequence[int]], Awaitable[Rechecked]]

_log = logging.getLogger(__name__)
_MISSING = (None, None, None)

MARKS_REMEMBERED_MAX = 65_536
"""Lost entries that a reader remembers: 6 MiB. The verification reads the others again."""


class FrameReads:
    """The frames of one open store.

    `recheck` is given the sequence numbers of frames that could not be read, or could although they
    are marked as lost: the writer reads them again and marks or unmarks them. The store's user sets
    it; None where nobody writes. `lost` are those that are known to be marked, for a reader's own use:
    the table says which are.
    """

    def __init__(self, database: Database, statements: ReadStatements) -> None:
        self.recheck: Recheck | None = None
        self.lost: set[int] = set()
        self._database = database
        self._statements = statements
        self._unpacker = FrameUnpacker()
        # Does not remember references: those in memory say nothing about the disk.
        self._verifier = FrameUnpacker()

    async def entry(self, row: Row) -> Entry:
        """The entry of a row that goes on with the columns of its frame; CONTENT_LOST."""
        frame = self._unpacker.unpack_at_hand(_packed(row, row[ENTRY_WIDTH:]))
        if frame is not None and not self.lost:
            return entry_of(row, frame)
        entries = await self.entries([row])
        if not entries:
            raise content_lost(row[4])
        return entries[0]

    async def entries(self, rows: Sequence[Row]) -> list[Entry]:
        """The entries of these rows, in their order; those whose frames cannot be read are left out.

        Frames that the rows do not bring along are asked for.
        """
        frames = await self._frames_of(rows, self._unpacker)
        return [entry_of(row, frames[row[0]]) for row in rows if row[0] in frames]

    async def verify(self, after_seq: int, limit: int, bytes_max: int) -> Verified:
        """Read frames behind a sequence number, and all that they need, from the database."""
        found = await self._database.rows(self._statements.feed, after=after_seq, limit=limit)
        if not found:
            return Verified(0, 0, after_seq)
        rows = found[: fitting_count(found, bytes_max)]
        self._verifier.forget_references()
        frames = await self._frames_of(rows, self._verifier)
        return Verified(len(rows), len(rows) - len(frames), rows[-1][0])

    async def retry(self, seqs: Sequence[int]) -> None:
        """Read frames again that are marked as lost: one whose rows were repaired is whole."""
        rows = await self._database.among(self._statements.entries_by_seq, seqs)
        await self._frames_of(rows, FrameUnpacker(is_silent=True))

    async def _frames_of(self, rows: Sequence[Row], unpacker: FrameUnpacker) -> dict[int, bytes]:
        absent = [row[0] for row in rows if not _brings_frame(row)]
        stored = await self._database.among(self._statements.frames, absent)
        columns = {seq: packed for seq, *packed in stored}
        frames = await self._unpack(
            unpacker,
            [_packed(row, columns.get(row[0]) or row[ENTRY_WIDTH:] or _MISSING) for row in rows],
        )
        if len(frames) < len(rows) or self.lost:
            await self._settle(rows, frames)
        return frames

    async def _settle(self, rows: Sequence[Row], frames: Mapping[int, bytes]) -> None:
        """Have marks brought up to date where they are not what was just read."""
        read = {row[0]: row for row in rows}
        doubted = [seq for seq in read if (seq in frames) == (seq in self.lost)]
        if not doubted or self.recheck is None:
            return
        try:
            found = await self.recheck(doubted)
        except Problem as problem:
            # Nothing is known of it then; whoever reads it next asks again.
            _log.warning("frames that cannot be read were not marked: %s", problem)
            return
        for seq in sorted(found.lost - self.lost)[: max(DAMAGES_TOLD_MAX - len(self.lost), 0)]:
            row = entry_row(read[seq])
            _log.error(
                "the content of message %r of channel %r is lost: no copy of frame %d can be read "
                "(digest %s)",
                row.message_id,
                row.channel_id,
                seq,
                row.digest.hex(),
            )
        self.lost -= found.whole
        if len(self.lost) < MARKS_REMEMBERED_MAX:
            self.lost |= found.lost

    async def references_in_doubt(self, limit: int) -> list[int]:
        """Sequence numbers of references of whose two copies one is damaged or gone. Reads all."""
        rows = await self._database.rows(self._statements.references_in_doubt, limit=limit)
        return [row[0] for row in rows]

    async def _unpack(
        self, unpacker: FrameUnpacker, packed: Sequence[PackedFrame]
    ) -> dict[int, bytes]:
        unpacking = unpacker.unpack(packed)
        statements = self._statements
        try:
            ask = next(unpacking)
            while True:
                query = statements.references if ask.of_references else statements.frames
                ask = unpacking.send(await self._database.among(query, ask.seqs))
        except StopIteration as end:
            frames: dict[int, bytes] = end.value
            return frames


def content_lost(digest: bytes) -> Problem:
    """The refusal to serve a frame that no copy gives back."""
    return Problem(
        Code.CONTENT_LOST,
        f"the stored frame of entry {digest.hex()} cannot be read; publish it again or sync with a "
        f"node that has it (`sdstore check --deep` lists all such)",
    )


def _brings_frame(row: Row) -> bool:
    return len(row) > ENTRY_WIDTH and row[ENTRY_WIDTH] is not None


def _packed(row: Row, columns: Sequence[object]) -> PackedFrame:
    return PackedFrame(row[0], row[ENTRY_WIDTH - 1], row[5], *columns)  # type: ignore[arg-type]
