"""What causal histories say: hints of other messages, and which messages are missing.

Histories repeat themselves (js-waku's repeat 199 of 200 entries from one message to the next), so
what was settled lately is remembered and costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from app.limits import Limits
from app.store.database import Row, Transaction
from app.store.keys import Keys
from app.store.records import MetId
from app.store.writestatements import WriteStatements

if TYPE_CHECKING:
    from app.store.groupwriter import Group

SETTLED_MAX = 65_536
"""References remembered as settled: the windows of some 300 busy channels, about 16 MiB."""

Reference = tuple[int, str, bytes]
"""(channel number, message ID, hint or nothing)."""
Name = tuple[int, str]
"""(channel number, message ID)."""


class ReferenceWriter:
    """Writes history claims, missing references and met IDs."""

    def __init__(self, statements: WriteStatements, keys: Keys, limits: Limits) -> None:
        self._statements = statements
        self._keys = keys
        self._limits = limits
        self._settled: dict[Reference, None] = {}

    def write(
        self, transaction: Transaction, group: Group, met: Sequence[MetId]
    ) -> dict[Reference, None]:
        """The references that are settled once the group is committed."""
        arrived = {(r.channel_no, entry.message.message_id) for entry, r in group.written}
        self._write_met(transaction, met)
        if group.has_missing:
            transaction.many(self._statements.delete_missing, list(arrived))
        unsettled = self._unsettled(group)
        self.settle(transaction, group, unsettled, arrived)
        return unsettled

    def settle(
        self,
        transaction: Transaction,
        group: Group,
        unsettled: dict[Reference, None],
        arrived: Collection[Name] = (),
    ) -> None:
        """Write what references tell; `arrived` are names that this group wrote itself."""
        names = dict.fromkeys((channel_no, message_id) for channel_no, message_id, _ in unsettled)
        self._write_missing(transaction, [name for name in names if name not in arrived])
        self._write_history_claims(transaction, group, unsettled)

    def remember(self, settled: dict[Reference, None]) -> None:
        """Called after the commit: what was rolled back is not settled."""
        if len(self._settled) + len(settled) > SETTLED_MAX:
            self._settled.clear()
        self._settled.update(settled)

    def forget(self) -> None:
        """Called where the database lost what it was told: it has to be told again."""
        self._settled.clear()

    def _unsettled(self, group: Group) -> dict[Reference, None]:
        settled = self._settled
        return {
            reference: None
            for entry, result in group.written
            for told in entry.message.causal_history
            if (reference := (result.channel_no, told.message_id, told.retrieval_hint))
            not in settled
        }

    def _write_missing(self, transaction: Transaction, names: Sequence[Name]) -> None:
        keyed = [
            (self._keys.of_text(message_id), message_id, channel_no)
            for channel_no, message_id in names
        ]
        here = {row[0] for row in transaction.each(self._statements.is_here, keyed)}
        missing = [name for number, name in enumerate(names) if number not in here]
        transaction.many(self._statements.insert_missing, missing)

    def _write_history_claims(
        self, transaction: Transaction, group: Group, unsettled: Iterable[Reference]
    ) -> None:
        told = [reference for reference in unsettled if reference[2]]
        names = list(dict.fromkeys((channel_no, message_id) for channel_no, message_id, _ in told))
        keys = {name: self._keys.of_text(name[1]) for name in names}
        held: dict[Name, set[bytes]] = {name: set() for name in names}
        asked = [(keys[name], *name) for name in names]
        for number, hint in transaction.each(self._statements.history_hints, asked):
            held[names[number]].add(hint)
        rows: list[Row] = []
        # In the order they were told: claims on one hint are listed in the order of their numbers.
        for channel_no, message_id, hint in told:
            known = held[channel_no, message_id]
            if hint in known or len(known) >= self._limits.hint_claims_per_entry_max:
                continue
            known.add(hint)
            group.last_history_no += 1
            key = keys[channel_no, message_id]
            hint_key = self._keys.of_bytes(hint)
            rows.append((group.last_history_no, hint_key, key, channel_no, message_id, hint))
        transaction.many(self._statements.insert_history, rows)

    def _write_met(self, transaction: Transaction, met: Sequence[MetId]) -> None:
        if not met:
            return
        statements = self._statements
        asked = [self._met_row(m.channel_id, m.message_id) for m in dict.fromkeys(met)]
        known = {row[0] for row in transaction.each(statements.is_met, asked)}
        new = [row for number, row in enumerate(asked) if number not in known]
        last = int(transaction.rows(statements.last_met)[0][0])
        transaction.many(statements.insert_met, [(last + n, *row) for n, row in enumerate(new, 1)])
        until = last + len(new) - self._limits.met_ids_max
        transaction.execute(statements.forget_met, until=until)

    def _met_row(self, channel_id: str, message_id: str) -> tuple[int, str, str]:
        return self._keys.of_met(channel_id, message_id), channel_id, message_id
