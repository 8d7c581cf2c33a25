"""Reading frames of the database, and the rows of entries that become records with them."""

from __future__ import annotations

from collections.abc import Sequence

from app.entries import Entry
from app.errors import Code, Problem
from app.store.database import Database
from app.store.entryrows import ENTRY_WIDTH, entry_of
from app.store.frames import FrameUnpacker, PackedFrame
from app.store.sql import Row
from app.store.statements import ReadStatements

_MISSING = (None, None, None)


class FrameReads:
    """The frames of one open store."""

    def __init__(self, database: Database, statements: ReadStatements) -> None:
        self._database = database
        self._statements = statements
        self._unpacker = FrameUnpacker()

    async def entry(self, row: Row) -> Entry:
        """The entry of a row that goes on with the columns of its frame; FRAME_DAMAGED."""
        packed = _packed(row, row[ENTRY_WIDTH:])
        frame = self._unpacker.unpack_at_hand(packed)
        if frame is None:
            frame = (await self._unpack([packed])).get(packed.seq)
        if frame is None:
            raise damaged(row[4])
        return entry_of(row, frame)

    async def entries(self, rows: Sequence[Row]) -> list[Entry]:
        """The entries of these rows, in their order; those with a damaged frame are left out.

        Frames that the rows do not bring along are asked for.
        """
        absent = [row[0] for row in rows if not _brings_frame(row)]
        stored = await self._database.among(self._statements.frames, absent)
        columns = {seq: packed for seq, *packed in stored}
        frames = await self._unpack(
            [_packed(row, columns.get(row[0]) or row[ENTRY_WIDTH:] or _MISSING) for row in rows]
        )
        return [entry_of(row, frames[row[0]]) for row in rows if row[0] in frames]

    async def references_in_doubt(self, limit: int) -> list[int]:
        """Sequence numbers of references of whose two copies one is damaged or gone. Reads all."""
        rows = await self._database.rows(self._statements.references_in_doubt, limit=limit)
        return [row[0] for row in rows]

    async def _unpack(self, packed: Sequence[PackedFrame]) -> dict[int, bytes]:
        unpacking = self._unpacker.unpack(packed)
        statements = self._statements
        try:
            ask = next(unpacking)
            while True:
                query = statements.references if ask.of_references else statements.frames
                ask = unpacking.send(await self._database.among(query, ask.seqs))
        except StopIteration as end:
            frames: dict[int, bytes] = end.value
            return frames


def damaged(digest: bytes) -> Problem:
    """The refusal to serve a frame that no copy gives back."""
    return Problem(
        Code.FRAME_DAMAGED,
        f"the frame of entry {digest.hex()} is damaged here; `sdstore check --deep` lists all such",
    )


def _brings_frame(row: Row) -> bool:
    return len(row) > ENTRY_WIDTH and row[ENTRY_WIDTH] is not None


def _packed(row: Row, columns: Sequence[object]) -> PackedFrame:
    return PackedFrame(row[0], row[ENTRY_WIDTH - 1], row[5], *columns)  # type: ignore[arg-type]
