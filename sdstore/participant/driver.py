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

A channel's `Follower` gets what the stores have for its participant.

Timers are of the event loop's monotonic clock. The participant gets the wall clock as `now_ms`, for
Lamport timestamps; it counts time itself so that a jump expires nothing, provided that it gets a tick
at least every minute.
"""

import asyncio
import random
import reprlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from sdstore.client.clients import AsyncStoreClient
from sdstore.client.exchange import ClientOptions, Retry
from sdstore.client.records import PublishOutcome
from sdstore.errors import LocalProtocolError, StoreError, bad_argument, check_argument
from sdstore.participant.channelorder import ChannelOrder
from sdstore.participant.events import (
    ChannelEvent,
    DriverError,
    EventQueue,
    PublishedAgain,
    SavedAgain,
    Unpublished,
    Unsaved,
)
from sdstore.participant.follower import Follower, StoreAccess
from sdstore.participant.keptorder import KeptOrder
from sdstore.participant.persistence import (
    SENT_KEY,
    MemoryPersistence,
    Persistence,
    unsaved_code,
)
from sdstore.participant.stores import PUBLISHING, BackOff, Outbox, Store, Stores, Waiting
from sdstore.sds.codec import decode
from sdstore.sds.effects import Broadcast, Effect, Missing, Publish, Rejected, Save, Status
from sdstore.sds.messages import ID_LENGTH_MAX
from sdstore.sds.model import LAMPORT_MAX, Kind, Message
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.outgoing import Acknowledgement, SentState
from sdstore.sds.participant import TAKEN_BYTES_MAX
from sdstore.sds.state import SENT

PENDING_EFFECTS_MAX = 500
"""Effects that gather in a batch before a reader waits for it to be carried out."""

PENDING_BYTES_MAX = 8 << 20
"""Frames of a batch, with the same rule: until the save they are in memory, and a file has a bound for it."""

TAKEN_AT_ONCE = 500
"""Staged messages that a participant takes before other work of the event loop goes on."""

TICK_S = 1.0
"""Between two ticks of each participant; sweeps and resends need no finer clock."""

SAVE_PAUSE_FACTOR = 4
"""Times the last save took: at most a fifth of the time goes to saves while messages stream in."""

SAVE_PAUSE_S_MAX = 0.05
"""The longest such pause. It delays the deliveries of a burst, and no call that waits for a save."""

SENT_KEYS_MAX = 10_000
"""Keys of `send` that a channel remembers, 1 MB; then the oldest is forgotten."""

SAVE_RETRY_S = 1.0
"""The pause after a save that failed for lack of room or because the file was busy."""


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a program can choose of a driver; the other bounds are constants of its modules.

    Values outside of these ranges are a `LocalProtocolError` (`bad_option`): `channels_max` 1 to 10,000,
    `copies_max` 0 to 10,000, `close_s` 0 to 3,600, pauses of `back_off` 0.001 to 86,400 s with
    `first_s` <= `max_s`.
    """

    channels_max: int = 64
    """`join` refuses more: 200 of them share a connection to a store."""
    copies_max: int = 2
    """Other stores that get a copy of each frame, for participants that follow those. Each costs its bytes
    again, which a metered network may not be worth."""
    close_s: float = 2.0
    """How long the end of the `async with` waits for frames that are on their way to a store: a program that
    sends and ends needs it, one that a person waits for may want less."""
    back_off: BackOff = field(default_factory=BackOff)
    """Pauses before a failed store is tried again. Short ones suit a person who waits, long ones a battery."""
    client: ClientOptions = field(
        default_factory=lambda: ClientOptions(retry=Retry(attempts_max=2, retry_after_max_s=1.0))
    )
    """Timeouts and bounds of the clients, for slow networks. They try little: another store may answer at once."""

    def __post_init__(self) -> None:
        """Raises `LocalProtocolError` (`bad_option`)."""
        for name, kind in (("back_off", BackOff), ("client", ClientOptions)):
            if not isinstance(getattr(self, name), kind):
                raise _bad_option(name, getattr(self, name), f"of the class {kind.__name__}")
        back_off = self.back_off
        for name, value, kinds, low, high in (
            ("channels_max", self.channels_max, int, 1, 10_000),
            ("copies_max", self.copies_max, int, 0, 10_000),
            ("close_s", self.close_s, int | float, 0, 3_600),
            ("back_off.first_s", back_off.first_s, int | float, 0.001, 86_400),
            ("back_off.max_s", back_off.max_s, int | float, back_off.first_s, 86_400),
            ("back_off.retry_after_max_s", back_off.retry_after_max_s, int | float, 0, 86_400),
        ):
            if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
                what = "an integer" if kinds is int else "a number"
                raise _bad_option(name, value, f"{what} from {low:,} to {high:,}")


