"""What answers tell about an entry beside the entry itself: its hints and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.entries import Entry
from app.store.database import Database
from app.store.keys import Keys
from app.store.statements import ReadStatements


@dataclass(slots=True)
class Meta:
    """`hints`: published and computed ones, first learned first. `variants`: digests of the other
    entries under the same channel and ID, in the order they would be served (capped)."""

    hints: list[bytes] = field(default_factory=list)
    variants: list[bytes] = field(default_factory=list)

    @property
    def shown_bytes(self) -> int:
        """What it takes in an answer: hexadecimal in quotes."""
        return sum(2 * len(each) + 3 for each in (*self.hints, *self.variants))


class MetaReads:
    """Reads it for many entries at once."""

    def __init__(self, database: Database, statements: ReadStatements, keys: Keys) -> None:
        self._database = database
        self._statements = statements
        self._keys = keys

    async def of(self, entries: Sequence[Entry]) -> list[Meta]:
        """One for each entry."""
        rows = await self._database.among(self._statements.meta, [each.seq for each in entries])
        found: dict[int, Meta] = {}
        sharing: set[int] = set()
        for seq, shares_id, hint, _ in sorted(rows, key=_claim_no):
            meta = found.setdefault(seq, Meta())
            if hint is not None:
                meta.hints.append(hint)
            if shares_id:
                sharing.add(seq)
        if sharing:
            await self._add_variants([each for each in entries if each.seq in sharing], found)
        return [found[each.seq] for each in entries]

    async def _add_variants(self, entries: Sequence[Entry], found: dict[int, Meta]) -> None:
        ids = list(dict.fromkeys((each.message_id, each.channel_id) for each in entries))
        asked = [(self._keys.of_text(message_id), message_id, name) for message_id, name in ids]
        digests: dict[tuple[str, str], list[bytes]] = {each: [] for each in ids}
        rows = await self._database.each(self._statements.matches_in_channel, asked)
        for which, _, digest in rows:
            digests[ids[which]].append(digest)
        for each in entries:
            same_id = digests[each.message_id, each.channel_id]
            found[each.seq].variants = [digest for digest in same_id if digest != each.digest]


def _claim_no(row: tuple[int, bool, bytes | None, int | None]) -> int:
    return row[3] or 0
