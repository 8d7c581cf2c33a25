"""The stampede: participants come back to one node within a second, each lacking different messages.

`python -m bench.stampede [SCENARIO …] [--quick]`. The node is a process of its own, as `sdstore serve`
runs it, with the default limits. The participants are asyncio tasks of this process; each runs the
session driver (`sdstore.sync.driver`) as a backfill does, over one connection from an address of its
own (127.0.x.y), and waits as the client library does when the node is busy. They share the columns of
their channel, so that their own work takes as little as possible of the processor that they share with
the node. Beside them an honest client reads a message 50 times a second. Results:
bench/results/stampede.csv.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop
import zstandard

from bench import steady_reader
from bench.loading import load_file
from bench.scratch import in_scratch
from bench.table import publish
from recon.agreement import Interest, SessionKey
from recon.elements import U8, U64, Mask, heads_of, order_of_lamport
from recon.index import Columns, RangeIndex, element_sequence
from recon.view import View
from sdstore.client.exchange import Retry
from sdstore.client.transport import sync_error
from sdstore.errors import StoreError, error_of_reply
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import HistoryEntry, Message, claim_id, entry_digest
from sdstore.sync.comparison import Mode
from sdstore.sync.driver import NOTHING_REMEMBERED, sync_with_peer
from sdstore.sync.memory import Element
from sdstore.sync.report import SyncReport
from sdstore.sync.steps import LostPage, Prepared, Stored
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item

READS_PER_S = 50
SESSIONS_MAX = 30
PAUSE_S = 2.0  # between two sessions of a participant; between two attempts of a call see RETRY
RETRY = Retry()
ANSWER_S_MAX = 60.0
START_S_MAX = 60.0
LEVEL_OF_FILES = 8_192  # open files of this process: a socket for each participant
_START_MS = 1_763_000_000_000
_EVERYTHING = Interest.make(everything=True).encode()
_HEAD = (
    b"POST /v1/recon HTTP/1.1\r\nhost: localhost\r\naccept: application/x-protobuf\r\n"
    b"accept-encoding: zstd\r\ncontent-type: application/x-protobuf\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Participants in turns over `channels` of `messages` each; everyone lacks `missing` of its own.

    `has_addresses`: each has an address of its own. `drops`: each breaks its connection so many times
    while an answer is on its way. `restart_after_s`: the node is killed then, and starts again.
    """

    participants: int = 500
    channels: int = 1
    messages: int = 10_000
    missing: int = 20
    within_s: float = 1.0
    has_addresses: bool = True
    drops: int = 0
    restart_after_s: float | None = None


SCENARIOS = {
    "one channel": Scenario(),
    "50 channels": Scenario(channels=50),
    "one address": Scenario(has_addresses=False),
    "dropped connections": Scenario(drops=2),
    "restart": Scenario(restart_after_s=0.5),
}


# --- the messages --------------------------------------------------------------------------------


def channel_name(number: int) -> str:
    """The name of a channel."""
    return f"/app/1/group-{number}/proto"


def frames_of(channel: int, count: int) -> Iterator[bytes]:
    """Frames of 300 bytes, each with two causes."""
    random = Random(channel)
    recent: tuple[str, ...] = ()
    for number in range(count):
        message_id = random.randbytes(32).hex()
        yield encode(
            Message(
                message_id,
                channel_name(channel),
                sender_id=f"0x{random.randrange(50):040x}",
                lamport_timestamp=_START_MS + 1_000 * number,
                causal_history=tuple(map(HistoryEntry, recent)),
                content=random.randbytes(50),
            )
        )
        recent = (*recent[-1:], message_id)


def write_store(path: Path, scenario: Scenario) -> tuple[list[RangeIndex], str]:
    """Load the store; the elements of each channel, and the ID of a message."""
    indexes, frames, known_id = [], [], ""
    for channel in range(scenario.channels):
        orders, digests = [], []
        for frame in frames_of(channel, scenario.messages):
            message, _ = decode(frame)
            orders.append(order_of_lamport(message.lamport_timestamp or 0))
            digests.append(entry_digest(message))
            frames.append(frame)
            known_id = message.message_id
        ids = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
        column = np.array(orders, np.uint64)
        sequence = element_sequence(column, heads_of(ids))
        indexes.append(
            RangeIndex.from_sorted(
                column[sequence], ids[sequence], np.zeros(len(orders), np.uint32)
            )
        )
    load_file(path, ((frame, ()) for frame in frames))
    return indexes, known_id


