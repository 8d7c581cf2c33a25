"""Received items are stored in large transactions, one at a time, while more arrive."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence

import pytest

import sdstore.sync.content as content_module
from sdstore.sync.driver import sync_with_peer
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import SyncCode, SyncError, SyncOutcome, SyncReport
from sdstore.sync.steps import Prepared, Stored
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse
from tests.support.memory_sync import EVERYTHING, MemoryPeer, MemoryReplica, content
from tests.sync.test_session import synced

AT_ONCE = 10


class Slow(MemoryReplica):
    """Its commits wait for `go`; `begun` has the sizes of those that began."""

    stored_at_once = AT_ONCE

    def __init__(self, contents: Iterable[bytes] = ()) -> None:
        super().__init__(contents)
        self.begun: list[int] = []
        self.go = asyncio.Event()
        self.most_at_a_time = self._at_a_time = 0

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        self.begun.append(len(prepared))
        self._at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            await self.go.wait()
            return await super().commit(prepared)
        finally:
            self._at_a_time -= 1


def session_of(ours: MemoryReplica, count: int) -> asyncio.Task[tuple[SyncReport, PeerMemory]]:
    """A session that fetches `count` elements in one answer."""
    theirs = MemoryReplica(content(n, "text") for n in range(count))
    return asyncio.create_task(sync_with_peer(ours, MemoryPeer(theirs), EVERYTHING))


async def turns() -> None:
    """Let every task run until it waits."""
    await asyncio.sleep(0.05)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    for _ in range(1_000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_one_transaction_runs_at_a_time_and_reading_waits_when_another_one_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(content_module, "READ_AT_ONCE", 4)

    async def scenario() -> None:
        slow = Slow()
        session = session_of(slow, 60)
        await until(lambda: slow.prepared_count == 24)
        await turns()
        assert (slow.begun, slow.prepared_count) == ([12], 24)
        slow.go.set()
        report, _ = await session
        assert (report.entries_received, slow.most_at_a_time) == (60, 1)

    asyncio.run(scenario())


class Full(MemoryReplica):
    """Has no room for the first items that it is given, several times."""

    full_count = 3

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        self.full_count -= bool(prepared)
        if self.full_count < 0 or not prepared:
            return await super().commit(prepared)
        stored = await super().commit(prepared[1:])
        return [Stored(wire.NOT_EXAMINED), *stored]


@pytest.mark.parametrize("side", ["here", "there"])
def test_what_finds_no_room_is_tried_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(content_module, "PATIENCE_STEP_S", 0.001)
    for full_count in (3, content_module.PATIENCE_STEPS + 1):
        full, other = Full(), MemoryReplica(CONTENTS[:5])
        full.full_count = full_count
        ours, theirs = (full, other) if side == "here" else (other, full)
        report, _ = synced(ours, MemoryPeer(theirs))
        has_time = full_count == 3
        assert report.proved is has_time
        assert report.code == ("" if has_time else SyncCode.OVERLOADED)
        assert len(full.contents) == (5 if has_time else 4)


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
