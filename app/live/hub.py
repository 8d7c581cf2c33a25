"""Live readers: clients that receive new messages as they arrive.

One task follows the store's feed into a bounded buffer that all readers share. So a reader misses
no message that any process of this node committed, sees none twice, and needs no queue of its own. A
reader that falls behind the buffer gets a gap with the place where it starts. Readers get messages in
batches, the next one only after they have read the last: a reader that does not read costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple
from weakref import WeakSet

import zstandard

from app.entries import START, Entry, Token
from app.errors import Code, Problem
from app.ingest.prepare import Relayed
from app.server.limits import Limits
from app.server.sharing import Sharing, Turns
from app.server.supervisor import Supervisor
from app.store.entryrows import LeftOut
from app.store.store import Store

_log = logging.getLogger(__name__)

FEED_PAGE = 500
"""Entries read at once."""

LEFT_OUT_BYTES = 1_500
"""Bytes of an entry's names in the buffer, at most: its message ID, channel and digest."""
REPLAY_PAGE = 100
"""Entries read at once for one reader that requested earlier messages."""

PART_BYTES = 64 * 1024
"""Bytes of frames given to a reader at once, unless one message alone has more."""

POLL_S = 1.0
"""The longest delay of another process's commit; this process's are announced at once."""


class Notice(NamedTuple):
    """What happened to a stored message: `retired`, `released` from the quarantine, or `superseded`.

    The last one is about an ID: the store serves this message under it now, and another one before.
    """

    name: str
    channel_id: str
    message_id: str
    digest: bytes


@dataclass(slots=True)
class LiveMessage:
    """A stored message, one that is only relayed, or what happened to a stored one.

    `item` is a `LeftOut` if the content of a stored message is lost. `rendered` caches the rendered
    bytes by form (four at most), which readers share.
    """

    item: Entry | Relayed | LeftOut | Notice
    channel_id: str
    bytes_count: int
    rendered: dict[object, bytes] = field(default_factory=dict)


class Skip(NamedTuple):
    """The messages that the reader missed begin after `after`."""

    after: Token


class Heartbeat(NamedTuple):
    """The reader is connected; it has received every message up to `last`, or a gap."""

    last: Token


class Place:
    """One of `live_readers_max` places; it becomes free once no reference to it is left."""

    __slots__ = ("__weakref__",)


class Coding(StrEnum):
    """A content coding of a stream (RFC 9110, section 8.4.1)."""

    ZSTD = "zstd"
    GZIP = "gzip"


WINDOW_LOG = 14
"""16 KiB, some twenty messages back, make a stream cost 132 KiB with zstd and 111 KiB with gzip; zstd's default
window would cost 815 KiB."""

PACKED_STREAM_BYTES = 144 * 1024
"""Of the contexts of one compressed stream, at most."""

_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, window_log=WINDOW_LOG)


