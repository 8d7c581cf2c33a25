"""The order of a channel that a driver keeps, and the votes of its indexer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from sdstore.ordering import OrderingError, Roles
from sdstore.participant.channelorder import ChannelOrder, Voting, vote_of
from sdstore.participant.events import ChannelEvent, DriverError, OrderChanged
from sdstore.participant.persistence import ORDER_KEY, ChannelLog
from sdstore.sds.effects import Broadcast, Deliver, Effect, StoredRemotely
from sdstore.sds.model import Kind

VOTE_REFUSED_S = 300.0
"""The pause after all stores refused a vote."""

ORDER_RETRY_S = 60.0
"""The pause before the log is ordered anew because too many messages waited for others."""

_Logged = tuple[str, str]  # message ID, path


class KeptOrder:
    """`order` grows with the log, and is complete once `is_loaded`. Errors are those of `ChannelOrder`."""

    def __init__(
        self,
        log: ChannelLog,
        sender_id: str,
        indexers: Sequence[str],
        saved: Mapping[str, bytes],
        say: Callable[[ChannelEvent], None],
    ) -> None:
        """`indexers`: the first ones. `saved`: the state of the channel."""
        self.order = ChannelOrder(log, Roles(indexers=tuple(indexers)), saved.get(ORDER_KEY, b""))
        self.is_loaded = False
        self._log = log
        self._sender_id = sender_id
        self._say = say
        self._waiting: list[_Logged] = []  # before the order is loaded
        self._voting = Voting(sender_id)
        self._is_awake = asyncio.Event()  # a vote is due, or the order is not loaded any more
        self._saving = self._saved = ("", 0, 0)  # versions

    async def run(self, send: Callable[[bytes], Awaitable[str]], now_ms: Callable[[], int]) -> None:
        """Order the log, then vote when it is our turn, until cancelled."""
        while True:
            with suppress(OrderingError):
                await self._load()
                while await self._is_awake.wait() and self.is_loaded:
                    self._is_awake.clear()
                    await self._vote(send, now_ms())
            # Too many messages wait for others. What is in the log by then may have them.
            await asyncio.sleep(ORDER_RETRY_S)
            self.order = ChannelOrder(self._log, self.order.first_roles, self.order.saved)

    async def _load(self) -> None:
        self._is_awake.clear()
        for _ in iter(self.order.load, False):
            await asyncio.sleep(0)
        self.is_loaded = True
        waiting, self._waiting = self._waiting, []
        self._put(waiting, changed_from=0)

    async def _vote(self, send: Callable[[bytes], Awaitable[str]], now_ms: int) -> None:
        try:
            await send(vote_of(self._sender_id, now_ms))
        except DriverError as error:
            if error.code != "rejected":
                raise
            await asyncio.sleep(VOTE_REFUSED_S)

    def vote_if_due(self, now_ms: int) -> None:
        """Vote if it is our turn."""
        if self.is_loaded and self._voting.is_due(self.order, now_ms):
            self._is_awake.set()

    def carried_out(self, effects: Iterable[Effect]) -> None:
        """Order what these effects have logged, now that they are saved."""
        logged: list[_Logged] = []
        for effect in effects:
            match effect:
                case Deliver(message=message, path=path):
                    logged.append((message.message_id, path))
                case StoredRemotely(message_id) | Broadcast(_, message_id, Kind.CONTENT):
                    logged.append((message_id, ""))
        if not self.is_loaded:
            self._waiting += logged
        elif logged:
            self._put(logged)

    def _put(self, logged: Iterable[_Logged], changed_from: int | None = None) -> None:
        ordering = self.order.ordering
        for message_id, path in logged:
            before = len(ordering)
            if not self._log.contains(message_id):
                continue
            try:
                change = self.order.add(message_id, path)
            except OrderingError:
                self.is_loaded = False
                self._is_awake.set()
                return
            if change.placed or change.rewound or change.confirmed:
                first = before - change.rewound
                changed_from = first if changed_from is None else min(first, changed_from)
        if changed_from is not None:
            self._say(OrderChanged(self.order.ordering.confirmed_count, changed_from))

    def change_roles(self, indexers: Sequence[str], after: str) -> list[str]:
        """See `ParticipantChannel.change_roles`; returns what our next messages must name."""
        if not self.is_loaded:
            raise DriverError("no_order", "the log is being ordered; wait for `OrderChanged`")
        unnamed = self.order.change_roles(Roles(indexers=tuple(indexers)), after)
        ordering = self.order.ordering
        self._say(OrderChanged(ordering.confirmed_count, ordering.confirmed.index(after) + 1))
        return unnamed

    @property
    def changes(self) -> list[tuple[str, bytes | None]]:
        """What is to save; nothing while the order can have confirmed less than what is saved."""
        if not self.is_loaded:
            return []
        self._saving = self.order.version
        return [] if self._saving == self._saved else [(ORDER_KEY, self.order.saved)]

    def saved(self) -> None:
        """The last `changes` are saved."""
        self._saved = self._saving
