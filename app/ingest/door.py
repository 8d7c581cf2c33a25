"""The one door: checks, writes and announces every message from every source.

**Group commit.** One thread writes all messages that arrived during its last commit. No message waits for a
group to fill: a single publisher commits at once, and messages that arrive during that commit share the next
one. Callers rely on these rules:

- An answer comes after the commit of its message. The answer to a duplicate comes after the commit of the first
  copy, because the same group writes both, or a later one.
- A group that fails is retried job by job and, within a job, row by row, so that a bad row fails alone. If
  the disk is full or the database is away, every message of the group fails and is not retried.
- Listeners run on the event loop after the commit and before the answers."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.access.callers import Binding, Caller, channels_of
from app.entries import Claim, MetId, NewEntry, Outcome, OutcomeKind, WriteResult
from app.errors import Code, Problem
from app.ingest.policy import Judge, Way
from app.ingest.prepare import Publication, Relayed, prepare, published_claim
from app.server.limits import MIB, Limits
from app.store.entryrows import Rechecked
from app.store.integrity import is_damage
from app.store.store import Store
from recon.agreement import Interest
from sdstore.sds.model import Kind

# ---- group commit


class Committed(NamedTuple):
    """An entry that is new or has new claims, after its commit.

    `source`: the peer whose session brought it, if this node started that session; the instance ID of
    the store that did, if it gave one; else empty.
    """

    entry: NewEntry
    result: WriteResult
    source: str = ""


Listener = Callable[[Sequence[Committed]], None]
"""Called with the entries of a commit; with none if it added only claims on known entries."""

Written = WriteResult | Problem
T = TypeVar("T")
Answer = list[Written] | Problem
"""The answer to a job: a result for each entry, the result of a recheck, or the fault that its whole
group shares."""

RETRY_AFTER_S = 1
"""Retry-After of an overloaded writer, in seconds; it empties a full queue in about two."""

TRY_AGAIN_S = 1.0
"""Seconds between two attempts to write after a fault, while the node is idle."""

_log = logging.getLogger(__name__)
_SHARED_FAULTS = frozenset({Code.DISK_FULL, Code.STORE_UNAVAILABLE})


@dataclass(slots=True)
class Counters:
    """Totals since the writer started, and the current queue."""

    groups: int = 0
    entries: int = 0
    bytes: int = 0
    largest_group: int = 0
    failed_groups: int = 0
    mended_entries: int = 0
    queue_items: int = 0
    queue_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """Entries to write for one caller, or a function to call on the writer's thread, and its future."""

    entries: Sequence[NewEntry]
    met: Sequence[MetId]
    call: Callable[[], Any] | None
    future: asyncio.Future[Any]
    bytes: int
    source: str = ""

    @property
    def items(self) -> int:
        return len(self.entries) + len(self.met) + (self.call is not None)

    @property
    def references(self) -> int:
        return sum(len(entry.message.causal_history) for entry in self.entries)


