"""The driver of a session: carries out the steps of `sdstore.sync.session.Sync` with asyncio.

A node, a backfill, a simulation and the tests share it. It is the only module of this package that waits, reads
a clock and draws random numbers. The set is a `Replica`, and the peer is called through a `Transport`; a method
of either raises `SyncError` to end the session.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from recon.agreement import Interest, SessionKey
from recon.elements import U8, U64, Mask
from recon.limits import NONCE_BYTES
from recon.marks import Arrived
from recon.view import View
from sdstore.sync.comparison import Mode
from sdstore.sync.memory import Element, PeerMemory
from sdstore.sync.report import (
    DEFAULT_LIMITS,
    Progress,
    SyncError,
    SyncLimits,
    SyncReport,
    misbehaved,
)
from sdstore.sync.session import Course, Sync
from sdstore.sync.steps import (
    Action,
    Call,
    Decoded,
    Do,
    Done,
    Failed,
    FindLost,
    Holds,
    Load,
    Look,
    Looked,
    LostPage,
    Prepared,
    Read,
    Show,
    StillLost,
    Store,
    Stored,
)
from sdstore.wire.recon_pb2 import Item, ReconResponse

ATTEMPTS_MAX = 8  # of one session: nonces that expire and interests that change in an hour
SENDING_S = 0.001  # for a request to leave before the work on an answer holds the event loop
NOTHING_REMEMBERED = PeerMemory()


class Transport(Protocol):
    """Calls to the peer. `bytes_up`, `bytes_down`: bodies as sent so far."""

    bytes_up: int
    bytes_down: int

    async def recon(self, request: bytes) -> bytes:
        """One call of the reconciliation protocol."""


class Replica(Protocol):
    """A set of elements and their content: a node's store, a file, a participant's log."""

    @property
    def arrived_count(self) -> int:
        """The number of elements that have arrived so far; the newest are compared first."""

    @property
    def stored_at_once(self) -> int:
        """See `sdstore.sync.steps.Decoded`."""

    async def catch_up(self) -> None:
        """Add all elements that are committed by now."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """The elements of an interest under a session key."""

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements are here, in any channel: bool[n]."""

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """The ID of the claim that this hint leads to this entry."""

    async def load(self, elements: Sequence[Element], bytes_max: int) -> Sequence[Item]:
        """See `sdstore.sync.steps.Load`."""

    async def prepare(self, items: Sequence[Item]) -> Sequence[Prepared]:
        """Decode entries and claims; one result for each, in order. Stores nothing."""

    async def commit(self, prepared: Sequence[Prepared]) -> Sequence[Stored]:
        """See `sdstore.sync.steps.Store`."""

    async def lost(self, interest: Interest, after: int, limit: int) -> LostPage:
        """See `sdstore.sync.steps.FindLost`."""

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        """The entries among these that are here and cannot be read."""


class ArrivalOrder(Protocol):
    """A replica that numbers its elements as they arrive, so that it can tell what is new.

    Only such a replica gets baselines (`sdstore.sync.memory.Baseline`).
    """

    def mark(self, interest: Interest) -> bytes:
        """The mark of everything that `Replica.view` has now."""

    def moment(self) -> bytes:
        """This moment, as `sdstore.sync.memory.Cuts` has it; empty if nothing is retired here ever."""

    async def view_without(
        self, key: SessionKey, interest: Interest, pairs: Sequence[tuple[bytes, bytes]]
    ) -> View:
        """As `Replica.view`, without what was retired at some moments; waits before it looks."""

    async def arrived_since(self, mark: bytes, interest: Interest) -> Arrived | None:
        """The elements of an interest that arrived after a mark, up to what `Replica.view` has now.

        None if the mark is not of this history, if an element before it was lost or a rule changed
        since, or if more arrived than `recon.marks.NEWS_MAX`.
        """


