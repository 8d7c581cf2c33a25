"""The machine of a session by itself: steps out, results in, in any order, without an event loop."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sdstore.sync.content as content_module
from recon.errors import LocalProtocolError
from sdstore.sync.comparison import Mode
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import DEFAULT_LIMITS, SyncCode, SyncOutcome, SyncReport
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
    Read,
    Show,
    Store,
)
from sdstore.wire.recon_pb2 import ReconResponse
from tests.support.memory_sync import EVERYTHING, MemoryPeer, MemoryReplica, content

START_S = 1_000_000.0
ATTEMPTS_MAX = 8


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


class Table:
    """Two replicas, the machine between them, and a hand that carries its steps out.

    What is under way is carried out in any order, and each result is given to the machine at any later moment.
    """

    def __init__(self, ours: MemoryReplica, theirs: MemoryReplica, rng: random.Random) -> None:
        self.ours = ours
        self.theirs = theirs
        self.peer = MemoryPeer(theirs)
        self.rng = rng
        self.now_s = START_S
        self.memory = PeerMemory()
        self.taken = 0  # results so far

    def sync(self, course: Course) -> Sync:
        """A machine for the next attempt."""
        return Sync(self.memory, EVERYTHING, course, self.now_s)

    def course(self) -> Course:
        """That of a session which begins now."""
        return Course(
            started_s=self.now_s,
            mode=Mode.MOVE,
            limits=DEFAULT_LIMITS,
            claim_id=self.ours.claim_id,
            nonce_secret=bytes(16),
            draw=self.rng.randbytes,
        )

    def session(self) -> SyncReport:
        """Attempts until one is the last; remembers what they learned."""
        course = self.course()
        for _ in range(ATTEMPTS_MAX):
            done = self.attempt(self.sync(course))
            assert done is not None
            self.memory = done.memory
            if not done.again:
                break
        return done.report

    def attempt(self, sync: Sync, steps_max: int = 100_000) -> Done | None:
        """Run a machine to its end, or leave it after a number of results."""
        under_way: list[Do] = []
        results: list[tuple[int, Any]] = []
        for _ in range(steps_max):
            for do in sync.poll(self.now_s):
                if isinstance(do.action, Done):
                    return do.action
                if not isinstance(do.action, Show):
                    under_way.append(do)
            assert len(under_way) + len(results) <= 32, "the steps under way are bounded"
            if not (under_way or results):
                assert sync.deadline_s > self.now_s, "it waits for nothing"
                self.now_s = sync.deadline_s
                continue
            if under_way and (not results or self.rng.random() < 0.5):
                number, action = under_way.pop(self.rng.randrange(len(under_way)))
                results.append((number, self.carry_out(action)))
            else:
                number, result = results.pop(self.rng.randrange(len(results)))
                self.taken += 1
                sync.done(number, result, self.now_s)
                for wrong in (number, number + 1_000_000):
                    with pytest.raises(LocalProtocolError):
                        sync.done(wrong, result, self.now_s)
        return None

    def carry_out(self, action: Action) -> Any:
        """The result of a step."""
        ours = self.ours
        match action:
            case Call(request):
                raw = at_once(self.peer.recon(request.SerializeToString()))
                return ReconResponse.FromString(raw)
            case Look(key, interest, since, orders, ids):
                at_once(ours.catch_up())
                found = at_once(ours.arrived_since(since, interest)) if since else None
                found = found if since else ours.view(key, interest)
                held, mark = ours.holds(orders, ids), ours.mark(interest)
                return Looked(found, mark, held, ours.arrived_count)
            case Holds(orders, ids):
                at_once(ours.catch_up())
                return ours.holds(orders, ids)
            case Load(elements, bytes_max):
                return at_once(ours.load(elements, bytes_max))
            case Read(items):
                return Decoded(at_once(ours.prepare(items)), self.rng.choice([1, 5, 1_000]))
            case Store(prepared):
                return at_once(ours.commit(prepared))
            case FindLost(interest, after, limit):
                return at_once(ours.lost(interest, after, limit))
        raise AssertionError(action)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a session has many steps."""
    monkeypatch.setattr(content_module, "MOVE_ELEMENTS_MAX", 7)
    monkeypatch.setattr(content_module, "READ_AT_ONCE", 3)


def numbered(numbers: Iterator[int] | range | set[int], text: str = "") -> list[bytes]:
    return [content(n, text) for n in numbers]


SIDES = st.sets(st.integers(0, 300), max_size=60)


