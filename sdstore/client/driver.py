"""`ParticipantDriver`: SDS participants that talk through store nodes, on an event loop.

    file = ParticipantFile("chat.db")
    async with ParticipantDriver(["http://127.0.0.1:8000"], file) as driver:
        channel = await driver.join("garden", "ada")
        message_id = await channel.send(b"hello")
        async for event in channel.events():
            if isinstance(event, Deliver):
                print(event.message.content)
                await channel.confirm(event.number)

Theory of operation. Every input of a participant (a frame, a message to send, a confirmation, a tick)
changes it at once and gives effects. The effects of a channel gather in a batch. `_carry_out` takes
the batches of all channels: first it saves them in one transaction, then it carries out their other
effects. So nothing is delivered or broadcast before it is saved, and a burst costs one transaction. A
save runs on the event loop and holds it up for some milliseconds: participants, logs and their file
belong to one thread.

Each channel has two tasks. `_follow` keeps a live stream to one store:

1. It opens the stream, which gives a cursor. Nothing is missed from there on.
2. It reads what the store got since the kept cursor of an earlier stream of the same store. This is the
   only probe for missed messages per connection. If there is no such cursor, if the store no longer
   accepts it, or if too much was missed, it reconciles the whole log with the store instead.
3. It keeps the new cursor, and then reads the stream.

If anything fails, it takes another store and does the same there. What has arrived stays, and a cursor
is kept only after what precedes it has arrived.

`_fetch` retrieves the messages that the participant misses, with their causes (`retrieval`).

Timers are of the event loop's monotonic clock. The participant gets the wall clock as `now_ms`, for
Lamport timestamps; it counts time itself so that a jump expires nothing, provided that it gets a tick
at least every minute.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.channelevents import (
    BackfillProgress,
    ChannelEvent,
    Connection,
    EventQueue,
    Refused,
)
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options
from sdstore.client.outbox import Outbox, Waiting
from sdstore.client.records import LiveMessage, PublishOutcome
from sdstore.client.retrieval import Retrieval
from sdstore.client.retry import Retry
from sdstore.client.stores import (
    PUBLISHING,
    BackOff,
    Store,
    Stores,
    channel_scope,
)
from sdstore.sds.codec import decode, encode
from sdstore.sds.digest import frame_hash
from sdstore.sds.effects import Broadcast, Effect, Missing, Save, Status
from sdstore.sds.log import BackfillLog, MemoryLog, ParticipantLog
from sdstore.sds.model import Dialect, HistoryEntry, Kind, MessageError
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.outgoing import Acknowledgement, SentState
from sdstore.sds.participant import TAKEN_BYTES_MAX, Participant
from sdstore.sds.state import SENT
from sdstore.sync.report import Progress

CURSOR_KEY = "driver/cursor/"
"""Keys of the driver in a channel's saved state: followed by a store's URL. The value is a cursor."""

DRIVER_KEYS = "driver/"
"""The start of all keys of the driver; the participant knows nothing of them."""

PENDING_EFFECTS_MAX = 500
"""Effects that gather in a batch before a reader waits for it to be carried out."""

PENDING_BYTES_MAX = 8 << 20
"""Frames of a batch, with the same rule: until the save they are in memory, and a file has a bound for it."""

TAKEN_AT_ONCE = 500
"""Staged messages that a participant takes before other work of the event loop goes on."""

GATHER_S = 0.02
"""How long missing messages gather before they are fetched in one call."""

WANTED_MAX = 10_000
"""Missing messages to fetch. The participant names one that does not fit again later."""

FETCHED_AT_ONCE = 1_000
"""Missing messages in one lookup."""

RECONCILE_PAUSE_S = 60.0
"""Between two backfills of a channel because of causes far back: anybody can send messages with such."""

SAVE_PAUSE_FACTOR = 4
"""Times the last save took: at most a fifth of the time goes to saves while messages stream in."""

MISSED_S_MAX = 300
"""Seconds in which a store sends what it got after the kept cursor, which is about one page; then it has
failed, and another store is tried."""

SAVE_PAUSE_S_MAX = 0.05
"""The longest such pause. It delays the deliveries of a burst, and no call that waits for a save."""

SAVE_RETRY_S = 1.0
"""The pause after a save that failed for lack of room or because the file was busy."""

UNSAVED_CODES = frozenset({"busy", "disk_full", "read_only"})
"""Codes of a save that can succeed later."""


class ChannelLog(ParticipantLog, BackfillLog, Protocol):
    """A log that a participant uses and that can be backfilled."""


class Persistence(Protocol):
    """Where the participants of a program live: `ParticipantFile`, or `MemoryPersistence`."""

    def participant(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> Participant:
        """The participant of a channel from where its last save left it, or a new one."""

    def log(self, channel_id: str) -> ChannelLog:
        """The log of a channel's participant."""

    def state(self, channel_id: str) -> Mapping[str, bytes]:
        """What the saved effects of a channel have written."""

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        """Write the `Save` effects and the pending rows of the logs of these channels in one transaction.

        Raises an error with a `code` of `UNSAVED_CODES` if nothing was written and a later save, which
        gets the same effects again, can succeed.
        """


