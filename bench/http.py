"""Latency of the HTTP interface at 10^4, 10^5 and 10^6 messages in the store.

`python -m bench.http [sqlite] [postgresql] [--quick]`. GET by ID is compared with its limits in the
same run: a bare ASGI application on the same server that returns the same bytes, and on PostgreSQL a
node that runs one query for each request. Servers and load generator are separate processes and take
turns, because machines drift; `cpu ratio` compares the CPU time of the servers alone. A single client
requests pages, hints and ancestors; `floor ms` is the time of the bare application and the client for
the same bytes.
"""

from __future__ import annotations

import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from urllib.parse import quote

from bench.comparing import bare_like, in_turns, median_load
from bench.frame_workloads import filter_frames, small_frames
from bench.http_load import Load, any_of, generate, request
from bench.http_servers import Served, serving
from bench.loading import Item, load, new_database
from bench.postgres_server import running_postgres
from bench.scratch import in_scratch
from bench.table import publish
from sdstore.sds.codec import decode
from sdstore.wire import store_pb2 as wire

CHANNELS = 8
"""So that 10^4 messages hold conversations of 1,000."""

HINT_EVERY = 10
SAMPLES_MAX = 5_000
LATEST = 200
"""Heads of the walks: every one has a thousand messages before it."""

SERVER = ("shared_buffers=512MB", "max_wal_size=4GB", "checkpoint_timeout=15min")
FORMS: dict[str, dict[str, str]] = {"protobuf": {"accept": "application/x-protobuf"}, "JSON": {}}
GOALS_MS = {"page of 100": 3.0, "hint look-up": 1.0, "ancestors, depth 1,000": 50.0}
Row = dict[str, Any]
NO_FIGURES = dict.fromkeys(
    (
        "per s",
        "p50 ms",
        "p99 ms",
        "cpu us",
        "limit",
        "limit per s",
        "ratio",
        "cpu ratio",
        "floor ms",
        "goal",
    ),
    "",
)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    sizes: tuple[int, ...]
    filter_frames_count: int
    seconds: float


FULL = Scale((10_000, 100_000, 1_000_000), 5_000, 1.0)
QUICK = Scale((10_000,), 500, 0.5)


