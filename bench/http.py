"""What HTTP costs: GET by ID beside a bare ASGI application, pages, hints, look-ups, batches.

`python -m bench.http [--quick]`. Each figure stands beside its limit, measured in the same run on the
same machine: a bare ASGI application on the same server that returns the same bytes. Servers and
load generator are processes of their own and take turns, because machines drift.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from urllib.parse import quote

from bench.frame_workloads import filter_frames, small_frames
from bench.http_load import Load, generate, request
from bench.http_servers import Served, serving
from bench.table import publish
from sdstore.sds.codec import decode
from sdstore.wire import store_pb2 as wire
from tests.support.postgres import running_postgres

CONNECTIONS = 32
ROUNDS = 5
BATCH_ITEMS = 1_000
BATCHES_IN_FLIGHT = 4
HINT_EVERY = 10
SAMPLES_MAX = 5_000
PROTOBUF = {"accept": "application/x-protobuf"}
POSTS_PROTOBUF = {"content-type": "application/x-protobuf", **PROTOBUF}
Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    sizes: tuple[int, ...]
    filter_frames_count: int
    seconds: float


FULL = Scale((10_000, 100_000, 1_000_000), 5_000, 2.0)
QUICK = Scale((10_000,), 500, 0.5)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A server beside its limit; the ratios are 1 where it reaches the limit."""

    limit: Load
    load: Load
    ratio: float
    cpu_us: float
    cpu_ratio: float


@dataclass
class Loaded:
    """IDs, hints and channels of what a node was given, as far as samples need them."""

    message_ids: list[str]
    hints: list[bytes]
    channel_ids: list[str]


def main() -> None:
    """Measure and print."""
    scale = QUICK if "--quick" in sys.argv else FULL
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/small.db"
        rows += _grow("sqlite", url, f"{folder}/small", scale)
        rows += _filters(f"sqlite:///{folder}/filters.db", f"{folder}/filters", scale)
        with running_postgres(()) as server_url:
            rows += _grow("postgresql", server_url, f"{folder}/postgresql", scale)
    publish("http", "HTTP, one worker, 32 connections", rows)


def _grow(database: str, url: str, folder: str, scale: Scale) -> Iterator[Row]:
    """One store that grows from size to size."""
    frames = small_frames(scale.sizes[-1])
    loaded = Loaded([], [], [])
    count = 0
    with serving("node", url, folder) as node:
        for size in scale.sizes:
            rate = _load(node, islice(frames, size - count), size - count, loaded)
            count = size
            about = {"database": database, "frames": "300 B", "messages": size}
            yield about | _row("messages published, batches of 1,000", rate)
            yield from _measured(about, node, url, folder, loaded, scale.seconds)


def _filters(url: str, folder: str, scale: Scale) -> Iterator[Row]:
    """Frames of 19 kB, as js-waku sends them."""
    count = scale.filter_frames_count
    loaded = Loaded([], [], [])
    about = {"database": "sqlite", "frames": "19 kB", "messages": count}
    with serving("node", url, folder) as node:
        rate = _load(node, filter_frames(count, known=2_000), count, loaded)
        yield about | _row("messages published, batches of 1,000", rate)
        yield from _get(about, node, folder, loaded, scale.seconds, "protobuf", PROTOBUF)


def _measured(
    about: Row, node: Served, url: str, folder: str, loaded: Loaded, seconds: float
) -> Iterator[Row]:
    yield from _get(about, node, folder, loaded, seconds, "protobuf", PROTOBUF)
    yield from _get(about, node, folder, loaded, seconds, "JSON", {})
    if about["database"] == "postgresql":
        yield from _against_naive(about, node, url, folder, loaded, seconds)
    random = Random(1)
    pages = [f"/v1/channels/messages?channel_id={c}" for c in loaded.channel_ids]
    hints = [f"/v1/hints/{hint.hex()}" for hint in loaded.hints]
    for what, targets in (("page of 100", pages), ("hint look-up", hints)):
        for form, headers in (("protobuf", PROTOBUF), ("JSON", {})):
            asked = [request("GET", target, headers) for target in targets]
            load = generate(node.url, _any_of(asked, random), connections=1, seconds=seconds)
            yield about | _row(f"{what}, {form}, 1 connection", load)
    ids = wire.LookupRequest(message_ids=loaded.message_ids[:1_000]).SerializeToString()
    lookup = request("POST", "/v1/messages/lookup", POSTS_PROTOBUF, ids)
    load = generate(node.url, lambda: lookup, connections=1, seconds=seconds)
    yield about | _row("look-up of 1,000 IDs, 1 connection", load)


def _get(
    about: Row,
    node: Served,
    folder: str,
    loaded: Loaded,
    seconds: float,
    form: str,
    headers: dict[str, str],
) -> Iterator[Row]:
    """GET by ID and the bare application, in turns."""
    asked = [request("GET", f"/v1/messages/{i}", headers) for i in loaded.message_ids]
    with _bare_like(f"{node.url}/v1/messages/{loaded.message_ids[0]}", headers, folder) as bare:
        compared = _in_turns(bare, node, asked, seconds)
    yield about | _compared_row(f"GET by ID, {form}", "bare ASGI", compared)