# --- the node ------------------------------------------------------------------------------------


class Node:
    """`sdstore serve` over a folder, with the default limits; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cpu_s = 0.0
        self._peak_bytes = 0
        self.port = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "sdstore", "serve", "--port", str(self.port), "--json",
                "--data-dir", str(self._folder), "--log-level", "error",
            ],
            stdout=subprocess.PIPE,
            env=os.environ | {"SDSTORE_DRAIN_S": "0"},
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the node did not start")
        self.port = int(json.loads(line)["url"].rpartition(":")[2])
        return process

    @property
    def process_id(self) -> int:
        """Of the process that serves now."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Seconds of CPU that its processes have used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return self._cpu_s + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """The highest resident memory of its processes, files that are mapped included."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        now = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        return max(self._peak_bytes, now)

    def restart(self) -> None:
        """Kill it, and start it again at the same port. Blocks."""
        self._cpu_s, self._peak_bytes = self.cpu_s(), self.peak_bytes()
        self._process.kill()
        self._process.communicate()
        self._process = self._start()

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=30)
        finally:
            self._process.kill()


@contextmanager
def running_node(folder: Path) -> Iterator[Node]:
    """A node that runs until the block ends."""
    node = Node(folder)
    try:
        yield node
    finally:
        node.stop()


@dataclass(slots=True)
class Reads:
    """The requests of an honest client in ms: its waits, and what the event loop worked meanwhile."""

    waits_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)


