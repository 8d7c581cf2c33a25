"""The stores of a `ParticipantDriver`: retrieval of missing messages from one, and frames on their way to all.

All work goes to one store, the home, which is drawn at random among the healthy ones; if it fails, another
one is drawn. All times are of a monotonic clock: a jump of the wall clock changes nothing.

Retrieval takes few calls. The wanted messages are looked up by hint and by ID in one call. What they depend on,
and the log lacks, follows with `ancestors`, which walks back to messages that the log has: a chain of 1,000
messages takes three calls.

Frames are published in order and in batches, and one store must accept each. Those of content messages wait
while no store answers. A frame is refused only if every store refuses it: what some refused is offered to the
others as soon as they answer. A frame that the outbox has no room for is left out: the participant broadcasts
it again later. Sync and ephemeral messages are dropped if they cannot be sent at once, because they are worth
nothing later. Other stores then get copies, so that participants who follow those get the message live. A copy
is tried once: the stores reconcile with each other.
"""

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from sdstore.client.clients import AsyncStoreClient
from sdstore.client.exchange import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, without_password
from sdstore.client.records import Key, PublishItem, PublishOutcome, StoredMessage
from sdstore.errors import StoreError, malformed_reply
from sdstore.participant.livestreams import StoreStream
from sdstore.sds.effects import Broadcast
from sdstore.sds.log import ParticipantLog
from sdstore.sds.model import LAMPORT_MAX, HistoryEntry, Kind, Message, MessageError

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
        self._streams: list[StoreStream] = []
        self.failures_count: dict[str, int] = {}
        self.retry_at_s: dict[str, float] = {}

    def stream(self) -> StoreStream:
        """A live stream that has room for one more channel."""
        found = next((each for each in self._streams if each.has_room), None)
        if found is None:
            found = StoreStream(self.client)
            self._streams.append(found)
        return found

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


OUTBOX_FRAMES_MAX = 10_000
"""Ten batches. The participant keeps what does not fit, and broadcasts it again."""

OUTBOX_BYTES_MAX = 64 * 1024 * 1024
"""Eight batches; 3,400 frames of js-waku's size."""

COPIES_MAX = BATCH_ITEMS_MAX
"""Frames that wait to be copied to one store; then the oldest is left out. One batch: another is in
flight, and a slow store gets the rest from the other stores."""

COPIES_BYTES_MAX = BATCH_BYTES_MAX
"""Bytes of these frames; then the oldest are left out."""

UNDECIDED_MAX = BATCH_ITEMS_MAX
"""Refused frames that wait for the stores that did not answer; then the oldest is left out."""


