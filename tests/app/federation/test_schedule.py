"""The policy of sessions, on a clock of the test: who starts when, whatever the peers and the news do."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random

import pytest

from app.federation.schedule import (
    BACKOFF_S_MAX,
    COST_S_MAX,
    EARLY_RETRY_S,
    JITTER,
    NUDGE_S,
    PAUSE_S_MIN,
    SHARE,
    Schedule,
    Verdict,
)
from app.server.limits import DEFAULT_LIMITS

INTERVAL_S = 30.0
HANG_S = 60.0  # the timeout of one request


@dataclass(frozen=True, slots=True)
class Habit:
    """What a session with a peer is like."""

    took_s: float = 0.02
    verdict: Verdict = Verdict.GOOD
    cost_s: float = 0.008


QUICK = Habit()
DEAD = Habit(5.0, Verdict.FAILED)
HANGING = Habit(HANG_S, Verdict.FAILED)
LYING = Habit(0.1, Verdict.FAILED)
ENORMOUS = Habit(600.0)


@dataclass(slots=True)
class World:
    """A schedule with peers that follow their habits, and the sessions that it made them have."""

    seed: int = 1
    interval_s: float = INTERVAL_S
    sessions_max: int = DEFAULT_LIMITS.peer_sessions_max
    slow_sessions_max: int = DEFAULT_LIMITS.peer_sessions_slow_max
    now_s: float = 0.0
    habits: dict[str, Habit] = field(default_factory=dict)
    sessions: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    running: dict[str, float] = field(default_factory=dict)
    looks_count: int = 0
    events: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)
    schedule: Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.schedule = Schedule(
            self.interval_s,
            Random(self.seed),
            sessions_max=self.sessions_max,
            slow_sessions_max=self.slow_sessions_max,
        )

    def add(self, peer_id: str, habit: Habit = QUICK) -> None:
        self.habits[peer_id] = habit
        self.schedule.add(peer_id, self.now_s)

    def at(self, at_s: float, do: Callable[[], object]) -> None:
        heapq.heappush(self.events, (at_s, next(self.numbers), do))

    def news_at(self, at_s: float, *without: str) -> None:
        self.at(at_s, lambda: self.schedule.nudge_all(self.now_s, without))

    def nudge_at(self, at_s: float, peer_id: str) -> None:
        self.at(at_s, lambda: self.schedule.nudge(peer_id, self.now_s))

    def stream(self, from_s: float, to_s: float, pause_s: float) -> None:
        for number in range(int((to_s - from_s) / pause_s)):
            self.news_at(from_s + number * pause_s)

    def run(self, until_s: float) -> None:
        while True:
            self._look()
            look_s = self.schedule.next_look_s(self.now_s)
            assert look_s is None or look_s > self.now_s
            event_s = self.events[0][0] if self.events else until_s
            self.now_s = min(until_s, event_s, look_s if look_s is not None else until_s)
            if self.now_s >= until_s:
                return
            while self.events and self.events[0][0] <= self.now_s:
                heapq.heappop(self.events)[2]()

    def _look(self) -> None:
        self.looks_count += 1
        for peer_id in self.schedule.start_due(self.now_s):
            assert peer_id not in self.running
            self.running[peer_id] = self.now_s
            self.at(self.now_s + self.habits[peer_id].took_s, lambda each=peer_id: self._end(each))
        assert len(self.running) <= self.sessions_max

    def _end(self, peer_id: str) -> None:
        habit = self.habits[peer_id]
        self.sessions[peer_id].append((self.running.pop(peer_id), self.now_s))
        self.schedule.end(peer_id, self.now_s, habit.verdict, habit.cost_s)

    def starts(self, peer_id: str, from_s: float = 0.0) -> list[float]:
        ended = [start_s for start_s, _ in self.sessions[peer_id] if start_s >= from_s]
        running = self.running.get(peer_id)
        return ended if running is None or running < from_s else [*ended, running]

    def gaps(self, peer_id: str) -> list[float]:
        """Seconds from the end of each session to the start of the next."""
        return [after[0] - before[1] for before, after in pairwise(self.sessions[peer_id])]


# --- the cycle -------------------------------------------------------------------------------------


def test_a_healthy_peer_gets_a_session_at_once_and_then_within_each_interval() -> None:
    world = World()
    for number in range(12):
        world.add(f"peer {number}")
    world.run(3_600.0)
    for peer_id in world.habits:
        assert world.starts(peer_id)[0] <= 2 * QUICK.took_s  # 8 new peers side by side
        assert all(
            INTERVAL_S * (1 - JITTER) <= gap_s <= INTERVAL_S for gap_s in world.gaps(peer_id)
        )
    # About two looks a session: its start and its end.
    assert world.looks_count <= 2.2 * sum(map(len, world.sessions.values()))


def test_a_peer_of_other_channels_costs_one_look_per_interval_whatever_is_written() -> None:
    world = World()
    world.add("apart", Habit(verdict=Verdict.APART))
    world.stream(0, 600, 0.1)
    for at_s in range(0, 600, 2):
        world.nudge_at(at_s, "apart")
    world.run(600.0)
    assert all(INTERVAL_S * (1 - JITTER) <= gap_s <= INTERVAL_S for gap_s in world.gaps("apart"))
    assert world.schedule.failures("apart") == 0


def test_a_peer_of_other_channels_is_looked_at_soon_when_the_interest_has_changed() -> None:
    world = World()
    world.add("apart", Habit(verdict=Verdict.APART))
    world.add("failing", LYING)
    world.run(10.0)
    world.schedule.forget_apart(10.0)
    world.schedule.nudge_all(10.0)
    world.run(11.0)
    assert len(world.starts("apart", 10.0)) == 1
    world.news_at(12.0)
    world.run(13.0)
    assert len(world.starts("apart", 10.0)) == 1


def test_a_removed_peer_gets_no_session_and_its_running_one_ends_quietly() -> None:
    world = World()
    world.add("peer", HANGING)
    world.at(1.0, lambda: world.schedule.remove("peer"))
    world.news_at(2.0)
    world.nudge_at(2.0, "peer")
    world.run(600.0)
    assert world.starts("peer") == [0.0]


# --- nudges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_news_is_the_matter_of_a_session_that_begins_after_it_and_soon(seed: int) -> None:
    random = Random(seed)
    world = World(seed)
    for number in range(random.randint(1, 12)):
        world.add(f"peer {number}", Habit(random.uniform(0.005, 0.1), cost_s=0.005))
    times = sorted(random.uniform(10, 60) for _ in range(random.randint(1, 200)))
    for at_s in times:
        world.news_at(at_s)
    world.run(70.0)
    longest_s = NUDGE_S[1] + max(PAUSE_S_MIN, 0.005 * 12 / SHARE) + 2 * 0.1
    for peer_id in world.habits:
        starts = world.starts(peer_id)
        for at_s in times:
            first_s = next(start_s for start_s in starts if start_s >= at_s)
            assert first_s - at_s <= longest_s, (seed, peer_id, at_s)


def test_a_burst_of_commits_is_one_session() -> None:
    world = World()
    world.add("peer")
    for number in range(20):
        world.news_at(10.0 + number / 1_000)
    world.run(12.0)
    assert len(world.starts("peer", 10.0)) == 1


def test_a_steady_stream_takes_a_bounded_share_of_a_core() -> None:
    for peers_count, cost_s in ((1, 0.002), (4, 0.02), (12, 0.008), (64, 0.01), (12, 0.5)):
        world = World()
        for number in range(peers_count):
            world.add(f"peer {number}", Habit(max(0.02, cost_s), cost_s=cost_s))
        world.stream(10, 70, 0.05)
        world.run(70.0)
        counts = [len(world.starts(peer_id, 10.0)) for peer_id in world.habits]
        counted_s = sum(counts) * min(cost_s, COST_S_MAX)
        assert counted_s / 60 <= 0.22, (peers_count, cost_s)
        assert min(counts) >= 2
        assert max(counts) <= 60 / PAUSE_S_MIN


def test_news_from_a_peer_is_no_news_for_it() -> None:
    world = World()
    for peer_id in ("source", "other"):
        world.add(peer_id)
    world.news_at(10.0, "source")
    world.run(12.0)
    assert not world.starts("source", 1.0)
    assert len(world.starts("other", 1.0)) == 1


def test_the_nudge_of_a_peer_concerns_that_peer_alone() -> None:
    world = World()
    for peer_id in ("one", "two"):
        world.add(peer_id)
    world.nudge_at(10.0, "one")
    world.nudge_at(10.0, "nobody")
    world.run(12.0)
    assert len(world.starts("one", 1.0)) == 1
    assert not world.starts("two", 1.0)


# --- peers that fail -------------------------------------------------------------------------------


def test_the_pauses_before_a_failing_peer_double_up_to_a_bound_and_end_with_a_success() -> None:
    world = World()
    world.add("peer", LYING)
    world.run(7_200.0)
    for number, gap_s in enumerate(world.gaps("peer"), 1):
        longest_s = min(INTERVAL_S * 2**number, BACKOFF_S_MAX)
        assert longest_s * (1 - JITTER) <= gap_s <= longest_s
    world.habits["peer"] = QUICK
    world.run(10_000.0)
    assert world.gaps("peer")[-1] <= INTERVAL_S
    assert world.schedule.failures("peer") == 0


def test_writes_bring_a_failing_peer_one_early_retry_and_no_more() -> None:
    world = World()
    world.add("peer", LYING)
    world.stream(0, 3_600, 0.5)
    world.run(3_600.0)
    gaps = world.gaps("peer")
    assert EARLY_RETRY_S <= gaps[0] <= EARLY_RETRY_S + 1
    assert all(
        gap_s >= min(INTERVAL_S * 2 ** (number + 2), BACKOFF_S_MAX) * (1 - JITTER)
        for number, gap_s in enumerate(gaps[1:])
    )


def test_a_failing_peer_that_nudges_all_the_time_gets_a_session_per_interval() -> None:
    world = World()
    world.add("peer", LYING)
    for number in range(7_200):
        world.nudge_at(number / 2, "peer")
    world.run(3_600.0)
    gaps = world.gaps("peer")
    assert EARLY_RETRY_S <= gaps[0] <= EARLY_RETRY_S + 1
    assert len(gaps) > 100
    assert min(gaps[1:]) >= INTERVAL_S - 1e-6


def test_what_is_no_fault_of_the_peer_changes_no_failures_and_is_tried_with_the_next_cycle() -> (
    None
):
    world = World()
    world.add("peer", LYING)
    world.run(100.0)
    failures = world.schedule.failures("peer")
    assert failures
    world.habits["peer"] = Habit(verdict=Verdict.NOTHING)
    world.stream(100, 4_000, 1)
    world.run(4_000.0)
    assert world.schedule.failures("peer") == failures
    assert all(gap_s >= INTERVAL_S * (1 - JITTER) for gap_s in world.gaps("peer")[1:])


# --- peers that take long --------------------------------------------------------------------------


@pytest.mark.parametrize("habit", [HANGING, ENORMOUS, DEAD], ids=["hang", "enormous", "dead"])
@pytest.mark.parametrize("bad_count", [3, 8, 40])
def test_peers_that_take_long_delay_no_quick_peer(habit: Habit, bad_count: int) -> None:
    world = World()
    for number in range(9):
        world.add(f"quick {number}")
    world.run(1.0)
    for number in range(bad_count):
        world.add(f"a bad {number}", habit)  # before the quick ones by name, too
    world.stream(10, 1_300, 2.0)
    world.run(1_300.0)
    for number in range(9):
        starts = world.starts(f"quick {number}", 10.0)
        assert max(after - before for before, after in pairwise(starts)) < 3.0
    reached = [number for number in range(bad_count) if world.starts(f"a bad {number}")]
    assert len(reached) >= min(bad_count, 16)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_no_peer_is_forgotten(seed: int) -> None:
    random = Random(seed)
    world = World(seed, sessions_max=6, slow_sessions_max=3)
    habits = [QUICK, DEAD, HANGING, LYING, Habit(8.0), Habit(verdict=Verdict.NOTHING)]
    for number in range(15):
        world.add(f"peer {number}", random.choice(habits))
    for _ in range(400):
        at_s = random.uniform(0, 3_000)
        peer_id = random.choice(list(world.habits))
        world.nudge_at(at_s, peer_id)
        world.news_at(random.uniform(0, 3_000))
        habit = random.choice(habits)
        world.at(at_s, lambda peer_id=peer_id, habit=habit: world.habits.update({peer_id: habit}))
    world.run(3_000.0)
    world.habits.update(dict.fromkeys(world.habits, QUICK))
    world.run(3_000.0 + BACKOFF_S_MAX + 10 * HANG_S)
    world.news_at(world.now_s)
    at_s = world.now_s
    world.run(at_s + 2.0)
    assert all(len(world.starts(peer_id, at_s)) == 1 for peer_id in world.habits), seed
