"""Reading messages: by ID, by digest, many at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from app.entries import Entry, Outline
from app.limits import Limits
from app.store.database import Database, Row, chunks
from app.store.entryrows import ENTRY_WIDTH, entry_row
from app.store.framereads import FrameReads, content_lost
from app.store.groupwriter import PREFIX_BYTES
from app.store.hintreads import HintReads
from app.store.keys import Keys
from app.store.records import Found, LookupResult
from app.store.statements import ReadStatements

LookupKey = str | bytes
Match = tuple[LookupKey, int, bytes]
"""(key, sequence number, digest)."""
Answer = tuple[LookupKey, Entry | bytes]
Lost = tuple[LookupKey, bytes]

KEYS_PER_STEP = 256
"""Keys looked up before the size of the reply is checked again."""

ROW_BYTES = 512
"""What a row of a reply takes beside its key and its frame: hashes in hex, names, punctuation."""


class MessageReads:
    """Look-ups of single messages."""

    def __init__(
        self,
        database: Database,
        statements: ReadStatements,
        frames: FrameReads,
        keys: Keys,
        hints: HintReads,
        limits: Limits,
    ) -> None:
        self._database = database
        self._statements = statements
        self._frames = frames
        self._keys = keys
        self._hints = hints
        self._limits = limits

    async def find(self, message_id: str, channel_id: str | None) -> Found | None:
        """The entry served under an ID, and the digests of all that bear it; CONTENT_LOST."""
        key = self._keys.of_text(message_id)
        if channel_id is None:
            rows = await self._database.single(self._statements.find, (key, message_id))
        else:
            query = self._statements.find_in_channel
            rows = await self._database.single(query, (key, message_id, channel_id))
        if not rows:
            return None
        entry = await self._frames.entry(rows[0])
        if len(rows) == 1:
            return Found(entry, (entry.digest,))
        matches = await self._id_matches([message_id], channel_id)
        return Found(entry, tuple(digest for _, _, digest in matches))

    async def find_among(self, message_id: str, channel_ids: Collection[str]) -> Found | None:
        """As `find`, as if the store held these channels only; CONTENT_LOST."""
        key, names = self._keys.of_text(message_id), list(channel_ids)
        asked = [(key, message_id, name) for name in names]
        rows = await self._database.each(self._statements.served_in_channel, asked)
        if not rows:
            return None
        served = sorted((unverified, seq, which, digest) for which, unverified, seq, digest in rows)
        found = await self.find(message_id, names[served[0][2]])
        variants = tuple(digest for _, _, _, digest in served[: self._limits.variants_listed_max])
        return None if found is None else Found(found.entry, variants)

    async def entry(self, digest: bytes) -> Entry | None:
        """The entry with a digest; CONTENT_LOST."""
        rows = await self._rows([digest])
        entries = await self._frames.entries(rows)
        if rows and not entries:
            raise content_lost(digest)
        return entries[0] if entries else None

    async def by_digest(self, digests: Sequence[bytes]) -> list[Entry]:
        """The entries that are here and can be read, in the order asked."""
        return await self._frames.entries(await self._rows(digests))

    async def outlines(self, digests: Sequence[bytes]) -> dict[bytes, Outline]:
        """What the rows of those entries tell that are here; no frame is read."""
        wanted = set(digests)
        prefixes = list({digest[:PREFIX_BYTES] for digest in wanted})
        found = await self._database.among(self._statements.rows_by_digest, prefixes)
        rows = (entry_row(row) for row in found)
        return {
            row.digest: Outline(row.channel_id, row.message_id, row.lamport)
            for row in rows
            if row.digest in wanted
        }

    async def frame_sizes(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """How long the frames of those entries are that are here, in bytes."""
        return {row[4]: int(row[ENTRY_WIDTH - 1]) for row in await self._rows(digests)}

    async def _rows(self, digests: Sequence[bytes]) -> list[Row]:
        prefixes = list({digest[:PREFIX_BYTES] for digest in digests})
        rows = await self._database.among(self._statements.entries_by_digest, prefixes)
        by_digest = {row[4]: row for row in rows}
        return [by_digest[digest] for digest in dict.fromkeys(digests) if digest in by_digest]

    async def lookup(
        self,
        ids: Sequence[str],
        hints: Sequence[bytes],
        channel_id: str | None,
        *,
        presence_only: bool,
        bytes_max: int,
    ) -> LookupResult:
        """What each key leads to, until the rows of the answer pass `bytes_max`."""
        result = LookupResult([], [], [], [])
        room = bytes_max
        asked: list[LookupKey] = [*dict.fromkeys(ids), *dict.fromkeys(hints)]
        for step in chunks(asked, KEYS_PER_STEP):
            if room <= 0:
                result.not_examined.extend(step)
                continue
            matches, cut = await self._matches(step, channel_id)
            rows = {} if presence_only else await self._rows_of(matches)
            sizes = [_row_bytes(key, rows.get(seq)) for key, seq, _ in matches]
            count = _fitting_count(matches, sizes, room, is_first=not result.found)
            taken = matches[:count]
            if presence_only:
                found, lost = self._present(taken)
            else:
                found, lost = await self._loaded(taken, rows)
            left_out = cut.union(key for key, _, _ in matches[count:])
            _add_step(result, step, found, lost, left_out)
            room = room - sum(sizes) if count == len(matches) else 0
        return result

    async def _rows_of(self, matches: Sequence[Match]) -> dict[int, Row]:
        seqs = list({seq for _, seq, _ in matches})
        rows = await self._database.among(self._statements.entries_by_seq, seqs)
        return {row[0]: row for row in rows}

    def _present(self, matches: Sequence[Match]) -> tuple[list[Answer], list[Lost]]:
        """The digests of matches, those of lost content apart."""
        marked = self._frames.lost
        found: list[Answer] = [(key, digest) for key, seq, digest in matches if seq not in marked]
        return found, [(key, digest) for key, seq, digest in matches if seq in marked]

    async def _loaded(
        self, matches: Sequence[Match], rows: Mapping[int, Row]
    ) -> tuple[list[Answer], list[Lost]]:
        """The entries of matches; those that cannot be read are left out: others may have them."""
        wanted = [rows[seq] for seq in dict.fromkeys(seq for _, seq, _ in matches)]
        entries = {entry.seq: entry for entry in await self._frames.entries(wanted)}
        found: list[Answer] = [(key, entries[seq]) for key, seq, _ in matches if seq in entries]
        return found, [(key, digest) for key, seq, digest in matches if seq not in entries]

    async def _matches(
        self, step: Sequence[LookupKey], channel_id: str | None
    ) -> tuple[list[Match], set[LookupKey]]:
        """Matches, and the hints of which not all claims were examined."""
        ids = [key for key in step if isinstance(key, str)]
        hints = [key for key in step if isinstance(key, bytes)]
        found = await self._id_matches(ids, channel_id) if ids else []
        if not hints:
            return found, set()
        by_hint = await self._hints.matches(hints, channel_id)
        return found + by_hint.found, {*by_hint.cut}

    async def _id_matches(self, ids: Sequence[str], channel_id: str | None) -> list[Match]:
        keyed: list[Row] = [(self._keys.of_text(each), each) for each in ids]
        query = self._statements.matches
        if channel_id is not None:
            query = self._statements.matches_in_channel
            keyed = [(*row, channel_id) for row in keyed]
        rows = await self._database.each(query, keyed)
        return [(ids[number], seq, digest) for number, seq, digest in rows]


def _row_bytes(key: LookupKey, row: Row | None) -> int:
    return ROW_BYTES + len(key) + (0 if row is None else int(row[ENTRY_WIDTH - 1]))


def _fitting_count(
    matches: Sequence[Match], sizes: Sequence[int], room: int, *, is_first: bool
) -> int:
    """How many matches fit; those of one key are torn apart only where they are a whole reply."""
    fitting = whole = sum(1 for size in accumulate(sizes) if size <= room)
    while 0 < whole < len(matches) and matches[whole - 1][0] == matches[whole][0]:
        whole -= 1
    if is_first and not whole:
        return min(len(matches), max(1, fitting))
    return whole


def _add_step(
    result: LookupResult,
    step: Sequence[LookupKey],
    found: list[Answer],
    lost: list[Lost],
    not_fitting: set[LookupKey],
) -> None:
    answered = {key for key, _ in found} | {key for key, _ in lost}
    result.found.extend(found)
    result.left_out.extend(lost)
    for key in step:
        if key not in answered:
            (result.not_examined if key in not_fitting else result.missing).append(key)