def _bad_option(name: str, value: object, wanted: str) -> LocalProtocolError:
    return LocalProtocolError(
        "bad_option", f"{name} is {reprlib.repr(value)}, and must be {wanted}"
    )


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
            raise bad_argument("stores", stores, "a list of URLs, not one URL")
        check_argument("stores", stores, Sequence, "a list of URLs")
        if not stores:
            raise bad_argument("stores", stores, "a list of at least one URL")
        for url in stores:
            check_argument("a store's URL", url, str, "a string")
        self.options = DriverOptions() if options is None else options
        check_argument("options", self.options, DriverOptions, "DriverOptions")
        self.persistence = MemoryPersistence() if persistence is None else persistence
        self.now_ms = clock_ms
        connected = connect or (lambda url: AsyncStoreClient(url, options=self.options.client))
        try:
            connections = [Store(url, connected(url)) for url in dict.fromkeys(stores)]
        except ValueError as error:  # of a wrong URL
            raise LocalProtocolError("bad_argument", f"stores: {error}") from error
        self.stores = Stores(connections, self.options.back_off, draw)
        self.access = StoreAccess(self.stores)
        self.outbox = Outbox(
            self.stores, self._on_published, self._on_attempt, self.options.copies_max
        )
        self._channels: dict[str, ParticipantChannel] = {}
        self._unsaved: dict[str, ParticipantChannel] = {}
        self._has_unsaved = asyncio.Event()
        self._is_awaited = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: DriverError | None = None
        self._saving: Unsaved | None = None  # why it fails now
        self._publishing: Unpublished | None = None  # why it fails now
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
            error = await self._close()
        if exc_type is None and error is not None:
            raise error

    async def join(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> "ParticipantChannel":
        """Take part in a channel as `sender_id`, from where the saved participant stopped.

        Deliveries that were not confirmed come again. Waits while the channel is being left. Raises
        `DriverError`, `LocalProtocolError` for wrong arguments, and what the persistence and
        `Participant.restore` raise.
        """
        self.check()
        check_argument("channel_id", channel_id, str, "a string")
        check_argument("sender_id", sender_id, str, "a string")
        check_argument("options", options, ParticipantOptions | None, "ParticipantOptions")
        if not self._is_started:
            raise DriverError("not_started", "use the driver in an `async with` statement")
        while (known := self._channels.get(channel_id)) is not None:
            if not known.is_leaving:
                raise DriverError("already_joined", f"channel {channel_id!r} was joined before")
            await known.leave()
            self.check()
        if len(self._channels) >= self.options.channels_max:
            raise DriverError(
                "too_many_channels",
                f"{self.options.channels_max} channels were joined; leave one, or raise channels_max",
            )
        channel = ParticipantChannel(self, channel_id, sender_id, options)
        self._channels[channel_id] = channel
        for failing in (self._saving, self._publishing):
            if failing is not None:
                channel.say(failing)
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
                if (code := unsaved_code(error)) is None:
                    raise
                self.saving_failed(code, error)
                return False
            self.saving_works()
        self._unsaved = {}
        for channel in unsaved.values():
            channel.carry_out()
        return True

    def obstacle(self, of_channel: str) -> str:
        """What is in the way of a channel, the worst first, in words."""
        if self._saving is not None:
            return f"nothing can be saved ({self._saving.code})"
        if of_channel or self._publishing is None:
            return of_channel
        return f"no store takes messages ({self._publishing.code})"

    def saving_failed(self, code: str, error: Exception) -> None:
        """Tell the applications, once for each cause, that nothing can be saved now."""
        if self._saving is None or self._saving.code != code:
            self._saving = Unsaved(code, getattr(error, "detail", None) or str(error))
            for channel in self._channels.values():
                channel.say(self._saving)

    def saving_works(self) -> None:
        """Tell the applications if saving failed before."""
        if self._saving is not None:
            self._saving = None
            for channel in self._channels.values():
                channel.say(SavedAgain())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
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

    async def _close(self) -> DriverError | None:
        """End everything; returns what the application must hear."""
        tasks = list(self._tasks)
        for task in tasks:
            task.remove_done_callback(self._on_ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._error is None:
            self._error = self._last_save()
        error = self._error
        for channel in self._channels.values():
            channel.end(error)
        self._channels = {}
        self._error = error or DriverError("closed", "the driver was closed")
        await self.stores.close()
        return error

    def _last_save(self) -> DriverError | None:
        for channel in self._channels.values():
            self.has_effects(channel)
        try:
            if self.save():
                return None
        except Exception as error:  # noqa: BLE001 - as in any task of the driver
            return _failed(error)
        cause = self._saving or Unsaved("", "")
        detail = f"the last changes are not saved ({cause.code}: {cause.detail})"
        return DriverError("unsaved", detail)

    def _on_published(self, waiting: Waiting, outcome: PublishOutcome) -> None:
        channel = self._channels.get(waiting.channel_id)
        if channel is not None:
            channel.on_published(waiting.broadcast, outcome)

    def _on_attempt(self, error: StoreError | None) -> None:
        """Tell the applications, once for each cause, that no store takes messages now."""
        before = self._publishing
        if error is None:
            self._publishing = None
        elif not self.stores.ready(PUBLISHING) and (before is None or before.code != error.code):
            self._publishing = Unpublished(error.code, error.detail)
        if self._publishing is not before:
            for channel in self._channels.values():
                channel.say(self._publishing or PublishedAgain())

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        cause = task.exception()
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        self._error = _failed(cause)
        for channel in self._channels.values():
            channel.end(self._error)
        for other in self._tasks:
            other.cancel()


def _failed(cause: BaseException | None) -> DriverError:
    error = DriverError("failed", f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


class _Batch:
    """Effects that are saved in one transaction and then carried out."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.frames_bytes = 0  # received and sent
        self.is_saved = False
        self.is_done = asyncio.Event()  # saved and carried out, or the end came before

    @property
    def is_full(self) -> bool:
        """Whether it must be saved before it gets more."""
        return len(self.effects) >= PENDING_EFFECTS_MAX or self.frames_bytes >= PENDING_BYTES_MAX


class _SentKeys:
    """The IDs of sent messages by the application's keys, oldest first."""

    def __init__(self, saved: Mapping[str, bytes]) -> None:
        found = []
        for name, value in saved.items():
            if name.startswith(SENT_KEY):
                number, _, message_id = value.decode().partition("/")
                found.append((int(number), name.removeprefix(SENT_KEY), message_id))
        found.sort()
        self.ids = {key: message_id for _, key, message_id in found}
        self._number = found[-1][0] if found else 0

    def add(self, key: str, message_id: str) -> Save:
        """Remember a key; returns what is to save."""
        self._number += 1
        self.ids[key] = message_id
        changes = [(SENT_KEY + key, f"{self._number}/{message_id}".encode())]
        if len(self.ids) > SENT_KEYS_MAX:
            oldest = next(iter(self.ids))
            del self.ids[oldest]
            return Save((*changes, (SENT_KEY + oldest, None)))
        return Save(tuple(changes))


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
        self.log = driver.persistence.log(channel_id)
        saved = driver.persistence.state(channel_id)
        self._kept: KeptOrder | None = None
        if options is not None and options.indexers:
            self._kept = KeptOrder(self.log, sender_id, options.indexers, saved, self.say)
            indexers = self._kept.order.last_roles.indexers
            options = replace(options, indexers=tuple(indexers))
        self.participant = driver.persistence.participant(channel_id, sender_id, options)
        self._follower = Follower(self, driver.access, saved)
        self._sent_keys = _SentKeys(saved)
        self._sent_ids = [key.removeprefix(SENT) for key in saved if key.startswith(SENT)]
        self._events = EventQueue()
        self._batch = _Batch()
        self.is_leaving = False
        self._ended = asyncio.Event()
        self._error: DriverError | None = None  # that ended it
        self._tasks: list[asyncio.Task[None]] = []
        self._status = Status()  # the last one that was told
        self._ordered = asyncio.Lock()
        self._is_decided = asyncio.Event()  # no ordered message is on its way to the stores
        self._rejection: Rejected | None = None  # the last one

    # ---- for the application

    async def send(
        self,
        content: bytes,
        *,
        key: str | None = None,
        retrieval_hint: bytes | None = None,
        ephemeral: bool = False,
    ) -> str:
        """Send a message; returns its ID.

        With a `key`, a name of your own for it, calling again sends nothing and returns the same ID, also
        after a crash: the key is saved with the message. The newest 10,000 keys of a channel are known.

        It is saved when this returns, and reaches a store as soon as one answers (`StoredRemotely`);
        no other call is needed for that, also after a restart. An ephemeral message is not saved, and is
        dropped if no store answers now.

        Waits while saving fails (`Unsaved`). An error means that the message is not saved. A call that
        is cancelled while it waits may have sent the message: read the log before you send it again.

        In ordered mode (`ParticipantOptions.ordered`) it waits until a store has the message, which is in
        the log then, and raises `DriverError` (`rejected`) if all stores refuse it.
        """
        self._check()
        check_argument("content", content, bytes | bytearray | memoryview, "bytes")
        check_argument("retrieval_hint", retrieval_hint, bytes | None, "bytes")
        check_argument("key", key, str | None, "a string")
        if key is not None and (ephemeral or not 0 < len(key) <= ID_LENGTH_MAX):
            raise bad_argument(
                "key", key, f"1 to {ID_LENGTH_MAX:,} characters, of a lasting message"
            )
        if self.participant.options.ordered and not ephemeral:
            return await self._send_ordered(content, key, retrieval_hint)
        return await self._send(content, key, retrieval_hint, ephemeral=ephemeral)

    async def _send(
        self, content: bytes, key: str | None, hint: bytes | None, *, ephemeral: bool = False
    ) -> str:
        while self.is_full:
            await self.carried_out()
            self._check()
        message_id = self._sent_keys.ids.get(key or "")
        if message_id is None:
            now_ms = self._driver.now_ms()
            effects = self.participant.send(
                content, now_ms, retrieval_hint=hint, ephemeral=ephemeral
            )
            ids = [each.message_id for each in effects if isinstance(each, Broadcast | Publish)]
            message_id = ids[-1]
            if key is not None:
                effects.append(self._sent_keys.add(key, message_id))
            self.apply(effects, len(content))
        await self.carried_out()
        return message_id

    async def _send_ordered(self, content: bytes, key: str | None, hint: bytes | None) -> str:
        """One at a time: each names the one before it, if a store took that."""
        async with self._ordered:
            await self._decided()  # one of before a restart
            message_id = await self._send(content, key, hint)
            await self._decided()
            await self.carried_out()
        if not self.log.contains(message_id):
            why = f": {self._rejection.code}" if self._rejection is not None else ""
            raise DriverError("rejected", f"all stores refused {message_id!r}{why}")
        return message_id

    async def _decided(self) -> None:
        while self.participant.unpublished_id is not None:
            self._is_decided.clear()
            await self._is_decided.wait()
            self._check()

    async def events(self) -> AsyncIterator[ChannelEvent]:
        """Deliveries and news, in order, until the driver is closed. Raises `DriverError` if it fails.

        Confirm deliveries: after `ParticipantOptions.deliveries_max` unconfirmed ones no further come.
        If the iteration is left, a new one continues. There is one reader: a new one takes over, and an older
        one that still reads gets `DriverError` (`events_taken_over`).
        """
        reader = object()
        self._events.read_by(reader)
        while (event := await self._events.get(reader)) is not None:
            yield event

    async def confirm(self, number: int) -> None:
        """The application has taken all deliveries up to `number`.

        Returns at once. The confirmation is written with the next save, within a moment; if the program
        stops before, the deliveries come again with the same numbers. Raises `LocalProtocolError`
        (`bad_argument`, or `unknown_delivery` for a number that no delivery has yet).
        """
        self._check()
        check_argument("number", number, int, "the number of a delivery")
        if number < 1:
            raise bad_argument("number", number, "at least 1")
        self.apply(self.participant.confirm(number))

    def message(self, message_id: str) -> Message:
        """A message of the log, ours or another's; `KeyError` if the log has none with this ID."""
        frame = self.log.frame(message_id)
        if frame is None:
            raise KeyError(message_id)
        return decode(frame)[0]

    def newest(self, count: int) -> list[Message]:
        """The newest messages of the log, ours included, in log order."""
        return [
            self.message(each.entry.message_id) for each in self.log.newest(count, LAMPORT_MAX + 1)
        ]

    @property
    def order(self) -> ChannelOrder:
        """With `ParticipantOptions.indexers`, the order of the channel: wait for `OrderChanged` before you read it.

        Raises `DriverError` (`no_order`) without them.
        """
        return self._order().order

    def change_roles(self, indexers: Sequence[str], after: str) -> None:
        """From the confirmed message `after` on these are the indexers, also after a restart.

        Every member must do this at the same message: let a message of the application say so, and call this when
        that one is confirmed, before anything is done with a later one. `join` still gets the first indexers. Raises
        `OrderingError` as `ChannelOrder.change_roles` does, and `DriverError` (`no_order`) before `OrderChanged`.
        """
        self._check()
        unnamed = self._order().change_roles(indexers, after)
        if self.participant.options.ordered:
            self.apply(self.participant.change_indexers(tuple(indexers), unnamed))
        self._driver.has_effects(self)

    def _order(self) -> KeptOrder:
        if self._kept is None:
            raise DriverError("no_order", "join the channel with `ParticipantOptions.indexers`")
        return self._kept

    @property
    def status(self) -> Status:
        """How complete the channel is here, and what stands in the way: `str(status)` says it."""
        obstacle = self._driver.obstacle(self._follower.obstacle)
        return replace(self.participant.store_status, obstacle=obstacle)

    async def leave(self) -> None:
        """Stop taking part. What is saved stays, and `join` continues from it.

        Returns when everything is saved, so it waits while saving fails. If the call is cancelled, the
        driver goes on with leaving.
        """
        if not self.is_leaving:
            self._check()
            self.is_leaving = True
            self._driver.start(self._leave(), f"leave {self.channel_id}")
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        batch = self._batch
        self._driver.has_effects(self)
        self._driver.hurry()
        await batch.is_done.wait()
        self._driver.forget(self)
        self.end(None)

    def _check(self) -> None:
        self._driver.check()
        if self.is_leaving:
            raise DriverError("closed", f"channel {self.channel_id!r} was left; join it again")

    # ---- for the driver

    def begin(self) -> None:
        """Start the channel's tasks."""
        self.apply(self.participant.tick(self._driver.now_ms()))
        self._publish_unstored()
        self._tasks = [
            self._driver.start(self._follower.follow(), f"follow {self.channel_id}"),
            self._driver.start(self._follower.fetch(), f"fetch {self.channel_id}"),
        ]
        if self._kept is not None:
            send = partial(self._send_ordered, key=None, hint=None)
            order = self._driver.start(
                self._kept.run(send, self._driver.now_ms), f"order {self.channel_id}"
            )
            self._tasks.append(order)

    def _publish_unstored(self) -> None:
        """Publish at once what an earlier program sent and no store has; it is saved already."""
        found = []
        for message_id in self._sent_ids:
            state = self.participant.sent_state(message_id)
            if state == SentState(Acknowledgement.UNACKNOWLEDGED, is_stored=False):
                frame = self.log.frame(message_id)
                if frame is not None:
                    lamport = decode(frame)[0].lamport_timestamp or 0
                    found.append((lamport, message_id, frame))
        for _, message_id, frame in sorted(found):
            self._driver.outbox.add(self.channel_id, Broadcast(frame, message_id, Kind.CONTENT))
        self._sent_ids.clear()

    def end(self, error: DriverError | None) -> None:
        """End the events, and the calls that wait."""
        self._error = self._error or error
        self._events.close(error)
        self._batch.is_done.set()
        self._is_decided.set()
        self._ended.set()

    def tick(self) -> None:
        """Let the participant do what is due.

        Its time stands still while no store answers, and until the channel has caught up: what cannot
        be fetched now is not lost, and what cannot be published now is not given up.
        """
        # A save that fails is repeated with all effects since.
        if not self.is_full and not self.is_leaving:
            if self._follower.is_caught_up:
                self.apply(self.participant.tick(self._driver.now_ms()))
                is_free = self.participant.options.ordered and not self._ordered.locked()
                if self._kept is not None and is_free:
                    self._kept.vote_if_due(self._driver.now_ms())
            self._follower.take_staged()
        if self._state_changes:
            self._driver.has_effects(self)
        self._say_status()

    @property
    def _state_changes(self) -> list[tuple[str, bytes | None]]:
        order_changes = [] if self._kept is None else self._kept.changes
        return self._follower.cursor_changes + order_changes

    def apply(self, effects: Sequence[Effect], frames_bytes: int = 0) -> None:
        """Carry out effects soon, after their save. `frames_bytes`: of the frames that caused them."""
        if effects:
            self._batch.effects += effects
            self._batch.frames_bytes += frames_bytes
            self._driver.has_effects(self)
        if self.participant.unpublished_id is None:
            self._is_decided.set()

    async def carried_out(self) -> None:
        """Wait until the effects so far are saved and carried out."""
        batch = self._batch
        if batch.effects:
            self._driver.hurry()
            await batch.is_done.wait()
            if not batch.is_saved:
                raise self._error or DriverError("closed", "the driver was closed")

    def saves(self) -> list[Effect]:
        """What is to save of the batch, and the cursors of what it contains."""
        saves: list[Effect] = [each for each in self._batch.effects if isinstance(each, Save)]
        if changes := self._state_changes:
            saves.append(Save(tuple(changes)))
        return saves

    def carry_out(self) -> None:
        """Carry out the other effects of the saved batch."""
        batch, self._batch = self._batch, _Batch()
        self._follower.saved()
        for effect in batch.effects:
            match effect:
                case Save():
                    pass
                case Broadcast():
                    self._driver.outbox.add(self.channel_id, effect)
                case Publish(frame, message_id):
                    first = Broadcast(frame, message_id, Kind.CONTENT)
                    self._driver.outbox.add(self.channel_id, first, is_ordered=True)
                case Missing(entries):
                    self._follower.want(entries)
                case Status():
                    pass  # told below, with what no store has
                case _:
                    self._events.put(effect)
        if self._kept is not None:
            self._kept.saved()
            self._kept.carried_out(batch.effects)
        self._say_status()
        batch.is_saved = True
        batch.is_done.set()

    def _say_status(self) -> None:
        if (status := self.status) != self._status:
            self._status = status
            self._events.put(status)

    def on_published(self, broadcast: Broadcast, outcome: PublishOutcome) -> None:
        """A store has a message of ours, or all refused it."""
        message_id, error = broadcast.message_id, outcome.error
        if error is None:
            if outcome.outcome in ("stored", "duplicate"):
                effects = self.participant.stored(message_id)
                # The store that has it passes it on: an ordered message need not be published again.
                self.apply([each for each in effects if not isinstance(each, Broadcast)])
        elif broadcast.kind is Kind.CONTENT:
            effects = self.participant.rejected(message_id, error.code, error.detail)
            self._rejection = next((e for e in effects if isinstance(e, Rejected)), self._rejection)
            self.apply(effects)
        elif broadcast.kind is Kind.EPHEMERAL:
            self._events.put(Rejected(message_id, error.code, error.detail))

    # ---- for the follower

    @property
    def is_full(self) -> bool:
        """See `Inbox`."""
        return self._batch.is_full

    def receive(self, frame: bytes, retrieval_hint: bytes, path: str) -> None:
        """See `Inbox`."""
        now_ms = self._driver.now_ms()
        effects = self.participant.receive(frame, now_ms, retrieval_hint or None, path)
        self.apply(effects, len(frame))

    def unobtainable(self, message_id: str, reason: str) -> None:
        """See `Inbox`."""
        self.apply(self.participant.unobtainable(message_id, reason))

    def take_staged(self) -> bool:
        """See `Inbox`."""
        effects = self.participant.take_staged(self._driver.now_ms(), TAKEN_AT_ONCE)
        self.apply(effects, TAKEN_BYTES_MAX)
        return bool(effects)

    def say(self, event: ChannelEvent) -> None:
        """Put an event for the application, and the status if it is another one now."""
        self._events.put(event)
        self._say_status()

    def saving_failed(self, code: str, error: Exception) -> None:
        """See `Inbox`."""
        self._driver.saving_failed(code, error)

    def saving_works(self) -> None:
        """See `Inbox`."""
        self._driver.saving_works()
