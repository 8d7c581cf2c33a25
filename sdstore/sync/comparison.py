"""One pass of a session: requests about ranges, and the transfer of content beside them.

`Pass.run` has two streams of requests. `recon.initiator.Initiator` asks about ranges, and each answer
yields events; `Moves` carries content in batches as soon as enough of it is known. What the events say is
counted in the `Session` that the pass belongs to.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from recon.events import Busy, Event, Expired, Fault, Have, Need, NotThere, Stated, Unsupported
from recon.initiator import Initiator, Options, OutgoingRequest
from recon.limits import DEFAULT_LIMITS as RECON_LIMITS
from recon.limits import Limits
from recon.session import SessionHeader
from recon.view import View
from sdstore.sync.exchange import InterestChangedError, NonceExpiredError, error_of
from sdstore.sync.memory import LackedBy
from sdstore.sync.moves import MOVE_ELEMENTS_MAX, Moves
from sdstore.sync.news import MOVED_MAX, PASSED_OVER_MAX
from sdstore.wire.recon_pb2 import ReconResponse

if TYPE_CHECKING:
    from sdstore.sync.session import Session

ASKS_IN_FLIGHT_MAX = 4  # hides the latency of a round; more would only queue at the peer
MOVES_IN_FLIGHT_MAX = 3  # one on the network, one at the peer, one at our own writer
NEWS_UNCUT_MAX = 48  # new elements compared as one range, and listed: 300 bytes and a single trip


@cache
def _limits(limits: Limits, response_bytes_max: int) -> Limits:
    return replace(limits, response_bytes_max=response_bytes_max, in_flight_max=ASKS_IN_FLIGHT_MAX)


class Pass:
    """One comparison of two sets: requests about ranges, and concurrent requests for content."""

    def __init__(
        self,
        session: Session,
        header: SessionHeader,
        view: View,
        recent: int | None,
    ) -> None:
        """`recent`: the number of newest elements; None: all of the view is new."""
        # Most of the news differ, so cuts would only cost bytes before the lists.
        news = Options(uncut_max=NEWS_UNCUT_MAX, list_max=NEWS_UNCUT_MAX)
        self.initiator = Initiator(
            view,
            header,
            options=news if recent is None else Options(),
            limits=_limits(RECON_LIMITS, session.limits.answer_bytes_max),
            seed=secrets.randbits(64),
            recent=recent or 0,
            apart=np.sort(session.aside.columns(LackedBy.THERE).orders),
            tells_interest=session.tells_interest(),
        )
        self.moves = Moves(
            session.replica,
            view,
            header,
            session.exchange,
            session.aside,
            session.ledger,
            session.counts,
            self.initiator,
            self._carry_more,
        )
        self._session = session
        self._view_count = len(view)
        self._started_s = time.monotonic()
        self._asks: set[asyncio.Task[None]] = set()
        self._carries: set[asyncio.Task[None]] = set()
        self._is_ending = False

    async def run(self) -> None:
        """Run until nothing is left to ask or to move."""
        try:
            while tasks := self._launched():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._asks -= done
                self._carries -= done
                await self._end_of(done)
                self._session.show_progress()
            await self.moves.flush()
        finally:
            running = self._asks | self._carries
            for task in running:
                task.cancel()
            await asyncio.gather(*running, self.moves.end(), return_exceptions=True)

    async def _end_of(self, done: set[asyncio.Task[None]]) -> None:
        failed = [error for task in done if (error := task.exception())]
        if not failed:
            return
        self._is_ending = True
        passing = (NonceExpiredError, InterestChangedError)
        faults = [error for error in failed if not isinstance(error, passing)]
        # What came is stored in any case. After an expired nonce the peer refuses the batches in
        # flight, too: each repeats its push, then ends.
        waited_for = self.moves.storing if faults else self._carries
        await asyncio.gather(*waited_for, return_exceptions=True)
        await asyncio.gather(self.moves.flush(), return_exceptions=True)
        raise (faults or failed)[0]

    def _launched(self) -> set[asyncio.Task[None]]:
        # Until the peer has given its mark, no other request can name it.
        while not (self._asks and self._session.exchange.awaits_mark) and (
            request := self.initiator.next_request(self._elapsed_s())
        ):
            self._asks.add(asyncio.create_task(self._ask(request)))
        self._carry_more()
        return self._asks | self._carries

    def _carry_more(self) -> None:
        while self._may_carry():
            self._carries.add(asyncio.create_task(self.moves.carry(self.moves.take())))

    def _may_carry(self) -> bool:
        """Whether to carry a batch: a small one waits until nothing more can join it."""
        waiting = self.moves.waiting_count
        if not waiting or self._is_ending or len(self._carries) >= MOVES_IN_FLIGHT_MAX:
            return False
        return waiting >= MOVE_ELEMENTS_MAX or not self._asks

    async def _ask(self, request: OutgoingRequest) -> None:
        self._receive(request.request_id, await self._session.exchange.call(request.message))

    def _receive(self, request_id: int, response: ReconResponse) -> None:
        for event in self.initiator.receive(request_id, response, self._elapsed_s()):
            self._take(event)
        if self.moves.moved.is_overfull:
            self._session.exchange.release()

    def _take(self, event: Event) -> None:
        session = self._session
        match event:
            case Have():
                session.found_count += 1
                session.missing_there += session.ledger.offer(event.ids)
                self.moves.moved.offer(event.orders, event.ids)
                if session.sends:
                    self.moves.add_have(event)
            case Need():
                session.found_count += 1
                session.missing_here += event.count
                if session.fetches:
                    self.moves.add_need(event)
            case NotThere():
                session.found_count += 1
                session.aside.forget([row.tobytes() for row in event.ids])
                self.moves.moved.leave_unnamed(event.orders, event.ids)
            case Stated():
                session.stated = event
                more_count = event.count - self._view_count
                if not -MOVED_MAX <= more_count <= PASSED_OVER_MAX:
                    self.moves.moved.give_up()
            case Fault():
                raise event.error
            case Expired() | Busy() | Unsupported():
                raise error_of(event)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


class Confirmation(Pass):
    """A pass over elements that the peer has acknowledged. It sends nothing: `moves.moved` has what is lacking."""

    def _take(self, event: Event) -> None:
        match event:
            case Have():
                self.moves.moved.offer(event.orders, event.ids)
            case Stated():
                pass  # the session's is that of the pass before
            case _:
                super()._take(event)
