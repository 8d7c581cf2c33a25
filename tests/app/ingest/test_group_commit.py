"""Concurrent publishers share commits; what each is told holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.entries import MetId, OutcomeKind, WriteResult
from app.errors import Code, Problem
from app.ingest.door import Committed, Door
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS, Limits
from app.store.store import Store
from sdstore.sds.model import HistoryEntry
from tests.support.ingest import Ingest, open_ingest
from tests.support.publications import content_frame
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio


class SlowDisk:
    """Stands before a store's writing: the test decides when a group goes on."""

    def __init__(self, store: Store) -> None:
        self.groups: list[int] = []
        self.write = store.writer.write
        self.may_go_on = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        store.writer.write = self._write_group  # type: ignore[method-assign]

    def _write_group(self, entries: Sequence, met: Sequence) -> list[WriteResult]:  # type: ignore[type-arg]
        self.entered.release()
        assert self.may_go_on.acquire(timeout=60)
        self.groups.append(len(entries))
        return self.write(entries, met)


async def publish_numbers(door: Door, numbers: Sequence[int]) -> None:
    for number in numbers:
        outcome = await door.publish(Publication(content_frame(number)))
        assert outcome.kind is OutcomeKind.STORED


async def test_whatever_waits_while_a_commit_runs_shares_the_next(stores: Stores) -> None:
    async with open_ingest(stores.new_url()) as ingest:
        disk = SlowDisk(ingest.store)
        first = asyncio.create_task(publish_numbers(ingest.door, [0]))
        await asyncio.to_thread(disk.entered.acquire)
        others = [asyncio.create_task(publish_numbers(ingest.door, [n])) for n in range(1, 20)]
        await asyncio.sleep(0.01)
        assert not first.done()
        disk.may_go_on.release(2)
        await asyncio.gather(first, *others)
        assert disk.groups == [1, 19]


async def test_long_histories_are_written_in_parts_and_others_wait_for_one_of_them(
    stores: Stores,
) -> None:
    limits = replace(DEFAULT_LIMITS, group_references_max=8)
    async with open_ingest(stores.new_url(), limits) as ingest:
        disk = SlowDisk(ingest.store)
        spam = [
            Publication(content_frame(n, history=tuple(HistoryEntry(f"{n}-{k}") for k in range(5))))
            for n in range(1, 5)
        ]
        floods = [
            asyncio.create_task(ingest.door.publish_many(each)) for each in (spam[:3], spam[3:])
        ]
        other = asyncio.create_task(publish_numbers(ingest.door, [0]))
        await asyncio.to_thread(disk.entered.acquire)  # by then all three are in the queue
        disk.may_go_on.release(2)
        await other
        disk.may_go_on.release(9)
        outcomes = [each for flood in floods for each in await flood]
        assert [each.kind for each in outcomes] == [OutcomeKind.STORED] * 4  # type: ignore[union-attr]
        assert disk.groups == [1, 2, 1, 1]


