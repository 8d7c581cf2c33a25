"""Live streams that the channels of a driver share: one connection to a store, not one for each channel.

A channel that joins or leaves makes the stream begin again at the place where it was, with the new list of
channels. So nothing is missed, and the store keeps nothing. A channel whose messages are not taken holds up no
other: beyond a bound it drops them and has to catch up again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sdstore.client.clients import AsyncStoreClient
from sdstore.client.live import AsyncLiveStream
from sdstore.client.records import LiveMessage
from sdstore.errors import StoreError

NAMES_MAX = 200
"""Channels of one stream; a node accepts as many."""

GATHER_S = 0.02
"""How long changes gather before the stream begins again with all of them."""

UNTAKEN_ITEMS_MAX = 1_000
UNTAKEN_BYTES_MAX = 8 << 20
"""Messages of one channel that wait to be taken, and their content and filters: 400 of js-waku's size."""

LeftOut = Callable[[bytes], None]
"""Called with the digest of a message whose content the store has lost."""


class FellBehindError(Exception):
    """The channel took its messages too slowly, and has to catch up."""


class ChannelStream:
    """The live messages of one channel. `cursor`: after the last message taken; initially the start."""

    def __init__(self, on_left_out: LeftOut) -> None:
        self.cursor: str | None = None
        self.on_left_out = on_left_out
        self.is_placed = False
        self._untaken: deque[LiveMessage] = deque()
        self._untaken_bytes = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def place(self, cursor: str | None) -> None:
        """The stream with this channel has begun: nothing after `cursor` is missed."""
        self.is_placed, self.cursor = True, cursor
        self._changed.set()

    def put(self, message: LiveMessage) -> None:
        """Add a message."""
        self._untaken.append(message)
        self._untaken_bytes += _bytes_of(message)
        if len(self._untaken) > UNTAKEN_ITEMS_MAX or self._untaken_bytes > UNTAKEN_BYTES_MAX:
            self._untaken.clear()
            self._untaken_bytes = 0
            self.fail(FellBehindError())
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Raise this after the messages that wait."""
        self._error = self._error or error
        self._changed.set()

    async def placed(self) -> None:
        """Wait until the stream has begun."""
        while not self.is_placed:
            await self._waited()

    def __aiter__(self) -> AsyncIterator[LiveMessage]:
        return self

    async def __anext__(self) -> LiveMessage:
        while not self._untaken:
            await self._waited()
        message = self._untaken.popleft()
        self._untaken_bytes -= _bytes_of(message)
        self.cursor = message.cursor
        return message

    async def _waited(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()


def _bytes_of(message: LiveMessage) -> int:
    return len(message.message.content) + len(message.message.bloom_filter)


class StoreStream:
    """One connection to a store for up to `NAMES_MAX` channels."""

    def __init__(self, client: AsyncStoreClient) -> None:
        self._client = client
        self._channels: dict[str, ChannelStream] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more channel fits."""
        return len(self._channels) < NAMES_MAX

    @asynccontextmanager
    async def following(
        self, channel_id: str, on_left_out: LeftOut
    ) -> AsyncIterator[ChannelStream]:
        """The live messages of a channel, once the stream with it has begun. Raises `StoreError`, also while read."""
        channel = self._channels[channel_id] = ChannelStream(on_left_out)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="participants: live")
        try:
            await channel.placed()
            yield channel
        finally:
            if self._channels.get(channel_id) is channel:
                del self._channels[channel_id]
            self._changed.set()
            if not self._channels and self._task is not None:
                # Before the wait: a channel that comes meanwhile needs a task of its own.
                task, self._task = self._task, None
                task.cancel()
                await asyncio.wait({task})

    async def _run(self) -> None:
        cursor: str | None = None
        try:
            while self._channels:
                await asyncio.sleep(GATHER_S)
                self._changed.clear()
                names = list(self._channels)
                try:
                    cursor = await self._read(names, cursor)
                except StoreError as error:
                    # The store does not let us read one of them: the others go on without it.
                    at = error.problem.get("index")
                    if not isinstance(at, int) or not 0 <= at < len(names):
                        raise
                    if (refused := self._channels.pop(names[at], None)) is not None:
                        refused.fail(error)
        except Exception as error:  # noqa: BLE001 - also a fault of ours
            # Its followers end with it, and the driver with them.
            channels, self._channels = self._channels, {}
            for channel in channels.values():
                channel.fail(error)

    async def _read(self, names: list[str], cursor: str | None) -> str | None:
        """Read the channels' messages after `cursor` until the list changes; returns the place reached."""
        stream = self._client.live_of(
            names, after=cursor, on_left_out=self._on_left_out, bloom_filter=True
        )
        async with stream:
            for name in names:
                channel = self._channels.get(name)
                if channel is not None and not channel.is_placed:
                    channel.place(stream.cursor)
            taking = asyncio.ensure_future(self._take(stream))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({taking, changed}, return_when=asyncio.FIRST_COMPLETED)
                if taking.done():
                    taking.result()
            finally:
                taking.cancel()
                changed.cancel()
                await asyncio.wait({taking, changed})
            return stream.cursor

    async def _take(self, stream: AsyncLiveStream) -> None:
        # No await between a message and its queue, so that `stream.cursor` is after what was put there.
        async for each in stream:
            channel = self._channels.get(each.message.channel_id)
            if channel is not None:
                channel.put(each)

    def _on_left_out(self, channel_id: str, digest: bytes) -> None:
        channel = self._channels.get(channel_id)
        if channel is not None:
            channel.on_left_out(digest)
