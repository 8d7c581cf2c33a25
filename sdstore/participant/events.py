"""What a participant's application is told, and the bounded queue that it reads from."""

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from sdstore.errors import SdstoreError
from sdstore.sds.effects import (
    Acknowledged,
    Deliver,
    Ephemeral,
    GaveUp,
    Lost,
    PossiblyAcknowledged,
    Rejected,
    Status,
    StoredRemotely,
)
from sdstore.sync.report import Progress

EVENTS_MAX = 1_000
"""Events that wait for the application, without deliveries. The participant bounds those itself: it
delivers no more than `ParticipantOptions.deliveries_max` before the application confirms some."""


class DriverError(SdstoreError):
    """The driver cannot do this, or cannot go on.

    `code` is stable: `not_started`, `already_joined`, `too_many_channels`, `closed`, `rejected` if all
    stores refused an ordered message, `events_taken_over` if another iteration of `events` began,
    `unsaved` if the last changes could not be saved before the end, or `failed` if the persistence does
    not work at all or the program has a fault (the cause of this exception). After `unsaved`, a
    `ParticipantFile` that stays open writes the changes with its next save.
    """


@dataclass(frozen=True, slots=True)
class Connection:
    """The channel's connection to a store changed. `store_url` is without user name and password.

    `offline`: the connection failed, and the reason is in `code` and `detail` (of a `StoreError`).
    `catching_up`: the store answers. `online`: what was missed has arrived; new messages arrive live.
    """

    store_url: str
    state: Literal["offline", "catching_up", "online"]
    code: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BackfillProgress:
    """The log is compared with a store, and gets what it lacks. `progress` counts and shows how far."""

    store_url: str
    progress: Progress


@dataclass(frozen=True, slots=True)
class Unpublished:
    """No store takes our messages now; they wait, and the driver tries again until `PublishedAgain`.

    `code`: of the last `StoreError`, such as `disk_full`.
    """

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class PublishedAgain:
    """A store took our messages after `Unpublished`."""


@dataclass(frozen=True, slots=True)
class Unsaved:
    """The participants cannot be saved now; the driver tries again until `SavedAgain`.

    Nothing is delivered or published meanwhile, and `send` waits. `code`: `disk_full`, `read_only` or
    `busy`, as of a `ParticipantFileError`.
    """

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class SavedAgain:
    """A save succeeded after `Unsaved`."""


@dataclass(frozen=True, slots=True)
class OrderChanged:
    """The order of the channel grew, or its tail changed: `ParticipantChannel.order` has it.

    The first `confirmed_count` messages never change again. The places before `changed_from` have the messages
    that they had at the last event; after a change of roles it can be below `confirmed_count`.
    """

    confirmed_count: int
    changed_from: int


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """The application did not read its events: so many were dropped here, and no delivery."""

    count: int


ChannelEvent = (
    Deliver
    | Ephemeral
    | Acknowledged
    | PossiblyAcknowledged
    | StoredRemotely
    | GaveUp
    | Lost
    | Status
    | Connection
    | BackfillProgress
    | Rejected
    | Unpublished
    | PublishedAgain
    | Unsaved
    | SavedAgain
    | OrderChanged
    | EventsDropped
)


class EventQueue:
    """Events in order. Deliveries are never dropped; of the others, the oldest half at the bound."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events_max = events_max
        self._events: deque[ChannelEvent] = deque()
        self._others_count = 0
        self._added = asyncio.Event()
        self._is_closed = False
        self._error: Exception | None = None
        self._reader: object = None

    def put(self, event: ChannelEvent) -> None:
        """Add an event. A status, a progress or a change of the order replaces an unread one directly before it."""
        last = self._events[-1] if self._events else None
        if isinstance(event, OrderChanged) and isinstance(last, OrderChanged):
            event = replace(event, changed_from=min(event.changed_from, last.changed_from))
            self._events[-1] = event
            return
        if isinstance(event, Status | BackfillProgress) and type(last) is type(event):
            self._events[-1] = event
            return
        if not isinstance(event, Deliver):
            if self._others_count >= self._events_max:
                self._drop()
            self._others_count += 1
        self._events.append(event)
        self._added.set()

    def read_by(self, reader: object) -> None:
        """Let a new reader have the events from now on; the one before it gets no more."""
        self._reader = reader
        self._added.set()

    async def get(self, reader: object = None) -> ChannelEvent | None:
        """The next event; None after the last one of a closed queue, or its error is raised.

        Raises `DriverError` (`events_taken_over`) for a reader that is not the newest.
        """
        while not self._events or reader is not self._reader:
            if reader is not self._reader:
                detail = "another iteration of events() has taken over this channel; a channel has one reader"
                raise DriverError("events_taken_over", detail)
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return None
            self._added.clear()
            await self._added.wait()
        event = self._events.popleft()
        self._others_count -= not isinstance(event, Deliver)
        return event

    def close(self, error: Exception | None = None) -> None:
        """No event follows those that wait.

        Waiting deliveries are dropped: nobody could confirm them, so they come again after a restart.
        """
        self._is_closed, self._error = True, error
        self._events = deque(each for each in self._events if not isinstance(each, Deliver))
        self._added.set()

    def _drop(self) -> None:
        kept: deque[ChannelEvent] = deque()
        surplus = max(self._others_count // 2, 1)
        dropped = 0
        for event in self._events:
            if not isinstance(event, Deliver) and surplus:
                surplus -= 1
                self._others_count -= 1
                dropped += event.count if isinstance(event, EventsDropped) else 1
            else:
                kept.append(event)
        kept.appendleft(EventsDropped(dropped))
        self._others_count += 1
        self._events = kept
