"""The store: everything the node keeps, behind one object.

Reading methods are coroutines for the event loop. Writing methods block and belong to one thread, the
group committer's (`app.ingest.committer`). Callers bound `limit`s and numbers of keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from sqlalchemy import select

from app.entries import START, Claim, Entry, NewEntry, Outline, Token, Watermark
from app.limits import Limits
from app.store.ancestors import AncestorReads
from app.store.database import Database
from app.store.elementreads import ElementReads
from app.store.faults import UnsupportedDatabaseError, missing_driver
from app.store.framereads import MARKS_REMEMBERED_MAX, FrameReads, Recheck
from app.store.gapreads import GapReads
from app.store.groupwriter import GroupWriter
from app.store.hintreads import HintReads
from app.store.keys import Keys
from app.store.messagereads import MessageReads
from app.store.metareads import Meta, MetaReads
from app.store.pagereads import PageReads, window
from app.store.records import (
    AncestorPage,
    ChannelInfo,
    ContentState,
    ElementColumns,
    Found,
    GapPage,
    HintPage,
    LeftOut,
    LookupResult,
    LostElement,
    MetId,
    Page,
    Position,
    Rechecked,
    Verified,
    WriteResult,
)
from app.store.rowcheck import RowCheck
from app.store.schema import store_meta
from app.store.sqlite import SqliteDatabase
from app.store.statements import read_statements

PEERS_NAME = "peers"
"""The row of `store_meta` that lists the peers which an operator added."""


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


async def open_database(url: str, limits: Limits) -> Database:
    """The database of a URL, at the schema of this code."""
    if url.startswith("postgresql:"):
        try:
            from app.store.postgres import PostgresDatabase  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise missing_driver(error) from error
        return await PostgresDatabase.open(url, limits)
    if url.startswith("sqlite:"):
        return SqliteDatabase.open(url)
    raise UnsupportedDatabaseError(f"no database of this kind: {url.split(':', maxsplit=1)[0]!r}")


class Store:
    """One open store. `database_id` was drawn when the database was made; cursors name it."""

    def __init__(
        self,
        database: Database,
        limits: Limits,
        database_id: str,
        keys: Keys,
        now_ms: Callable[[], int] = _wall_clock_ms,
    ) -> None:
        self.database_id = database_id
        self._database = database
        self._limits = limits
        self._keys = keys
        statements = read_statements(database.sql, limits)
        frames = self._frames = FrameReads(database, statements)
        self._hints = HintReads(database, statements, frames, keys, limits)
        self._meta = MetaReads(database, statements, keys)
        self._messages = MessageReads(database, statements, frames, keys, self._hints, limits)
        self._pages = PageReads(database, statements, frames)
        self._ancestors = AncestorReads(database, statements, frames, keys, limits)
        self._elements = ElementReads(database, statements)
        self._gaps = GapReads(database, statements, keys, limits)
        self._rows = RowCheck(database, keys)
        self._writer = GroupWriter(database, keys, limits, now_ms)
        named_peers = select(store_meta.c.value).where(store_meta.c.name == PEERS_NAME)
        self._peer_urls = database.sql.query(named_peers)
        self._write_meta = database.sql.upsert(
            store_meta, "name", lambda excluded: {"value": excluded.value}
        )

    @classmethod
    async def open(
        cls, database_url: str, limits: Limits, now_ms: Callable[[], int] = _wall_clock_ms
    ) -> Store:
        """Open a database, make it where there is none, upgrade its schema where it is older.

        Takes no lock that another reader or the writer would notice. Raises the `StoreError`s of
        `app.store.faults`.
        """
        database = await open_database(database_url, limits)
        meta: dict[str, bytes] = dict(await database.rows(database.sql.query(store_meta.select())))
        keys = Keys(meta["key_secret"])
        return cls(database, limits, meta["database_id"].decode(), keys, now_ms)

    async def close(self) -> None:
        """Let go of the database."""
        await self._database.close()

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Store]:
        """This store as of the first read inside the block, whoever writes meanwhile.

        For reading only, and for seconds: it keeps the database from cleaning up.
        """
        async with self._database.snapshot() as database:
            yield Store(database, self._limits, self.database_id, self._keys)

    async def ping(self) -> None:
        """Return once the database has answered. Raises `Problem` STORE_UNAVAILABLE."""
        await self._database.ping()

    # ---- writing: one thread

    def begin_writing(self) -> None:
        """Become the writer; `StoreBusyError` where another process is it already."""
        self._database.begin_writing()

    def write_group(
        self,
        entries: Sequence[NewEntry],
        met: Sequence[MetId] = (),
        refused: Sequence[bytes] = (),
    ) -> list[WriteResult]:
        """Write entries, IDs that were met and digests that a local policy refuses.

        One transaction: all or, on any exception, nothing. One result for each entry, in order.
        Raises `Problem` DISK_FULL or STORE_UNAVAILABLE, and whatever the database says where the data
        are at fault.
        """
        return self._writer.write(entries, met, refused)

    def write_claims(self, claims: Sequence[tuple[bytes, Claim]]) -> int:
        """Write hint claims on entries that are here, each with its entry's digest; how many are new.

        One transaction. Claims on other entries are passed over.
        """
        return self._writer.write_claims(claims)

    def recheck(self, seqs: Sequence[int]) -> Rechecked:
        """Read the frames of entries again, and mark or unmark each as lost.

        One transaction, which makes it the second reading of what a reader could not read. Raises
        as `write_group`; nothing is marked then.
        """
        return self._writer.recheck(seqs)

    def recheck_with(self, recheck: Recheck | None) -> None:
        """Let readers have frames rechecked that they cannot read; None: they mark nothing."""
        self._frames.recheck = recheck

    def write_peer_urls(self, urls: Sequence[str]) -> None:
        """Keep the URLs of the peers that an operator added. Raises `Problem` as `write_group`."""
        value = json.dumps(urls).encode()
        with self._database.transaction() as transaction:
            transaction.many(self._write_meta, [(PEERS_NAME, value)])

    # ---- reading: the event loop

    async def find(self, message_id: str, channel_id: str | None) -> Found | None:
        """What is served under an ID: one whose ID verifies first, then the first seen.

        Raises `Problem` CONTENT_LOST.
        """
        return await self._messages.find(message_id, channel_id)

    async def find_among(self, message_id: str, channel_ids: Collection[str]) -> Found | None:
        """As `find`, as if the store held these channels only.

        Raises `Problem` CONTENT_LOST.
        """
        return await self._messages.find_among(message_id, channel_ids)

    async def entry(self, digest: bytes) -> Entry | None:
        """One entry. Raises `Problem` CONTENT_LOST."""
        return await self._messages.entry(digest)

    async def by_digest(self, digests: Sequence[bytes]) -> list[Entry]:
        """The entries that are here, in the order asked; damaged ones are left out."""
        return await self._messages.by_digest(digests)

    async def outlines(self, digests: Sequence[bytes]) -> dict[bytes, Outline]:
        """Channel, ID and Lamport timestamp of those entries that are here, lost or not.

        No frame is read, however long they are.
        """
        return await self._messages.outlines(digests)

    async def frame_sizes(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """How long the frames of those entries are that are here, in bytes."""
        return await self._messages.frame_sizes(digests)

    async def lookup(
        self,
        ids: Sequence[str],
        hints: Sequence[bytes],
        channel_id: str | None,
        *,
        presence_only: bool,
        bytes_max: int,
    ) -> LookupResult:
        """What each ID and hint leads to, until the frames pass `bytes_max`."""
        return await self._messages.lookup(
            ids, hints, channel_id, presence_only=presence_only, bytes_max=bytes_max
        )

    async def hint(
        self, hint: bytes, channel_id: str | None, limit: int, after: Position | None = None
    ) -> HintPage:
        """The entries a hint may mean: computed, published, told by histories; then first seen."""
        return await self._hints.page(hint, channel_id, limit, after)

    async def hints_of(self, digests: Sequence[bytes]) -> dict[bytes, list[Claim]]:
        """Published and computed claims of entries; entries without any are left out."""
        return await self._hints.claims_of(digests)

    async def meta_of(self, entries: Sequence[Entry]) -> list[Meta]:
        """Hints and variants of each of these entries."""
        return await self._meta.of(entries)

    async def claims_by_element(self, ids: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """(digest, hint) of the claim elements that are here, in the order asked."""
        return await self._hints.claims_by_element(ids)

    async def channels(
        self, after: str | None, limit: int, prefix: str | None = None
    ) -> list[ChannelInfo]:
        """Channels by name as UTF-8 bytes."""
        return await self._pages.channels(after, limit, prefix)

    async def channels_among(
        self, names: Collection[str], after: str | None, limit: int, prefix: str | None = None
    ) -> list[ChannelInfo]:
        """As `channels`, as if the store held no others than these."""
        return await self._pages.channels_among(names, after, limit, prefix)

    async def channel(self, channel_id: str) -> ChannelInfo | None:
        """One channel, None where nothing of it is here."""
        return await self._pages.channel(channel_id)

    async def channels_numbered_after(self, channel_no: int, limit: int) -> list[ChannelInfo]:
        """Channels in the order their first entries came."""
        return await self._pages.channels_numbered_after(channel_no, limit)

    async def page(
        self,
        channel_id: str,
        *,
        order: Literal["log", "arrival"] = "log",
        direction: Literal["asc", "desc"] = "asc",
        after: Position | None = None,
        before: Position | None = None,
        lamport_from: int | None = None,
        lamport_to: int | None = None,
        limit: int,
        bytes_max: int,
    ) -> Page:
        """A page of a channel; `after` and `before` (exclusive) count in the reading direction."""
        read = self._pages.log_page if order == "log" else self._pages.arrival_page
        return await read(
            channel_id,
            descending=direction == "desc",
            after=after,
            before=before,
            lamports=window(lamport_from, lamport_to),
            limit=limit,
            bytes_max=bytes_max,
        )

    async def feed(self, after_seq: int, limit: int, bytes_max: int) -> Page:
        """All channels in arrival order, up to what is committed."""
        return await self._pages.feed(after_seq, limit, bytes_max)

    async def gaps(self, channel_id: str, after: Position | None, limit: int) -> GapPage:
        """Message IDs that histories name and the store lacks; met sync messages are none."""
        return await self._gaps.page(channel_id, after, limit)

    async def ancestors(
        self,
        channel_id: str,
        heads: Sequence[str],
        known: Sequence[str] = (),
        *,
        limit: int,
        bytes_max: int,
        after: Position | None = None,
    ) -> AncestorPage:
        """Everything before `heads`, not passing through `known`, the latest first.

        Within a page every message comes after its causes. Pages may be empty and go on.
        """
        return await self._ancestors.page(
            channel_id, heads, known, limit=limit, bytes_max=bytes_max, after=after
        )

    async def elements_after(self, seq: int, claim_no: int, limit: int) -> ElementColumns:
        """Elements in the order they were committed; empty columns at the end.

        Entries of channel number c are group 2c, its published claims group 2c + 1.
        """
        return await self._elements.after(seq, claim_no, limit)

    async def references_in_doubt(self, limit: int) -> list[int]:
        """Sequence numbers of entries whose frames others are compressed against, and of whose two
        copies one is damaged or gone. Reads every frame's row."""
        return await self._frames.references_in_doubt(limit)

    async def content_states(self, digests: Sequence[bytes]) -> dict[bytes, ContentState]:
        """Those of these digests that are here and cannot be served, each with the reason.

        To be asked after `by_digest`, which leaves them out.
        """
        return {each.digest: ContentState.LOST for each in await self.left_out(digests)}

    async def left_out(self, digests: Sequence[bytes]) -> list[LeftOut]:
        """Those of these entries whose content is lost, with what they are named by."""
        return await self._elements.left_out(digests)

    async def lost_elements(self, limit: int, after: int = 0) -> list[LostElement]:
        """Entries whose content is lost, in order of their sequence numbers, from `after` on."""
        return await self._elements.lost(limit, after)

    async def lost_count(self) -> int:
        """How many entries have lost content."""
        return await self._elements.lost_count()

    async def verify_frames(self, after_seq: int, limit: int, bytes_max: int) -> Verified:
        """Read the frames that came after `after_seq`, up to `limit` and until they pass `bytes_max`.

        Nothing that earlier reads left in memory is trusted.
        """
        return await self._frames.verify(after_seq, limit, bytes_max)

    async def follow_marks(self) -> int:
        """Learn what other processes marked as lost; how many entries are."""
        marked = await self.lost_elements(MARKS_REMEMBERED_MAX)
        self._frames.lost = {each.seq for each in marked}
        return len(marked) if len(marked) < MARKS_REMEMBERED_MAX else await self.lost_count()

    async def retry_lost(self, after_seq: int, limit: int) -> int:
        """Read lost frames again, in turn; where to go on."""
        lost = await self.lost_elements(limit, after_seq)
        await self._frames.retry([each.seq for each in lost])
        return lost[-1].seq if len(lost) == limit else 0

    async def row_faults(self) -> AsyncIterator[str]:
        """What contradicts itself within rows, in words; reads all rows, not the frames."""
        async for fault in self._rows.faults():
            yield fault

    async def watermark(self) -> tuple[int, int]:
        """Sequence and claim numbers up to which everything is committed."""
        entries, claims = await self._elements.arrived()
        return entries.number, claims.number

    async def arrived(self) -> Watermark:
        """The places of the arrival chains up to which everything is committed."""
        return await self._elements.arrived()

    async def holds(self, entries: Token, claims: Token = START) -> bool:
        """Whether this database's history up to these places is the one they were read from.

        False where it went back in time since, or is another one.
        """
        is_same, _ = await self._elements.holds(Watermark(entries, claims))
        return is_same

    async def follows(self, read: Watermark) -> tuple[bool, bool]:
        """(as `holds`, whether there is more behind these places)."""
        return await self._elements.holds(read)

    async def peer_urls(self) -> list[str]:
        """The URLs that `write_peer_urls` wrote last."""
        rows = await self._database.rows(self._peer_urls)
        return list(json.loads(rows[0][0])) if rows else []

    async def refused(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these digests a local policy refused lately."""
        return await self._elements.refused(digests)