class Waiting(NamedTuple):
    """A frame that no store has yet, and the stores that refused it.

    `is_ordered`: once refused it must never appear, so no store may keep it for later.
    """

    channel_id: str
    broadcast: Broadcast
    refused_by: tuple[Store, ...] = ()
    is_ordered: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Channel ID and message ID."""
        return self.channel_id, self.broadcast.message_id


class Outbox:
    """See the module. `on_outcome` is called with the channel and the outcome of each frame.

    A store refuses a frame if it answers 4xx for it. `on_attempt` is called with the error of each attempt
    to publish at all, `None` if it went well.
    """

    def __init__(
        self,
        stores: Stores,
        on_outcome: Callable[[Waiting, PublishOutcome], None],
        on_attempt: Callable[[StoreError | None], None],
        copies_max: int = 0,
    ) -> None:
        self._stores = stores
        self._on_outcome = on_outcome
        self._on_attempt = on_attempt
        self._copies_max = copies_max
        self._copiers = [_Copier(store, stores) for store in stores.all]
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._undecided: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        self._has_undecided = asyncio.Event()
        self._asked: dict[tuple[str, str], Waiting] = {}  # undecided ones on their way to a store
        self._added = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, channel_id: str, broadcast: Broadcast, *, is_ordered: bool = False) -> None:
        """Publish a frame soon, unless it waits already, or there is no room."""
        waiting = Waiting(channel_id, broadcast, is_ordered=is_ordered)
        is_full = (
            len(self._waiting) >= OUTBOX_FRAMES_MAX
            or self._waiting_bytes + len(broadcast.frame) > OUTBOX_BYTES_MAX
        )
        is_known = any(
            waiting.key in known for known in (self._waiting, self._undecided, self._asked)
        )
        if is_full or is_known:
            return
        if broadcast.kind is not Kind.CONTENT and not self._stores.ready(PUBLISHING):
            return
        self._put(waiting)

    async def emptied(self) -> None:
        """Wait until each frame is stored, relayed or refused."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Publish until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for copier in self._copiers:
                tasks.create_task(copier.run())
            tasks.create_task(self._ask_others())
            await self._publish_all()

    async def _publish_all(self) -> None:
        while True:
            await self._added.wait()
            store = await self._stores.choose(PUBLISHING)
            await self._publish(store, self._take_batch())
            if not self._waiting:
                self._added.clear()
            self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not (self._waiting or self._undecided or self._asked):
            self._emptied.set()

    async def _ask_others(self) -> None:
        """Offer what some stores refused to those that did not answer then."""
        while True:
            await self._has_undecided.wait()
            undecided = list(self._undecided.values())
            untried = [
                store
                for store in self._stores.all
                if any(store not in each.refused_by for each in undecided)
            ]
            store = await self._stores.choose(PUBLISHING, untried)
            batch = [each for each in undecided if store not in each.refused_by]
            batch = batch[: _fitting_count(batch)]
            self._asked = {each.key: self._undecided.pop(each.key) for each in batch}
            await self._publish(store, batch)
            self._asked = {}
            if not self._undecided:
                self._has_undecided.clear()
            self._note_if_empty()

    async def _publish(self, store: Store, batch: Sequence[Waiting]) -> None:
        try:
            items = [
                PublishItem(each.broadcast.frame, without_quarantine=each.is_ordered)
                for each in batch
            ]
            outcomes = await store.client.publish_batch(items)
        except StoreError as error:
            if error.status not in (400, 413, 422):
                self._failed(store, error)
                self._put_back(batch)
                return
            if len(batch) > 1:
                # One frame, or all of them together, is not acceptable: find out which.
                half = len(batch) // 2
                await self._publish(store, batch[:half])
                await self._publish(store, batch[half:])
                return
            [each] = batch
            outcomes = [
                PublishOutcome("refused", each.broadcast.message_id, each.channel_id, error=error)
            ]
        refused = self._take_outcomes(store, batch, outcomes)
        self._copy(store, [each for each, o in zip(batch, outcomes, strict=True) if not o.error])
        for each, outcome in refused:
            left = each._replace(refused_by=(*each.refused_by, store))
            is_content = each.broadcast.kind is Kind.CONTENT
            may_take = self._stores.all if is_content else self._stores.ready(PUBLISHING)
            if set(may_take).difference(left.refused_by):
                self._leave_undecided(left)
            else:
                self._on_outcome(each, outcome)

    def _take_outcomes(
        self, store: Store, batch: Sequence[Waiting], outcomes: Sequence[PublishOutcome]
    ) -> list[tuple[Waiting, PublishOutcome]]:
        """Report what the store has; returns what it refused for good."""
        refused = []
        failed = []
        error: StoreError | None = None
        for each, outcome in zip(batch, outcomes, strict=True):
            if outcome.error is None:
                self._on_outcome(each, outcome)
            elif concerns_the_request(outcome.error):
                refused.append((each, outcome))
            else:
                # The store cannot store now: its disk or its queue is full, its database away.
                error = outcome.error
                failed.append(each)
        self._put_back(failed)
        if error is None:
            self._stores.succeeded(store, PUBLISHING)
            self._on_attempt(None)
        else:
            self._failed(store, error)
        return refused

    def _failed(self, store: Store, error: StoreError) -> None:
        self._stores.failed(store, PUBLISHING, error)
        self._on_attempt(error)

    def _leave_undecided(self, waiting: Waiting) -> None:
        self._undecided[waiting.key] = waiting
        if len(self._undecided) > UNDECIDED_MAX:
            self._undecided.popitem(last=False)
        self._has_undecided.set()

    def _copy(self, source: Store, accepted: Sequence[Waiting]) -> None:
        ready = self._stores.ready(PUBLISHING)
        others = [each for each in self._copiers if each.store in ready and each.store != source]
        for copier in others[: self._copies_max]:
            copier.add([PublishItem(each.broadcast.frame) for each in accepted])

    def _put(self, waiting: Waiting, *, is_last: bool = True) -> None:
        self._waiting[waiting.key] = waiting
        self._waiting.move_to_end(waiting.key, last=is_last)
        self._waiting_bytes += len(waiting.broadcast.frame)
        self._added.set()
        self._emptied.clear()

    def _put_back(self, batch: Sequence[Waiting]) -> None:
        for waiting in reversed(batch):
            if waiting.broadcast.kind is not Kind.CONTENT:
                continue
            if waiting.refused_by:
                self._leave_undecided(waiting)
            elif waiting.key not in self._waiting:
                self._put(waiting, is_last=False)

    def _take_batch(self) -> list[Waiting]:
        batch = list(islice(self._waiting.values(), BATCH_ITEMS_MAX))
        batch = batch[: _fitting_count(batch)]
        for waiting in batch:
            del self._waiting[waiting.key]
            self._waiting_bytes -= len(waiting.broadcast.frame)
        return batch


def _fitting_count(batch: Sequence[Waiting]) -> int:
    """How many of the first frames a request can hold: one of any size, or several."""
    sizes = accumulate(len(each.broadcast.frame) for each in batch)
    fitting = sum(1 for size in sizes if size <= BATCH_BYTES_MAX)
    return min(max(fitting, 1), BATCH_ITEMS_MAX)


class _Copier:
    """Copies frames to one store, one request at a time."""

    def __init__(self, store: Store, stores: Stores) -> None:
        self.store = store
        self._stores = stores
        self._items: deque[PublishItem] = deque()
        self._bytes = 0
        self._added = asyncio.Event()

    def add(self, items: Iterable[PublishItem]) -> None:
        """Copy these soon."""
        for item in items:
            self._items.append(item)
            self._bytes += len(item.frame)
            while len(self._items) > COPIES_MAX or self._bytes > COPIES_BYTES_MAX:
                self._bytes -= len(self._items.popleft().frame)
        self._added.set()

    async def run(self) -> None:
        """Copy until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            items = list(self._items)
            self._items.clear()
            self._bytes = 0
            try:
                await self.store.client.publish_batch(items)
            except StoreError as error:
                self._stores.failed(self.store, PUBLISHING, error)
