"""Received items are stored in large transactions, one at a time, while more arrive."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence

import pytest

import sdstore.sync.received as received
from sdstore.sync.received import Row, WriteBehind
from sdstore.sync.replica import Element, Prepared, Stored
from sdstore.sync.report import SyncCode, SyncError, SyncOutcome
from sdstore.sync.session import sync_with_peer
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse
from tests.support.memory_sync import EVERYTHING, MemoryPeer, MemoryReplica, content, element_of
from tests.sync.test_session import synced

AT_ONCE = 10


class Slow(MemoryReplica):
    """Its commits wait for `go`; `begun` has the sizes of those that began."""

    stored_at_once = AT_ONCE

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.go = asyncio.Event()
        self.most_at_a_time = self._at_a_time = 0
        self.error: SyncError | None = None

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        self.begun.append(len(prepared))
        self._at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            return await super().commit(prepared)
        finally:
            self._at_a_time -= 1


def rows(numbers: range) -> list[Row]:
    made = []
    for number in numbers:
        raw = content(number, "text")
        order, element_id = element_of(raw)
        prepared = Prepared(order=order, element_id=element_id, content=raw)
        made.append(Row(prepared, Element(order, element_id)))
    return made


def run(scenario: Callable[[Slow, WriteBehind, list[Row]], Awaitable[None]]) -> None:
    """`scenario` gets a replica, what stores in it, and the list of the rows that were settled."""

    async def ran() -> None:
        settled: list[Row] = []

        def settle(row: Row, stored: Stored) -> bool:
            assert stored.outcome == wire.STORED
            settled.append(row)
            return True

        slow = Slow()
        behind = WriteBehind(slow, settle)
        await asyncio.wait_for(scenario(slow, behind, settled), 10)

    asyncio.run(ran())


async def turns() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_rows_wait_for_a_transaction_that_is_worth_it_and_are_all_stored_in_order() -> None:
    async def scenario(slow: Slow, behind: WriteBehind, settled: list[Row]) -> None:
        slow.go.set()
        wanted = rows(range(25))
        for start in range(0, 25, 4):
            await behind.add(wanted[start : start + 4], 4)
            await turns()
        assert slow.begun == [12, 12]
        await behind.flush()
        assert slow.begun == [12, 12, 1]
        assert settled == wanted
        await behind.flush()
        assert slow.begun == [12, 12, 1]

    run(scenario)


def test_one_transaction_runs_at_a_time_and_whoever_adds_to_a_full_wait_waits() -> None:
    async def scenario(slow: Slow, behind: WriteBehind, settled: list[Row]) -> None:
        wanted = rows(range(40))
        await behind.add(wanted[:10], 10)
        await behind.add(wanted[10:19], 9)
        adding = [
            asyncio.create_task(behind.add(wanted[19:30], 11)),
            asyncio.create_task(behind.add(wanted[30:], 10)),
        ]
        await turns()
        assert slow.begun == [10]
        assert not any(each.done() for each in adding)
        slow.go.set()
        await asyncio.gather(*adding)
        await asyncio.gather(behind.flush(), behind.flush())
        assert settled == wanted
        assert slow.most_at_a_time == 1

    run(scenario)


def test_large_rows_and_old_ones_are_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(slow: Slow, behind: WriteBehind, settled: list[Row]) -> None:
        slow.go.set()
        await behind.add(rows(range(1)), received.HELD_BYTES_MAX)
        await turns()
        assert slow.begun == [1]
        monkeypatch.setattr(received, "HELD_S_MAX", 0.01)
        await behind.add(rows(range(1, 3)), 2)
        await turns()
        assert slow.begun == [1]
        await asyncio.sleep(0.1)  # nothing more comes
        assert slow.begun == [1, 2]
        assert len(settled) == 3
        slow.go.clear()
        await behind.add(rows(range(3, 13)), 10)
        await behind.add(rows(range(13, 14)), 1)
        await asyncio.sleep(0.1)
        assert slow.begun == [1, 2, 10]  # one at a time
        slow.go.set()
        await asyncio.sleep(0.1)
        assert slow.begun == [1, 2, 10, 1]
        assert len(settled) == 14

    run(scenario)


@pytest.mark.parametrize("how", ["add", "flush"])
def test_the_error_of_a_transaction_reaches_whoever_comes_next_once(how: str) -> None:
    async def scenario(slow: Slow, behind: WriteBehind, settled: list[Row]) -> None:
        slow.go.set()
        slow.error = SyncError("disk_full", "no room left")
        await behind.add(rows(range(10)), 10)
        await turns()
        assert slow.begun == [10]
        with pytest.raises(SyncError, match="no room left"):
            await (behind.add(rows(range(10, 20)), 10) if how == "add" else behind.flush())
        slow.error = None
        await behind.flush()
        assert [row.element for row in settled] == [
            row.element for row in (rows(range(10, 20)) if how == "add" else [])
        ]

    run(scenario)


def test_at_the_end_nothing_goes_on_and_nothing_is_begun() -> None:
    async def scenario(slow: Slow, behind: WriteBehind, settled: list[Row]) -> None:
        await behind.add(rows(range(10)), 10)
        await behind.add(rows(range(10, 15)), 5)
        await turns()
        await behind.end()
        slow.go.set()
        await behind.flush()
        assert slow.begun == [10]
        assert settled == []

    run(scenario)


class Patient(MemoryReplica):
    """Would keep everything for one transaction."""

    stored_at_once = 1 << 20


class BreaksOff(MemoryPeer):
    """Misbehaves after some requests for content."""

    def __init__(self, replica: MemoryReplica, contents_max: int) -> None:
        super().__init__(replica)
        self.served_count = 0
        self._contents_max = contents_max

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        response = await super()._answer(request)
        if request.HasField("fetch"):
            if not self._contents_max:
                raise SyncError(SyncCode.PEER_UNREACHABLE, "gone")
            self._contents_max -= 1
            self.served_count += len(response.items)
        return response


CONTENTS = [content(n, "some text") for n in range(8_000)]


def test_what_came_before_a_peer_broke_off_is_stored() -> None:
    ours = Patient(CONTENTS[::2])
    peer = BreaksOff(MemoryReplica(CONTENTS), contents_max=2)
    report, _ = synced(ours, peer)
    assert report.outcome is SyncOutcome.PEER_FAULT
    assert 0 < report.entries_received < len(CONTENTS) // 2
    assert report.entries_received == len(ours.contents) - len(CONTENTS) // 2 == peer.served_count


def test_what_is_being_read_when_a_peer_breaks_off_is_stored() -> None:
    class Reading(MemoryReplica):
        """Reads what it was served only after the peer has broken off, in several turns."""

        async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
            await gone.wait()
            await turns()
            return await super().prepare(items)

    class Breaking(BreaksOff):
        async def _answer(self, request: ReconRequest) -> ReconResponse:
            try:
                return await super()._answer(request)
            except SyncError:
                gone.set()
                raise

    gone = asyncio.Event()
    ours = Reading(CONTENTS[::2])
    peer = Breaking(MemoryReplica(CONTENTS), contents_max=2)
    report, _ = synced(ours, peer)
    assert report.outcome is SyncOutcome.PEER_FAULT
    assert (
        report.entries_received == len(ours.contents) - len(CONTENTS) // 2 == peer.served_count > 0
    )


def test_a_session_that_is_cancelled_leaves_nothing_behind() -> None:
    class Silent(BreaksOff):
        """Serves one batch, then answers no more."""

        async def _answer(self, request: ReconRequest) -> ReconResponse:
            try:
                return await super()._answer(request)
            except SyncError:
                return await asyncio.Future[ReconResponse]()

    class Reading(Patient):
        async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
            came.set()
            return await super().prepare(items)

    came = asyncio.Event()

    async def begun_and_cancelled() -> weakref.ref[Patient]:
        ours = Reading(CONTENTS[::2])
        peer = Silent(MemoryReplica(CONTENTS), contents_max=1)
        session = asyncio.create_task(sync_with_peer(ours, peer, EVERYTHING))
        await came.wait()
        await turns()  # what came waits for a transaction
        session.cancel()
        await asyncio.wait({session})
        assert session.cancelled()
        assert len(ours.contents) == len(CONTENTS) // 2
        return weakref.ref(ours)

    async def scenario() -> None:
        async with asyncio.timeout(60):
            replica = await begun_and_cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        assert replica() is None

    asyncio.run(scenario())


def test_a_session_ends_when_everything_is_stored() -> None:
    ours = Patient(CONTENTS[::2])
    report, _ = synced(ours, MemoryPeer(MemoryReplica(CONTENTS)))
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
    assert ours.contents == set(CONTENTS)