class Sampled:
    """Passes items on to a store, and keeps as many as requests are made of."""

    def __init__(self, frames: Iterable[bytes], count: int) -> None:
        self.message_ids: list[str] = []
        self.hints: list[str] = []
        self.channel_ids: list[str] = []
        self.latest: list[str] = []
        self._frames = frames
        self._count = count

    def items(self) -> Iterator[Item]:
        """Everything, every tenth with a hint."""
        every = max(1, self._count // SAMPLES_MAX)
        for number, frame in enumerate(self._frames):
            hints = (number.to_bytes(32, "big"),) if number % HINT_EVERY == 0 else ()
            is_latest = number >= self._count - LATEST
            if is_latest or number % every == 0:
                message, _ = decode(frame)
                self.message_ids.append(message.message_id)
                self.channel_ids.append(quote(message.channel_id, safe=""))
                self.hints += [hint.hex() for hint in hints]
                self.latest += [message.message_id] if is_latest else []
            yield frame, hints


@dataclass(frozen=True)
class Target:
    """A running node and samples of its messages. `about` begins each row."""

    node: Served
    about: Row
    url: str
    folder: str
    held: Sampled
    seconds: float

    def row(self, what: str, **figures: Any) -> Row:
        """A row of the table."""
        return self.about | {"what": what} | NO_FIGURES | figures


def main() -> None:
    """Measure and print."""
    scale = QUICK if "--quick" in sys.argv else FULL
    asked = {"sqlite", "postgresql"} & set(sys.argv) or {"sqlite", "postgresql"}
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sdstore-bench-"))
        if "sqlite" in asked:
            for size in scale.sizes:
                rows += _small("sqlite", f"sqlite:///{folder}/{size}.db", folder, size, scale)
            rows += _filters(folder, scale)
        if "postgresql" in asked:
            server_url = stack.enter_context(running_postgres(SERVER))
            for size in scale.sizes:
                url = new_database(server_url, f"of_{size}")
                rows += _small("postgresql", url, folder, size, scale)
    publish("http", "HTTP, one worker", rows)


def _small(database: str, url: str, folder: str, size: int, scale: Scale) -> Iterator[Row]:
    held = Sampled(small_frames(size, channels=CHANNELS), size)
    load(url, held.items())
    about = {"database": database, "frames": "300 B", "messages": size}
    data = f"{folder}/{database}-{size}"
    yield from _start(about, url, data)
    with serving("node", url, data) as node:
        target = Target(node, about, url, data, held, scale.seconds)
        for form in FORMS:
            yield _against_bare(target, form)
        if database == "postgresql":
            yield _against_naive(target)
        yield from _single_client(target)


def _filters(folder: str, scale: Scale) -> Iterator[Row]:
    """Frames of 19 kB, as js-waku sends them."""
    count, url, data = (
        scale.filter_frames_count,
        f"sqlite:///{folder}/filters.db",
        f"{folder}/filters",
    )
    held = Sampled(filter_frames(count, known=2_000), count)
    load(url, held.items())
    with serving("node", url, data) as node:
        about = {"database": "sqlite", "frames": "19 kB", "messages": count}
        yield _against_bare(Target(node, about, url, data, held, scale.seconds), "protobuf")


def _start(about: Row, url: str, data: str) -> Iterator[Row]:
    """From the start of the process to /readyz, without and with the index that a stop leaves."""
    for what in ("first start", "start"):
        started = time.perf_counter()
        with serving("node", url, data) as node:
            urllib.request.urlopen(f"{node.url}/readyz").close()
            took_ms = (time.perf_counter() - started) * 1e3
            mib = node.memory_bytes() / 2**20
        row = about | {"what": f"{what}, {mib:.0f} MiB of memory"} | NO_FIGURES
        yield row | {"p50 ms": took_ms, "goal": "<= 1500 ms at 10^6"}


def _against_bare(target: Target, form: str) -> Row:
    asked = _get(target, form)
    with bare_like(target.node.url, asked[0], target.folder) as bare:
        compared = in_turns(bare, target.node, asked, target.seconds)
    figures = {"limit": "bare ASGI", "goal": "ratio >= 0.45"}
    return target.row(f"GET by ID, {form}, 32 connections", **compared, **figures)


def _against_naive(target: Target) -> Row:
    with serving("naive", target.url, target.folder) as naive:
        compared = in_turns(naive, target.node, _get(target, "protobuf"), target.seconds)
    figures = {"limit": "a query per request", "goal": "ratio >= 2"}
    return target.row("GET by ID, protobuf, 32 connections", **compared, **figures)


def _get(target: Target, form: str) -> list[bytes]:
    return [request("GET", f"/v1/messages/{i}", FORMS[form]) for i in target.held.message_ids]


def _single_client(target: Target) -> Iterator[Row]:
    held = target.held
    paths = {
        "page of 100": [f"/v1/channels/{each}/messages" for each in set(held.channel_ids)],
        "hint look-up": [f"/v1/hints/{each}" for each in held.hints],
        "ancestors, depth 1,000": [f"/v1/messages/{i}/ancestors?limit=1000" for i in held.latest],
    }
    for what, targets in paths.items():
        for form, headers in FORMS.items():
            asked = [request("GET", path, headers) for path in targets]
            floor, load_ = _in_turn_with_bare(target, asked)
            figures = {"floor ms": floor.p50_ms, "goal": f"<= {GOALS_MS[what]:g} ms"}
            yield target.row(f"{what}, {form}, 1 connection", **load_.figures(), **figures)
    ids = wire.LookupRequest(message_ids=held.message_ids[:1_000]).SerializeToString()
    headers = {"content-type": "application/x-protobuf", **FORMS["protobuf"]}
    lookup = request("POST", "/v1/messages/lookup", headers, ids)
    load_ = generate(target.node.url, lambda: lookup, connections=1, seconds=target.seconds)
    yield target.row("look-up of 1,000 IDs, 1 connection", **load_.figures())


def _in_turn_with_bare(target: Target, asked: Sequence[bytes]) -> tuple[Load, Load]:
    ask = partial(generate, make_request=any_of(asked, Random(1)), connections=1)
    with bare_like(target.node.url, asked[0], target.folder) as bare:
        floor = ask(bare.url, seconds=target.seconds / 2)
    return floor, median_load([ask(target.node.url, seconds=target.seconds) for _ in range(3)])


if __name__ == "__main__":
    in_scratch(main)
