"""Negentropy v1 at a million records: `python -m bench.negentropy`.

Both sides run in this process and identify differences only; every run loads the sets and builds the
sums again. `sorts` is the time relative to `np.sort` of as many 64-bit integers in the same run, so that
figures of different machines compare.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from recon.negentropy import Negentropy, Records

RECORDS = 10**6
REPEATS = 3
SCENARIOS = (  # differing records, at the newest end or anywhere, frame limit in bytes
    (0, False, 0),
    (1, False, 0),
    (1000, True, 0),
    (1000, False, 0),
    (1000, False, 60_000),
    (10_000, False, 0),
)

Columns = tuple[NDArray[np.uint64], NDArray[np.uint8]]


@dataclass
class Row:
    """One scenario, best of the repeats."""

    scenario: str
    frame_bytes: int
    bytes_up: int
    bytes_down: int
    round_trips: int
    ms: float
    sorts: float


def two_sets(differing: int, *, newest: bool) -> tuple[Columns, Columns]:
    """Sets of a million that differ in so many records, half on either side."""
    random = np.random.default_rng(1)
    count = RECORDS + differing
    timestamps = random.integers(0, RECORDS, count, dtype=np.uint64)
    ids = random.integers(0, 256, (count, 32), dtype=np.uint8)
    order = np.lexsort((ids.view("S32").ravel(), timestamps))
    timestamps, ids = timestamps[order], ids[order]
    picked = np.arange(RECORDS, count) if newest else random.choice(count, differing, replace=False)
    random.shuffle(picked)
    client, server = (np.delete(np.arange(count), half) for half in np.array_split(picked, 2))
    return (timestamps[client], ids[client]), (timestamps[server], ids[server])


def reconcile(client: Columns, server: Columns, frame_bytes: int) -> tuple[int, int, int]:
    """Load both sets and run one conversation; returns bytes up, bytes down, round trips."""
    near, far = Negentropy(Records(*client), frame_bytes), Negentropy(Records(*server), frame_bytes)
    bytes_up = bytes_down = round_trips = 0
    message: bytes | None = near.initiate()
    while message is not None:
        answer = far.respond(message)
        bytes_up += len(message)
        bytes_down += len(answer)
        round_trips += 1
        message = near.reconcile(answer).message
    return bytes_up, bytes_down, round_trips


def best_ms(action: Callable[[], object]) -> float:
    """The shortest of the repeats."""
    times_s = []
    for _ in range(REPEATS):
        start_s = perf_counter()
        action()
        times_s.append(perf_counter() - start_s)
    return 1000 * min(times_s)


def measure() -> Iterator[Row]:
    """All scenarios, and what building the sums alone costs."""
    numbers = np.random.default_rng(1).integers(0, 2**63, RECORDS, dtype=np.uint64)
    sort_ms = best_ms(lambda: np.sort(numbers))
    columns, _ = two_sets(0, newest=False)
    edges = np.array([[0, RECORDS]])
    for scenario, action in (
        ("records taken in", lambda: Records(*columns)),
        ("and their sums built", lambda: Records(*columns).fingerprints(edges)),
    ):
        ms = best_ms(action)
        yield Row(scenario, 0, 0, 0, 0, ms, ms / sort_ms)
    for differing, newest, frame_bytes in SCENARIOS:
        sets = two_sets(differing, newest=newest)
        cost = reconcile(*sets, frame_bytes)
        ms = best_ms(partial(reconcile, *sets, frame_bytes))
        scenario = f"d = {differing} {'newest' if newest else 'uniform'}"
        yield Row(scenario, frame_bytes, *cost, ms, ms / sort_ms)


def main() -> None:
    """Print the table."""
    print("".join(f"{field.name:>22}" for field in fields(Row)))
    for row in measure():
        cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in astuple(row)]
        print("".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