@contextmanager
def reading(node: Node, message_id: str) -> Iterator[Reads]:
    """An honest client beside the block; its figures are there afterwards."""
    reads = Reads()
    arguments = map(str, (node.port, node.process_id, message_id, READS_PER_S))
    with subprocess.Popen(
        [sys.executable, steady_reader.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        time.sleep(0.3)  # it has started
        try:
            yield reads
        finally:
            out, _ = process.communicate(timeout=ANSWER_S_MAX)
    reads.waits_ms, reads.busy_ms = json.loads(out)


# --- one participant -----------------------------------------------------------------------------


class Log:
    """A participant's log of one channel: all its elements but some. A `Replica` that fetches only.

    All logs of a channel share its columns.
    """

    def __init__(self, channel: RangeIndex, lacking: U64) -> None:
        self._channel = channel
        columns = channel.state.snapshot.base
        self._lacking = Columns(
            columns.orders[lacking], columns.ids[lacking], columns.groups[lacking]
        )
        self.missing_ids = {row.tobytes() for row in self._lacking.ids}
        self.received_again_count = 0

    @property
    def received_count(self) -> int:
        """Messages that it lacked at first and has now."""
        return len(self._lacking) - len(self.missing_ids)

    @property
    def arrived_count(self) -> int:
        return len(self._channel) - len(self.missing_ids)

    async def catch_up(self) -> None:
        pass

    def view(self, key: SessionKey, interest: Interest) -> View:
        whole = View(self._channel, key, window=interest.window)
        here = [row.tobytes() not in self.missing_ids for row in self._lacking.ids]
        nothing = self._lacking.take(slice(0))
        return whole.corrected(nothing, self._lacking.take(~np.array(here, bool)))

    def holds(self, orders: U64, ids: U8) -> Mask:
        del orders
        return np.array([row.tobytes() not in self.missing_ids for row in ids], bool)

    async def load(self, elements: Sequence[Element], bytes_max: int) -> list[Item]:
        del bytes_max
        assert not elements, "it only fetches"
        return []

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        return claim_id(entry_id, hint)

    async def prepare(self, items: Sequence[Item]) -> Sequence[Prepared]:
        prepared = []
        for item in items:
            message, _ = decode(item.entry.frame)
            order = order_of_lamport(message.lamport_timestamp or 0)
            prepared.append(Prepared(order=order, element_id=entry_digest(message)))
        return prepared

    @property
    def stored_at_once(self) -> int:
        return 1

    async def commit(self, prepared: Sequence[Prepared]) -> Sequence[Stored]:
        stored = []
        for each in prepared:
            is_new = each.element_id in self.missing_ids
            self.missing_ids.discard(each.element_id)
            self.received_again_count += not is_new
            stored.append(Stored(wire.STORED if is_new else wire.DUPLICATE))
        return stored

    async def lost(self, interest: Interest, after: int, limit: int) -> LostPage:
        del interest, after, limit
        return LostPage([], 0, 0)

    async def lost_among(self, entry_ids: Sequence[bytes]) -> set[bytes]:
        del entry_ids
        return set()


class Calls:
    """A `Transport` as that of a backfill, over one connection from `address`, with less work.

    A failed call is repeated as `sdstore.client.Retry` has it; then the session ends.
    """

    def __init__(self, port: int, address: str | None, drops: Sequence[int] = ()) -> None:
        """`drops`: the calls, counted from 0, whose connection breaks before the answer is read."""
        self.bytes_up = 0
        self.bytes_down = 0
        self.refusals: Counter[str] = Counter()
        self._port = port
        self._address = address
        self._drops = set(drops)
        self._calls_count = 0
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def recon(self, request: bytes) -> bytes:
        attempt = 1
        async with self._turn:
            while True:
                failed = await self._attempt(request)
                if isinstance(failed, bytes):
                    return failed
                delay_s = RETRY.delay_s(attempt, failed)
                if delay_s is None:
                    raise sync_error(failed)
                await asyncio.sleep(delay_s)
                attempt += 1

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _attempt(self, body: bytes) -> bytes | StoreError:
        self.bytes_up += len(body)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                status, headers, answer = await self._exchange(
                    b"%scontent-length: %d\r\n\r\n%s" % (_HEAD, len(body), body)
                )
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            self.refusals[type(error).__name__] += 1
            return StoreError("unreachable", 0, str(error))
        except BaseException:
            self.close()
            raise
        self.bytes_down += len(answer)
        if headers.get("connection") == "close":
            self.close()
        if status == 200:
            is_packed = headers.get("content-encoding") == "zstd"
            return zstandard.decompress(answer) if is_packed else answer
        self.refusals[str(status)] += 1
        return error_of_reply(status, headers, answer)

    async def _exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        if self._streams is None:
            local = None if self._address is None else (self._address, 0)
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, local_addr=local)
        reader, writer = self._streams
        writer.write(request)
        number, self._calls_count = self._calls_count, self._calls_count + 1
        if number in self._drops:
            await asyncio.sleep(0.01)
            raise ConnectionError("dropped by the participant")
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").lower().split("\r\n")[:-2]
        headers = dict(line.split(": ", 1) for line in lines)
        answer = await reader.readexactly(int(headers["content-length"]))
        return int(first.split(" ")[1]), headers, answer


@dataclass(slots=True)
class Returned:
    """What became of one participant."""

    name: str
    whole_after_s: float | None = None
    sessions: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    report: SyncReport | None = None


async def come_back(
    name: str, log: Log, calls: Calls, interest: Interest, random: Random
) -> Returned:
    """Backfill until the log is whole; after a session that fails, pause and begin another."""
    returned, memory = Returned(name), NOTHING_REMEMBERED
    started_s = time.monotonic()
    while log.missing_ids and returned.sessions < SESSIONS_MAX:
        if returned.sessions:
            await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.0))
        returned.sessions += 1
        returned.report, memory = await sync_with_peer(
            log, calls, interest, memory=memory, mode=Mode.FETCH
        )
    if not log.missing_ids:
        returned.whole_after_s = time.monotonic() - started_s
    returned.refusals = calls.refusals
    calls.close()
    return returned


