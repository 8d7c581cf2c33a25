"""What retrieval hints may mean: candidates, ranked by where the claim was learned.

Claims are free to make, so each look-up examines a bounded number of them and says how to go on; where
it names a channel, only claims of that channel count. Rank 0 and 1 are claims published with an entry; rank 2 are claims that histories make about a
channel and message ID, which lead to every entry that bears the ID.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.entries import Claim, ClaimSource
from app.limits import Limits
from app.store.database import Database, ManyQuery, Row
from app.store.entryrows import fitting_count, left_out
from app.store.framereads import FrameReads
from app.store.keys import Keys
from app.store.records import HintPage, Position
from app.store.statements import ReadStatements

HISTORY = int(ClaimSource.HISTORY)
PREFIX_BYTES = 8
_START = (-1, 0, 0)
_LAST_SEQ = 2**63 - 1


@dataclass(slots=True)
class Candidates:
    """(position, row of an entry) of what a hint may mean; `resume` where it was cut."""

    found: list[tuple[Position, Row]] = field(default_factory=list)
    resume: Position | None = None


class HintMatches(NamedTuple):
    """`found`: (hint, sequence number, digest); `cut`: hints of which not all claims were examined."""

    found: list[tuple[str | bytes, int, bytes]]
    cut: set[bytes]


class HintReads:
    """Look-ups by hint, and the claims on entries."""

    def __init__(
        self,
        database: Database,
        statements: ReadStatements,
        frames: FrameReads,
        keys: Keys,
        limits: Limits,
    ) -> None:
        self._database = database
        self._statements = statements
        self._frames = frames
        self._keys = keys
        self._limits = limits

    async def page(
        self, hint: bytes, channel_id: str | None, limit: int, after: Position | None
    ) -> HintPage:
        """Entries that the hint may mean, best first."""
        published = self._statements.published_with_frames[channel_id is not None]
        (candidates,) = await self._gather([hint], channel_id, after, published)
        found = candidates.found
        rows = [row for _, row in found]
        count = min(limit, fitting_count(rows, self._limits.reply_bytes_max))
        resume = found[count - 1][0] if count < len(found) else candidates.resume
        entries = await self._frames.entries(rows[:count])
        return HintPage(entries, resume, left_out(rows[:count], entries))

    async def matches(self, hints: Sequence[bytes], channel_id: str | None) -> HintMatches:
        """The best candidates of each hint."""
        most = self._limits.variants_listed_max
        published = self._statements.published_by_hint[channel_id is not None]
        gathered = await self._gather(hints, channel_id, None, published)
        matches: list[tuple[str | bytes, int, bytes]] = [
            (hint, row[0], row[4])
            for hint, candidates in zip(hints, gathered, strict=True)
            for _, row in candidates.found[:most]
        ]
        pairs = zip(hints, gathered, strict=True)
        return HintMatches(matches, {hint for hint, its in pairs if its.resume is not None})

    async def claims_of(self, digests: Sequence[bytes]) -> dict[bytes, list[Claim]]:
        """Published claims of entries, in the order they were learned."""
        if len(digests) == 1:
            found = await self._claims_of_one(digests[0])
            return {digests[0]: found} if found else {}
        prefixes = list({digest[:PREFIX_BYTES] for digest in digests})
        rows = await self._database.among(self._statements.seqs_by_digest, prefixes)
        wanted = set(digests)
        digest_of = {seq: digest for digest, seq in rows if digest in wanted}
        claims: dict[bytes, list[Claim]] = {}
        rows = await self._database.among(self._statements.claims_by_seq, list(digest_of))
        for seq, source, hint, _ in sorted(rows, key=lambda row: int(row[3])):
            claims.setdefault(digest_of[seq], []).append(Claim(hint, ClaimSource(source)))
        return claims

    async def _claims_of_one(self, digest: bytes) -> list[Claim]:
        asked = (digest[:PREFIX_BYTES], digest)
        rows = await self._database.single(self._statements.claims_by_digest, asked)
        return [Claim(hint, ClaimSource(source)) for source, hint in rows]

    async def claims_by_element(self, ids: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """(digest, hint) of the claim elements that are here, in the order asked."""
        prefixes = list({element[:PREFIX_BYTES] for element in ids})
        rows = await self._database.among(self._statements.claims_by_element, prefixes)
        by_element = {element: (digest, hint) for element, digest, hint in rows}
        return [by_element[element] for element in dict.fromkeys(ids) if element in by_element]

    async def _gather(
        self,
        hints: Sequence[bytes],
        channel_id: str | None,
        after: Position | None,
        published: ManyQuery,
    ) -> list[Candidates]:
        """`published`: what finds published claims, with frames or without."""
        gathered = [Candidates() for _ in hints]
        channel_no = None
        if channel_id is not None:
            channel = await self._database.rows(self._statements.channel, channel_id=channel_id)
            if not channel:
                return gathered
            channel_no = int(channel[0][1])
        rank, number, seq = (int(part) for part in after or _START)
        keyed = [(self._keys.of_bytes(hint), hint) for hint in hints]
        if rank < HISTORY:
            one_channel = () if channel_no is None else (channel_no,)
            asked = [(*key, *one_channel, rank, number) for key in keyed]
            rows = await self._database.each(published, asked)
            self._add_published(gathered, rows)
            number = seq = 0
        await self._gather_history(gathered, keyed, channel_no, (number, seq))
        return gathered

    def _add_published(self, gathered: list[Candidates], rows: Sequence[Row]) -> None:
        examined = Counter(row[0] for row in rows)
        for which, *columns, source in rows:
            position = source, columns[0], 0
            gathered[which].found.append((position, tuple(columns)))
            if examined[which] == self._limits.hint_candidates_max:
                gathered[which].resume = position

    async def _gather_history(
        self,
        gathered: list[Candidates],
        keyed: Sequence[Row],
        channel_no: int | None,
        after: tuple[int, int],
    ) -> None:
        statement = self._statements.history_by_hint[channel_no is not None]
        first_channel = await self._channel_told(after[0]) if channel_no is None else channel_no
        asked = [(*key, first_channel, after[0]) for key in keyed]
        rows = await self._database.each(statement, asked)
        claims = [row for row in rows if gathered[row[0]].resume is None]
        counts = Counter(row[0] for row in claims)
        for which, claim_no, *_ in claims:
            if counts[which] == self._limits.hint_candidates_max:
                gathered[which].resume = (HISTORY, claim_no, _LAST_SEQ)
        if not claims:
            return
        entries = await self._entries_told(claims)
        published = await self._published([row[0] for _, row in entries])
        for (which, claim_no, *_), row in entries:
            hint = keyed[which][1]
            seq = row[0]
            is_new = claim_no != after[0] or seq > after[1]
            if is_new and (seq, hint) not in published:
                gathered[which].found.append(((HISTORY, claim_no, seq), row))

    async def _channel_told(self, claim_no: int) -> int:
        """The channel of a history claim; claims are read in the order of channels and numbers."""
        query = self._statements.channel_of_history_claim
        rows = await self._database.rows(query, claim_no=claim_no) if claim_no else []
        return int(rows[0][0]) if rows else 0

    async def _entries_told(self, claims: Sequence[Row]) -> list[tuple[Row, Row]]:
        """(history claim, entry) in order of the claims, and of entries under one."""
        named = [(id_key, message_id, number) for _, _, number, id_key, message_id in claims]
        rows = await self._database.each(self._statements.entries_numbered, named)
        return [(claims[which], tuple(columns)) for which, *columns in sorted(rows)]

    async def _published(self, seqs: Sequence[int]) -> set[tuple[int, bytes]]:
        rows = await self._database.among(self._statements.claims_by_seq, list(set(seqs)))
        return {(seq, hint) for seq, _, hint, _ in rows}
