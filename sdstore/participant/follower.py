"""`Follower`: keeps a channel's participant up to date with the stores.

It has two tasks. `follow` keeps a live stream to one store:

1. It opens the stream, which gives a cursor. Nothing is missed from there on.
2. It reads what the store got since the kept cursor of an earlier stream of the same store. This is the
   only probe for missed messages per connection. If there is no such cursor, if the store no longer
   accepts it, or if too much was missed, it reconciles the whole log with the store instead.
3. It keeps the new cursor, and then reads the stream.

If anything fails, it takes another store and does the same there. What has arrived stays, and a cursor
is kept only after what precedes it has arrived.

`fetch` retrieves the messages that the participant misses, with their causes (`retrieval`). It tells the
participant of those that cannot come: every store lacks them, and one refuses or withholds them. As long as
a store is silent, it might have them.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from sdstore.client.records import LiveMessage
from sdstore.errors import StoreError
from sdstore.participant.events import BackfillProgress, Connection
from sdstore.participant.livestreams import FellBehindError
from sdstore.participant.persistence import CURSOR_KEY, ChannelLog, unsaved_code
from sdstore.participant.stores import Retrieval, Store, Stores, channel_scope
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, MessageError, frame_hash
from sdstore.sync.report import Progress

GATHER_S = 0.02
"""How long missing messages gather before they are fetched in one call."""

WANTED_MAX = 10_000
"""Missing messages to fetch. The participant names one that does not fit again later."""

FETCHED_AT_ONCE = 1_000
"""Missing messages in one lookup."""

MET_AS_SYNC = "met_as_sync"
"""What a store says of a missing ID that a sync message had."""

LEFT_OUT_AT_ONCE = 100
"""Messages that one store lost and others are asked for, each with a request of its own, before the next
lookup has its turn."""

RECONCILE_PAUSE_S = 60.0
"""Between two backfills of a channel because of causes far back: anybody can send messages with such."""

REQUESTS_MAX = 8
"""Lookups and walks at the same time, of all channels of a driver. Publications do not wait for them."""

BACKFILLS_MAX = 2
"""Channels of a driver that are backfilled at the same time."""

MISSED_MESSAGES_MAX = 1_000
"""Messages read after a kept cursor, a page of a node. After a longer absence reconciling is cheaper."""

MISSED_S_MAX = 300
"""Seconds in which a store sends what it got after the kept cursor, which is about one page, or makes
progress in a backfill; then it has failed, and another store is tried."""


UNSAVED_PAUSE_S = 1.0
"""The pause before a backfill that could not be written is tried again. It doubles each time."""

UNSAVED_PAUSE_S_MAX = 30.0
"""The longest such pause: each attempt fetches again what could not be written."""

LASTING_S = 5.0
"""Seconds after which a connection counts as a success, and the next pause is the first one again."""


class Inbox(Protocol):
    """A channel's participant, as a follower needs it."""

    channel_id: str
    log: ChannelLog

    @property
    def is_full(self) -> bool:
        """Whether the effects so far must be saved before the participant gets more."""

    def receive(self, frame: bytes, retrieval_hint: bytes, path: str) -> None:
        """Give the participant a frame from the store `path`; an empty hint is unknown."""

    def unobtainable(self, message_id: str, reason: str) -> None:
        """See `Participant.unobtainable`."""

    def take_staged(self) -> bool:
        """Let the participant take some staged messages; False if it took none."""

    async def carried_out(self) -> None:
        """Wait until the effects so far are saved and carried out."""

    def say(self, event: Connection | BackfillProgress) -> None:
        """Tell the application."""

    def saving_failed(self, code: str, error: Exception) -> None:
        """The log could not be written, and a later attempt can succeed."""

    def saving_works(self) -> None:
        """The log was written."""


