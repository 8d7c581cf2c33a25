"""Rows whose columns contradict each other: a key that is not its value's, a sum out of its chain.

The database's own check compares rows with indexes; what no index repeats is compared here with what it
was made of. Left out are columns that nothing else in the database tells: docs/store.md names them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, bindparam, select

from app.store.arrivals import ArrivalChain
from app.store.database import Database, Query, Row
from app.store.keys import Keys
from app.store.schema import channels, history_claims, messages, met_ids, published_claims
from sdstore.sds.digest import claim_id

ROWS_PER_READ = 4_096
_PREFIX_BYTES = 8
_WORD = 1 << 64


class RowCheck:
    """Checks the rows of one open store."""

    def __init__(self, database: Database, keys: Keys) -> None:
        self._database = database
        self._keys = keys
        self._chain = ArrivalChain(keys.secret)

    async def faults(self) -> AsyncIterator[str]:
        """What is wrong, row by row; reads every row of the tables that hold keys."""
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
        for what, number, statement, faults in (
            ("message", m.seq, message, self._of_messages),
            ("hint claim", p.claim_no, claim, self._of_claims),
            ("hint of a history", h.claim_no, told, self._of_history),
            ("known sync message", met.met_no, found_met, self._of_met),
        ):
            async for fault_no, fault in self._walked(number, statement, faults):
                yield f"{what} number {fault_no}: {fault}"

    async def _walked(
        self,
        number: Column[int],
        statement: Any,
        faults: Callable[[Sequence[Row], Row | None], Iterator[tuple[int, str]]],
    ) -> AsyncIterator[tuple[int, str]]:
        after: Any = bindparam("after", type_=BigInteger())
        most: Any = bindparam("most", type_=Integer())
        portion: Query = self._database.sql.query(
            statement.where(number > after).order_by(number).limit(most)
        )
        last: Row | None = None
        while True:
            at = -1 if last is None else last[0]
            rows = await self._database.rows(portion, after=at, most=ROWS_PER_READ)
            if not rows:
                return
            for fault in faults(rows, last):
                yield fault
            last = rows[-1]

    def _of_messages(self, rows: Sequence[Row], last: Row | None) -> Iterator[tuple[int, str]]:
        yield from self._of_chain(rows, last)
        for seq, digest, _, prefix, key, message_id in rows:
            if bytes(prefix) != bytes(digest)[:_PREFIX_BYTES]:
                yield seq, "its digest is not the one that is indexed"
            if key != self._keys.of_text(message_id):
                yield seq, "its ID is not the one that is indexed"

    def _of_claims(self, rows: Sequence[Row], last: Row | None) -> Iterator[tuple[int, str]]:
        yield from self._of_chain(rows, last)
        for claim_no, element, _, prefix, key, hint, channel_no, its_channel_no, digest in rows:
            if digest is None:
                yield claim_no, "its entry is not in the table of messages"
            elif bytes(element) != claim_id(bytes(digest), bytes(hint)):
                yield claim_no, "entry and hint do not give its element"
            elif channel_no != its_channel_no:
                yield claim_no, "its channel is not that of its entry"
            if bytes(prefix) != bytes(element)[:_PREFIX_BYTES]:
                yield claim_no, "its element is not the one that is indexed"
            if key != self._keys.of_bytes(bytes(hint)):
                yield claim_no, "its hint is not the one that is indexed"

    def _of_history(self, rows: Sequence[Row], _: Row | None) -> Iterator[tuple[int, str]]:
        for claim_no, hint_key, hint, id_key, message_id, channel_no in rows:
            if hint_key != self._keys.of_bytes(bytes(hint)):
                yield claim_no, "its hint is not the one that is indexed"
            if id_key != self._keys.of_text(message_id):
                yield claim_no, "its message ID is not the one that is indexed"
            if channel_no is None:
                yield claim_no, "there is no channel of its number"

    def _of_met(self, rows: Sequence[Row], _: Row | None) -> Iterator[tuple[int, str]]:
        for met_no, key, channel_id, message_id in rows:
            if key != self._keys.of_met(channel_id, message_id):
                yield met_no, "its ID is not the one that is indexed"

    def _of_chain(self, rows: Sequence[Row], last: Row | None) -> Iterator[tuple[int, str]]:
        """Rows whose sum is not that of the row before and their own element.

        Behind a gap in the numbers nothing is known: rows that were dropped have their part in the sum.
        """
        numbers, elements = [row[0] for row in rows], [bytes(row[1]) for row in rows]
        if any(len(each) != 32 for each in elements):
            yield (
                numbers[0],
                "among the rows from here on there is an element that has not 32 bytes",
            )
            return
        own = [0, *self._chain.sums(0, numbers, elements)]
        before = (0, 0) if last is None else (last[0], last[2])
        for place, row in enumerate(rows):
            added = own[place + 1] - own[place]
            if row[0] == before[0] + 1 and (row[2] - before[1] - added) % _WORD:
                yield row[0], "its sum, or that of the row before, is not that of the arrival chain"
            before = (row[0], row[2])