@settings(deadline=None)  # of an example: it depends on the machine
@given(
    ours=SIDES,
    theirs=SIDES,
    seed=st.integers(0, 1 << 32),
    cancelled=st.lists(st.integers(1, 80), max_size=4),
)
def test_results_in_any_order_and_cancelled_anywhere_lead_to_the_same_sets(
    ours: set[int], theirs: set[int], seed: int, cancelled: list[int]
) -> None:
    rng = random.Random(seed)
    table = Table(MemoryReplica(numbered(ours)), MemoryReplica(numbered(theirs)), rng)
    everything = set(numbered(ours | theirs))
    for steps_max in cancelled:
        done = table.attempt(table.sync(table.course()), steps_max)
        if done is not None:
            table.memory = done.memory
        elif rng.random() < 0.5:  # something arrives on one side
            new = content(rng.randrange(300), f"meanwhile {rng.random()}")
            rng.choice([table.ours, table.theirs]).add(new)
            everything.add(new)
    report = table.session()
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), report
    assert table.ours.contents == table.theirs.contents == everything
    again = table.session()
    assert (again.proved, again.requests, again.missing_here, again.missing_there) == (
        True,
        1,
        0,
        0,
    )


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32), at=st.integers(0, 60))
def test_a_step_that_fails_ends_the_attempt_and_loses_nothing(seed: int, at: int) -> None:
    class Failing(Table):
        def carry_out(self, action: Action) -> Any:
            self.failing_at -= 1
            if self.failing_at == 0:
                return Failed(SyncCode.PEER_UNREACHABLE, "gone")
            return super().carry_out(action)

        failing_at = 0

    rng = random.Random(seed)
    table = Failing(MemoryReplica(numbered(range(40))), MemoryReplica(numbered(range(20, 60))), rng)
    table.failing_at = at
    done = table.attempt(table.sync(table.course()))
    assert done is not None
    report = done.report
    if at > 0 and table.failing_at <= 0:
        assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, SyncCode.PEER_UNREACHABLE)
    assert report.entries_received == len(table.ours.contents) - 40
    table.memory, table.failing_at = done.memory, 0
    assert table.session().proved
    assert table.ours.contents == table.theirs.contents == set(numbered(range(60)))


def test_an_attempt_ends_in_time_whatever_never_returns() -> None:
    table = Table(MemoryReplica(), MemoryReplica(numbered(range(5))), random.Random(1))
    sync = table.sync(table.course())
    [hello] = sync.poll(START_S)
    assert sync.deadline_s == START_S + DEFAULT_LIMITS.seconds_max
    done = [each.action for each in sync.poll(sync.deadline_s) if isinstance(each.action, Done)]
    assert [(each.report.outcome, each.report.code) for each in done] == [
        (SyncOutcome.PARTIAL, SyncCode.BUDGET_SPENT)
    ]
    sync.done(hello.number, table.carry_out(hello.action), START_S)
    assert sync.poll(START_S + 10_000) == []


def test_a_dripping_catch_up_across_three_nonces_costs_hardly_more_than_an_undisturbed_one() -> (
    None
):
    """Each answer takes its time, and the peer's nonce expires three times meanwhile."""

    def bytes_of(nonces_count: int) -> int:
        rng = random.Random(5)
        ours, theirs = MemoryReplica(), MemoryReplica(numbered(range(4_000), "x" * 250))
        table = Table(ours, theirs, rng)
        table.peer.items_max = 50
        due = [4_000 * n // (nonces_count + 1) for n in range(1, nonces_count + 1)]

        def renew(_: object) -> None:
            if due and len(ours.held) >= due[0]:
                due.pop(0)
                table.peer.nonce = rng.randbytes(16)

        table.peer.asked = renew
        report = table.session()
        assert (report.outcome, report.proved, due) == (SyncOutcome.IN_SYNC, True, [])
        assert report.entries_received == 4_000
        return table.peer.bytes_up + table.peer.bytes_down

    assert bytes_of(3) <= 1.1 * bytes_of(0)


def test_an_interest_that_changes_all_the_time_still_leads_to_equal_sets() -> None:
    """Every twelfth result the peer has another policy, as after a change of its interest."""
    table = Table(
        MemoryReplica(numbered(range(200))),
        MemoryReplica(numbered(range(100, 300))),
        random.Random(3),
    )

    def change(_: object) -> None:
        table.theirs.policy = table.taken // 12

    table.peer.asked = change
    for _ in range(10):
        report = table.session()
        if report.outcome is SyncOutcome.IN_SYNC:
            break
        assert (report.outcome, report.code) == (SyncOutcome.PARTIAL, SyncCode.OVERLOADED)
    assert table.theirs.policy > 2
    assert report.proved
    assert table.ours.contents == table.theirs.contents == set(numbered(range(300)))


# --- what ends an attempt and not the session ------------------------------------------------------
