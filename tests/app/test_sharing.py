"""Shares: nobody holds more than there is, callers take turns, and who stalls makes room."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from app.server.sharing import PROGRESS_BYTES_MIN, Holding, Share, SharedAnswer

pytestmark = pytest.mark.anyio

LIMITS = replace(DEFAULT_LIMITS, share_wait_s=5, stall_under_load_s=0)


class Client:
    """A holder that has moved some bytes, until it is cut."""

    def __init__(self, bytes_per_look: int) -> None:
        self.holding: Holding | None = None
        self.is_cut = False
        self._moved_bytes = 0
        self._bytes_per_look = bytes_per_look

    def moved_bytes(self) -> int:
        self._moved_bytes += self._bytes_per_look
        return self._moved_bytes

    def cut(self) -> None:
        self.is_cut = True
        assert self.holding is not None
        self.holding.release()


async def test_each_caller_has_one_turn_before_anybody_has_a_second() -> None:
    share = Share(1, "turns", replace(LIMITS, stall_under_load_s=60))
    served: list[str] = []

    async def request(caller: str) -> None:
        with await share.take(caller, 1):
            served.append(caller)
            await asyncio.sleep(0)

    holding = await share.take("first", 1)
    waiting = [asyncio.create_task(request(caller)) for caller in "aaaaabc"]
    await asyncio.sleep(0)
    holding.release()
    await asyncio.gather(*waiting)
    assert served == list("abcaaaa")
    assert share.free_units == 1


async def test_requests_that_arrived_together_leave_the_event_loop_to_others_between_two_of_them() -> (
    None
):
    share = Share(4, "turns", replace(LIMITS, stall_under_load_s=60))
    answered: list[str] = []

    async def request(caller: str) -> None:
        turn = await share.take(caller, 1)
        # The answer waits for nothing.
        answered.append(caller)
        turn.release_after_pass()

    requests = [asyncio.create_task(request(str(n))) for n in range(40)]
    counts = []
    while share.free_units < 4 or len(answered) < 40:
        counts.append(len(answered))
        await asyncio.sleep(0)  # one pass of the event loop
    steps = [after - before for before, after in pairwise(counts)]
    # The first ones find free turns. From then on each pass answers one.
    assert max(steps) <= 4
    assert sum(step > 1 for step in steps) <= 1
    assert answered == list(map(str, range(40)))
    await asyncio.gather(*requests)


async def test_who_finds_no_room_in_time_is_refused_and_leaves_nothing_behind() -> None:
    share = Share(10, "bytes", replace(LIMITS, share_wait_s=0, stall_under_load_s=60))
    with await share.take("a", 8):
        with pytest.raises(Problem) as caught:
            await share.take("b", 5)
        assert (caught.value.code, caught.value.headers) == (Code.OVERLOADED, {"Retry-After": "2"})
        with await share.take("c", 2):
            assert share.free_units == 0
    assert share.free_units == 10


async def test_one_who_is_cancelled_while_it_waits_delays_nobody() -> None:
    share = Share(10, "bytes", replace(LIMITS, stall_under_load_s=60))
    holding = await share.take("a", 8)
    large = asyncio.create_task(share.take("b", 9))
    small = asyncio.create_task(share.take("c", 2))
    await asyncio.sleep(0)
    # It fits, but the one before it is served first: else the large would wait for ever.
    assert not small.done()
    large.cancel()
    (await small).release()
    holding.release()
    assert share.free_units == 10


async def test_a_holder_that_stalls_makes_room_and_one_that_moves_keeps_its_place() -> None:
    share = Share(10, "bytes", LIMITS)
    stalled, moving = Client(PROGRESS_BYTES_MIN - 1), Client(PROGRESS_BYTES_MIN)
    for client in (stalled, moving):
        client.holding = await share.take("a", 5, client)
    with await share.take("b", 5):
        assert (stalled.is_cut, moving.is_cut) == (True, False)
        assert moving.holding is not None
        moving.holding.release()
    assert share.free_units == 10


async def test_a_caller_with_too_many_requests_is_refused_at_once() -> None:
    limits = replace(LIMITS, requests_waiting_max=3, stall_under_load_s=60)
    share = Share(1, "turns", limits)
    holding = await share.take("a", 1)
    waiting = [asyncio.create_task(share.take("a", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Problem) as caught:
        await share.take("a", 1)
    assert caught.value.code is Code.OVERLOADED
    holding.release()
    for each in waiting:
        (await each).release()
    assert share.free_units == 1


async def test_of_two_that_grow_one_waits_and_the_other_is_refused_at_once() -> None:
    share = Share(64, "bytes", LIMITS)
    first, second = Client(0), Client(0)
    first.holding = await share.take("a", 20, first)
    second.holding = await share.take("b", 20, second)
    newcomer = asyncio.create_task(share.take("c", 30))
    await asyncio.sleep(0)
    growing = asyncio.create_task(share.grow(first.holding, 32))
    await asyncio.sleep(0)
    with pytest.raises(Problem) as caught:
        await share.grow(second.holding, 32)
    assert caught.value.code is Code.OVERLOADED
    second.holding.release()
    await growing
    assert (first.holding.units, share.free_units, first.is_cut) == (52, 12, False)
    first.holding.release()
    (await newcomer).release()
    assert share.free_units == 64


async def test_one_that_gives_up_growing_leaves_nothing_behind() -> None:
    share = Share(64, "bytes", replace(LIMITS, share_wait_s=0))
    with await share.take("a", 20) as growing, await share.take("b", 40):
        with pytest.raises(Problem):
            await share.grow(growing, 30)
        (await share.take("c", 4)).release()
        assert (growing.units, share.free_units) == (20, 4)
    assert share.free_units == 64


async def test_an_answer_is_made_once_for_all_who_ask_at_about_the_same_time() -> None:
    made: list[int] = []

    async def make() -> int:
        made.append(len(made))
        await asyncio.sleep(0.01)
        if len(made) == 1:
            raise OSError
        return made[-1]

    answer = SharedAnswer[int](0.1)
    first = await asyncio.gather(*(answer.get(make) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in first] == [OSError] * 3
    leaving = asyncio.create_task(answer.get(make))
    others = [asyncio.create_task(answer.get(make)) for _ in range(3)]
    await asyncio.sleep(0)
    leaving.cancel()
    assert await asyncio.gather(*others) == [1, 1, 1]
    assert await answer.get(make) == 1
    await asyncio.sleep(0.12)
    assert await answer.get(make) == 2
