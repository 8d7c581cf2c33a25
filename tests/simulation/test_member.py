"""Honest participants beside one hostile member: nothing honest is lost, replaced, hidden or late.

`python -m tests.simulation --member SEED` runs one world. Seeds that failed once are in `member_seeds.txt`.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.fault import ENVIRONMENT as PLANTED_FAULT
from tests.simulation.member import wrong_in

SEEDS = Path(__file__).parent / "member_seeds.txt"
ORDERED_WORLDS = 4
ORDERED_S = 5.0
FAST_S = 12.0
SLOW_SCHEDULES = 2_000
FIRST_SLOW_SEED = 10_000


def fail(found: dict[int, str]) -> None:
    """Keep the seeds that failed, unless a fault is planted, and name them."""
    wrong = {seed: what for seed, what in found.items() if what}
    if wrong:
        if not os.environ.get(PLANTED_FAULT):
            with SEEDS.open("a", encoding="ascii") as kept:
                kept.writelines(f"{seed}\n" for seed in wrong)
        pytest.fail("\n".join(f"{seed}: {what}" for seed, what in wrong.items()), pytrace=False)


def test_worlds_that_failed_once_hold() -> None:
    fail({int(seed): wrong_in(int(seed)) for seed in SEEDS.read_text(encoding="ascii").split()})


def test_nothing_honest_suffers_from_a_hostile_member() -> None:
    ends, seed = time.monotonic() + FAST_S, 0
    while time.monotonic() < ends:
        fail({seed: wrong_in(seed)})
        seed += 1
    assert seed >= 3


def test_a_hostile_indexer_stops_no_order_and_no_two_honest_readers_disagree() -> None:
    """The first worlds, and more for a while."""
    ends, seed = time.monotonic() + ORDERED_S, 0
    while seed < ORDERED_WORLDS or time.monotonic() < ends:
        assert not (wrong := wrong_in(seed, is_ordered=True)), f"ordered world {seed}: {wrong}"
        seed += 1


@pytest.mark.slow
def test_nothing_honest_suffers_in_2_000_worlds() -> None:
    """On all cores, some 300 s of CPU time. No world waits for another one."""
    seeds = range(FIRST_SLOW_SEED, FIRST_SLOW_SEED + SLOW_SCHEDULES)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(seeds, pool.map(wrong_in, seeds, chunksize=5), strict=True))
    assert len(found) == 2_000
    fail(found)
