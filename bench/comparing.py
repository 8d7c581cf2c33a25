"""A server compared with its limit, in turns."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

from bench.http_load import Load, answer_to, any_of, generate
from bench.http_servers import Served, serving

CONNECTIONS = 32
ROUNDS = 5


def in_turns(
    limit: Served, server: Served, asked: Sequence[bytes], seconds: float
) -> dict[str, float]:
    """Load both in turns; returns the server's medians, and the medians of its ratios to the limit.

    A ratio of 1 means that the server reaches the limit.
    """
    make_request = any_of(asked, Random(1))
    rounds = [
        (_costing(limit, make_request, seconds), _costing(server, make_request, seconds))
        for _ in range(ROUNDS)
    ]
    return median_load([load for _, (load, _) in rounds]).figures() | {
        "cpu us": median(cpu_us for _, (_, cpu_us) in rounds),
        "limit per s": round(median(load.requests_per_s for (load, _), _ in rounds)),
        "ratio": median(b.requests_per_s / a.requests_per_s for (a, _), (b, _) in rounds),
        "cpu ratio": median(a / b for (_, a), (_, b) in rounds),
    }


def median_load(loads: Sequence[Load]) -> Load:
    """The median of each figure."""
    return Load(
        round(sum(load.requests_count for load in loads) / len(loads)),
        median(load.requests_per_s for load in loads),
        median(load.p50_ms for load in loads),
        median(load.p99_ms for load in loads),
    )


@contextmanager
def bare_like(url: str, asked: bytes, folder: str) -> Iterator[Served]:
    """A bare application that answers every request as the server at `url` answers `asked`."""
    head, body = answer_to(url, asked)
    status, *lines = head.split(b"\r\n")
    pairs = [tuple(line.split(b": ", 1)) for line in lines]
    file = Path(folder) / "answer"
    # The date is the server's own.
    file.write_bytes(
        pickle.dumps((int(status.split()[1]), [each for each in pairs if each[0] != b"date"], body))
    )
    with serving("bare", str(file)) as bare:
        yield bare


def _costing(
    server: Served, make_request: Callable[[], bytes], seconds: float
) -> tuple[Load, float]:
    """A load, and the microseconds of CPU that the server spent on a request."""
    before_s = server.cpu_s()
    load = generate(server.url, make_request, connections=CONNECTIONS, seconds=seconds)
    return load, (server.cpu_s() - before_s) / load.requests_count * 1e6