class StoreAccess:
    """What the followers of a driver share: the stores, and the bounds on using them at the same time."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.requests = asyncio.Semaphore(REQUESTS_MAX)
        self.backfills = asyncio.Semaphore(BACKFILLS_MAX)


class Follower:
    """See the module. `saved` is the channel's saved state."""

    def __init__(self, inbox: Inbox, access: StoreAccess, saved: Mapping[str, bytes]) -> None:
        self._inbox = inbox
        self._stores = access.stores
        self._access = access
        self._scope = channel_scope(inbox.channel_id)
        self._cursors = {
            key.removeprefix(CURSOR_KEY): value.decode(errors="replace")
            for key, value in saved.items()
            if key.startswith(CURSOR_KEY)
        }
        self._cursor_changes: dict[str, str | None] = {}
        self._wanted: dict[str, HistoryEntry] = {}
        self._not_found: dict[str, HistoryEntry] = {}
        self._has_wanted = asyncio.Event()
        self._is_caught_up = asyncio.Event()
        self._left_out: dict[bytes, Store] = {}
        self._has_staged = False
        self._reconciling = asyncio.Lock()
        self._reconcile_at_s = 0.0
        self._said: dict[str, Connection] = {}

    @property
    def is_caught_up(self) -> bool:
        """Whether a store answers, and what it got in our absence has arrived."""
        return self._is_caught_up.is_set()

    @property
    def obstacle(self) -> str:
        """Why something of the stores can be missing here, in words; "" if nothing is known to be."""
        if self.is_caught_up:
            return "catching up" if self._has_staged else ""
        states = {each.state: each for each in self._said.values()}
        if "catching_up" in states:
            return "catching up"
        offline = states.get("offline")
        return "no store answers" + (f" ({offline.code})" if offline is not None else " yet")

    @property
    def cursor_changes(self) -> list[tuple[str, bytes | None]]:
        """Changes of the saved state: cursors of what the participant has received by now."""
        return [
            (CURSOR_KEY + url, None if cursor is None else cursor.encode())
            for url, cursor in self._cursor_changes.items()
        ]

    def saved(self) -> None:
        """The cursor changes are saved."""
        self._cursor_changes = {}

    # ---- following a store

    async def follow(self) -> None:
        """Follow one store after the other until cancelled."""
        while True:
            store = await self._stores.choose(self._scope)
            try:
                await self._follow_store(store)
            except FellBehindError:
                continue  # and catch up again
            except StoreError as error:
                self._is_caught_up.clear()
                self._stores.failed(store, self._scope, error)
                if error.status == 410:
                    self._keep_cursor(store, None)
                self._say(Connection(store.name, "offline", error.code, error.detail))

    async def _follow_store(self, store: Store) -> None:
        def left_out(digest: bytes) -> None:
            self._note_left_out(store, (digest,))

        async with store.stream().following(self._inbox.channel_id, left_out) as stream:
            start = stream.cursor
            self._say(Connection(store.name, "catching_up"))
            await self._catch_up(store)
            self._keep_cursor(store, start)
            # What is staged comes before what the stream brings.
            await self._drain()
            self._is_caught_up.set()
            self.want(self._not_found.values())
            self._say(Connection(store.name, "online"))
            with self._lasting(store):
                async for each in stream:
                    frame = await self._frame_of(each, store)
                    self._inbox.receive(frame, _hint_of(each), store.name)
                    if self._cursors.get(store.name) != stream.cursor:
                        self._keep_cursor(store, stream.cursor)
                    if self._inbox.is_full:
                        await self._inbox.carried_out()

    @contextmanager
    def _lasting(self, store: Store) -> Iterator[None]:
        """The store is healthy again when its connection has lasted for a while.

        The pauses before a store that ends each connection grow until then.
        """
        loop = asyncio.get_running_loop()
        success = loop.call_later(LASTING_S, self._stores.succeeded, store, self._scope)
        try:
            yield
        finally:
            success.cancel()

    async def _catch_up(self, store: Store) -> None:
        """Get what the store has and the log lacks; raises `StoreError`."""
        cursor = self._cursors.get(store.name)
        if cursor is None or not await self._read_missed(store, cursor):
            await self._reconcile(store)

    async def _read_missed(self, store: Store, cursor: str) -> bool:
        """Read what the store got after `cursor`; False if that is too much, or the cursor is too old."""
        count = 0
        messages = store.client.messages(
            self._inbox.channel_id,
            order="arrival",
            after=cursor,
            page_size=MISSED_MESSAGES_MAX,
            on_left_out=partial(self._note_left_out, store),
        )
        try:
            async with asyncio.timeout(MISSED_S_MAX) as limit:
                async for stored in messages:
                    count += 1
                    if count > MISSED_MESSAGES_MAX:
                        return False
                    hint = next(iter(stored.retrieval_hints), b"")
                    self._inbox.receive(stored.frame, hint, store.name)
                    if self._inbox.is_full:
                        limit.reschedule(None)  # it is not the store's fault if a save takes long
                        await self._inbox.carried_out()
                        limit.reschedule(asyncio.get_running_loop().time() + MISSED_S_MAX)
        except TimeoutError:
            detail = f"the missed messages did not come within {MISSED_S_MAX} s"
            raise StoreError("timeout", 0, detail) from None
        except StoreError as error:
            if error.status != 410 and error.code != "invalid_cursor":
                raise
            return False
        return True

    async def _reconcile(self, store: Store) -> None:
        """Stage what the store has and the log lacks; raises `StoreError`."""

        loop = asyncio.get_running_loop()
        reached = (0.0, 0)

        def show(progress: Progress) -> None:
            nonlocal reached
            self._inbox.say(BackfillProgress(store.name, progress))
            reaches = (progress.in_sync_percent, progress.entries_received)
            if reaches != reached and not limit.expired():
                reached = reaches
                limit.reschedule(loop.time() + MISSED_S_MAX)

        async with self._reconciling, self._access.backfills:
            pause_s = UNSAVED_PAUSE_S
            while True:
                try:
                    async with asyncio.timeout(MISSED_S_MAX) as limit:
                        report = await store.client.backfill(
                            self._inbox.channel_id, self._inbox.log, show
                        )
                    break
                except TimeoutError:
                    detail = f"the backfill made no progress for {MISSED_S_MAX} s"
                    raise StoreError("timeout", 0, detail) from None
                except Exception as error:
                    if (code := unsaved_code(error)) is None:
                        raise
                    self._inbox.saving_failed(code, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, UNSAVED_PAUSE_S_MAX)
            if report.entries_received:
                self._inbox.saving_works()
        if not report.in_sync:
            raise StoreError(report.code or report.outcome, 0, report.detail)

    async def _drain(self) -> None:
        """Let the participant take what a complete backfill staged, as far as it has room now."""
        self._has_staged = True
        while self.take_staged():
            await self._inbox.carried_out()

    def take_staged(self) -> bool:
        """Let the participant take some staged messages; False if there are none, or no room."""
        if not self._has_staged:
            return False
        has_taken = self._inbox.take_staged()
        if not has_taken:
            self._has_staged = bool(self._inbox.log.staged(1))
        return has_taken

    def _say(self, connection: Connection) -> None:
        """Report a change, once: attempts to reach a dead store repeat."""
        if self._said.get(connection.store_url) != connection:
            self._said[connection.store_url] = connection
            self._inbox.say(connection)

    def _keep_cursor(self, store: Store, cursor: str | None) -> None:
        """Save the cursor together with the effects so far."""
        self._cursor_changes[store.name] = cursor
        if cursor is None:
            self._cursors.pop(store.name, None)
        else:
            self._cursors[store.name] = cursor

    async def _frame_of(self, live: LiveMessage, store: Store) -> bytes:
        """The frame of a live message, which comes as JSON: the same bytes if it is stored."""
        try:
            frame = encode(live.message, Dialect[live.dialect.upper()])
        except (MessageError, KeyError):
            frame = b""
        if live.digest is None:
            return frame
        if frame_hash(frame).hex() == live.document["meta"].get("frame_hash"):
            return frame
        try:
            return (await store.client.get_entry(live.digest)).frame
        except StoreError:
            if not frame:
                raise
            return frame  # other bytes, but the digest says that it is the same message

    # ---- missing messages

    def want(self, entries: Iterable[HistoryEntry]) -> None:
        """Retrieve these soon."""
        for entry in entries:
            if len(self._wanted) >= WANTED_MAX:
                break
            self._wanted.setdefault(entry.message_id, entry)
        self._has_wanted.set()

    async def fetch(self) -> None:
        """Retrieve what is wanted until cancelled."""
        while True:
            await self._has_wanted.wait()
            await self._is_caught_up.wait()
            await asyncio.sleep(GATHER_S)
            entries = self._take_wanted()
            told: dict[str, list[str]] = {}  # what each store that lacks a message says of it
            for store in self._stores.ready(self._scope):
                if not entries:
                    break
                entries = await self._fetch_from(store, entries, told)
            entries = [each for each in entries if not self._is_unobtainable(each, told)]
            # The participant asks for these again; a new connection is a better moment.
            for entry in entries:
                if len(self._not_found) < WANTED_MAX:
                    self._not_found[entry.message_id] = entry
            await self._fetch_left_out()
            if not (self._wanted or self._left_out):
                self._has_wanted.clear()

    def _take_wanted(self) -> list[HistoryEntry]:
        taken: list[HistoryEntry] = []
        for message_id in list(self._wanted)[:FETCHED_AT_ONCE]:
            entry = self._wanted.pop(message_id)
            self._not_found.pop(message_id, None)
            if not self._inbox.log.contains(message_id):
                taken.append(entry)
        return taken

    def _is_unobtainable(self, entry: HistoryEntry, told: Mapping[str, Sequence[str]]) -> bool:
        """Whether this message cannot come, by what the stores that lack it say; tells the participant."""
        message_id = entry.message_id
        states = told.get(message_id, ())
        reason = next((state for state in states if state and state != MET_AS_SYNC), "")
        if not reason or len(states) < len(self._stores.all):
            # Anybody hears sync messages, so one store that met this one is enough.
            reason = MET_AS_SYNC if MET_AS_SYNC in states else ""
        if reason:
            self._inbox.unobtainable(message_id, reason)
        return bool(reason)

    async def _fetch_from(
        self, store: Store, entries: list[HistoryEntry], told: dict[str, list[str]]
    ) -> list[HistoryEntry]:
        """Retrieve from one store; returns what it does not have, and adds to what is told of that."""
        retrieval = Retrieval(store.client, self._inbox.channel_id, self._inbox.log)
        try:
            async with self._access.requests:
                await retrieval.run(entries)
        except StoreError as error:
            self._stores.failed(store, self._scope, error)
        for message_id, state in retrieval.missing.items():
            told.setdefault(message_id, []).append(state)
        for each in retrieval.in_log_order():
            self._inbox.receive(each.frame, each.retrieval_hint, store.name)
            if self._inbox.is_full:
                await self._inbox.carried_out()
        await self._inbox.carried_out()
        if not retrieval.is_complete:
            await self._fetch_depths(store)
        return [each for each in entries if each.message_id not in retrieval.found]

    def _note_left_out(self, store: Store, digests: Iterable[bytes]) -> None:
        """The store knows these messages and has lost their content."""
        for digest in digests:
            if len(self._left_out) < WANTED_MAX:
                self._left_out[digest] = store
        self._has_wanted.set()

    async def _fetch_left_out(self) -> None:
        """Ask the other stores once for what one store lost: some of it now, the rest next time."""
        for digest in list(self._left_out)[:LEFT_OUT_AT_ONCE]:
            loser = self._left_out.pop(digest)
            for store in self._stores.ready(self._scope):
                if store is not loser:
                    try:
                        found = await store.client.get_entry(digest)
                    except StoreError:
                        continue
                    self._inbox.receive(found.frame, b"", store.name)
                    break
            if self._inbox.is_full:
                await self._inbox.carried_out()

    async def _fetch_depths(self, store: Store) -> None:
        """The causes go back too far to walk: reconcile, but not again at once."""
        if time.monotonic() < self._reconcile_at_s:
            return
        self._reconcile_at_s = time.monotonic() + RECONCILE_PAUSE_S
        try:
            await self._reconcile(store)
        except StoreError as error:
            self._stores.failed(store, self._scope, error)
        else:
            await self._drain()


def _hint_of(live: LiveMessage) -> bytes:
    hints = live.document["meta"].get("hints")
    first = hints[0] if isinstance(hints, list) and hints else ""
    try:
        return bytes.fromhex(first) if isinstance(first, str) else b""
    except ValueError:
        return b""
