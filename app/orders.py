"""Orders: the confirmed prefix and the tentative tail of channels, for the writers that callers name.

A caller chooses the indexers, so each set of writers is an order of its own (`sdstore.ordering`). An
`Order` reads its channel in arrival order, so another call costs only what is new. It is a cache of
SQL: if the database's history differs from the one that was read, it begins anew. The computing runs in
a thread, in steps of `STEP_S`, one step of one order at a time; so the event loop never waits for an
order, and orders wait for each other for one step.

One call examines a bounded number of messages. Until an order has read its whole channel it is not
*complete*: its confirmed prefix is final nevertheless, and its tail is not shown.

Workers of a node read the same arrivals, so their complete orders are equal. Stores receive messages in
other orders; their confirmed prefixes agree as docs/ordering.md says.

Of two messages with one ID the one that arrived first is ordered. If the other has another sender or other
causes, references to the ID are ambiguous: that is a breach, and nothing more is confirmed. A copy that its
ID disproves is neither a message of the order nor a breach.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import orjson
from blake3 import blake3

from app.access.rates import Budget
from app.entries import START, Entry
from app.errors import Code, Problem
from app.server.limits import Limits
from app.server.sharing import Sharing, Turns
from app.store.entryrows import LeftOut, Tombstone
from app.store.store import Store
from sdstore.ordering import Change, Ordering, OrderingError, Roles
from sdstore.ordering.order import Added
from sdstore.sds.codec import decode
from sdstore.sds.model import Rank, is_disproved, rank

STEP_S = 0.05
"""Seconds of one step in the thread: the longest wait of another order, and of a caller that left."""

READ_ITEMS, READ_BYTES = 100, 1 << 20
"""Messages and bytes of frames of one read: a millisecond or two of the event loop on SQLite."""

LOST_READ = 100
"""Messages with lost content that a call reads again; they can have come back."""

NAMED_MAX = 100
"""Breaches, missing causes and lost messages that one answer names."""

MESSAGE_BYTES = 1_100
"""Memory of an ordered message beside its names, measured: 500 to 800 in the graph, 300 here."""

CAUSE_BYTES = 150
"""Memory of the name of a missing cause beside its characters."""

HASH_EVERY = 256
"""Messages between two remembered hashes of the order: a cursor costs the hash of fewer."""

THREAD_HASHES_MIN = 4_096
"""Hashing the order of so many messages takes a millisecond: a thread does it."""

REWINDS_MAX = 256
"""Changes remembered, to compute how far a tail was rewound; beyond it the answer is an upper bound."""

MAX_SEQ = 2**63 - 1
_T = TypeVar("_T")


class WantedChange(NamedTuple):
    """Other writers from a confirmed message on."""

    after: str
    indexers: tuple[str, ...]
    relayed: tuple[str, ...]


class Wanted(NamedTuple):
    """An order by its channel and its writers, which are sorted, and their changes in order."""

    channel_id: str
    indexers: tuple[str, ...]
    relayed: tuple[str, ...]
    changes: tuple[WantedChange, ...] = ()

    @property
    def name(self) -> str:
        """A hash in hexadecimal, for cursors: 64 digits."""
        *same, changes = self
        return blake3(orjson.dumps([*same, *map(tuple, changes)])).hexdigest()


class Known(NamedTuple):
    """The message that arrived first under an ID. `sender_id` is None while its content is lost."""

    message_id: str
    digest: bytes
    sender_id: str | None


class Place(NamedTuple):
    """A place in an order: the number of messages before it, and their hash (64 hexadecimal digits)."""

    number: int
    hash: str


class Taken(NamedTuple):
    """One step: the number of messages, and the CPU time in milliseconds, rounded up."""

    messages_count: int
    ms: int


def _tombstone_of(item: Entry | LeftOut, *, needs_rank: bool) -> Tombstone | None:
    """What ordering needs of a message; None if its history is gone. The rank costs hashes of the message."""
    if isinstance(item, LeftOut):
        kept = item.tombstone
        return None if kept is None or kept.causes is None else kept
    message, _ = decode(item.frame)
    return Tombstone(
        message.sender_id,
        tuple([each.message_id for each in message.causal_history]),
        rank(message) if needs_rank else Rank.UNKNOWN,
        is_disproved(message),
    )


class OrderCaller(NamedTuple):
    """A caller: its names in budgets and in turns, whether it has hung up, and whether it is known."""

    name: str
    address: str
    has_left: Callable[[], bool]
    is_anonymous: bool = False


class Order:
    """The order of one channel for one set of writers, as far as it was read. Use it under `lock`."""

    def __init__(self, wanted: Wanted) -> None:
        """Raises `Problem` (`invalid_parameter`) for writers that the ordering refuses."""
        self.wanted = wanted
        self.lock = asyncio.Lock()
        self.users_count = 0
        self._version = 0
        self.begin()

    def begin(self) -> None:
        """Forget everything that was read."""
        try:
            self.ordering = Ordering(_roles_of(self.wanted))
        except OrderingError as error:
            raise Problem(Code.INVALID_PARAMETER, error.detail) from None
        self._changes = iter(self.wanted.changes)
        self._coming = next(self._changes, None)
        self._changed_at = 0  # messages up to the last change of roles
        self._rest: Iterator[Added] | None = None
        self.problem: Problem | None = None
        self.read = START
        self.known: dict[str, Known] = {}
        self._senders: dict[str, str] = {}  # one string for each
        self.lost: dict[bytes, None] = {}
        self.bytes_count = 0
        self.senderless_count = 0
        self.is_complete = False
        self.is_too_large = False
        self._hashes: list[bytes] = []
        # (version, first place that changed with it)
        self._version += 1
        self._rewinds: list[tuple[int, int]] = [(self._version, 0)]

    def give_up(self) -> None:
        """Forget everything but the place up to which it was read: the order is too large to keep."""
        read = self.read
        self.begin()
        self.read, self.is_too_large = read, True

    # ---- reading, in the thread

    def take(self, items: Sequence[Entry | LeftOut]) -> Taken:
        """Add messages in arrival order, for one step. If `is_behind`, it first orders what it has."""
        started_s, until_s = time.thread_time(), time.perf_counter() + STEP_S
        count = 0
        while count < len(items) or self.is_behind:
            try:
                if self.ordering.is_behind:
                    self._note(self.ordering.go_on)
                elif self._rest is not None:
                    self._take_rest(self._rest)
                else:
                    count += 1
                    self._take(items[count - 1])
                self._change_roles()
            except OrderingError:  # too many messages wait
                self.is_too_large = True
            if self.is_too_large or self.problem or time.perf_counter() > until_s:
                break
        return Taken(count, 1 + int(1_000 * (time.thread_time() - started_s)))

    @property
    def is_behind(self) -> bool:
        """Whether messages that were read are not in the order yet."""
        return self.ordering.is_behind or self._rest is not None

    def _change_roles(self) -> None:
        """Begin the next roles once their message is confirmed; the messages after it follow in steps."""
        change = self._coming
        if change is None or self._rest is not None or not self.ordering.is_confirmed(change.after):
            return
        before = len(self.ordering)
        changed, rest = self.ordering.begin_roles(_roles_of(change), change.after)
        if changed.confirmed_count < self._changed_at:
            detail = f"the change at {change.after!r} comes before the one that it follows"
            self.problem = Problem(Code.INVALID_PARAMETER, detail)
            return
        self._coming, self._changed_at = next(self._changes, None), changed.confirmed_count
        self.ordering, self._rest = changed, rest
        self._changed(before, self._changed_at)

    def _take_rest(self, rest: Iterator[Added]) -> None:
        if (each := next(rest, None)) is None:
            self._rest = None
        else:
            self._note(partial(self.ordering.add, *each))

    def _take(self, item: Entry | LeftOut) -> None:
        first = self.known.get(item.message_id) or Known(item.message_id, item.digest, None)
        is_first = first.digest == item.digest
        if is_first and first.sender_id is not None:
            return
        needs_rank = not is_first and first.sender_id is None
        message = _tombstone_of(item, needs_rank=needs_rank)
        if message is not None and message.is_disproved:
            self.lost.pop(item.digest, None)
            if is_first:
                self.known.pop(item.message_id, None)
            return
        if message is None or (needs_rank and message.rank is not Rank.WHOLE):
            # A variant is compared when its content, and that of the first, can be read.
            self._remember(first)
            self.lost[item.digest] = None
            return
        self.lost.pop(item.digest, None)
        sender_id = self._senders.setdefault(message.sender_id, message.sender_id)
        if first.sender_id is None:
            self.senderless_count += not sender_id
            self._remember(Known(first.message_id, item.digest, sender_id))
        causes = []
        for each in message.causes or ():
            known = self.known.get(each)
            # One string for each ID: those of a message that waits are kept.
            causes.append(each if known is None else known.message_id)
            self.bytes_count += 8 if known else CAUSE_BYTES + _text_bytes(each)
        self._note(partial(self.ordering.add, first.message_id, sender_id, causes))

    def _note(self, work: Callable[[], Change]) -> None:
        """Change the order, and note from where on."""
        before = len(self.ordering)
        change = work()
        self._changed(before, before - change.rewound)

    def _changed(self, before: int, first_changed: int) -> None:
        del self._hashes[first_changed // HASH_EVERY :]
        if first_changed < before:
            self._note_rewind(first_changed)

    def _remember(self, known: Known) -> None:
        if known.message_id not in self.known:
            names_bytes = _text_bytes(known.message_id) + _text_bytes(known.sender_id or "")
            self.bytes_count += MESSAGE_BYTES + names_bytes + 4 * len(self.wanted.indexers)
        self.known[known.message_id] = known

    def has_content(self, message_id: str) -> bool:
        """Whether a message with this ID was read, ordered or not."""
        known = self.known.get(message_id)
        return known is not None and known.sender_id is not None

    # ---- places

    def place(self, number: int) -> Place:
        """The place after `number` ordered messages."""
        while len(self._hashes) < number // HASH_EVERY:
            start = len(self._hashes) * HASH_EVERY
            self._hashes.append(self._hash(start, start + HASH_EVERY))
        start = number // HASH_EVERY * HASH_EVERY
        return Place(number, self._hash(start, number).hex())

    def hashes_missing(self, number: int) -> int:
        """Messages that `place` would hash."""
        return number - HASH_EVERY * min(len(self._hashes), number // HASH_EVERY)

    def _hash(self, start: int, stop: int) -> bytes:
        before = self._hashes[start // HASH_EVERY - 1] if start else b""
        return blake3(before + orjson.dumps(self.ordering.page(start, stop))).digest()

    def position(self, place: Place) -> int | None:
        """The number of messages before a place; None if this order is not complete and lacks it.

        Raises `Problem` (`cursor_rewound`) if the order before the place has changed.
        """
        if place.number <= len(self.ordering) and self.place(place.number) == place:
            return place.number
        if not self.is_complete and place.number > self.ordering.confirmed_count:
            return None
        raise Problem(
            Code.CURSOR_REWOUND,
            "the order before this cursor has changed: start again without a cursor, or at the last "
            "`next_confirmed`",
        )

    # ---- how far the tail was rewound

    @property
    def version(self) -> int:
        """A number that grows with each rewind."""
        return self._version

    def first_changed_since(self, version: int) -> int:
        """The first place that may have another message than in this version, as far as it was ordered."""
        at = bisect_right(self._rewinds, version, key=lambda rewind: rewind[0])
        return self._rewinds[at][1] if at < len(self._rewinds) else len(self.ordering)

    def _note_rewind(self, first_changed: int) -> None:
        # Only the lowest place since each version matters, so places ascend with versions.
        self._version += 1
        rewinds = self._rewinds
        while rewinds and rewinds[-1][1] >= first_changed:
            rewinds.pop()
        rewinds.append((self._version, first_changed))
        if len(rewinds) > REWINDS_MAX:
            # Readers between these two versions are told that the tail was rewound further.
            rewinds[:2] = [(rewinds[1][0], rewinds[0][1])]


def _roles_of(writers: Wanted | WantedChange) -> Roles:
    return Roles(indexers=writers.indexers, relayed=frozenset(writers.relayed))


def _text_bytes(text: str) -> int:
    """Memory of the characters of a text, and of the same text in UTF-8."""
    return len(text) * (2 if text.isascii() else 8)


class Orders:
    """The orders of a node. Recently used ones are kept, within bounds of number and memory."""

    def __init__(self, store: Store, limits: Limits, sharing: Sharing) -> None:
        self._store = store
        self._limits = limits
        self._sharing = sharing
        self._orders: OrderedDict[Wanted, Order] = OrderedDict()
        self._thread = asyncio.Lock()
        self._budget, self._anonymous_budget = (
            Budget(ms_max, "ms of computing orders", Code.ORDER_BUDGET_SPENT)
            for ms_max in (limits.order_ms_per_minute, limits.anonymous_order_ms_per_minute)
        )

    @property
    def count(self) -> int:
        """The number of cached orders."""
        return len(self._orders)

    @property
    def bytes_count(self) -> int:
        """The memory of cached orders, estimated."""
        return sum(each.bytes_count for each in self._orders.values())

    @asynccontextmanager
    async def opened(self, wanted: Wanted, caller: OrderCaller) -> AsyncIterator[Order]:
        """The order, with what was committed by now, as far as one call reads. Nobody changes it meanwhile.

        Takes a turn. Raises `Problem`: `order_budget_spent`, `order_too_large`, `overloaded`.
        """
        with await self._sharing.turns[Turns.ORDERS].take(caller.address, 1):
            async with self.followed(wanted, caller, MAX_SEQ) as order:
                yield order

    @asynccontextmanager
    async def followed(
        self, wanted: Wanted, caller: OrderCaller, through_seq: int
    ) -> AsyncIterator[Order]:
        """As `opened`, for a reader that follows the channel: it takes no turn.

        An order that has read the sequence number `through_seq` reads nothing: of all readers of an order,
        the first one that hears of a message pays for it.
        """
        order = self._orders.get(wanted) or Order(wanted)
        self._orders[wanted] = order
        self._orders.move_to_end(wanted)
        order.users_count += 1
        try:
            async with order.lock:
                if order.read.number < through_seq or order.is_behind:
                    await self._catch_up(order, caller)
                if order.problem is not None:
                    raise order.problem
                if order.is_too_large:
                    bound = self._limits.order_bytes_max
                    detail = f"this order needs more than {bound} bytes, or too many messages wait for others"
                    raise Problem(Code.ORDER_TOO_LARGE, detail)
                yield order
        finally:
            order.users_count -= 1
            self._evict()

    async def hash_up_to(self, order: Order, number: int) -> None:
        """Hash an opened order up to a place, so that `place` takes no time; no further than it goes."""
        if order.hashes_missing(number) > THREAD_HASHES_MIN:
            await self.in_thread(partial(order.place, min(number, len(order.ordering))))

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """What `work` returns; one thread works at a time.

        A cancelled caller waits for the end of the thread, which must not change an order that another
        caller has opened.
        """
        async with self._thread:
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                await asyncio.wait([working])
                raise

    async def _catch_up(self, order: Order, caller: OrderCaller) -> None:
        if not await self._store.arrivals.holds(order.read):
            order.begin()
        await self._read_lost(order, caller)
        until_s = time.monotonic() + self._limits.order_call_s
        left_count = self._limits.order_messages_per_call_max
        order.is_complete = False
        while not (order.is_complete or order.is_too_large or order.problem):
            if left_count <= 0 or time.monotonic() > until_s or caller.has_left():
                return
            with await self._sharing.turns[Turns.READS].take(caller.address, 1):
                page = await self._store.channels.page(
                    order.wanted.channel_id,
                    order="arrival",
                    after=order.read,
                    limit=READ_ITEMS,
                    bytes_max=READ_BYTES,
                )
                # After the read, so that the check covers the messages read.
                is_same = await self._store.arrivals.holds(order.read)
            if not is_same:
                order.begin()
                continue
            items = page.in_order
            left_count -= len(items)
            await self._take(order, caller, items)
            is_at_end = page.next is None and (page.last is None or order.read == page.last)
            order.is_complete = is_at_end and not order.is_behind

    async def _read_lost(self, order: Order, caller: OrderCaller) -> None:
        """Add messages whose content came back."""
        if order.lost:
            read = order.read
            digests = list(islice(order.lost, LOST_READ))
            found = await self._store.entries.by_digest(digests)
            for each in digests:  # the next call reads others
                order.lost[each] = order.lost.pop(each)
            await self._take(order, caller, found)
            order.read = read

    async def _take(
        self, order: Order, caller: OrderCaller, items: Sequence[Entry | LeftOut]
    ) -> None:
        """Add messages, until the caller has left or the order is too large."""
        while (
            (items or order.is_behind)
            and not (order.is_too_large or order.problem)
            and not caller.has_left()
        ):
            budget = self._anonymous_budget if caller.is_anonymous else self._budget
            budget.check(caller.name)
            taken = await self.in_thread(partial(order.take, items))
            budget.spend(caller.name, taken.ms)
            if taken.messages_count:
                order.read = items[taken.messages_count - 1].place
            items = items[taken.messages_count :]
            if order.bytes_count > self._limits.order_bytes_max or order.is_too_large:
                order.give_up()
            self._evict()
            if self.bytes_count > self._limits.order_cache_bytes_max:
                raise Problem(
                    Code.OVERLOADED,
                    "the orders in work need too much memory",
                    headers={"Retry-After": "10"},
                )

    def _evict(self) -> None:
        """Drop the least recently used orders that nobody uses, down to the bounds."""
        limits = self._limits
        for wanted in list(self._orders):
            is_full = len(self._orders) > limits.order_sets_max
            if not is_full and self.bytes_count <= limits.order_cache_bytes_max:
                return
            if not self._orders[wanted].users_count:
                del self._orders[wanted]
