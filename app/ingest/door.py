"""The one door: checks, writes and announces every message from every source."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.entries import Claim, MetId, NewEntry, Outcome, OutcomeKind
from app.errors import Code, Problem
from app.ingest.committer import GroupCommitter, Listener, Written
from app.ingest.policy import Judge, Way
from app.ingest.prepare import Publication, Relayed, prepare, published_claim
from app.server.limits import MIB, Limits
from app.store.store import Store
from sdstore.sds.model import Kind

# ---- the disk watermark

LOOK_S = 0.2
"""From one look at the disk to the next, at most: a call of `statvfs`, some 2 microseconds."""

GROWTH = 4
"""Bytes on disk for a byte of a frame, at most: the row, its indexes, and both in the write-ahead log."""

MARGIN = 1 / 16
"""Part of the watermark that must be free on top before messages are taken again."""

_log = logging.getLogger(__name__)


class DiskWatermark(Collector):
    """Whether the disk of a folder has `free_bytes_min` bytes left; 0 switches it off."""

    def __init__(self, folder: Path, free_bytes_min: int) -> None:
        self.folder = folder
        self.free_bytes: int | None = None
        self._free_bytes_min = free_bytes_min
        self._is_low = False
        self._looked_s = float("-inf")
        self._taken_bytes = 0

    @property
    def is_low(self) -> bool:
        """Whether messages are refused now."""
        if not self._free_bytes_min:
            return False
        room = (self.free_bytes or 0) - self._free_bytes_min
        if time.monotonic() - self._looked_s > LOOK_S or self._taken_bytes * GROWTH > room:
            self.look()
        return self._is_low

    def look(self) -> None:
        """Look at the disk, and log a change."""
        self._looked_s = time.monotonic()
        self._taken_bytes = 0
        try:
            disk = os.statvfs(self.folder)
        except OSError:
            return  # the write itself reports what is wrong
        free = self.free_bytes = disk.f_bavail * disk.f_frsize
        least = self._free_bytes_min
        if not self._is_low and free < least:
            self._is_low = True
            _log.warning("messages are refused: %s", self.reason)
        elif self._is_low and free >= least + least * MARGIN:
            self._is_low = False
            _log.info("messages are taken again: %d MiB free on %s", free // MIB, self.folder)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        self.look()
        free_bytes = self.free_bytes or 0
        yield GaugeMetricFamily("sdstore_disk_free_bytes", "Bytes free on the disk", free_bytes)
        yield GaugeMetricFamily(
            "sdstore_disk_low",
            "1 while the node takes no messages because the disk is nearly full",
            self.is_low,
        )

    @property
    def reason(self) -> str:
        """Why messages are refused."""
        free, least = (self.free_bytes or 0) / MIB, self._free_bytes_min / MIB
        return (
            f"{self.folder} has {free:.1f} MiB free; messages are refused below {least:.1f} "
            f"(disk_free_min_bytes), and taken again from {least * (1 + MARGIN):.1f}"
        )

    def check(self, frames_bytes: int = 0) -> None:
        """Raise `disk_full` below the watermark; `frames_bytes` are to be written otherwise."""
        self._taken_bytes += frames_bytes
        if self.is_low:
            raise Problem(Code.DISK_FULL, self.reason)


# ---- the door

RelayListener = Callable[[Relayed], None]
Prepared = NewEntry | Relayed | Problem

PREPARED_PER_TURN = 100
"""Messages decoded before other callers of the event loop get their turn: about a millisecond."""

OTHERS_S = 10.0
"""How long after its last message a publisher is expected to publish again."""


class Door:
    """The only way into the store, so every source gets the same refusals with the same codes."""

    def __init__(
        self,
        store: Store,
        committer: GroupCommitter,
        limits: Limits,
        *,
        listeners: Sequence[Listener] = (),
        watermark: DiskWatermark | None = None,
        judge: Judge | None = None,
    ) -> None:
        """`judge` calls the operator's policy, if there is one."""
        self.store = store
        self.judge = judge
        self.watermark = watermark
        self._committer = committer
        self._limits = limits
        self._published_s = float("-inf")
        self.relay_listeners: list[RelayListener] = []
        committer.listeners.extend(listeners)

    async def publish(self, item: Publication, who: str = "") -> Outcome:
        """The outcome of one message of a caller, once it is on disk. Raises `Problem`."""
        self._published_s = time.monotonic()
        prepared: Prepared = prepare(item, self._limits)
        if self.judge is not None:
            [prepared] = await self.judged([prepared], Way.HTTP, who)
        if isinstance(prepared, Problem):
            raise prepared
        if isinstance(prepared, NewEntry):
            self._check_disk([prepared])
            (written,) = await self._committer.submit([prepared])
            outcome = _stored(prepared, written)
        else:
            met = _met(prepared)
            if met:
                await self._committer.submit([], met)
            outcome = self._relay(prepared)
        if isinstance(outcome, Problem):
            raise outcome
        return outcome

    async def publish_many(
        self,
        items: Sequence[Publication],
        on_prepared: Callable[[], None] | None = None,
        who: str = "",
    ) -> list[Outcome | Problem]:
        """One outcome for each item, in order; a bad item does not spoil the rest.

        `on_prepared` is called once only the disk remains to wait for.
        """
        prepared = await self.prepare_many(items)
        if on_prepared is not None:
            on_prepared()
        return await self.publish_prepared(prepared, who=who)

    async def prepare_many(self, items: Sequence[Publication]) -> list[Prepared]:
        """Decode and check messages; the refusal of a bad one takes its place."""
        prepared: list[Prepared] = []
        for number, item in enumerate(items, 1):
            try:
                prepared.append(prepare(item, self._limits))
            except Problem as problem:
                prepared.append(problem.detached())
            if number % PREPARED_PER_TURN == 0:
                await asyncio.sleep(0)
        return prepared

    async def publish_prepared(
        self, prepared: Sequence[Prepared], source: str = "", way: Way = Way.BATCH, who: str = ""
    ) -> list[Outcome | Problem]:
        """Write or relay the messages that `prepare_many` prepared; one outcome for each, in order.

        `source`: the peer that they came from, for listeners (`Committed`); `way`: how they came, for the
        policy; `who`: the caller or peer, for the memory of what is refused. Raises Problem: `overloaded` if too many messages wait for the policy.
        """
        if way is not Way.SYNC:
            self._published_s = time.monotonic()
        return await self._write(await self.judged(prepared, way, who), source)

    async def judged(
        self, prepared: Sequence[Prepared], way: Way, who: str = ""
    ) -> Sequence[Prepared]:
        """The messages with the policy's refusals in place of those that it does not accept.

        Raises Problem: `overloaded` if too many messages wait for the policy.
        """
        if self.judge is None:
            return prepared
        return await self.judge.judge(prepared, way, self.store.entries.outlines, who)

    async def release(self, entry: NewEntry) -> Outcome:
        """Write a message that an operator released: the policy does not see it again. Raises Problem."""
        [outcome] = await self._write([entry], "")
        if isinstance(outcome, Problem):
            raise outcome.detached()
        return outcome

    async def _write(self, prepared: Sequence[Prepared], source: str) -> list[Outcome | Problem]:
        entries = [each for each in prepared if isinstance(each, NewEntry)]
        met = [
            each for relayed in prepared if isinstance(relayed, Relayed) for each in _met(relayed)
        ]
        try:
            if entries:
                self._check_disk(entries)
            written = (
                await self._committer.submit(entries, met, source=source) if entries or met else []
            )
        except Problem as problem:
            return [each if isinstance(each, Problem) else problem for each in prepared]
        results = iter(written)
        return [
            _stored(each, next(results))
            if isinstance(each, NewEntry)
            else self._relay(each)
            if isinstance(each, Relayed)
            else each
            for each in prepared
        ]

    async def publish_claims(self, claims: Sequence[tuple[bytes, bytes]]) -> list[Problem | None]:
        """Write hints on known entries, (digest, hint) each; returns the refusal of each, or None.

        Reads no frame. An entry with the most claims it can have keeps them, and the new one is not refused.
        """
        faults: list[Problem | None] = []
        wanted: list[tuple[bytes, Claim]] = []
        for digest, hint in claims:
            try:
                wanted.append((digest, published_claim(hint, self._limits)))
                faults.append(None)
            except Problem as problem:
                faults.append(problem.detached())
        try:
            if wanted:
                self._check_disk()
                written = self._committer.call(lambda: self.store.writer.write_claims(wanted))
                if await written:
                    self._committer.tell([])
        except Problem as problem:
            return [fault or problem for fault in faults]
        return faults

    async def remember_met(self, relayed: Sequence[Relayed]) -> None:
        """Remember the IDs of sync messages that another store relays. Raises `Problem`."""
        met = [met_id for each in relayed for met_id in _met(each)]
        if met:
            await self._committer.submit([], met)

    @property
    def is_busy_with_others(self) -> bool:
        """Whether others than own syncs published in the last `OTHERS_S`, through this process."""
        return time.monotonic() - self._published_s < OTHERS_S

    @property
    def is_disk_low(self) -> bool:
        """Whether messages are refused to keep some of the disk free."""
        return self.watermark is not None and self.watermark.is_low

    def _check_disk(self, entries: Sequence[NewEntry] = ()) -> None:
        """Raise `disk_full` below the watermark."""
        if self.watermark is not None:
            self.watermark.check(sum(len(each.frame) for each in entries))

    def _relay(self, relayed: Relayed) -> Outcome:
        for listener in self.relay_listeners:
            listener(relayed)
        message = relayed.message
        return Outcome(OutcomeKind.RELAYED, message.message_id, message.channel_id)


@asynccontextmanager
async def open_door(url: str, limits: Limits) -> AsyncIterator[Door]:
    """The door of a store whose node does not run; creates the store if there is none.

    Raises the `StoreError`s of `app.store.database`, such as `StoreBusyError` if a process writes to it.
    """
    store = await Store.open(url, limits)
    try:
        committer = GroupCommitter(store, limits)
        await committer.start()
        try:
            yield Door(store, committer, limits)
        finally:
            await committer.close()
    finally:
        await store.close()


def _met(relayed: Relayed) -> list[MetId]:
    """The ID of a sync message, which version 1 participants name in later histories, and what it names."""
    message = relayed.message
    if message.kind is not Kind.SYNC:
        return []
    named = tuple(entry.message_id for entry in message.causal_history)
    return [MetId(message.channel_id, message.message_id, named)]


def _stored(entry: NewEntry, written: Written) -> Outcome | Problem:
    if isinstance(written, Problem):
        return written
    is_stored = written.is_new or written.is_mended
    kind = OutcomeKind.STORED if is_stored else OutcomeKind.DUPLICATE
    message = entry.message
    dropped = written.hints_dropped
    return Outcome(kind, message.message_id, message.channel_id, entry.digest, dropped)