async def sync_with_peer(
    replica: Replica,
    transport: Transport,
    interest: Interest,
    *,
    memory: PeerMemory = NOTHING_REMEMBERED,
    limits: SyncLimits = DEFAULT_LIMITS,
    nonce_secret: bytes | None = None,
    arrivals: ArrivalOrder | None = None,
    mode: Mode = Mode.MOVE,
    current_interest: Callable[[], Interest] | None = None,
    changed: Callable[[Progress], None] = lambda _: None,
    now_s: float | None = None,
    draw: Callable[[int], bytes] = os.urandom,
) -> tuple[SyncReport, PeerMemory]:
    """Make a replica and a peer equal over the mutual part of `interest`.

    Returns the report, and the memory for the next session with this peer. `changed` is called with the
    progress while the session runs. `nonce_secret` is the key by which the caller's own responder recognises
    the nonces of its sessions. `current_interest` returns the interest of the moment, where it can change
    during the session: then the session goes on with the new one, as it does when the peer's changes. With
    `arrivals`, the arrival order of the replica, later sessions compare only what is new. `now_s`: seconds
    since the Unix epoch, by default of now; `draw` gives random bytes. Never raises for faults of the peer:
    the report contains them.
    """
    # The time goes on evenly, also if the system's clock is set meanwhile.
    loop_time = asyncio.get_running_loop().time
    offset_s = (time.time() if now_s is None else now_s) - loop_time()

    def clock() -> float:
        return loop_time() + offset_s

    course = Course(
        started_s=clock(),
        mode=mode,
        limits=limits,
        claim_id=replica.claim_id,
        nonce_secret=nonce_secret or draw(NONCE_BYTES),
        draw=draw,
    )
    for attempts_left in reversed(range(ATTEMPTS_MAX)):
        wanted = current_interest or (lambda: interest)
        sync = Sync(memory, wanted(), course, clock())
        driver = _Driver(sync, replica, transport, arrivals, changed, clock)
        done = await driver.run(wanted)
        memory = done.memory
        if not (done.again and attempts_left):
            break
        await asyncio.sleep(done.pause_s)
    bytes_up, bytes_down = transport.bytes_up, transport.bytes_down
    return replace(done.report, bytes_up=bytes_up, bytes_down=bytes_down), memory


class _Driver:
    """Runs one attempt: a task for each step that waits for something."""

    def __init__(
        self,
        sync: Sync,
        replica: Replica,
        transport: Transport,
        arrivals: ArrivalOrder | None,
        changed: Callable[[Progress], None],
        clock: Callable[[], float],
    ) -> None:
        self._sync = sync
        self._replica = replica
        self._transport = transport
        self._arrivals = arrivals
        self._changed = changed
        self._clock = clock
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._done: Done | None = None

    async def run(self, wanted: Callable[[], Interest]) -> Done:
        interest = wanted()
        try:
            while True:
                if wanted() != interest:
                    interest = wanted()
                    self._sync.interest_changed()
                self._begin(self._sync.poll(self._clock()))
                if self._done is not None:
                    return self._done
                timeout_s = max(self._sync.deadline_s - self._clock(), 0.0)
                if not self._tasks:
                    await asyncio.sleep(timeout_s)
                    continue
                ended, _ = await asyncio.wait(
                    self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    self._sync.done(self._tasks.pop(task), task.result(), self._clock())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, steps: Sequence[Do]) -> None:
        is_sending = any(isinstance(each.action, Call) for each in steps)
        for number, action in steps:
            match action:
                case Show(progress):
                    up, down = self._transport.bytes_up, self._transport.bytes_down
                    self._changed(replace(progress, bytes_up=up, bytes_down=down))
                case Done():
                    self._done = action
                case _:
                    task = asyncio.create_task(self._result(action, is_sending=is_sending))
                    self._tasks[task] = number

    async def _result(self, action: Action, *, is_sending: bool) -> Any:
        """The result of a step; `is_sending`: a request leaves at the same time."""
        try:
            if is_sending and isinstance(action, Read):
                await asyncio.sleep(SENDING_S)
            return await self._carried_out(action)
        except SyncError as error:
            return Failed(error.code, error.detail)

    async def _carried_out(self, action: Action) -> Any:
        replica = self._replica
        match action:
            case Call(request):
                raw = await self._transport.recon(request.SerializeToString())
                try:
                    return ReconResponse.FromString(raw)
                except DecodeError:
                    raise misbehaved("an answer is not a ReconResponse") from None
            case Look():
                return await self._looked(action)
            case Holds(orders, ids):
                await replica.catch_up()
                return replica.holds(orders, ids)
            case Load(elements, bytes_max):
                return await replica.load(elements, bytes_max)
            case Read(items):
                return Decoded(await replica.prepare(items), replica.stored_at_once)
            case Store(prepared):
                return await replica.commit(prepared)
            case FindLost(interest, after, limit):
                return await replica.lost(interest, after, limit)
            case StillLost(entry_ids):
                return await replica.lost_among(entry_ids)
            case _:
                raise NotImplementedError(action)

    async def _looked(self, look: Look) -> Looked:
        replica, arrivals = self._replica, self._arrivals
        await replica.catch_up()
        found: View | Arrived | None = None
        if arrivals is not None and look.since:
            found = await arrivals.arrived_since(look.since, look.interest)
        elif arrivals is not None and look.without:
            found = await arrivals.view_without(look.key, look.interest, look.without)
        # From here on nothing waits, so the mark is that of what was found.
        if not (look.since or look.without):
            found = replica.view(look.key, look.interest)
        held = replica.holds(look.orders, look.ids)
        mark = arrivals.mark(look.interest) if arrivals else b""
        moment = arrivals.moment() if arrivals else b""
        return Looked(found, mark, held, replica.arrived_count, moment)
