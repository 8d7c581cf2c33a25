"""Retention: entries that are beyond the bounds of their channel are retired, the oldest first.

One task of a node looks at all channels once a minute, and at once when the rules change. It looks again only at
channels where something arrived, or where an entry came of age. Only arrival counts, by this node's clock; Lamport
timestamps of senders play no part. It retires through `app.ingest.retirement`, a few entries in each transaction,
and keeps no place: after a kill it goes on with what still has content.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from app.ingest.retirement import Retirement
from app.server.limits import Limits
from app.server.logs import audit_change, printable
from app.server.settings import RetentionRule
from app.store.retained import Bounds, ChannelCount, Cut, Retained
from app.store.store import Store

ENTRIES_PER_STEP = 200
"""Retired in one transaction, some 15 ms of the writer; then it rests for as long, for messages that wait."""

ENTRIES_PER_TURN = 10_000
"""Retired of one channel before the next has its turn: one line of the audit log, one erasure."""

CHANNELS_PER_READ = 1_000
CHANNELS_REMEMBERED_MAX = 65_536
"""Channels of which the node remembers what it found; it looks again at others each time."""

DRY_RUN_S = 2.0
"""How long one call of `would_retire` looks for more."""

_log = logging.getLogger(__name__)


class Looked(NamedTuple):
    """What was found of a channel: its entries then, the floor, and when its oldest entry comes of age."""

    entries_count: int
    floor: int
    due_ms: float


class WouldRetire(NamedTuple):
    """What a rule would retire of a channel now: counts, and the first and last arrival."""

    rule: int
    channel_id: str
    bound: str
    entries: int
    bytes: int
    oldest_ms: int
    newest_ms: int


def rule_of(rules: Sequence[RetentionRule], channel_id: str) -> int | None:
    """The place of the first rule that covers a channel and bounds it; None: everything is kept."""
    for place, rule in enumerate(rules):
        if rule.covers(channel_id):
            return None if rule.keeps_all else place
    return None


class Retention(Collector):
    """See the module. `now_ms`: this node's clock."""

    def __init__(
        self,
        store: Store,
        retirement: Retirement,
        limits: Limits,
        now_ms: Callable[[], int],
    ) -> None:
        self.rules: Sequence[RetentionRule] = ()
        self._store = store
        self._retirement = retirement
        self._limits = limits
        self._now_ms = now_ms
        self._looked: dict[int, Looked] = {}
        self._changed = asyncio.Event()
        self._entries_count = self._bytes_count = 0

    def configure(self, rules: Sequence[RetentionRule]) -> None:
        """Take other rules, and look at every channel again."""
        if self.rules != rules:
            self.rules = rules
            self._looked.clear()
            self._changed.set()

    async def run(self) -> None:
        """Retire what is beyond the bounds, for as long as the node runs."""
        while True:
            self._changed.clear()
            if await self._retire_once():
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.retention_interval_s):
                    await self._changed.wait()

    async def would_retire(
        self, rules: Sequence[RetentionRule], after: int
    ) -> tuple[list[WouldRetire], int | None]:
        """What rules would retire now, and the channel number to go on after; None at the end."""
        found: list[WouldRetire] = []
        until_s = time.monotonic() + DRY_RUN_S
        channels = await self._store.retained.channels_after(after, CHANNELS_PER_READ)
        for channel in channels:
            place = rule_of(rules, channel.channel_id)
            if place is not None:
                cut = await self._cut(channel, rules[place], 0)
                if cut.seq:
                    found.append(await self._sum(place, channel, cut))
            if time.monotonic() > until_s:
                return found, channel.channel_no
        return found, channels[-1].channel_no if len(channels) == CHANNELS_PER_READ else None

    async def _sum(self, place: int, channel: ChannelCount, cut: Cut) -> WouldRetire:
        count = size = floor = newest_ms = 0
        oldest_ms = 2**63
        while rows := await self._oldest(channel, floor, cut, ENTRIES_PER_TURN):
            floor = rows[-1].seq
            count, size = count + len(rows), size + sum(each.frame_bytes for each in rows)
            oldest_ms = min(oldest_ms, *[each.received_at_ms for each in rows])
            newest_ms = max(newest_ms, *[each.received_at_ms for each in rows])
        return WouldRetire(place, channel.channel_id, cut.bound, count, size, oldest_ms, newest_ms)

    async def _retire_once(self) -> bool:
        """One look at all channels; whether more is to be retired at once."""
        if not any(not rule.keeps_all for rule in self.rules):
            return False
        rules, after, more = self.rules, 0, False
        while channels := await self._store.retained.channels_after(after, CHANNELS_PER_READ):
            after = channels[-1].channel_no
            for channel in channels:
                place = rule_of(rules, channel.channel_id)
                if place is not None and self._is_due(channel):
                    more |= await self._retire_turn(channel, rules[place])
                if self._changed.is_set():
                    return True
            await asyncio.sleep(0)
        return more

    def _is_due(self, channel: ChannelCount) -> bool:
        looked = self._looked.get(channel.channel_no)
        return (
            looked is None
            or looked.entries_count != channel.entries_count
            or looked.due_ms <= self._now_ms()
        )

    async def _retire_turn(self, channel: ChannelCount, rule: RetentionRule) -> bool:
        """Retire the oldest entries of a channel; whether more are to be retired."""
        looked = self._looked.pop(channel.channel_no, Looked(0, 0, 0))
        cut, floor = await self._cut(channel, rule, looked.floor), looked.floor
        rows: list[Retained] = []
        count = size = 0
        while count < ENTRIES_PER_TURN and (
            rows := await self._oldest(channel, floor, cut, ENTRIES_PER_STEP)
        ):
            began_s = time.monotonic()
            # Readers are not told: what a store keeps is its own affair, and so many events displace messages.
            digests = [each.digest for each in rows]
            reason = f"retention: {cut.bound}"
            await self._retirement.retire_step(digests, reason, tells=False)
            floor = rows[-1].seq
            count, size = count + len(rows), size + sum(each.frame_bytes for each in rows)
            self._entries_count += len(rows)
            self._bytes_count += sum(each.frame_bytes for each in rows)
            if self._changed.is_set():
                break
            await asyncio.sleep(time.monotonic() - began_s)
        if count:
            name = printable(channel.channel_id)
            audit_change(
                "retention",
                f"retired {count} messages of channel {name!r} ({cut.bound}, {size} bytes)",
                who="retention",
            )
            await self._retirement.erase()
        if rows:
            self._remember(channel, Looked(-1, floor, 0))
            return True
        due_ms = float("inf")
        if cut.due_ms is not None and rule.max_age_s is not None:
            due_ms = cut.due_ms + 1_000 * rule.max_age_s
        self._remember(channel, Looked(channel.entries_count, max(floor, cut.seq), due_ms))
        return False

    def _remember(self, channel: ChannelCount, looked: Looked) -> None:
        if len(self._looked) >= CHANNELS_REMEMBERED_MAX:
            self._looked.clear()
        self._looked[channel.channel_no] = looked

    async def _cut(self, channel: ChannelCount, rule: RetentionRule, floor: int) -> Cut:
        now_ms = self._now_ms()
        cutoff_ms = None if rule.max_age_s is None else now_ms - int(1_000 * rule.max_age_s)
        bounds = Bounds(cutoff_ms, rule.max_count, rule.max_bytes)
        return await self._store.retained.cut(channel.channel_no, floor, bounds, now_ms)

    async def _oldest(
        self, channel: ChannelCount, floor: int, cut: Cut, limit: int
    ) -> list[Retained]:
        return await self._store.retained.oldest(channel.channel_no, floor, cut.seq, limit)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        yield CounterMetricFamily(
            "sdstore_retention_entries", "Messages retired by retention", self._entries_count
        )
        yield CounterMetricFamily(
            "sdstore_retention_bytes", "Bytes of frames retired by retention", self._bytes_count
        )
