"""Participants in seeded worlds: whatever fails, the laws hold, and everything settles afterwards.

`python -m tests.simulation SEED` shows one world. Seeds that failed once are in `seeds.txt`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.fault import ENVIRONMENT as PLANTED_FAULT
from tests.simulation.schedule import schedule_of
from tests.simulation.world import World

ROOT = Path(__file__).resolve().parents[2]
SEEDS = Path(__file__).parent / "seeds.txt"

FAST_S = 12.0
SLOW_S = 60.0
SOAK_SCHEDULES = 50_000
SOAK_CHUNK = 50
NEXT_SEED = "simulation/next_seed"
"""Where pytest's cache keeps the progress of the soak test."""


def run(seed: int) -> str:
    """Run the world of a seed; empty, or what is wrong."""
    try:
        World(schedule_of(seed)).run()
    except Exception as error:  # noqa: BLE001 (whatever is raised belongs to the seed)
        return f"{type(error).__name__}: {error}"
    return ""


def run_all(seeds: Iterable[int]) -> list[tuple[int, str]]:
    """The seeds that fail, with what is wrong."""
    return [(seed, wrong) for seed in seeds if (wrong := run(seed))]


def fail(failures: list[tuple[int, str]]) -> None:
    """Keep the seeds that failed, unless a fault is planted, and name them."""
    if failures:
        if not os.environ.get(PLANTED_FAULT):
            with SEEDS.open("a", encoding="ascii") as kept:
                kept.writelines(f"{seed}\n" for seed, _ in failures)
        lines = [f"{wrong}\n  python -m tests.simulation {seed}" for seed, wrong in failures]
        pytest.fail("\n".join(lines), pytrace=False)


def run_for(seconds: float) -> int:
    """Run worlds for a time, those of the first seeds; the number of worlds.

    Fresh seeds belong to the soak test: there a fault that one world in thousands shows is found, and
    does not stop a change that has nothing to do with it.
    """
    ends, seed = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        fail(run_all([seed]))
        seed += 1
    return seed


def trace_hash(seed: int) -> str:
    """A hash over everything that happens in the world of a seed."""
    digest = hashlib.blake2b(digest_size=16)
    World(schedule_of(seed), lambda line: digest.update(line.encode())).run()
    return digest.hexdigest()


def test_worlds_that_failed_once_settle() -> None:
    fail(run_all(map(int, SEEDS.read_text(encoding="ascii").split())))


def test_the_laws_hold_in_many_worlds() -> None:
    assert run_for(FAST_S) >= 5


@pytest.mark.slow
def test_the_laws_hold_in_more_worlds() -> None:
    assert run_for(SLOW_S) >= 25


def test_a_world_is_a_function_of_its_seed() -> None:
    """Also in another process, where the sets of strings have other orders."""
    program = "from tests.simulation.test_participants import trace_hash as t; print(t(7), t(8))"
    here = f"{trace_hash(7)} {trace_hash(8)}"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout.strip() == here


@pytest.mark.soak
def test_the_laws_hold_in_50_000_worlds(pytestconfig: pytest.Config) -> None:
    """On all cores. It stops after `SOAK_MINUTES`; the next run goes on with the next seed."""
    cache = pytestconfig.cache
    assert cache is not None
    first = done = int(cache.get(NEXT_SEED, 0))
    goal = (first // SOAK_SCHEDULES + 1) * SOAK_SCHEDULES
    started, failures = time.monotonic(), []
    ends = started + 60 * float(os.environ.get("SOAK_MINUTES", "60"))
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        while done < goal and time.monotonic() < ends:
            chunks = [
                range(done + n * SOAK_CHUNK, done + (n + 1) * SOAK_CHUNK) for n in range(cores)
            ]
            for found in pool.map(run_all, chunks):
                failures += found
            done += cores * SOAK_CHUNK
            cache.set(NEXT_SEED, done)
    minutes = (time.monotonic() - started) / 60
    print(f"seeds {first} to {done - 1} in {minutes:.1f} minutes: {len(failures)} fail")
    fail(failures)