def _against_naive(
    about: Row, node: Served, url: str, folder: str, loaded: Loaded, seconds: float
) -> Iterator[Row]:
    asked = [request("GET", f"/v1/messages/{i}", PROTOBUF) for i in loaded.message_ids]
    with serving("naive", url, folder) as naive:
        compared = _in_turns(naive, node, asked, seconds)
    yield about | _compared_row("GET by ID, protobuf", "a query per request", compared)


def _in_turns(first: Served, second: Served, asked: list[bytes], seconds: float) -> Compared:
    """Load on both in turns: medians, and the median ratios of the second to the first."""
    make_request = _any_of(asked, Random(1))
    rounds = [
        [_costing(server, make_request, seconds) for server in (first, second)]
        for _ in range(ROUNDS)
    ]
    return Compared(
        limit=_median([limit for (limit, _), _ in rounds]),
        load=_median([load for _, (load, _) in rounds]),
        ratio=median(b.requests_per_s / a.requests_per_s for (a, _), (b, _) in rounds),
        cpu_us=median(cpu_us for _, (_, cpu_us) in rounds),
        cpu_ratio=median(a / b for (_, a), (_, b) in rounds),
    )


def _costing(
    server: Served, make_request: Callable[[], bytes], seconds: float
) -> tuple[Load, float]:
    """A load, and the microseconds of CPU that the server spent on a request."""
    before_s = server.cpu_s()
    load = generate(server.url, make_request, connections=CONNECTIONS, seconds=seconds)
    requests_count = load.requests_per_s * max(seconds, 0.001)
    return load, (server.cpu_s() - before_s) / requests_count * 1e6


def _median(loads: list[Load]) -> Load:
    return Load(
        median(load.requests_per_s for load in loads),
        median(load.p50_ms for load in loads),
        median(load.p99_ms for load in loads),
    )


def _any_of(asked: list[bytes], random: Random) -> Callable[[], bytes]:
    return lambda: asked[int(random.random() * len(asked))]


@contextmanager
def _bare_like(url: str, headers: dict[str, str], folder: str) -> Iterator[Served]:
    """A bare application that gives the answer that `url` gives."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        own = {"date", "connection"}  # the server's, not the application's
        lower = [(name.lower(), value) for name, value in answer.headers.items()]
        named = [(name.encode(), value.encode()) for name, value in lower if name not in own]
        pickled = pickle.dumps((answer.status, named, answer.read()))
    file = Path(folder) / "answer"
    file.write_bytes(pickled)
    with serving("bare", str(file)) as bare:
        yield bare


def _load(node: Served, frames: Iterator[bytes], count: int, loaded: Loaded) -> Load:
    """Publish frames in batches, some at a time; messages per second while they are sent."""
    every = max(1, count // SAMPLES_MAX)
    seconds, times_ms = 0.0, []
    numbered = enumerate(islice(frames, count))
    while batches := [
        _batch(items, every, loaded)
        for _ in range(BATCHES_IN_FLIGHT)
        if (items := list(islice(numbered, BATCH_ITEMS)))
    ]:
        load = generate(node.url, batches.pop, connections=len(batches), seconds=0)
        seconds += BATCHES_IN_FLIGHT / load.requests_per_s
        times_ms += [load.p50_ms, load.p99_ms]
    return Load(count / seconds, median(times_ms), max(times_ms))


def _batch(items: list[tuple[int, bytes]], every: int, loaded: Loaded) -> bytes:
    batch = wire.PublishBatch()
    for number, frame in items:
        hints = [number.to_bytes(32, "big")] if number % HINT_EVERY == 0 else []
        batch.items.add(frame=frame, retrieval_hints=hints)
        if number % every == 0:
            message, _ = decode(frame)
            loaded.message_ids.append(message.message_id)
            loaded.hints += hints
            loaded.channel_ids.append(quote(message.channel_id, safe=""))
    return request("POST", "/v1/messages/batch", POSTS_PROTOBUF, batch.SerializeToString())


def _row(what: str, load: Load) -> Row:
    columns = {"cpu us": "", "limit": "", "limit per s": "", "ratio": "", "cpu ratio": ""}
    return {
        "what": what,
        "per s": round(load.requests_per_s),
        "p50 ms": load.p50_ms,
        "p99 ms": load.p99_ms,
    } | columns


def _compared_row(what: str, limit: str, compared: Compared) -> Row:
    return _row(what, compared.load) | {
        "cpu us": compared.cpu_us,
        "limit": limit,
        "limit per s": round(compared.limit.requests_per_s),
        "ratio": compared.ratio,
        "cpu ratio": compared.cpu_ratio,
    }


if __name__ == "__main__":
    main()