# --- all of them ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of one stampede."""

    returned: list[Returned]
    reads: Reads
    wall_s: float
    node_cpu_s: float
    clients_cpu_s: float
    node_peak_bytes: int
    received_count: int
    received_again_count: int

    @property
    def not_whole(self) -> list[str]:
        """Participants that gave up."""
        return [each.name for each in self.returned if each.whole_after_s is None]

    @property
    def refusals(self) -> Counter[str]:
        """HTTP statuses and broken connections, over all participants."""
        return sum((each.refusals for each in self.returned), Counter[str]())

    @property
    def slowest(self) -> Returned:
        """The participant that needed most time."""
        return max(self.returned, key=lambda each: each.whole_after_s or float("inf"))

    @property
    def read_p99_ms(self) -> float:
        """The wait of the honest client."""
        return _p99(self.reads.waits_ms)

    @property
    def read_busy_p99_ms(self) -> float:
        """The work of the event loop while the honest client waits."""
        return _p99(self.reads.busy_ms)

    def row(self, name: str) -> dict[str, Any]:
        """The figures by name."""
        times = sorted(each.whole_after_s or float("inf") for each in self.returned)
        reports = [each.report for each in self.returned if each.report]
        return {
            "scenario": name,
            "whole": f"{len(times) - len(self.not_whole)} of {len(times)}",
            "wall s": round(self.wall_s, 2),
            "p50 s": round(times[len(times) // 2], 2),
            "p99 s": round(times[len(times) * 99 // 100], 2),
            "slowest s": round(times[-1], 2),
            "slowest": self.slowest.name,
            "refusals": " ".join(f"{k}:{v}" for k, v in sorted(self.refusals.items())) or "-",
            "sessions max": max(each.sessions for each in self.returned),
            "requests each": round(sum(each.requests for each in reports) / len(reports), 1),
            "node CPU s": round(self.node_cpu_s, 2),
            "clients CPU s": round(self.clients_cpu_s, 2),
            "node MiB": round(self.node_peak_bytes / 2**20),
            "GETs": len(self.reads.waits_ms),
            "GET p99 ms": round(self.read_p99_ms, 1),
            "GET max ms": round(max(self.reads.waits_ms), 1),
            "GET p99 CPU ms": round(self.read_busy_p99_ms, 1),
        }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def address_of(number: int) -> str:
    """The address of a participant: one of this machine for each of 64,000."""
    return f"127.0.{1 + number // 250}.{1 + number % 250}"


def stampede(scenario: Scenario, folder: Path, seed: int = 1) -> Outcome:
    """Load a store in `folder`, serve it, and let the participants come back."""
    _allow_files()
    indexes, known_id = write_store(folder / "sdstore.db", scenario)
    with running_node(folder) as node, reading(node, known_id) as reads:
        cpu_s, own_cpu_s, wall_s = node.cpu_s(), time.process_time(), time.monotonic()
        returned, logs = uvloop.run(_come_back_all(scenario, node, indexes, seed))
        wall_s, own_cpu_s = time.monotonic() - wall_s, time.process_time() - own_cpu_s
        cpu_s, peak_bytes = node.cpu_s() - cpu_s, node.peak_bytes()
    return Outcome(
        returned=returned,
        reads=reads,
        wall_s=wall_s,
        node_cpu_s=cpu_s,
        clients_cpu_s=own_cpu_s,
        node_peak_bytes=peak_bytes,
        received_count=sum(log.received_count for log in logs),
        received_again_count=sum(log.received_again_count for log in logs),
    )


async def _come_back_all(
    scenario: Scenario, node: Node, indexes: list[RangeIndex], seed: int
) -> tuple[list[Returned], list[Log]]:
    async def restart() -> None:
        if scenario.restart_after_s is not None:
            await asyncio.sleep(scenario.restart_after_s)
            await asyncio.to_thread(node.restart)

    returned, _ = await asyncio.gather(
        come_back_together(scenario, node.port, indexes, seed), restart()
    )
    return returned


async def come_back_together(
    scenario: Scenario, port: int, indexes: list[RangeIndex], seed: int
) -> tuple[list[Returned], list[Log]]:
    """All participants against the node at `port`, which has the channels of `indexes`."""
    random = Random(seed)
    sequences = [
        np.random.default_rng((seed, n)).permutation(len(i)) for n, i in enumerate(indexes)
    ]
    logs: list[Log] = []

    async def one(number: int) -> Returned:
        channel, place = number % scenario.channels, number // scenario.channels
        # Each message is lacked by one participant of the channel, as far as they go round.
        at = (np.arange(scenario.missing) + place * scenario.missing) % scenario.messages
        log = Log(indexes[channel], sequences[channel][at].astype(np.uint64))
        logs.append(log)
        address = address_of(number) if scenario.has_addresses else None
        drops = [1 + 2 * n for n in range(scenario.drops)]
        name = f"{number} ({address or 'same address'})"
        interest = Interest.make(channels=frozenset((channel_name(channel),)))
        own_random = Random(random.random())
        await asyncio.sleep(own_random.uniform(0, scenario.within_s))
        return await come_back(name, log, Calls(port, address, drops), interest, own_random)

    return await asyncio.gather(*map(one, range(scenario.participants))), logs


def _allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, LEVEL_OF_FILES), hard))


def main() -> int:
    """Measure, print, write CSV."""
    names = [each for each in sys.argv[1:] if not each.startswith("-")] or list(SCENARIOS)
    rows = []
    for name in names:
        scenario = SCENARIOS[name]
        if "--quick" in sys.argv:
            scenario = replace(
                scenario, participants=100, channels=min(10, scenario.channels), messages=2_000
            )
        with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
            rows.append(stampede(scenario, Path(folder)).row(name))
    publish("stampede", "Participants that come back at once", rows)
    return 0


if __name__ == "__main__":
    sys.exit(in_scratch(main))