class GroupCommitter:
    """The only user of the store's writing side. Belongs to the event loop that starts it.

    `fault` is why the last group could not be written; None after a success. `damage` is the first
    fault caused by a damaged database. It stays, because later groups may touch only intact pages.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self.counters = Counters()
        self.listeners: list[Listener] = []
        self.fault: Problem | None = None
        self.damage: Problem | None = None
        self._store = store
        self._limits = limits
        self._waiting: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Types of errors that were logged since the last successful write.
        self._told: set[type[Exception]] = set()

    async def start(self) -> None:
        """Become the store's writer; `StoreBusyError` if another process is the writer."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._store.begin_writing)
        self._thread = threading.Thread(
            target=self._run, args=(self._loop,), name="sdstore-writer", daemon=True
        )
        self._thread.start()
        self._store.frames.recheck = self.recheck

    async def close(self) -> None:
        """Write the waiting jobs, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def submit(
        self,
        entries: Sequence[NewEntry],
        met: Sequence[MetId] = (),
        source: str = "",
    ) -> list[Written]:
        """One result for each entry, in order, once it is on disk. `source`: see `Committed`.

        Raises `Problem`: OVERLOADED if the queue has no room for all entries, DISK_FULL and
        STORE_UNAVAILABLE if the whole group could not be written.
        """
        size = sum(len(entry.frame) for entry in entries)
        written: list[Written] = await self._done(
            _Job(entries, met, None, self._new_future(), size, source)
        )
        return written

    async def recheck(self, seqs: Sequence[int]) -> Rechecked:
        """Make the writer read frames again, and mark or unmark each as lost. Raises as `submit`."""
        rechecked: Rechecked = await self.call(lambda: self._store.writer.recheck(seqs))
        return rechecked

    async def call(self, do: Callable[[], T]) -> T:
        """The result of a function that the writer's thread calls in queue order.

        Raises as `submit`, and INTERNAL_ERROR for any other error of the function.
        """
        done: T = await self._done(_Job((), (), do, self._new_future(), 0))
        return done

    def _new_future(self) -> asyncio.Future[Any]:
        if self._loop is None or self._closing:
            raise Problem(Code.NOT_READY, "the writer is not running")
        return self._loop.create_future()

    async def _done(self, job: _Job) -> Any:
        self._admit(job)
        # A caller that goes away does not cancel its job.
        return await asyncio.shield(job.future)

    def _admit(self, job: _Job) -> None:
        counters, limits = self.counters, self._limits
        with self._wake:
            # Admit a job larger than the queue when the queue is empty, or it could never enter.
            if self._waiting and (
                counters.queue_items + job.items > limits.ingest_queue_items_max
                or counters.queue_bytes + job.bytes > limits.ingest_queue_bytes_max
            ):
                raise Problem(
                    Code.OVERLOADED,
                    f"the ingest queue is full (at most {limits.ingest_queue_items_max:,} messages and "
                    f"{limits.ingest_queue_bytes_max:,} bytes); retry after {RETRY_AFTER_S} s",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            self._waiting.append(job)
            counters.queue_items += job.items
            counters.queue_bytes += job.bytes
            self._wake.notify()

    # ---- the writer's thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while group := self._next_group():
            try:
                self._do(loop, group)
            except Exception:  # noqa: BLE001 - without this thread every caller waits for ever
                _log.exception("the writer failed")
                answers: list[Answer] = [_internal_error() for _ in group]
                loop.call_soon_threadsafe(self._finish, group, answers)

    def _do(self, loop: asyncio.AbstractEventLoop, group: list[_Job]) -> None:
        writing = [job for job in group if job.call is None]
        if writing:
            loop.call_soon_threadsafe(self._finish, writing, self._write_or_retry(writing))
        for job in group:
            if job.call is not None:
                loop.call_soon_threadsafe(self._finish, [job], [self._called(job.call)])

    def _next_group(self) -> list[_Job]:
        """All waiting jobs, up to the bounds of a group; empty once the committer is closing."""
        self._try_while_idle()
        with self._wake:
            while not self._waiting and not self._closing:
                self._wake.wait()
            group: list[_Job] = []
            items = size = references = 0
            while self._waiting:
                job = self._waiting[0]
                references += job.references
                if group and not self._fits(items + job.items, size + job.bytes, references):
                    break
                self._waiting.popleft()
                items, size = items + job.items, size + job.bytes
                group.append(job)
            self.counters.queue_items -= items
            self.counters.queue_bytes -= size
            return group

    def _try_while_idle(self) -> None:
        """After a fault, write empty groups, so that an idle node notices when writing works again."""
        while self.fault is not None:
            with self._wake:
                if self._waiting or self._closing or self._wake.wait(TRY_AGAIN_S):
                    return
            try:
                self._store.writer.write([])
                self.fault = None
                self._told.clear()
            except Problem as problem:
                self._note_fault(problem)
            except Exception as error:  # noqa: BLE001 - such as absent tables, until they are restored
                self.fault = Problem(
                    Code.STORE_UNAVAILABLE, "the database does not contain a store at the moment"
                )
                if type(error) not in self._told:
                    self._told.add(type(error))
                    _log.warning("the database cannot be written", exc_info=error)

    def _note_fault(self, fault: Problem) -> None:
        self.fault = fault.detached()
        if self.damage is None and is_damage(fault):
            self.damage = self.fault

    def _fits(self, items: int, size: int, references: int) -> bool:
        limits = self._limits
        return (
            items <= limits.group_items_max
            and size <= limits.group_bytes_max
            and references <= limits.group_references_max
        )

    def _write_or_retry(self, group: list[_Job]) -> list[Answer]:
        try:
            return self._write(group)
        except Exception as error:  # noqa: BLE001 - whatever it is, every caller gets an answer
            self.counters.failed_groups += 1
            if isinstance(error, Problem) and error.code in _SHARED_FAULTS:
                if self.fault is None:
                    _log.warning("a group could not be written: %s", " ".join(str(error).split()))
                self._note_fault(error)
                # Each caller raises its own copy.
                return [error.detached() for _ in group]
            _log.warning("a group failed, retrying row by row", exc_info=error)
            return [self._write_rows(job) for job in group]

    def _write(self, group: list[_Job]) -> list[Answer]:
        entries = [entry for job in group for entry in job.entries]
        met = [each for job in group for each in job.met]
        written = self._store.writer.write(entries, met)
        results = iter(written)
        self.fault = None
        counters = self.counters
        counters.mended_entries += sum(result.is_mended for result in written)
        counters.groups += 1
        counters.entries += len(entries)
        counters.bytes += sum(job.bytes for job in group)
        counters.largest_group = max(counters.largest_group, len(entries))
        return [[next(results) for _ in job.entries] for job in group]

    def _called(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Problem as problem:
            return problem.detached()
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets an answer
            _log.exception("a call of the writer failed")
            return _internal_error()

    def _write_rows(self, job: _Job) -> Answer:
        """A result for each entry; a fault of the rows beside the entries is one of the whole job."""
        beside = self._attempt((), job.met)
        if isinstance(beside, Problem):
            return beside
        written: list[Written] = []
        for entry in job.entries:
            one = self._attempt((entry,), ())
            written += [one] if isinstance(one, Problem) else one
        return written

    def _attempt(
        self, entries: Sequence[NewEntry], met: Sequence[MetId]
    ) -> Sequence[WriteResult] | Problem:
        try:
            return self._store.writer.write(entries, met)
        except Problem as problem:
            return problem.detached()
        except Exception:  # noqa: BLE001 - the row's fault, of whatever kind
            _log.exception("a row could not be written")
            return Problem(Code.INTERNAL_ERROR, "the row could not be written")

    # ---- back on the event loop

    def _finish(self, group: list[_Job], answers: list[Answer]) -> None:
        committed = [
            Committed(entry, result, job.source)
            for job, answer in zip(group, answers, strict=True)
            if job.call is None and isinstance(answer, list)
            for entry, result in zip(job.entries, answer, strict=True)
            if isinstance(result, WriteResult) and (result.is_new or result.new_claims)
        ]
        if committed:
            self.tell(committed)
        for job, answer in zip(group, answers, strict=True):
            if job.future.done():
                continue
            if isinstance(answer, Problem):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer)

    def tell(self, committed: Sequence[Committed]) -> None:
        """Tell the listeners of a commit."""
        for listener in self.listeners:
            try:
                listener(committed)
            except Exception:  # noqa: BLE001 - the commit is done; its publisher must get the answer
                _log.exception("a listener failed")


def _internal_error() -> Problem:
    return Problem(Code.INTERNAL_ERROR, "the fault is this node's; see its log")


# ---- the disk watermark

LOOK_S = 0.2
"""From one look at the disk to the next, at most: a call of `statvfs`, some 2 microseconds."""

GROWTH = 4
"""Bytes on disk for a byte of a frame, at most: the row, its indexes, and both in the write-ahead log."""

MARGIN = 1 / 16
"""Part of the watermark that must be free on top before messages are taken again."""


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
        watermark: DiskWatermark | None = None,
        judge: Judge | None = None,
    ) -> None:
        """`judge` calls the operator's policy, if there is one."""
        self.store = store
        self.judge = judge
        self._bound: Interest | None = None
        self.watermark = watermark
        self._committer = committer
        self._limits = limits
        self._published_s = float("-inf")
        self.relay_listeners: list[RelayListener] = []

    async def publish(self, item: Publication, caller: Caller | None = None) -> Outcome:
        """The outcome of one message of a caller, once it is on disk. Raises `Problem`."""
        self._published_s = time.monotonic()
        prepared: Prepared = prepare(item, self._limits)
        if self.judge is not None or self._bound is not None:
            [prepared] = await self.judged([prepared], Way.HTTP, caller)
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
        caller: Caller | None = None,
    ) -> list[Outcome | Problem]:
        """One outcome for each item, in order; a bad item does not spoil the rest.

        `on_prepared` is called once only the disk remains to wait for.
        """
        prepared = await self.prepare_many(items)
        if on_prepared is not None:
            on_prepared()
        return await self.publish_prepared(prepared, caller=caller)

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
        self,
        prepared: Sequence[Prepared],
        source: str = "",
        way: Way = Way.BATCH,
        caller: Caller | None = None,
    ) -> list[Outcome | Problem]:
        """Write or relay the messages that `prepare_many` prepared; one outcome for each, in order.

        `source`: the peer that they came from, for listeners (`Committed`); `way`: how they came, for the
        policy; `caller`: who brings them, None for this node itself, which vouches for what its operator or its
        peers give it. Raises Problem: `overloaded` if too many messages wait for the policy.
        """
        if way is not Way.SYNC:
            self._published_s = time.monotonic()
        return await self._write(await self.judged(prepared, way, caller, source), source)

    async def judged(
        self,
        prepared: Sequence[Prepared],
        way: Way,
        caller: Caller | None = None,
        source: str = "",
    ) -> Sequence[Prepared]:
        """The messages with refusals in place of those that a caller may not bring, or the policy does not accept.

        Raises Problem: `overloaded` if too many messages wait for the policy.
        """
        if self._bound is not None and caller is not None:
            prepared = await self._of_bound_senders(prepared, self._bound, caller)
        if self.judge is None:
            return prepared
        bringer = caller or Caller(source, vouches=True)
        return await self.judge.judge(prepared, way, self.store.entries.outlines, bringer)

    @property
    def demands_senders(self) -> bool:
        """Whether some channels demand bound senders."""
        return self._bound is not None

    def demand_bound_senders(self, prefixes: Sequence[str]) -> None:
        """In these channels take only messages whose senders the caller's credentials cover."""
        self._bound = channels_of(prefixes) if prefixes else None

    async def _of_bound_senders(
        self, prepared: Sequence[Prepared], bound: Interest, caller: Caller
    ) -> Sequence[Prepared]:
        """Refuse messages of senders to which the caller is not bound, in the channels that demand it.

        What the store has, and the caller may read, is a duplicate whoever brings it: members of a channel
        broadcast the messages of others again.
        """
        checked = list(prepared)
        repeated: dict[bytes, list[int]] = {}
        for at, each in enumerate(prepared):
            if isinstance(each, Problem) or not bound.matches(each.message.channel_id):
                continue
            message = each.message
            if caller.binding(message.sender_id, message.channel_id) is not Binding.UNBOUND:
                continue
            detail = f"the credentials do not cover the sender {message.sender_id[:80]!r} in this channel"
            checked[at] = Problem(Code.SENDER_NOT_YOURS, detail)
            if isinstance(each, NewEntry) and caller.reads(message.channel_id):
                repeated.setdefault(each.digest, []).append(at)
        if repeated:
            for digest in await self.store.entries.outlines(list(repeated)):
                for at in repeated[digest]:
                    checked[at] = prepared[at]
        return checked

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
        written: list[Written] = []
        try:
            if entries:
                self._check_disk(entries)
            # One after the other, so that other callers' messages come in between.
            for part in self._parts(entries):
                written += await self._committer.submit(part, met, source=source)
                met = []
            if met:
                await self._committer.submit([], met)
        except Problem as problem:
            if not written:
                return [each if isinstance(each, Problem) else problem for each in prepared]
            written += [problem.detached() for _ in entries[len(written) :]]
        results = iter(written)
        return [
            _stored(each, next(results))
            if isinstance(each, NewEntry)
            else self._relay(each)
            if isinstance(each, Relayed)
            else each
            for each in prepared
        ]

    def _parts(self, entries: Sequence[NewEntry]) -> Iterator[Sequence[NewEntry]]:
        """Entries with no more references than a group writes, or one entry."""
        start = references = 0
        for number, entry in enumerate(entries):
            references += len(entry.message.causal_history)
            if references > self._limits.group_references_max and number > start:
                yield entries[start:number]
                start, references = number, len(entry.message.causal_history)
        if entries:
            yield entries[start:]

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
    if written.is_retired:
        return Problem(
            Code.RETIRED, f"entry {entry.digest.hex()} was retired: it stays without content"
        )
    is_stored = written.is_new or written.is_mended
    kind = OutcomeKind.STORED if is_stored else OutcomeKind.DUPLICATE
    message = entry.message
    dropped = written.hints_dropped
    return Outcome(kind, message.message_id, message.channel_id, entry.digest, dropped)