async def test_a_duplicate_is_answered_by_the_commit_of_the_first_copy(stores: Stores) -> None:
    publication = Publication(content_frame(1))
    async with open_ingest(stores.new_url()) as ingest:
        disk = SlowDisk(ingest.store)
        copies = [asyncio.create_task(ingest.door.publish(publication)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(copy.done() for copy in copies)
        disk.may_go_on.release(3)
        kinds = [(await copy).kind for copy in copies]
        assert kinds == [OutcomeKind.STORED, OutcomeKind.DUPLICATE, OutcomeKind.DUPLICATE]


async def test_listeners_hear_of_a_commit_before_its_publishers(stores: Stores) -> None:
    told: list[str] = []

    async def publish(ingest: Ingest) -> None:
        await ingest.door.publish(Publication(content_frame(1), (b"hint",)))
        told.append("publisher")

    async with open_ingest(stores.new_url()) as ingest:
        ingest.committer.listeners.append(lambda _: told.append("listener"))
        await publish(ingest)
        (committed,) = ingest.committed
        assert told == ["listener", "publisher"]
        assert committed.result.is_new
        assert [claim.hint for claim in committed.result.new_claims] == [b"hint"]


async def test_a_duplicate_is_announced_only_for_a_new_claim(stores: Stores) -> None:
    async with open_ingest(stores.new_url()) as ingest:
        for hints in ((b"a",), (b"a",), (b"a", b"b"), ()):
            await ingest.door.publish(Publication(content_frame(1), hints))
        heard = [
            (each.result.is_new, [claim.hint for claim in each.result.new_claims])
            for each in ingest.committed
        ]
    assert heard == [(True, [b"a"]), (False, [b"b"])]


async def test_a_failing_listener_takes_nothing_back(stores: Stores) -> None:
    def fail(committed: list[Committed]) -> None:
        raise RuntimeError("listener")

    async with open_ingest(stores.new_url()) as ingest:
        ingest.committer.listeners.insert(0, fail)
        outcome = await ingest.door.publish(Publication(content_frame(1)))
        assert outcome.kind is OutcomeKind.STORED
        assert len(ingest.committed) == 1


async def test_one_bad_row_costs_only_itself(stores: Stores) -> None:
    url = stores.new_url()
    stores.refuse_rows(url, "message-000005")
    async with open_ingest(url) as ingest:
        disk = SlowDisk(ingest.store)
        tasks = [
            asyncio.create_task(ingest.door.publish_many([Publication(content_frame(n))]))
            for n in range(10)
        ]
        disk.may_go_on.release(100)
        outcomes = [outcome for task in tasks for outcome in await task]
        refused = [number for number, each in enumerate(outcomes) if isinstance(each, Problem)]
        assert refused == [5]
        assert outcomes[5].code is Code.INTERNAL_ERROR  # type: ignore[union-attr]
        assert len((await ingest.store.channels.feed(0, 100, 10**6)).entries) == 9
        assert ingest.committer.counters.failed_groups >= 1
        # The writer must not cache anything from a failed group.
        again = await ingest.door.publish(Publication(content_frame(50)))
        assert again.kind is OutcomeKind.STORED


async def test_a_full_queue_answers_overloaded_at_once(stores: Stores) -> None:
    limits = Limits(ingest_queue_items_max=5)
    async with open_ingest(stores.new_url(), limits) as ingest:
        disk = SlowDisk(ingest.store)
        writing = asyncio.create_task(publish_numbers(ingest.door, [0]))
        await asyncio.to_thread(disk.entered.acquire)
        waiting = [asyncio.create_task(publish_numbers(ingest.door, [n])) for n in range(1, 6)]
        await asyncio.sleep(0.01)
        assert ingest.committer.counters.queue_items == 5
        with pytest.raises(Problem) as refused:
            await ingest.door.publish(Publication(content_frame(6)))
        assert refused.value.code is Code.OVERLOADED
        assert int(refused.value.headers["Retry-After"]) >= 1
        disk.may_go_on.release(10)
        await asyncio.gather(writing, *waiting)
        await publish_numbers(ingest.door, [7])
        assert ingest.committer.counters.queue_items == 0


async def test_a_bad_item_does_not_spoil_its_batch(stores: Stores) -> None:
    good = [Publication(content_frame(n)) for n in (1, 2, 1)]
    async with open_ingest(stores.new_url()) as ingest:
        outcomes = await ingest.door.publish_many([good[0], Publication(b"\xff"), *good[1:]])
    kinds = [each.code if isinstance(each, Problem) else each.kind for each in outcomes]
    assert kinds == [
        OutcomeKind.STORED,
        Code.MALFORMED_FRAME,
        OutcomeKind.STORED,
        OutcomeKind.DUPLICATE,
    ]


async def test_publishers_of_a_group_that_fails_raise_a_fault_each(stores: Stores) -> None:
    def fail(*_: object) -> None:
        raise Problem(Code.DISK_FULL, "full")

    async with open_ingest(stores.new_url()) as ingest:
        disk = SlowDisk(ingest.store)
        first = asyncio.create_task(ingest.door.publish(Publication(content_frame(0))))
        await asyncio.to_thread(disk.entered.acquire)
        others = [
            asyncio.create_task(ingest.door.publish(Publication(content_frame(n))))
            for n in range(1, 4)
        ]
        await asyncio.sleep(0.05)
        ingest.store.writer.write = fail  # type: ignore[method-assign, assignment]
        disk.may_go_on.release(10)
        faults = await asyncio.gather(*others, return_exceptions=True)
        await first
        assert [each.code for each in faults] == [Code.DISK_FULL] * 3  # type: ignore[union-attr]
        # Raised again and again, one exception would collect the frames of all who raised it.
        assert len(set(map(id, faults))) == 3
        assert ingest.committer.fault is not None
        assert ingest.committer.fault.__traceback__ is None


async def test_a_caller_that_goes_away_loses_nothing(stores: Stores) -> None:
    async with open_ingest(stores.new_url()) as ingest:
        disk = SlowDisk(ingest.store)
        task = asyncio.create_task(publish_numbers(ingest.door, [1]))
        await asyncio.to_thread(disk.entered.acquire)
        task.cancel()
        disk.may_go_on.release(2)
        await publish_numbers(ingest.door, [2])
        assert await ingest.store.entries.find("message-000001", "channel") is not None


async def test_closing_writes_what_waits_and_then_refuses(stores: Stores) -> None:
    async with open_ingest(stores.new_url()) as ingest:
        disk = SlowDisk(ingest.store)
        tasks = [asyncio.create_task(publish_numbers(ingest.door, [n])) for n in range(5)]
        await asyncio.to_thread(disk.entered.acquire)
        disk.may_go_on.release(10)
        await ingest.committer.close()
        await asyncio.gather(*tasks)
        with pytest.raises(Problem) as refused:
            await ingest.door.publish(Publication(content_frame(9)))
        assert refused.value.code is Code.NOT_READY


async def test_what_could_not_be_remembered_beside_messages_is_an_error_of_its_caller(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ingest(stores.new_url()) as ingest:

        def write(entries: Sequence, met: Sequence) -> list[WriteResult]:  # type: ignore[type-arg]
            if met:
                raise ValueError("odd")
            return []

        monkeypatch.setattr(ingest.store.writer, "write", write)
        with pytest.raises(Problem, match="could not be written"):
            await ingest.committer.submit([], [MetId("channel", "m")])
        assert await ingest.committer.submit([]) == []
