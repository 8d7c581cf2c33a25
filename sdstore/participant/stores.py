"""The stores of a `ParticipantDriver`, and the retrieval of missing messages from one.

All work goes to one store, the home, which is drawn at random among the healthy ones; if it fails, another
one is drawn. All times are of a monotonic clock: a jump of the wall clock changes nothing.

Retrieval takes few calls. The wanted messages are looked up by hint and by ID in one call. What they depend on,
and the log lacks, follows with `ancestors`, which walks back to messages that the log has: a chain of 1,000
messages takes three calls.
"""

import asyncio
import random
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.errors import StoreError, malformed_reply
from sdstore.client.exchange import without_password
from sdstore.client.records import Key, StoredMessage
from sdstore.sds.log import ParticipantLog
from sdstore.sds.model import LAMPORT_MAX, HistoryEntry, Message, MessageError

NODE = "node"
"""The scope of a failure that concerns everything that a store does."""

PUBLISHING = "publishing"
"""The scope of a store that does not let this participant publish."""


def channel_scope(channel_id: str) -> str:
    """The scope of a store that does not serve a channel to this participant."""
    return f"channel {channel_id}"


@dataclass(frozen=True, slots=True)
class BackOff:
    """The pause before a failed store is tried again.

    It doubles from `first_s` to `max_s` and is drawn between half and all of it, so that participants
    do not return together. A longer `Retry-After` counts, up to `retry_after_max_s`.
    """

    first_s: float = 0.5
    max_s: float = 60.0
    retry_after_max_s: float = 300.0

    def pause_s(self, failures_count: int, error: StoreError, draw: random.Random) -> float:
        """The pause after so many failures in a row, the last of them `error`."""
        pause_s = min(self.max_s, self.first_s * 2.0 ** min(failures_count - 1, 30))
        asked_s = min(error.retry_after_s or 0.0, self.retry_after_max_s)
        return max(pause_s * draw.uniform(0.5, 1.0), asked_s)


class Store:
    """One store. Its health is kept per scope: a store that refuses one channel may serve others."""

    def __init__(self, url: str, client: AsyncStoreClient) -> None:
        self.name = without_password(url)  # for people and files
        self.client = client
        self.failures_count: dict[str, int] = {}
        self.retry_at_s: dict[str, float] = {}

    def ready_at_s(self, scope: str) -> float:
        """The time from which the store can be tried for `scope`."""
        retry_at_s = self.retry_at_s
        return max(retry_at_s.get(NODE, 0.0), retry_at_s.get(scope, 0.0))


