"""Relayed messages between stores, and news of commits.

Relayed messages are sync and ephemeral ones, which are never stored. A store passes each of
them on once: to the live readers of every worker, and to the stores that it is connected to, except the one
that it came from. It remembers the hashes of what it has passed on, so a message that comes back on another
path, as in a triangle of stores, ends there. A memory can be too small for a ring of busy stores, or new after a
restart, and then a ring would pass on the same messages for ever. So a message also says by which stores it
came: none of them takes it again.

Everything that waits for peers is in one bounded queue that all of them share. Each peer has a place in
it and no queue of its own: a peer that does not read costs nothing, and misses what the queue drops.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from app.access.callers import Caller, Scope
from app.entries import Outcome, OutcomeKind
from app.errors import Code, Problem
from app.ingest.door import Committed, Door
from app.ingest.policy import Way
from app.ingest.prepare import Publication, Relayed
from app.live.hub import LiveHub, Wanted
from app.server.limits import Limits
from recon.agreement import Interest
from sdstore.sds.codec import decode
from sdstore.sds.model import MessageError, frame_hash

if TYPE_CHECKING:  # an extra
    from app.live.notifybus import NotifyBus


class Presence(NamedTuple):
    """A process that is there, and is about to stop if `is_leaving`.

    `settings_peers`: the IDs of the peers of its settings. `reads`: the instance IDs of the stores whose
    streams it reads.
    """

    process: str
    settings_peers: Sequence[str]
    reads: Sequence[str]
    is_leaving: bool = False


PART_BYTES = 64 * 1024
"""Bytes of frames given to a reader at once, unless one message alone has more."""

TAG_BYTES = 4
"""Of an instance ID, in the path of a message. Two stores in one path have equal tags in one of 10^7 rings of
thirty; then the message does not pass the second one."""

STORES_PASSED_MAX = 64
"""A message that this many stores passed on goes to no further one: 256 bytes. Sixteen hops reach 10,000
stores with four peers each."""

CHANNELS_NAMED_MAX = 64
"""Channels of a commit that are compared with what a reader may read; more wake every reader."""


@dataclass(slots=True)
class Passing:
    """A relayed message in the queue. `origin` is the instance ID of the store it came from; empty if
    it was published here. `via` has the tags of all stores that passed it on, this one included.
    `rendered` caches the event, which streams share."""

    relayed: Relayed
    origin: str
    via: bytes
    at_s: float
    rendered: bytes = b""


@dataclass(slots=True)
class RelayCounters:
    """Relayed messages since the process started, by what became of them, and nudges."""

    passed: int = 0
    duplicate: int = 0
    refused: int = 0
    dropped: int = 0
    nudges_sent: int = 0
    nudges_received: int = 0


def tag_of(instance_id: str) -> bytes:
    """What names a store in the path of a message; nothing for a text that is not an instance ID."""
    try:
        return bytes.fromhex(instance_id)[:TAG_BYTES]
    except ValueError:
        return b""


def tags_in(via: bytes) -> set[bytes]:
    """The tags of the stores in a path."""
    return {via[at : at + TAG_BYTES] for at in range(0, len(via), TAG_BYTES)}


def _bounded(via: bytes) -> bytes:
    """A path as another store gives it: whole tags, and not too many."""
    return via[: min(len(via) // TAG_BYTES, STORES_PASSED_MAX) * TAG_BYTES]


class Seen:
    """Hashes of recent frames: at most so many, and none older than so many seconds."""

    def __init__(self, items_max: int, age_s_max: float) -> None:
        self._items_max = items_max
        self._age_s_max = age_s_max
        self._seen_at_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, frame_hash: bytes) -> bool:
        return frame_hash in self._seen_at_s

    def add(self, frame_hash: bytes, now_s: float) -> bool:
        """Remember a hash; whether it is new."""
        seen = self._seen_at_s
        while seen and next(iter(seen.values())) < now_s - self._age_s_max:
            seen.popitem(last=False)
        if frame_hash in seen:
            return False
        seen[frame_hash] = now_s
        if len(seen) > self._items_max:
            seen.popitem(last=False)
        return True


class Relay:
    """See the module. One per process; `bus` connects those of one PostgreSQL database."""

    def __init__(
        self,
        door: Door,
        live: LiveHub,
        limits: Limits,
        interest: Callable[[], Interest],
        instance_id: str,
    ) -> None:
        self._tag = tag_of(instance_id)
        self.counters = RelayCounters()
        self.bus: NotifyBus | None = None
        self.news_listeners: set[Callable[[Collection[str] | None, str], None]] = set()
        """Called when any process has committed messages, as `on_notified_commit`."""
        self.presence_listeners: list[Callable[[Presence], None]] = []
        """Called when another process announces itself."""
        self.changed = asyncio.Event()
        """Replaced by a new event, and set, whenever a reader may have something to do."""
        self.is_closed = False
        self._door = door
        self._live = live
        self._limits = limits
        self._interest = interest
        self._seen = Seen(limits.relay_seen_max, limits.relay_seen_s)
        self._queue: deque[Passing] = deque()
        self._queue_bytes = 0
        self._first_number = 0
        self._readers: WeakSet[RelayReader] = WeakSet()
        door.relay_listeners.append(self.on_published)

    def on_published(self, relayed: Relayed) -> None:
        """Pass on what a participant published here. A listener of ingest."""
        self._pass_on(relayed, "")

    async def take(
        self,
        frames: Sequence[bytes],
        origin: str,
        caller: Caller | None = None,
        paths: Sequence[bytes] = (),
    ) -> list[Outcome | Problem]:
        """Pass on what another store relays to this one; one outcome for each frame, in order.

        `origin` is the instance ID of that store; `paths`: the `via` of each frame, or nothing. Content
        messages are refused (`not_relayed`), and so are channels outside of this store's interest; with a
        `caller`, also those that it may not publish in.
        """
        prepared = await self._door.prepare_many([Publication(frame) for frame in frames])
        taken = [self._checked(each, caller) for each in prepared]
        fresh_at = [at for at, each in enumerate(taken) if self._is_fresh(each)]
        judged = await self._door.judged([taken[at] for at in fresh_at], Way.RELAY, caller, origin)
        fresh: list[Relayed] = []
        for at, each in zip(fresh_at, judged, strict=True):
            if isinstance(each, Relayed):
                fresh.append(each)
            elif isinstance(each, Problem):
                taken[at] = each
        try:
            await self._door.remember_met(fresh)
        except Problem as problem:
            return [each if isinstance(each, Problem) else problem for each in taken]
        outcomes: list[Outcome | Problem] = []
        for checked, via in zip(taken, paths or [b""] * len(taken), strict=True):
            if isinstance(checked, Problem):
                self.counters.refused += 1
                outcomes.append(checked)
                continue
            is_new = self._pass_on(checked, origin, _bounded(via))
            kind = OutcomeKind.RELAYED if is_new else OutcomeKind.DUPLICATE
            message = checked.message
            outcomes.append(Outcome(kind, message.message_id, message.channel_id))
        return outcomes

    def _is_fresh(self, checked: Relayed | Problem) -> bool:
        return isinstance(checked, Relayed) and frame_hash(checked.frame) not in self._seen

    def _checked(self, prepared: object, caller: Caller | None) -> Relayed | Problem:
        if isinstance(prepared, Problem):
            return prepared
        if not isinstance(prepared, Relayed):
            return Problem(
                Code.NOT_RELAYED, "a content message is published or synced, never relayed"
            )
        channel_id = prepared.message.channel_id
        if caller is not None:
            try:
                caller.require(Scope.PUBLISH, channel_id)
            except Problem as problem:
                return problem.detached()
        if not self._interest().matches(channel_id):
            return Problem(Code.NOT_RELAYED, "this store's interest does not cover the channel")
        return prepared

    def _pass_on(
        self, relayed: Relayed, origin: str, via: bytes = b"", *, is_on_bus: bool = False
    ) -> bool:
        """Whether the message is new here."""
        now_s = time.monotonic()
        # Another worker of this host names it as well.
        has_passed = self._tag in tags_in(via) and not is_on_bus
        if has_passed or not self._seen.add(frame_hash(relayed.frame), now_s):
            self.counters.duplicate += 1
            return False
        self.counters.passed += 1
        self._live.on_relayed(relayed)
        via = via if self._tag in tags_in(via) else via + self._tag
        if self.bus is not None and not is_on_bus:
            self.bus.send_frame(relayed.frame, origin, via)
        if len(via) > STORES_PASSED_MAX * TAG_BYTES:
            self.counters.dropped += 1
        elif self._readers and self._interest().matches(relayed.message.channel_id):
            self._append(Passing(relayed, origin, via, now_s))
            self._announce()
        return True

    def _append(self, passing: Passing) -> None:
        self._queue.append(passing)
        self._queue_bytes += len(passing.relayed.frame)
        oldest_s = passing.at_s - self._limits.relay_age_s
        while (
            len(self._queue) > self._limits.relay_queue_items_max
            or self._queue_bytes > self._limits.relay_queue_bytes_max
            or self._queue[0].at_s < oldest_s
        ):
            self._queue_bytes -= len(self._queue.popleft().relayed.frame)
            self._first_number += 1

    # ---- news

    def on_committed(self, committed: Sequence[Committed]) -> None:
        """Tell everyone here, and the other workers. The listener of ingest.

        What a store has pushed is not news for that store. Of several sources, each lacks what the others
        brought.
        """
        channels = {each.entry.message.channel_id for each in committed}
        sources = {each.source for each in committed}
        named = channels if 0 < len(channels) <= CHANNELS_NAMED_MAX else None
        source = sources.pop() if len(sources) == 1 else ""
        self.on_notified_commit(named, source)
        if self.bus is not None:
            self.bus.send_commit(named, source)

    def on_interest_changed(self) -> None:
        """This store wants something else: its readers' sessions may have something to move."""
        self._nudge(None)

    def _nudge(self, channels: Collection[str] | None, source: str = "") -> None:
        """Nudge the readers of these channels, but not `source`; None: of any."""
        if not self._readers:
            return
        matches = self._interest().matches
        wanted = None if channels is None else [each for each in channels if matches(each)]
        is_anyone_nudged = False
        for reader in self._readers:
            if reader.is_nudged or (source and source == reader.instance_id):
                continue
            if wanted is None or any(map(reader.wanted, wanted)):
                reader.is_nudged = is_anyone_nudged = True
        if is_anyone_nudged:
            self._announce()

    # ---- from the other workers

    def on_notified_frame(self, frame: bytes, origin: str, via: bytes) -> None:
        """Pass on what another process has taken. Its door has checked it; garbage is ignored."""
        try:
            message, dialect = decode(frame)
        except MessageError:
            self.counters.refused += 1
            return
        self._pass_on(Relayed(frame, message, dialect), origin, via, is_on_bus=True)

    def on_notified_commit(self, channels: Collection[str] | None, source: str) -> None:
        """Messages of these channels were committed; None: of any. `source` as in `app.ingest.door.Committed`, if
        all have the same; otherwise empty."""
        self._live.committed.set()
        self._nudge(channels, source)
        for listener in self.news_listeners:
            listener(channels, source)

    def announce(self, presence: Presence) -> None:
        """Tell the other workers that this one is there."""
        if self.bus is not None:
            self.bus.send_presence(presence)

    def on_notified_presence(self, presence: Presence) -> None:
        """Another process announces itself."""
        for listener in self.presence_listeners:
            listener(presence)

    # ---- readers

    def reader(self, wanted: Wanted, instance_id: str) -> RelayReader:
        """A place at the end of the queue. It ends when no reference to it is left.

        `instance_id`: of the reading store, which gets nothing back that came from it.
        """
        reader = RelayReader(self, wanted, instance_id)
        self._readers.add(reader)
        return reader

    @property
    def end(self) -> int:
        """The number of the next message of the queue."""
        return self._first_number + len(self._queue)

    def since(self, number: int) -> tuple[int, Iterable[Passing]]:
        """How many messages after `number` the queue has dropped, and those that it holds."""
        dropped = max(0, self._first_number - number)
        start = max(0, number - self._first_number)
        return dropped, (self._queue[each] for each in range(start, len(self._queue)))

    def wake(self) -> None:
        """Make readers look whether they have something to do."""
        self._announce()

    def _announce(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def close(self) -> None:
        """End all readers."""
        self.is_closed = True
        self._announce()


class RelayReader:
    """The place of one peer in the queue, and whether there is news for it."""

    __slots__ = ("__weakref__", "_number", "_relay", "_tag", "instance_id", "is_nudged", "wanted")

    def __init__(self, relay: Relay, wanted: Wanted, instance_id: str) -> None:
        self.wanted = wanted
        self.is_nudged = False
        self._relay = relay
        self.instance_id = instance_id
        self._tag = tag_of(instance_id)
        self._number = relay.end

    def take(self, age_s_max: float, items_max: int) -> list[Passing]:
        """The next messages; those that waited for longer than `age_s_max` are dropped."""
        relay = self._relay
        dropped, waiting = relay.since(self._number)
        relay.counters.dropped += dropped
        self._number += dropped
        taken: list[Passing] = []
        bytes_count = 0
        oldest_s = time.monotonic() - age_s_max
        for each in waiting:
            if len(taken) >= items_max or bytes_count >= PART_BYTES:
                break
            self._number += 1
            if each.origin and each.origin == self.instance_id:
                continue
            if self._tag in tags_in(each.via):
                continue
            if not self.wanted(each.relayed.message.channel_id):
                continue
            if each.at_s < oldest_s:
                relay.counters.dropped += 1
                continue
            taken.append(each)
            bytes_count += len(each.relayed.frame)
        return taken