class Packer:
    """Compresses one stream, each part so that its reader can read all of it at once."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding
        self._stream: Any
        if coding is Coding.ZSTD:
            self._stream = zstandard.ZstdCompressor(compression_params=_ZSTD).compressobj()
            self._flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        else:
            self._stream = zlib.compressobj(6, zlib.DEFLATED, 16 + WINDOW_LOG, 7)
            self._flush = zlib.Z_SYNC_FLUSH

    def pack(self, part: Iterable[bytes]) -> bytes:
        """The bytes to send for a part."""
        packed = b"".join(map(self._stream.compress, part))
        return packed + bytes(self._stream.flush(self._flush))

    def end(self) -> bytes:
        """The last bytes."""
        return bytes(self._stream.flush())


READER_GROUPS = 16
"""An event costs some 80 us for each reader: waking 1,000 readers at once would delay requests by 80 ms."""

LiveEvent = LiveMessage | Skip | Heartbeat
Wanted = Callable[[str], bool]
"""Whether a reader wants, and may read, a channel."""


class LiveHub:
    """See the module. Set `committed` after a commit; the follower reads the entries from the feed."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        sharing: Sharing | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._store = store
        self._limits = limits
        self._sharing = sharing or Sharing(limits)
        self._supervisor = supervisor or Supervisor()
        self._buffer: deque[LiveMessage] = deque()
        self._buffer_bytes = 0
        # The buffer holds the messages numbered from `_first_number` on; entries up to `_last`.
        self._first_number = 0
        self._last = START
        self._readers_count = 0
        # A reader that leaves before its first event has nothing to clean up but its place.
        self._places: WeakSet[Place] = WeakSet()
        self._packers: WeakSet[Packer] = WeakSet()
        self._follower: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.committed = asyncio.Event()
        # One event for each group of readers.
        self._changed = [asyncio.Event() for _ in range(READER_GROUPS)]
        self._is_closed = False

    @property
    def readers_count(self) -> int:
        """The current number of readers."""
        return self._readers_count

    def on_relayed(self, relayed: Relayed) -> None:
        """Pass on a message that is not stored."""
        if self._follower is not None:
            self._append(relayed, relayed.message.channel_id, len(relayed.frame))
            self._announce()

    def tell(self, notice: Notice) -> None:
        """Tell the readers of this process what happened to a message."""
        if self._follower is not None:
            self._append(notice, notice.channel_id, LEFT_OUT_BYTES)
            self._announce()

    async def close(self) -> None:
        """End all readers."""
        self._is_closed = True
        self._announce()
        self._stop()

    async def admit(self) -> Place:
        """A place for `events`; `overloaded` if all are taken. Raises what a read of the store raises."""
        # Count before the first await, so that concurrent requests see each other.
        place = self.take_place()
        # Check now: once the stream has begun, an error could only end it.
        await self._store.arrivals.watermark()
        return place

    def take_place(self) -> Place:
        """A place of any stream that lasts. Raises `overloaded` if all are taken."""
        if len(self._places) >= self._limits.live_readers_max:
            raise Problem(Code.OVERLOADED, "too many live readers", headers={"Retry-After": "10"})
        place = Place()
        self._places.add(place)
        return place

    def take_packer(self, coding: Coding) -> Packer | None:
        """What compresses one stream; None if `live_compressed_max` are compressed."""
        if len(self._packers) >= self._limits.live_compressed_max:
            return None
        packer = Packer(coding)
        self._packers.add(packer)
        return packer

    async def events(
        self, wanted: Wanted, after: Token | None, caller: str = "", place: Place | None = None
    ) -> AsyncGenerator[Sequence[LiveEvent], None]:
        """Every message from now on, preceded by those stored after `after`, if given.

        Available messages come in one batch; `caller` takes turns with others for reads of the store.
        """
        self._readers_count += 1
        try:
            if not self._is_closed:
                await self._start()
            group = self._readers_count % READER_GROUPS
            reader = _Reader(wanted, self._last if after is None else after, self._end, group)
            # From here on nothing is missed: with this place a client can resume.
            yield [Heartbeat(reader.last)]
            is_behind = after is not None
            while not self._is_closed:
                if is_behind:
                    # Not bound to a name, so that events are freed while the reader waits.
                    yield await self._replayed(reader, caller)
                    is_behind = reader.is_behind
                else:
                    yield await self._next_events(reader)
            # The place to resume at, in another process of this node or after a restart.
            yield [Heartbeat(reader.last)]
        finally:
            self._readers_count -= 1
            if place is not None:
                self._places.discard(place)
            if not self._readers_count:
                self._stop()

    async def _replayed(self, reader: _Reader, caller: str) -> list[LiveEvent]:
        """The next stored messages, up to the place where the buffer takes over."""
        with await self._sharing.turns[Turns.READS].take(caller, 1):
            # Taken before the read: later commits come in the buffer.
            reader.number = self._end
            page = await self._store.channels.feed(reader.last.number, REPLAY_PAGE, PART_BYTES)
            is_same = await self._store.arrivals.holds(reader.last)
        if not is_same:
            skip = Skip(reader.last)
            reader.is_behind, reader.last = False, self._last
            return [skip]
        reader.is_behind = page.next is not None
        reader.last = page.last or reader.last
        return [
            LiveMessage(item, item.channel_id, _bytes_of(item))
            for item in page.in_order
            if reader.wanted(item.channel_id)
        ]

    async def _next_events(self, reader: _Reader) -> list[LiveEvent]:
        while not self._is_closed:
            changed = self._changed[reader.group]
            if reader.number < self._first_number:
                skip = Skip(reader.last)
                reader.number, reader.last = self._end, self._last
                return [skip]
            if events := self._buffered(reader):
                return events
            try:
                async with asyncio.timeout(self._limits.live_heartbeat_s):
                    await changed.wait()
            except TimeoutError:
                return [Heartbeat(reader.last)]
        return []

    def _buffered(self, reader: _Reader) -> list[LiveEvent]:
        events: list[LiveEvent] = []
        bytes_count = 0
        while reader.number < self._end and bytes_count < PART_BYTES:
            message = self._buffer[reader.number - self._first_number]
            reader.number += 1
            if reader.takes(message):
                events.append(message)
                bytes_count += message.bytes_count
        return events

    @property
    def _end(self) -> int:
        return self._first_number + len(self._buffer)

    def _append(
        self, item: Entry | Relayed | LeftOut | Notice, channel_id: str, bytes_count: int
    ) -> None:
        self._buffer.append(LiveMessage(item, channel_id, bytes_count))
        self._buffer_bytes += bytes_count
        while (
            len(self._buffer) > self._limits.live_queue_items_max
            or self._buffer_bytes > self._limits.live_queue_bytes_max
        ):
            self._buffer_bytes -= self._buffer.popleft().bytes_count
            self._first_number += 1

    async def forget(self, digests: Sequence[bytes], *, tells: bool = True) -> None:
        """Replace retired messages that wait for readers by what was left of them, and tell the readers."""
        waiting = {each.item.digest for each in self._buffer if isinstance(each.item, Entry)}
        if not tells and waiting.isdisjoint(digests):
            return
        gone = {each.digest: each for each in await self._store.frames.left_out(digests)}
        for number, message in enumerate(self._buffer):
            if isinstance(message.item, Entry) and message.item.digest in gone:
                item = gone[message.item.digest]
                self._buffer[number] = LiveMessage(item, message.channel_id, message.bytes_count)
        for each in gone.values() if tells else ():
            self.tell(Notice("retired", each.channel_id, each.message_id, each.digest))

    def _announce(self, group: int = 0) -> None:
        """Wake the readers, one group in each turn of the event loop: requests are served in between."""
        changed, self._changed[group] = self._changed[group], asyncio.Event()
        changed.set()
        if group + 1 < READER_GROUPS:
            asyncio.get_running_loop().call_soon(self._announce, group + 1)

    async def _start(self) -> None:
        async with self._starting:
            if self._follower is None:
                self._last = (await self._store.arrivals.arrived()).entries
                self._follower = self._supervisor.keep("live", self._follow_store)

    def _stop(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None
            self._first_number = self._end
            self._buffer.clear()
            self._buffer_bytes = 0

    async def _follow_store(self) -> None:
        while True:
            self.committed.clear()
            if not await self._read_feed():
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self.committed.wait()

    async def _read_feed(self) -> bool:
        page = await self._store.channels.feed(
            self._last.number, FEED_PAGE, self._limits.reply_bytes_max
        )
        # Checked after the read, so that the check covers the entries read.
        if not await self._store.arrivals.holds(self._last):
            await self._begin_again()
            return False
        superseding = await self._superseding(page.entries)
        for item in page.in_order:
            self._append(item, item.channel_id, _bytes_of(item))
            if item.digest in superseding:
                notice = Notice("superseded", item.channel_id, item.message_id, item.digest)
                self._append(notice, item.channel_id, LEFT_OUT_BYTES)
        self._last = page.last or self._last
        if page.last is not None:
            self._announce()
            # Let readers run before the buffer drops messages.
            await asyncio.sleep(0)
        return page.next is not None

    async def _superseding(self, entries: Sequence[Entry]) -> set[bytes]:
        """Those that the store serves now under an ID that had another message before."""
        found = set()
        metas = await self._store.entries.meta_of(entries)
        for entry, meta in zip(entries, metas, strict=True):
            if meta.variants:
                with suppress(Problem):  # the content of the one that is served is gone
                    served = await self._store.entries.find(entry.message_id, entry.channel_id)
                    if served is not None and served.entry.digest == entry.digest:
                        found.add(entry.digest)
        return found

    async def _begin_again(self) -> None:
        """The database was rolled back: give every reader a gap that ends at the present."""
        self._last = (await self._store.arrivals.arrived()).entries
        _log.warning("the database was rolled back to an older copy: live readers get a gap")
        self._first_number = self._end + 1
        self._buffer.clear()
        self._buffer_bytes = 0
        self._announce()


def _bytes_of(item: Entry | LeftOut) -> int:
    return len(item.frame) if isinstance(item, Entry) else LEFT_OUT_BYTES


@dataclass(slots=True)
class _Reader:
    """A reader's state: its next number in the buffer, and the place of the last entry it saw."""

    wanted: Wanted
    last: Token
    number: int
    group: int
    is_behind: bool = True

    def takes(self, message: LiveMessage) -> bool:
        if isinstance(message.item, Entry | LeftOut):
            if message.item.seq <= self.last.number:
                return False
            self.last = message.item.place
        return self.wanted(message.channel_id)
