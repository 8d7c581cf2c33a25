"""Frames on their way to the stores, published in order and in batches.

One store must accept each frame. Frames of content messages wait while no store answers. A frame is
refused only if every store refuses it: what some refused is offered to the others as soon as they answer.
A frame that the outbox has no room for is left out: the participant broadcasts it again later. Sync and
ephemeral messages are dropped if they cannot be sent at once, because they are worth nothing later.

Other stores then get copies, so that participants who follow those get the message live. A copy is
tried once: the stores reconcile with each other.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from sdstore.client.errors import StoreError
from sdstore.client.exchange import BATCH_BYTES_MAX, BATCH_ITEMS_MAX
from sdstore.client.records import PublishItem, PublishOutcome
from sdstore.participant.stores import PUBLISHING, Store, Stores, concerns_the_request
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
