"""What all requests of one process share: room in bytes, and turns on the event loop.

A bound per request is no bound on many requests. So bodies that arrive, replies that wait to be
read, and the work of dear requests each take units of a `Share`. A request that finds none free
waits, and callers are served in turns, so that one caller with many requests delays mostly itself.
While anybody waits, a holder that makes no progress loses its place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from app.errors import Code, Problem
from app.limits import Limits

PROGRESS_BYTES_MIN = 64 * 1024
"""What a holder has to move between two looks: 32 KiB/s, while others wait for its place."""


class Holder(Protocol):
    """Holds units for as long as the other end of a connection takes."""

    def moved_bytes(self) -> int:
        """A number that rises by one for each byte sent or received."""
        ...

    def cut(self) -> None:
        """Give the place up: others wait, and nothing moves."""
        ...


class Holding:
    """Units taken from a share, until `release`; also a context."""

    __slots__ = ("_share", "holder", "seen_bytes", "units")

    def __init__(self, share: Share, units: int, holder: Holder | None) -> None:
        self._share = share
        self.units = units
        self.holder = holder
        self.seen_bytes: int | None = None

    def resize(self, units: int) -> None:
        """Hold so many units from now on. More of them are never refused here."""
        self._share.give_back(self.units - units)
        self.units = units

    def add(self, other: Holding) -> None:
        """Hold what another one held, too."""
        self.units += other.units
        other.units = 0

    def release(self) -> None:
        """Give everything back; a second time is harmless."""
        self._share.forget(self)
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class _Waiter(NamedTuple):
    granted: asyncio.Future[None]
    units: int


class Share:
    """`units_max` units for everybody; `what` names them in a refusal."""

    def __init__(self, units_max: int, what: str, limits: Limits) -> None:
        self.free_units = units_max
        self._units_max = units_max
        self._what = what
        self._limits = limits
        self._holdings: set[Holding] = set()
        self._waiters: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None

    async def take(self, caller: str, units: int, holder: Holder | None = None) -> Holding:
        """Take units, waiting for them if need be; `overloaded` when none come free in time."""
        if self._waiters or units > self.free_units:
            await self._wait(caller, min(units, self._units_max))
            # They were taken from what is free when they were granted.
            self.free_units += min(units, self._units_max)
        return self.take_now(units, holder)

    def take_now(self, units: int, holder: Holder | None = None) -> Holding:
        """Take units that are in use already, even where that leaves fewer than none free."""
        self.free_units -= units
        if self.free_units < 0:
            self._watch()
        holding = Holding(self, units, holder)
        if holder is not None:
            self._holdings.add(holding)
        return holding

    def give_back(self, units: int) -> None:
        """Let whoever is next have units."""
        self.free_units += units
        while self._waiters:
            caller, waiters = next(iter(self._waiters.items()))
            if waiters and not waiters[0].granted.done():
                if waiters[0].units > self.free_units:
                    return
                self.free_units -= waiters[0].units
                waiters[0].granted.set_result(None)
            if waiters:
                waiters.popleft()
            del self._waiters[caller]
            if waiters:
                # Behind all others: each caller has one turn before anybody has a second one.
                self._waiters[caller] = waiters

    def forget(self, holding: Holding) -> None:
        """Do not look at it any more."""
        self._holdings.discard(holding)

    def refuse(self) -> Problem:
        """The refusal of a request for which nothing is free; those in the way are looked at."""
        self._watch()
        return Problem(Code.OVERLOADED, f"too many {self._what}", headers={"Retry-After": "2"})

    async def _wait(self, caller: str, units: int) -> None:
        waiters = self._waiters.setdefault(caller, deque())
        if len(waiters) >= self._limits.requests_waiting_max:
            raise self.refuse()
        waiter = _Waiter(asyncio.get_running_loop().create_future(), units)
        waiters.append(waiter)
        self._watch()
        try:
            async with asyncio.timeout(self._limits.share_wait_s):
                await waiter.granted
        except BaseException as error:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give_back(units)
            else:
                waiter.granted.cancel()
                # The next one may need fewer units.
                self.give_back(0)
            if isinstance(error, TimeoutError):
                raise self.refuse() from None
            raise

    def _watch(self) -> None:
        if self._sweep is None:
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(self._limits.stall_under_load_s, self._look)

    def _look(self) -> None:
        self._sweep = None
        for holding in list(self._holdings):
            holder = holding.holder
            if holder is None:
                continue
            moved_bytes = holder.moved_bytes()
            seen_bytes, holding.seen_bytes = holding.seen_bytes, moved_bytes
            if seen_bytes is not None and moved_bytes - seen_bytes < PROGRESS_BYTES_MIN:
                holder.cut()
        if self._waiters or self.free_units < 0:
            self._watch()


class Turns(StrEnum):
    """What waits for a turn: requests of one kind do not wait for those of another."""

    READS = "reads"
    BATCHES = "batches"
    SYNCS = "reconciliations"


class Sharing:
    """The shares of one process, and whether it is about to stop."""

    def __init__(self, limits: Limits) -> None:
        self.bodies = Share(limits.bodies_bytes_max, "bytes of requests in flight", limits)
        self.replies = Share(limits.replies_bytes_max, "bytes of replies wait to be read", limits)
        counts = {Turns.SYNCS: limits.sync_turns_max}
        self.turns = {
            kind: Share(counts.get(kind, limits.turns_max), f"{kind} at a time", limits)
            for kind in Turns
        }
        self.live = Share(limits.live_unread_bytes_max, "bytes of events wait to be read", limits)
        self.is_draining = False
