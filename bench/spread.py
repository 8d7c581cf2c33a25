"""How fast a message spreads over a federation: `python -m bench.spread [--quick]`.

First a simulation of 10 to 10,000 stores, each with the schedule of real nodes
(`app.federation.schedule`), on a clock of its own. Each store has `DEGREE` peers at random, and hears
the nudges of its peers; a session is a union of two sets after a latency. One store publishes a message,
and the run ends when every store that lives has it. Hops: sessions between the publisher and a store.
"cycle": the same without nudges; "full": each store has all others as peers. Results:
bench/results/spread.csv and .png; `--docs` copies both into docs.

Then 16 real nodes on loopback, each in a process of its own (`bench.spread_nodes`).
"""

from __future__ import annotations

import argparse
import heapq
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import matplotlib as mpl

from app.federation.schedule import Schedule, Verdict
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings
from bench.scratch import in_scratch
from bench.spread_nodes import measure_nodes
from bench.table import publish

SIZES = (10, 30, 100, 300, 1_000, 3_000, 10_000)
QUICK_SIZES = (10, 100, 1_000)
FULL_SIZE_MAX = 100
DEGREE = 4
INTERVAL_S: float = Settings.model_fields["sync_interval_s"].default
SESSION_S = (0.02, 0.06)  # two round trips of 10 to 30 ms
SLOW_SESSION_S = (2.0, 8.0)
DEAD_SESSION_S = 5.0  # the connection is not made
NUDGE_S = 0.015  # on its way to the stores that listen
COST_S = 0.008
WARM_UP_S = 1.5 * INTERVAL_S  # each store has met its peers, and knows the dead
STORES_MEASURED = 1_000  # small federations are measured several times
RUNS_MAX = 10
DOCS = Path(__file__).parent.parent / "docs"


class Habit(Enum):
    """How a store behaves."""

    QUICK = "quick"
    SLOW = "slow"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class Store:
    """A store. `hops`: sessions between the publisher and it; None: it lacks the message."""

    name: str
    habit: Habit
    schedule: Schedule
    listeners: list[Store] = field(default_factory=list)
    hops: int | None = None
    got_at_s: float = math.inf
    look_at_s: float = math.inf
    sessions_count: int = 0


