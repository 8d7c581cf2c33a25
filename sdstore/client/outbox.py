"""Frames on their way to the stores, published in order and in batches.

One store must accept each frame. Frames of content messages wait while no store answers. A frame that
the outbox has no room for is left out: the participant broadcasts it again later. Sync and ephemeral
messages are dropped if they cannot be sent at once, because they are worth nothing later.

Other stores then get copies, so that participants who follow those get the message live. A copy is
tried once: the stores reconcile with each other.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sdstore.client.batching import BATCH_BYTES_MAX, BATCH_ITEMS_MAX
from sdstore.client.errors import StoreError
from sdstore.client.records import PublishItem, PublishOutcome
from sdstore.client.stores import PUBLISHING, Store, Stores, concerns_the_request
from sdstore.sds.effects import Broadcast
from sdstore.sds.model import Kind

OUTBOX_FRAMES_MAX = 10_000
"""Ten batches. The participant keeps what does not fit, and broadcasts it again."""

OUTBOX_BYTES_MAX = 64 * 1024 * 1024
"""Eight batches; 3,400 frames of js-waku's size."""

COPIES_MAX = BATCH_ITEMS_MAX
"""Frames that wait to be copied to one store; then the oldest is left out. One batch: another is in
flight, and a slow store gets the rest from the other stores."""

COPIES_BYTES_MAX = BATCH_BYTES_MAX
"""Bytes of these frames; then the oldest are left out."""

REFUSED_MAX = 10_000
"""Refused messages that are remembered. A forgotten one is offered and reported again."""


class Waiting(NamedTuple):
    """A frame that no store has yet."""

    channel_id: str
    broadcast: Broadcast

    @property
    def key(self) -> tuple[str, str]:
        """Channel ID and message ID."""
        return self.channel_id, self.broadcast.message_id


class Outbox:
    """See the module. `on_outcome` is called with the channel and the outcome of each frame.

    A frame is refused if a store answers 4xx for it and no other store accepts it then.
    """

    def __init__(
        self,
        stores: Stores,
        on_outcome: Callable[[Waiting, PublishOutcome], None],
        copies_max: int = 0,
    ) -> None:
        self._stores = stores
        self._on_outcome = on_outcome
        self._copies_max = copies_max
        self._copiers = [_Copier(store, stores) for store in stores.all]
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._refused: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._added = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, channel_id: str, broadcast: Broadcast) -> None:
        """Publish a frame soon, unless it waits already, was refused, or there is no room."""
        waiting = Waiting(channel_id, broadcast)
        is_full = (
            len(self._waiting) >= OUTBOX_FRAMES_MAX
            or self._waiting_bytes + len(broadcast.frame) > OUTBOX_BYTES_MAX
        )
        if is_full or waiting.key in self._waiting or waiting.key in self._refused:
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
            await self._publish_all()

    async def _publish_all(self) -> None:
        while True:
            await self._added.wait()
            store = await self._stores.choose(PUBLISHING)
            await self._publish(store, self._take_batch())
            if not self._waiting:
                self._added.clear()
                self._emptied.set()

    async def _publish(
        self, store: Store, batch: Sequence[Waiting], refused_by: tuple[Store, ...] = ()
    ) -> None:
        try:
            items = [PublishItem(each.broadcast.frame) for each in batch]
            outcomes = [each async for each in store.client.publish_batch(items)]
        except StoreError as error:
            if error.status not in (400, 413, 422):
                self._stores.failed(store, PUBLISHING, error)
                self._put_back(batch)
                return
            if len(batch) > 1:
                # One frame, or all of them together, is not acceptable: find out which.
                half = len(batch) // 2
                await self._publish(store, batch[:half], refused_by)
                await self._publish(store, batch[half:], refused_by)
                return
            [each] = batch
            outcomes = [
                PublishOutcome("refused", each.broadcast.message_id, each.channel_id, error=error)
            ]
        refused = self._take_outcomes(store, batch, outcomes)
        self._copy(store, [each for each, o in zip(batch, outcomes, strict=True) if not o.error])
        refused_by = (*refused_by, store)
        for other in self._stores.ready(PUBLISHING):
            if refused and other not in refused_by:
                await self._publish(other, [each for each, _ in refused], refused_by)
                return
        for each, outcome in refused:
            self._refused[each.key] = None
            if len(self._refused) > REFUSED_MAX:
                self._refused.popitem(last=False)
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
        else:
            self._stores.failed(store, PUBLISHING, error)
        return refused

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
            if waiting.broadcast.kind is Kind.CONTENT and waiting.key not in self._waiting:
                self._put(waiting, is_last=False)

    def _take_batch(self) -> list[Waiting]:
        batch: list[Waiting] = []
        bytes_count = 0
        for waiting in self._waiting.values():
            bytes_count += len(waiting.broadcast.frame)
            if batch and (len(batch) >= BATCH_ITEMS_MAX or bytes_count > BATCH_BYTES_MAX):
                break
            batch.append(waiting)
        for waiting in batch:
            del self._waiting[waiting.key]
            self._waiting_bytes -= len(waiting.broadcast.frame)
        return batch


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
                async for _ in self.store.client.publish_batch(items):
                    pass
            except StoreError as error:
                self._stores.failed(self.store, PUBLISHING, error)
