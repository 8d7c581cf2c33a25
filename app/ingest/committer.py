"""Group commit: one thread writes all messages that arrived during its last commit.

No message waits for a group to fill: a single publisher commits at once, and messages that arrive during
that commit share the next one. Callers rely on these rules:

- An answer comes after the commit of its message. A duplicate's answer comes after the commit of the first
  copy, because the same group writes both, or a later one.
- A group that fails is retried job by job and, within a job, row by row, so that a bad row fails alone. If
  the disk is full or the database is away, every message of the group fails and is not retried.
- Listeners run on the event loop after the commit and before the answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from app.entries import MetId, NewEntry, WriteResult
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.entryrows import Rechecked
from app.store.integrity import is_damage
from app.store.store import Store


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
            items = size = 0
            while self._waiting and (not group or self._fits(items, size, self._waiting[0])):
                job = self._waiting.popleft()
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

    def _fits(self, items: int, size: int, job: _Job) -> bool:
        limits = self._limits
        return items + job.items <= limits.group_items_max and (
            size + job.bytes <= limits.group_bytes_max
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