class Federation:
    """Stores, and what happens to them, in the order of a simulated clock."""

    def __init__(
        self,
        stores_count: int,
        seed: int,
        *,
        degree: int = DEGREE,
        dead_share: float = 0.0,
        slow_share: float = 0.0,
        nudges: bool = True,
    ) -> None:
        self.now_s = 0.0
        self._random = random = Random(seed)
        self._nudges = nudges
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.stores: dict[str, Store] = {}
        for number in range(stores_count):
            chance = random.random() if number else 1.0  # the publisher is quick
            habit = Habit.DEAD if chance < dead_share else Habit.QUICK
            if dead_share <= chance < dead_share + slow_share:
                habit = Habit.SLOW
            schedule = Schedule(
                INTERVAL_S,
                random,
                sessions_max=DEFAULT_LIMITS.peer_sessions_max,
                slow_sessions_max=DEFAULT_LIMITS.peer_sessions_slow_max,
            )
            self.stores[str(number)] = Store(str(number), habit, schedule)
        names = list(self.stores)
        for store in self.alive:
            others = random.sample(names, min(degree + 1, stores_count))
            for name in [each for each in others if each != store.name][:degree]:
                store.schedule.add(name, random.uniform(0, INTERVAL_S))
                self.stores[name].listeners.append(store)
            self._plan(store)

    @property
    def alive(self) -> list[Store]:
        """The stores that are not dead."""
        return [each for each in self.stores.values() if each.habit is not Habit.DEAD]

    @property
    def sessions_count(self) -> int:
        """Sessions that have begun."""
        return sum(each.sessions_count for each in self.stores.values())

    def publish(self) -> None:
        """The first store gets a message from a client."""
        self._receive(next(iter(self.stores.values())), 0, "")

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until_s and not is_done():
            self.now_s, _, do = heapq.heappop(self._events)
            do()

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), do))

    def _plan(self, store: Store) -> None:
        """Look at a store when its schedule says so, unless it looks earlier anyway."""
        look_s = store.schedule.next_look_s(self.now_s)
        if look_s is not None and look_s < store.look_at_s:
            store.look_at_s = look_s
            self._at(look_s, lambda: self._look(store, look_s))

    def _look(self, store: Store, planned_s: float) -> None:
        if planned_s == store.look_at_s:
            store.look_at_s = math.inf
            self._start(store)

    def _start(self, store: Store) -> None:
        for name in store.schedule.start_due(self.now_s):
            self._begin(store, self.stores[name])
        self._plan(store)

    def _begin(self, store: Store, peer: Store) -> None:
        store.sessions_count += 1
        habits = {store.habit, peer.habit}
        if Habit.DEAD in habits:
            took_s = DEAD_SESSION_S
        else:
            took_s = self._random.uniform(*(SLOW_SESSION_S if Habit.SLOW in habits else SESSION_S))
        # Both sides compare what they have when it begins.
        before = store.hops, peer.hops
        self._at(self.now_s + took_s, lambda: self._end(store, peer, *before))

    def _end(self, store: Store, peer: Store, here: int | None, there: int | None) -> None:
        is_dead = peer.habit is Habit.DEAD
        if not is_dead and here is None and there is not None:
            self._receive(store, there + 1, peer.name)
        if not is_dead and there is None and here is not None:
            self._receive(peer, here + 1, "")
        verdict = Verdict.FAILED if is_dead else Verdict.GOOD
        store.schedule.end(peer.name, self.now_s, verdict, COST_S)
        self._start(store)

    def _receive(self, store: Store, hops: int, source: str) -> None:
        if store.hops is not None:
            return
        store.hops, store.got_at_s = hops, self.now_s
        if self._nudges:
            store.schedule.nudge_all(self.now_s, {source})
            self._plan(store)
            for each in store.listeners:
                self._at(self.now_s + NUDGE_S, lambda each=each: self._hear(each, store.name))

    def _hear(self, store: Store, name: str) -> None:
        if store.schedule.nudge(name, self.now_s):
            self._plan(store)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of federation."""

    name: str
    dead_share: float = 0.0
    slow_share: float = 0.0
    nudges: bool = True
    is_full: bool = False


SCENARIOS = (
    Scenario("nudged"),
    Scenario("nudged, 10 % dead", dead_share=0.1),
    Scenario("nudged, 10 % slow", slow_share=0.1),
    Scenario("nudged, 10 % dead, 10 % slow", dead_share=0.1, slow_share=0.1),
    Scenario("nudged, full", is_full=True),
    Scenario("cycle", nudges=False),
    Scenario("cycle, 10 % dead, 10 % slow", dead_share=0.1, slow_share=0.1, nudges=False),
)


def spread(scenario: Scenario, stores_count: int, seed: int) -> dict[str, float]:
    """One message in one federation: hops, seconds to half, to all quick and to all stores that live."""
    federation = Federation(
        stores_count,
        seed,
        degree=stores_count - 1 if scenario.is_full else DEGREE,
        dead_share=scenario.dead_share,
        slow_share=scenario.slow_share,
        nudges=scenario.nudges,
    )
    federation.run(WARM_UP_S)
    federation.now_s = WARM_UP_S
    before_count = federation.sessions_count
    federation.publish()
    alive = federation.alive
    waiting = set(alive)

    def is_done() -> bool:
        nonlocal waiting
        if waiting and next(iter(waiting)).hops is not None:
            waiting = {each for each in waiting if each.hops is None}
        return not waiting

    federation.run(WARM_UP_S + 100 * INTERVAL_S, is_done)
    took_s = sorted(each.got_at_s - WARM_UP_S for each in alive)
    quick_s = max(each.got_at_s for each in alive if each.habit is Habit.QUICK) - WARM_UP_S
    return {
        "hops": max(math.inf if each.hops is None else each.hops for each in alive),
        "half_s": took_s[len(took_s) // 2],
        "quick_s": quick_s,
        "all_s": took_s[-1],
        "rounds": took_s[-1] / INTERVAL_S,
        "sessions_each": (federation.sessions_count - before_count) / len(alive),
    }


def simulate(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each scenario and size: means over several federations, and the slowest of them."""
    rows = []
    for scenario in SCENARIOS:
        for stores_count in sizes:
            if scenario.is_full and stores_count > FULL_SIZE_MAX:
                continue
            runs_count = max(1, min(RUNS_MAX, STORES_MEASURED // stores_count))
            runs = [spread(scenario, stores_count, seed) for seed in range(runs_count)]
            means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
            rows.append(
                {
                    "scenario": scenario.name,
                    "stores": stores_count,
                    "log2": round(math.log2(stores_count), 2),
                    "peers_each": stores_count - 1 if scenario.is_full else DEGREE,
                    "runs": runs_count,
                    **{name: round(value, 3) for name, value in means.items()},
                    "all_s_max": round(max(run["all_s"] for run in runs), 3),
                }
            )
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Hops and rounds against log2 of the number of stores, and seconds."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of a backend

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for scenario in SCENARIOS:
        some = [row for row in rows if row["scenario"] == scenario.name]
        sizes = [row["stores"] for row in some]
        name, unit = ("hops", "hops") if scenario.nudges else ("rounds", "cycles")
        left.plot(sizes, [row[name] for row in some], "o-", label=f"{scenario.name} ({unit})")
        if scenario.nudges:
            right.plot(sizes, [row["all_s"] for row in some], "o-", label=scenario.name)
    sizes = sorted({row["stores"] for row in rows})
    left.plot(sizes, [math.log2(each) for each in sizes], "k:", label="log2(stores)")
    left.set_ylabel("until all stores have a new message")
    right.set_yscale("log")
    right.set_ylabel("seconds until all stores have a new message")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel(f"stores, {DEGREE} peers each")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    """Simulate, then measure."""
    parser = argparse.ArgumentParser(prog="python -m bench.spread")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, no real nodes")
    parser.add_argument("--docs", action="store_true", help="copy the results into docs")
    arguments = parser.parse_args()
    started_s = time.process_time()
    rows = simulate(QUICK_SIZES if arguments.quick else SIZES)
    path = publish("spread", "until all stores have a new message, simulated", rows)
    print(f"{time.process_time() - started_s:.0f} s of CPU; {path}")
    picture = path.with_suffix(".png")
    plot(rows, picture)
    if arguments.docs:
        for each in (path, picture):
            shutil.copy(each, DOCS)
    if not arguments.quick:
        publish("spread_nodes", "16 real nodes on loopback", [measure_nodes()])


if __name__ == "__main__":
    in_scratch(main)
