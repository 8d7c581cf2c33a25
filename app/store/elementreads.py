"""What reconciliation and the range index follow: elements in the order they were committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.entries import Watermark
from app.store.arrivals import goes_on_from, watermark_of
from app.store.database import Database, Row
from app.store.groupwriter import PREFIX_BYTES
from app.store.records import ElementColumns, LeftOut, LostElement
from app.store.statements import ReadStatements
from sdstore.sds.digest import order_value

DIGEST_BYTES = 32
_NUMBER_MAX = 2**63 - 1
_ORDER_OFFSET = np.uint64(order_value(0))


class ElementReads:
    """Entries and claims as elements; refused digests."""

    def __init__(self, database: Database, statements: ReadStatements) -> None:
        self._database = database
        self._statements = statements

    async def after(self, seq: int, claim_no: int, limit: int) -> ElementColumns:
        """Entries after `seq`, at the end of them claims after `claim_no`; up to `limit` of each."""
        statements = self._statements
        entries = await self._database.rows(statements.entry_elements, after=seq, limit=limit)
        claims: Sequence[Row] = ()
        if len(entries) < limit:
            claims = await self._database.rows(
                statements.claim_elements, after=claim_no, limit=limit
            )
        columns = _columns(entries, 0), _columns(claims, 1)
        return ElementColumns(
            np.concatenate([orders for orders, _, _ in columns]),
            np.concatenate([ids for _, ids, _ in columns]),
            np.concatenate([groups for _, _, groups in columns]),
            entries[-1][0] if entries else seq,
            claims[-1][0] if claims else claim_no,
            entries[-1][-1] if entries else None,
            claims[-1][-1] if claims else None,
        )

    async def arrived(self) -> Watermark:
        """The places up to which everything is committed."""
        return watermark_of(await self._sums_at(_NUMBER_MAX, _NUMBER_MAX))

    async def holds(self, read: Watermark) -> tuple[bool, bool]:
        """(whether this history up to `read` is the one that was read, whether there is more)."""
        numbers = read.entries.number, read.claims.number
        row = await self._sums_at(*numbers)
        return goes_on_from(read, row), (row[0], row[2]) != numbers

    async def _sums_at(self, seq: int, claim_no: int) -> Row:
        query = self._statements.sums_at
        [row] = await self._database.rows(query, seq_at=seq, claim_no_at=claim_no)
        return row

    async def refused(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these digests a local policy refused lately."""
        rows = await self._database.among(self._statements.refused, digests)
        return {row[0] for row in rows}

    async def left_out(self, digests: Sequence[bytes]) -> list[LeftOut]:
        """Those of these entries that are marked as lost."""
        prefixes = list({digest[:PREFIX_BYTES] for digest in digests})
        rows = await self._database.among(self._statements.lost_by_digest, prefixes)
        wanted = set(digests)
        return [left_out for row in rows if (left_out := LeftOut(*row)).digest in wanted]

    async def lost(self, limit: int, after: int) -> list[LostElement]:
        """Lost entries with sequence numbers above `after`, in their order."""
        rows = await self._database.rows(self._statements.lost_elements, after=after, limit=limit)
        return [
            LostElement(order_value(lamport), digest, channel_no, seq)
            for seq, channel_no, lamport, digest in rows
        ]

    async def lost_count(self) -> int:
        """How many entries are marked as lost."""
        ((count,),) = await self._database.rows(self._statements.lost_count)
        return int(count)


def _columns(
    rows: Sequence[Row], parity: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint8], NDArray[np.uint32]]:
    """Rows of (number, channel number, Lamport timestamp, 32 bytes, sum); group = 2 channels + parity."""
    _, channel_numbers, lamports, ids, _ = zip(*rows, strict=True) if rows else ((),) * 5
    orders = np.array(lamports, dtype=np.int64).view(np.uint64) + _ORDER_OFFSET
    groups = np.array(channel_numbers, dtype=np.uint32) * np.uint32(2) + np.uint32(parity)
    flat = np.frombuffer(b"".join(ids), dtype=np.uint8)
    return orders, flat.reshape(-1, DIGEST_BYTES), groups