class Stores:
    """See the module."""

    def __init__(
        self, stores: Sequence[Store], back_off: BackOff, draw: random.Random | None = None
    ) -> None:
        self.all = tuple(stores)
        self._back_off = back_off
        self._draw = draw or random.Random()
        self._home: Store | None = None
        self._changed = asyncio.Event()

    def ready(self, scope: str) -> list[Store]:
        """The stores that can be tried now, the home first, the others in random order."""
        now_s = time.monotonic()
        found = [store for store in self.all if store.ready_at_s(scope) <= now_s]
        self._draw.shuffle(found)
        # A home that only lacks this scope stays the home for the others.
        is_homeless = self._home is None or self._home.ready_at_s(NODE) > now_s
        if found and is_homeless:
            self._home = found[0]
        found.sort(key=lambda store: store is not self._home)
        return found

    async def choose(self, scope: str, among: Sequence[Store] | None = None) -> Store:
        """The home, or another store if the home does not serve `scope`; waits until one can be tried.

        `among`: only these.
        """
        allowed = self.all if among is None else among
        while not (found := [each for each in self.ready(scope) if each in allowed]):
            self._changed.clear()
            ready_at_s = min(store.ready_at_s(scope) for store in allowed)
            try:
                async with asyncio.timeout(max(ready_at_s - time.monotonic(), 0.001)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return found[0]

    def failed(self, store: Store, scope: str, error: StoreError) -> None:
        """Leave the store alone for a while: for everything, if the error is not about `scope`."""
        if not concerns_the_request(error):
            scope = NODE
        count = store.failures_count[scope] = store.failures_count.get(scope, 0) + 1
        pause_s = self._back_off.pause_s(count, error, self._draw)
        store.retry_at_s[scope] = time.monotonic() + pause_s

    def succeeded(self, store: Store, scope: str) -> None:
        """Try the store at once from now on, and let the next pause be the first again."""
        for each in (NODE, scope):
            store.failures_count.pop(each, None)
            if store.retry_at_s.pop(each, None) is not None:
                self._changed.set()

    async def close(self) -> None:
        """Close the connections to all stores."""
        for store in self.all:
            await store.client.close()


def concerns_the_request(error: StoreError) -> bool:
    """Whether the store refused this request, and may accept others (4xx but 401, 408, 429)."""
    return 400 <= error.status < 500 and error.status not in (401, 408, 429)


# ---- retrieval

LOOKUP_ENTRIES_MAX = 1_000
"""Missing messages of one call, each with its ID and perhaps a hint; nodes examine 10,000 keys."""

LOOKUPS_MAX = 16
"""Calls for one batch: a reply that is full leaves keys unexamined."""

WALKS_MAX = 6
"""Calls for ancestors. A longer chain is a long absence, which a backfill fills faster."""

WALK_LIMITS = (100, 1_000)
"""Messages of the first walk and of the others. The first can lead into what the log has."""

HEADS_MAX = 1_000
"""A node accepts as many."""

KNOWN_NEWEST = 500
"""Of the newest logged messages, at which a walk stops."""

KNOWN_MAX = 2_000
"""IDs at which a walk stops, 64 bytes each. A walk that passes by brings messages that the log has."""

ID_BYTES_MAX = 1_024
"""A longer ID is in no store."""

HINT_BYTES_MAX = 256
"""A longer hint is in no store."""


FOUND_BYTES_MAX = 32 * 1024 * 1024
"""Frames of one retrieval, which are all in memory: two replies of the largest size. A backfill, which
stages what it fetches on disk, gets the rest."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A message from a store, with its frame as the store received it and a hint, empty if unknown."""

    message: Message
    frame: bytes
    retrieval_hint: bytes


class Retrieval:
    """What one store has of some missing messages and of their causes.

    `found` maps IDs to messages. `is_complete` is False if the causes go back further than the allowed
    walks, or the frames are more than `FOUND_BYTES_MAX`; a backfill is due then. `missing` has the wanted IDs
    that the store lacks, with what it says of them (`LookupResult.states`), or nothing.
    """

    def __init__(self, client: AsyncStoreClient, channel_id: str, log: ParticipantLog) -> None:
        self.found: dict[str, Retrieved] = {}
        self.missing: dict[str, str] = {}
        self.is_complete = True
        self._client = client
        self._channel_id = channel_id
        self._log = log
        self._absent: set[str] = set()
        self._found_bytes = 0

    def in_log_order(self) -> list[Retrieved]:
        """What was found, causes before the messages that depend on them."""
        return sorted(
            self.found.values(),
            key=lambda each: (
                each.message.lamport_timestamp or 0,
                each.message.message_id.encode(),
            ),
        )

    async def run(self, entries: Sequence[HistoryEntry]) -> None:
        """Retrieve; raises `StoreError`."""
        await self._look_up(entries)
        for number in range(WALKS_MAX + 1):
            edge = self._edge()
            if not edge or not self.is_complete:
                return
            if number == WALKS_MAX:
                self.is_complete = False
                return
            if not await self._walk(edge, WALK_LIMITS[min(number, len(WALK_LIMITS) - 1)]):
                return

    async def _look_up(self, entries: Sequence[HistoryEntry]) -> None:
        wanted = {each.message_id for each in entries}
        keys: list[Key] = [
            each.retrieval_hint
            for each in entries
            if 0 < len(each.retrieval_hint) <= HINT_BYTES_MAX
        ]
        keys += [each for each in wanted if len(each.encode()) <= ID_BYTES_MAX]
        for _ in range(LOOKUPS_MAX):
            if not keys or not self.is_complete:
                return
            result = await self._client.lookup(keys, self._channel_id)
            self._keep((match.message for match in result.found if match.message), wanted)
            for key in result.missing:
                if isinstance(key, str):
                    self.missing[key] = result.states.get(key, "")
            # A hint whose message came by its ID need not be asked for again.
            left = set(result.not_examined)
            keys = [key for key in keys if key in left and key not in self.found]

    def _edge(self) -> list[Retrieved]:
        """The found messages whose causes are neither found nor in the log nor absent from the store."""
        return [
            each
            for each in self.found.values()
            if any(map(self._is_wanted, each.message.causal_history))
        ]

    def _is_wanted(self, entry: HistoryEntry) -> bool:
        message_id = entry.message_id
        return not (
            message_id in self.found or message_id in self._absent or self._log.contains(message_id)
        )

    async def _walk(self, edge: Sequence[Retrieved], limit: int) -> bool:
        """One call for the causes of `edge`; False if it brought nothing that was wanted."""
        known = [
            entry.message_id
            for each in edge
            for entry in each.message.causal_history
            if not self._is_wanted(entry)
        ]
        newest = self._log.newest(KNOWN_NEWEST, LAMPORT_MAX)
        known += [each.entry.message_id for each in newest]
        heads = [each.message.message_id for each in edge]
        page = await self._client.ancestors(
            self._channel_id,
            heads[-HEADS_MAX:],
            list(dict.fromkeys(known))[:KNOWN_MAX],
            limit=limit,
        )
        self._absent.update(page.missing)
        found_count = len(self.found)
        self._keep(page.messages)
        has_progress = len(self.found) > found_count
        if page.next is not None and not has_progress:
            self.is_complete = False
        return has_progress

    def _keep(
        self, messages: Iterable[StoredMessage], wanted: Collection[str] | None = None
    ) -> None:
        for stored in messages:
            try:
                message = stored.message
            except MessageError as error:
                raise malformed_reply(f"not an SDS frame: {error}") from None
            message_id = message.message_id
            if message_id in self.found or self._log.contains(message_id):
                continue
            if message.channel_id == self._channel_id and (wanted is None or message_id in wanted):
                if self._found_bytes + len(stored.frame) > FOUND_BYTES_MAX:
                    self.is_complete = False
                    return
                self._found_bytes += len(stored.frame)
                hint = stored.retrieval_hints[0] if stored.retrieval_hints else b""
                self.found[message_id] = Retrieved(message, stored.frame, hint)