class MemoryPersistence:
    """Participants that end with the process."""

    def __init__(self) -> None:
        self._logs: dict[str, MemoryLog] = {}
        self._states: dict[str, dict[str, bytes | None]] = {}

    def participant(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> Participant:
        """See `Persistence`."""
        state = self.state(channel_id)
        own = {key: value for key, value in state.items() if not key.startswith(DRIVER_KEYS)}
        return Participant.restore(
            channel_id, sender_id, own, self.log(channel_id), options=options
        )

    def log(self, channel_id: str) -> MemoryLog:
        """See `Persistence`."""
        return self._logs.setdefault(channel_id, MemoryLog())

    def state(self, channel_id: str) -> dict[str, bytes]:
        """See `Persistence`."""
        saved = self._states.get(channel_id, {})
        return {key: value for key, value in saved.items() if value is not None}

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        """See `Persistence`."""
        for channel_id, some in effects.items():
            state = self._states.setdefault(channel_id, {})
            for effect in some:
                if isinstance(effect, Save):
                    state.update(effect.changes)
            for key in [key for key, value in state.items() if value is None]:
                del state[key]


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Pauses and bounds of a driver."""

    tick_s: float = 1.0
    """Between two ticks of each participant; sweeps and resends need no finer clock."""
    channels_max: int = 64
    """Each channel has a connection for its live stream; `join` refuses more."""
    requests_max: int = 8
    """Publications, lookups and walks at the same time, of all channels."""
    copies_max: int = 2
    """Other stores that get a copy of each frame, for participants that follow those."""
    backfills_max: int = 2
    """Channels that are backfilled at the same time."""
    missed_messages_max: int = 1_000
    """Messages read after a kept cursor, about a page. After a longer absence reconciling is cheaper."""
    close_s: float = 2.0
    """How long the end of the `async with` waits for frames that are on their way to a store."""
    back_off: BackOff = field(default_factory=BackOff)
    """Pauses before a failed store is tried again."""
    client: Options = field(
        default_factory=lambda: Options(retry=Retry(attempts_max=2, retry_after_max_s=1.0))
    )
    """Timeouts and bounds of the clients. They try little: another store may answer at once."""


class DriverError(Exception):
    """The driver cannot do this, or cannot go on.

    `code` is stable: `not_started`, `already_joined`, `too_many_channels`, `closed`, or `failed` if the
    participants could not be saved or the program has a fault (the cause of this exception).
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class ParticipantDriver:
    """Runs one participant per channel against some stores; see the module.

    `stores` are the base URLs of stores that hold the same channels and reconcile with each other. The
    driver follows one of them, and publishes to it and to some others. `persistence` keeps the participants; the
    application closes it after the driver. `connect` makes the client of a URL, for tokens and transports.
    `clock_ms` is the wall clock. Use it in an `async with` statement.
    """

    def __init__(
        self,
        stores: Sequence[str],
        persistence: Persistence | None = None,
        *,
        options: DriverOptions | None = None,
        connect: Callable[[str], AsyncStoreClient] | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        draw: random.Random | None = None,
    ) -> None:
        if isinstance(stores, str):
            raise TypeError("stores is a list of URLs, not one URL")
        if not stores:
            raise ValueError("a driver needs at least one store")
        self.options = options or DriverOptions()
        self.persistence = persistence or MemoryPersistence()
        self.now_ms = clock_ms
        connected = connect or (lambda url: AsyncStoreClient(url, options=self.options.client))
        self.stores = Stores(
            [Store(url, connected(url)) for url in dict.fromkeys(stores)],
            self.options.back_off,
            draw,
        )
        self.requests = asyncio.Semaphore(self.options.requests_max)
        self.backfills = asyncio.Semaphore(self.options.backfills_max)
        self.outbox = Outbox(
            self.stores, self.requests, self._on_published, self.options.copies_max
        )
        self._channels: dict[str, ParticipantChannel] = {}
        self._unsaved: dict[str, ParticipantChannel] = {}
        self._has_unsaved = asyncio.Event()
        self._is_awaited = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: DriverError | None = None
        self._is_started = False

    async def __aenter__(self) -> Self:
        self._is_started = True
        self.start(self.outbox.run(), "publish")
        self.start(self._carry_out(), "carry out")
        self.start(self._tick(), "tick")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None and self._error is None and self.stores.ready(PUBLISHING):
                await self._published()
        finally:
            error = self._error
            await self._close(error)
        if exc_type is None and error is not None:
            raise error

    async def join(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> "ParticipantChannel":
        """Take part in a channel as `sender_id`, from where the saved participant stopped.

        Deliveries that were not confirmed come again. Raises `DriverError`, and what the persistence
        and `Participant.restore` raise.
        """
        self.check()
        if not self._is_started:
            raise DriverError("not_started", "use the driver in an `async with` statement")
        if channel_id in self._channels:
            raise DriverError("already_joined", f"channel {channel_id!r} was joined before")
        if len(self._channels) >= self.options.channels_max:
            raise DriverError(
                "too_many_channels",
                f"{self.options.channels_max} channels were joined; leave one, or raise channels_max",
            )
        channel = ParticipantChannel(self, channel_id, sender_id, options)
        self._channels[channel_id] = channel
        channel.begin()
        return channel

    def check(self) -> None:
        """Raise the error that ended the driver, if any."""
        if self._error is not None:
            raise self._error

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task until the driver ends; its failure ends the driver."""
        task = asyncio.create_task(work, name=f"participants: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_ended)
        return task

    def forget(self, channel: "ParticipantChannel") -> None:
        """A channel was left."""
        self._channels.pop(channel.channel_id, None)
        self._unsaved.pop(channel.channel_id, None)

    def has_effects(self, channel: "ParticipantChannel") -> None:
        """Carry out the channel's batch soon."""
        self._unsaved[channel.channel_id] = channel
        self._has_unsaved.set()

    def hurry(self) -> None:
        """Somebody waits for a save."""
        self._is_awaited.set()

    async def _carry_out(self) -> None:
        while True:
            await self._has_unsaved.wait()
            self._has_unsaved.clear()
            self._is_awaited.clear()
            started_s = time.monotonic()
            if not self.save():
                await asyncio.sleep(SAVE_RETRY_S)
                self._has_unsaved.set()
                continue
            # Let more of a burst gather for the next transaction.
            pause_s = min((time.monotonic() - started_s) * SAVE_PAUSE_FACTOR, SAVE_PAUSE_S_MAX)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_awaited.wait()

    def save(self) -> bool:
        """Save all batches, then carry out their other effects; False if it must be tried again."""
        unsaved = self._unsaved
        saves = {each.channel_id: saves for each in unsaved.values() if (saves := each.saves())}
        if saves:
            try:
                self.persistence.save_all(saves)
            except Exception as error:
                if getattr(error, "code", None) in UNSAVED_CODES:
                    return False
                raise
        self._unsaved = {}
        for channel in unsaved.values():
            channel.carry_out()
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.options.tick_s)
            for channel in list(self._channels.values()):
                channel.tick()

    async def _published(self) -> None:
        """Wait a moment for saves and for frames that a store is about to get."""
        try:
            async with asyncio.timeout(self.options.close_s):
                for channel in list(self._channels.values()):
                    await channel.carried_out()
                await self.outbox.emptied()
        except (TimeoutError, DriverError):
            return

    async def _close(self, error: DriverError | None) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.remove_done_callback(self._on_ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channels, self._channels = list(self._channels.values()), {}
        self._error = error or DriverError("closed", "the driver was closed")
        try:
            if error is None:
                for channel in channels:
                    self.has_effects(channel)
                self.save()
        finally:
            for channel in channels:
                channel.end(error)
            await self.stores.close()

    def _on_published(self, waiting: Waiting, outcome: PublishOutcome) -> None:
        channel = self._channels.get(waiting.channel_id)
        if channel is not None:
            channel.on_published(waiting.broadcast.message_id, outcome)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        cause = task.exception()
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        self._error = DriverError("failed", f"{type(cause).__name__}: {cause}")
        self._error.__cause__ = cause
        for channel in self._channels.values():
            channel.end(self._error)
        for other in self._tasks:
            other.cancel()


class _Batch:
    """Effects that are saved in one transaction and then carried out."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.frames_bytes = 0  # received and sent
        self.is_done = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether it must be saved before it gets more."""
        return len(self.effects) >= PENDING_EFFECTS_MAX or self.frames_bytes >= PENDING_BYTES_MAX


class ParticipantChannel:
    """One participant at work; `ParticipantDriver.join` makes it."""

    def __init__(
        self,
        driver: ParticipantDriver,
        channel_id: str,
        sender_id: str,
        options: ParticipantOptions | None,
    ) -> None:
        self.channel_id = channel_id
        self.sender_id = sender_id
        self._driver = driver
        self._log = driver.persistence.log(channel_id)
        saved = driver.persistence.state(channel_id)
        self.participant = driver.persistence.participant(channel_id, sender_id, options)
        self._cursors = {
            key.removeprefix(CURSOR_KEY): value.decode(errors="replace")
            for key, value in saved.items()
            if key.startswith(CURSOR_KEY)
        }
        self._sent_ids = [key.removeprefix(SENT) for key in saved if key.startswith(SENT)]
        self._cursor_changes: dict[str, str | None] = {}
        self._events = EventQueue()
        self._batch = _Batch()
        self._wanted: dict[str, HistoryEntry] = {}
        self._not_found: dict[str, HistoryEntry] = {}
        self._has_wanted = asyncio.Event()
        self._is_caught_up = asyncio.Event()
        self._left_out: dict[bytes, Store] = {}
        self._has_left = False
        self._has_staged = False
        self._reconciling = asyncio.Lock()
        self._reconcile_at_s = 0.0
        self._said: dict[str, Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # ---- for the application

    async def send(
        self, content: bytes, *, retrieval_hint: bytes | None = None, ephemeral: bool = False
    ) -> str:
        """Send a message; returns its ID.

        It is saved when this returns, and reaches a store as soon as one answers (`StoredRemotely`);
        no other call is needed for that, also after a restart. An ephemeral message is not saved, and is
        dropped if no store answers now.
        """
        self._check()
        while self._batch.is_full:
            await self.carried_out()
            self._check()
        effects = self.participant.send(
            content, self._driver.now_ms(), retrieval_hint=retrieval_hint, ephemeral=ephemeral
        )
        message_ids = [each.message_id for each in effects if isinstance(each, Broadcast)]
        self.apply(effects, len(content))
        await self.carried_out()
        return message_ids[-1]

    async def events(self) -> AsyncIterator[ChannelEvent]:
        """Deliveries and news, in order, until the driver is closed. Raises `DriverError` if it fails.

        Confirm deliveries: after `ParticipantOptions.deliveries_max` unconfirmed ones no further come.
        If the iteration is left, a new one continues.
        """
        while (event := await self._events.get()) is not None:
            yield event

    async def confirm(self, number: int) -> None:
        """The application has taken all deliveries up to `number`.

        Returns at once. The confirmation is written with the next save, within a moment; if the program
        stops before, the deliveries come again with the same numbers.
        """
        self._check()
        self.apply(self.participant.confirm(number))

    @property
    def status(self) -> Status:
        """How complete the channel is here."""
        return self.participant.status

    async def leave(self) -> None:
        """Stop taking part. What is saved stays, and `join` continues from it."""
        self._check()
        self._has_left = True
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also if this call is cancelled: the channel can be joined again
            self._driver.has_effects(self)
            if not self._driver.save():
                await self.carried_out()
            self._driver.forget(self)
            self.end(None)

    def _check(self) -> None:
        self._driver.check()
        if self._has_left:
            raise DriverError("closed", f"channel {self.channel_id!r} was left; join it again")

    # ---- for the driver

    def begin(self) -> None:
        """Start the channel's tasks."""
        self.apply(self.participant.tick(self._driver.now_ms()))
        self._publish_unstored()
        self._tasks = [
            self._driver.start(self._follow(), f"follow {self.channel_id}"),
            self._driver.start(self._fetch(), f"fetch {self.channel_id}"),
        ]

    def _publish_unstored(self) -> None:
        """Publish at once what an earlier program sent and no store has; it is saved already."""
        found = []
        for message_id in self._sent_ids:
            state = self.participant.sent_state(message_id)
            if state == SentState(Acknowledgement.UNACKNOWLEDGED, is_stored=False):
                frame = self._log.frame(message_id)
                if frame is not None:
                    lamport = decode(frame)[0].lamport_timestamp or 0
                    found.append((lamport, message_id, frame))
        for _, message_id, frame in sorted(found):
            self._driver.outbox.add(self.channel_id, Broadcast(frame, message_id, Kind.CONTENT))
        self._sent_ids.clear()

    def end(self, error: DriverError | None) -> None:
        """End the events."""
        self._events.close(error)
        self._batch.is_done.set()

    def tick(self) -> None:
        """Let the participant do what is due.

        Its time stands still while no store answers, and until the channel has caught up: what cannot
        be fetched now is not lost, and what cannot be published now is not given up.
        """
        if self._is_caught_up.is_set():
            self.apply(self.participant.tick(self._driver.now_ms()))
        # A save that fails is repeated with all effects since.
        if not self._batch.is_full:
            self._take_staged()
        if self._cursor_changes:
            self._driver.has_effects(self)

    def apply(self, effects: Sequence[Effect], frames_bytes: int = 0) -> None:
        """Carry out effects soon, after their save. `frames_bytes`: of the frames that caused them."""
        if effects:
            self._batch.effects += effects
            self._batch.frames_bytes += frames_bytes
            self._driver.has_effects(self)

    async def carried_out(self) -> None:
        """Wait until the effects so far are saved and carried out."""
        batch = self._batch
        if batch.effects:
            self._driver.hurry()
            await batch.is_done.wait()
            self._driver.check()

    def saves(self) -> list[Effect]:
        """What is to save of the batch, and the cursors of what it contains."""
        saves: list[Effect] = [each for each in self._batch.effects if isinstance(each, Save)]
        if self._cursor_changes:
            changes = [
                (CURSOR_KEY + url, None if cursor is None else cursor.encode())
                for url, cursor in self._cursor_changes.items()
            ]
            saves.append(Save(tuple(changes)))
        return saves

    def carry_out(self) -> None:
        """Carry out the other effects of the saved batch."""
        batch, self._batch = self._batch, _Batch()
        self._cursor_changes = {}
        for effect in batch.effects:
            match effect:
                case Save():
                    pass
                case Broadcast():
                    self._driver.outbox.add(self.channel_id, effect)
                case Missing(entries):
                    self._want(entries)
                case _:
                    self._events.put(effect)
        batch.is_done.set()

    def on_published(self, message_id: str, outcome: PublishOutcome) -> None:
        """A store has a message of ours, or refused it."""
        if outcome.error is not None:
            self._events.put(Refused(message_id, outcome.error.code, outcome.error.detail))
        elif outcome.outcome in ("stored", "duplicate"):
            self.apply(self.participant.stored(message_id))

    # ---- following a store

    async def _follow(self) -> None:
        scope = channel_scope(self.channel_id)
        while True:
            store = await self._driver.stores.choose(scope)
            try:
                await self._follow_store(store, scope)
            except StoreError as error:
                self._is_caught_up.clear()
                self._driver.stores.failed(store, scope, error)
                if error.status == 410:
                    self._keep_cursor(store, None)
                self._say(Connection(store.url, "offline", error.code, error.detail))

    async def _follow_store(self, store: Store, scope: str) -> None:
        left_out = partial(self._note_left_out, store)
        async with store.client.live(self.channel_id, on_left_out=left_out) as stream:
            start = stream.cursor
            self._say(Connection(store.url, "catching_up"))
            await self._catch_up(store)
            self._keep_cursor(store, start)
            self._driver.stores.succeeded(store, scope)
            # What is staged comes before what the stream brings.
            await self._drain()
            self._is_caught_up.set()
            self._want(self._not_found.values())
            self._say(Connection(store.url, "online"))
            async for each in stream:
                frame = await self._frame_of(each, store)
                self._receive(frame, _hint_of(each))
                if self._cursors.get(store.url) != stream.cursor:
                    self._keep_cursor(store, stream.cursor)
                if self._batch.is_full:
                    await self.carried_out()

    async def _catch_up(self, store: Store) -> None:
        """Get what the store has and the log lacks; raises `StoreError`."""
        cursor = self._cursors.get(store.url)
        if cursor is None or not await self._read_missed(store, cursor):
            await self._reconcile(store)

    async def _read_missed(self, store: Store, cursor: str) -> bool:
        """Read what the store got after `cursor`; False if that is too much, or the cursor is too old."""
        count = 0
        messages = store.client.messages(
            self.channel_id,
            order="arrival",
            after=cursor,
            page_size=self._driver.options.missed_messages_max,
            on_left_out=partial(self._note_left_out, store),
        )
        try:
            async with asyncio.timeout(MISSED_S_MAX):
                async for stored in messages:
                    count += 1
                    if count > self._driver.options.missed_messages_max:
                        return False
                    self._receive(stored.frame, next(iter(stored.retrieval_hints), b""))
                    if self._batch.is_full:
                        await self.carried_out()
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

        def show(progress: Progress) -> None:
            self._events.put(BackfillProgress(store.url, progress))

        async with self._reconciling, self._driver.backfills:
            try:
                report = await store.client.backfill(self.channel_id, self._log, show)
            except Exception as error:
                if (code := getattr(error, "code", None)) in UNSAVED_CODES:
                    raise StoreError(code, 0, f"the log cannot be written now: {error}") from error
                raise
        if not report.in_sync:
            raise StoreError(report.code or report.outcome, 0, report.detail)

    def _receive(self, frame: bytes, retrieval_hint: bytes) -> None:
        now_ms = self._driver.now_ms()
        effects = self.participant.receive(frame, now_ms, retrieval_hint=retrieval_hint or None)
        self.apply(effects, len(frame))

    async def _drain(self) -> None:
        """Let the participant take what a complete backfill staged, as far as it has room now."""
        self._has_staged = True
        while self._take_staged():
            await self.carried_out()

    def _take_staged(self) -> bool:
        """Let the participant take some staged messages; False if there are none, or no room."""
        if not self._has_staged:
            return False
        effects = self.participant.take_staged(self._driver.now_ms(), TAKEN_AT_ONCE)
        self.apply(effects, TAKEN_BYTES_MAX)
        if not effects:
            self._has_staged = bool(self._log.staged(1))
        return bool(effects)

    def _say(self, connection: Connection) -> None:
        """Report a change, once: attempts to reach a dead store repeat."""
        if self._said.get(connection.store_url) != connection:
            self._said[connection.store_url] = connection
            self._events.put(connection)

    def _keep_cursor(self, store: Store, cursor: str | None) -> None:
        """Save the cursor together with the effects so far."""
        self._cursor_changes[store.url] = cursor
        if cursor is None:
            self._cursors.pop(store.url, None)
        else:
            self._cursors[store.url] = cursor

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

    def _want(self, entries: Iterable[HistoryEntry]) -> None:
        for entry in entries:
            if len(self._wanted) >= WANTED_MAX:
                break
            self._wanted.setdefault(entry.message_id, entry)
        self._has_wanted.set()

    async def _fetch(self) -> None:
        while True:
            await self._has_wanted.wait()
            await self._is_caught_up.wait()
            await asyncio.sleep(GATHER_S)
            entries = self._take_wanted()
            for store in self._driver.stores.ready(channel_scope(self.channel_id)):
                if not entries:
                    break
                entries = await self._fetch_from(store, entries)
            # The participant asks for these again; a new connection is a better moment.
            for entry in entries:
                if len(self._not_found) < WANTED_MAX:
                    self._not_found[entry.message_id] = entry
            await self._fetch_left_out()
            if not self._wanted:
                self._has_wanted.clear()

    def _take_wanted(self) -> list[HistoryEntry]:
        taken: list[HistoryEntry] = []
        for message_id in list(self._wanted)[:FETCHED_AT_ONCE]:
            entry = self._wanted.pop(message_id)
            self._not_found.pop(message_id, None)
            if not self._log.contains(message_id):
                taken.append(entry)
        return taken

    async def _fetch_from(self, store: Store, entries: list[HistoryEntry]) -> list[HistoryEntry]:
        """Retrieve from one store; returns what it does not have."""
        retrieval = Retrieval(store.client, self.channel_id, self._log)
        try:
            async with self._driver.requests:
                await retrieval.run(entries)
        except StoreError as error:
            self._driver.stores.failed(store, channel_scope(self.channel_id), error)
        for each in retrieval.in_log_order():
            self._receive(each.frame, each.retrieval_hint)
            if self._batch.is_full:
                await self.carried_out()
        await self.carried_out()
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
        """Ask the other stores once for what one store lost."""
        left_out, self._left_out = self._left_out, {}
        for digest, loser in left_out.items():
            for store in self._driver.stores.ready(channel_scope(self.channel_id)):
                if store is not loser:
                    try:
                        found = await store.client.get_entry(digest)
                    except StoreError:
                        continue
                    self._receive(found.frame, b"")
                    break

    async def _fetch_depths(self, store: Store) -> None:
        """The causes go back too far to walk: reconcile, but not again at once."""
        if time.monotonic() < self._reconcile_at_s:
            return
        self._reconcile_at_s = time.monotonic() + RECONCILE_PAUSE_S
        try:
            await self._reconcile(store)
        except StoreError as error:
            self._driver.stores.failed(store, channel_scope(self.channel_id), error)
        else:
            await self._drain()


def _hint_of(live: LiveMessage) -> bytes:
    hints = live.document["meta"].get("hints")
    first = hints[0] if isinstance(hints, list) and hints else ""
    try:
        return bytes.fromhex(first) if isinstance(first, str) else b""
    except ValueError:
        return b""
