"""Resources that all requests of one process share: memory in bytes, and turns on the event loop.

A bound per request does not bound many requests. So arriving bodies, unread replies and expensive
requests each take units of a `Share`. A request that finds no free units waits. Callers are served in
turns, so that a caller with many requests delays mostly itself. While a request waits, a holder that
makes no progress is cut off.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from enum import StrEnum
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from app.errors import Code, Problem
from app.server.limits import Limits

PROGRESS_BYTES_MIN = 64 * 1024
"""Bytes that a holder must move between two checks (32 KiB/s) while others wait for its units."""


METRICS_AGE_S_MAX = 1.0
"""Age of the metrics of several workers. A scrape asks every worker, which asks the database."""

RETIRED_AGE_S_MAX = 10.0
"""Age of the number of retired entries on the page, which every open page asks for: counting them is a scan of
their table."""

_T = TypeVar("_T")


class Holder(Protocol):
    """Holds units for as long as the other end of a connection takes."""

    def moved_bytes(self) -> int:
        """A number that rises by one for each byte sent or received."""
        ...

    def cut(self) -> None:
        """Give up the units: others wait, and nothing moves."""
        ...


class Holding:
    """Units taken from a share until `release`; also a context manager."""

    __slots__ = ("_share", "holder", "seen_bytes", "units")

    def __init__(self, share: Share, units: int, holder: Holder | None) -> None:
        self._share = share
        self.units = units
        self.holder = holder
        self.seen_bytes: int | None = None

    def resize(self, units: int) -> None:
        """Change the number of units held. An increase always succeeds here."""
        self._share.give_back(self.units - units)
        self.units = units

    def release(self) -> None:
        """Give all units back. Idempotent."""
        self._share.forget(self)
        self.resize(0)

    def release_after_pass(self) -> None:
        """Release in a later pass of the event loop; a share releases one of these in each pass.

        For turns. A request that waits for nothing is answered in one step of the event loop. If it gave
        its turn back at once, all requests that have arrived would be answered one after the other
        before the loop looks at any other connection.
        """
        self._share.release_after_pass(self)

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


class _Growing(NamedTuple):
    granted: asyncio.Future[None]
    holding: Holding
    units: int


class Share:
    """`units_max` units for all callers; `what` names them in a refusal."""

    def __init__(self, units_max: int, what: str, limits: Limits) -> None:
        self.free_units = units_max
        self._units_max = units_max
        self._what = what
        self._limits = limits
        self._holdings: set[Holding] = set()
        self._waiters: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._growing: _Growing | None = None
        self._ending: deque[Holding] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    async def take(self, caller: str, units: int, holder: Holder | None = None) -> Holding:
        """Take units, waiting if needed; `overloaded` if not enough become free in time."""
        if self._waiters or self._growing or units > self.free_units:
            await self._wait(caller, min(units, self._units_max))
            # `give_back` subtracted the units when it granted them.
            self.free_units += min(units, self._units_max)
        return self.take_now(units, holder)

    async def grow(self, holding: Holding, units: int) -> None:
        """Take `units` more, ahead of all callers that hold none.

        Only one holder can wait here, because two could wait for each other's units. A second one is
        refused as `overloaded`, and so is one that does not get its units in time.
        """
        if self._growing is None and units <= self.free_units:
            holding.resize(holding.units + units)
            return
        if self._growing is not None:
            raise self.refuse()
        units = min(units, self._units_max - holding.units)
        growing = self._growing = _Growing(
            asyncio.get_running_loop().create_future(), holding, units
        )
        # It cannot make progress while it waits here, so exempt it from the check.
        is_watched = holding in self._holdings
        self.forget(holding)
        self._watch()
        try:
            async with asyncio.timeout(self._limits.share_wait_s):
                await growing.granted
        except TimeoutError:
            raise self.refuse() from None
        finally:
            if self._growing is growing:
                self._growing = None
                self.give_back(0)
            if is_watched:
                holding.seen_bytes = None
                self._holdings.add(holding)

    def take_now(self, units: int, holder: Holder | None = None) -> Holding:
        """Take units for memory that is in use already, even if the free count becomes negative."""
        self.free_units -= units
        if self.free_units < 0:
            self._watch()
        holding = Holding(self, units, holder)
        if holder is not None:
            self._holdings.add(holding)
        return holding

    def give_back(self, units: int) -> None:
        """Return units and grant them to the next waiters."""
        self.free_units += units
        if self._growing is not None and not self._growing.granted.done():
            if self._growing.units > self.free_units:
                return
            self.free_units -= self._growing.units
            self._growing.holding.units += self._growing.units
            self._growing.granted.set_result(None)
            self._growing = None
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
                # Move it behind all others: each caller gets one turn before any gets a second.
                self._waiters[caller] = waiters

    def release_after_pass(self, holding: Holding) -> None:
        """See `Holding`."""
        self._ending.append(holding)
        if len(self._ending) == 1:
            asyncio.get_running_loop().call_soon(self._release_next)

    def _release_next(self) -> None:
        self._ending.popleft().release()
        if self._ending:
            asyncio.get_running_loop().call_soon(self._release_next)

    def forget(self, holding: Holding) -> None:
        """Stop checking the progress of a holding."""
        self._holdings.discard(holding)

    def refuse(self) -> Problem:
        """The refusal of a request for which no units are free; starts checking the holders."""
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
        if self._waiters or self._growing or self.free_units < 0:
            self._watch()


class SharedAnswer(Generic[_T]):
    """An answer that requests share while it is being made, and for `age_s_max` afterwards."""

    def __init__(self, age_s_max: float) -> None:
        self._age_s_max = age_s_max
        self._making: asyncio.Task[_T] | None = None
        self._made_at_s = 0.0

    async def get(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The answer. Errors of `make` are raised and not cached."""
        loop = asyncio.get_running_loop()
        if self._making is None or (
            self._making.done() and loop.time() - self._made_at_s > self._age_s_max
        ):
            self._making = loop.create_task(self._made(make))
        # A cancelled caller does not cancel the answer for the others.
        return await asyncio.shield(self._making)

    async def _made(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        try:
            made = await make()
        except BaseException:
            self._making = None
            raise
        self._made_at_s = asyncio.get_running_loop().time()
        return made


class Turns(StrEnum):
    """Kinds of turns: requests of one kind do not wait for those of another."""

    READS = "reads"
    BATCHES = "batches"
    SYNCS = "reconciliations"
    ORDERS = "orders"


class Sharing:
    """The shares of one process, and whether it is about to stop."""

    def __init__(self, limits: Limits) -> None:
        self.bodies = Share(limits.bodies_bytes_max, "bytes of requests in flight", limits)
        self.replies = Share(limits.replies_bytes_max, "bytes of replies wait to be read", limits)
        counts = {Turns.SYNCS: limits.sync_turns_max, Turns.ORDERS: limits.order_turns_max}
        self.turns = {
            kind: Share(counts.get(kind, limits.turns_max), f"{kind} at a time", limits)
            for kind in Turns
        }
        self.live = Share(limits.live_unread_bytes_max, "bytes of events wait to be read", limits)
        self.metrics: SharedAnswer[bytes] = SharedAnswer(METRICS_AGE_S_MAX)
        self.lost_count: SharedAnswer[int] = SharedAnswer(0)
        self.retired_count: SharedAnswer[int] = SharedAnswer(RETIRED_AGE_S_MAX)
        self.is_draining = False
