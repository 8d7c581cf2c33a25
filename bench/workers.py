"""Reads of a SQLite node with one, two and more workers, under load from a generator in C.

`python -m bench.workers [--quick]`. It needs wrk (Debian: `apt-get install wrk`). The services take turns,
because machines drift. `per s` are look-ups by ID of 300 bytes over 32 connections; `cpu us` is the CPU time
of all processes of the service for one of them, which other work on the machine hardly changes; `writer %` is
the share of the process that only writes. `own MiB` is the memory of all processes that no other shares.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.http_servers import Served
from bench.scratch import in_scratch
from bench.table import publish
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.wire import store_pb2 as wire

MESSAGES = 10_000
BATCH = 1_000
CONNECTIONS = 32
MIB = 1 << 20

LOOK_UPS = """
local requests = {}
local number = 1
init = function()
  for each = 1, %d do
    requests[each] = wrk.format("GET", "/v1/messages/m" .. each - 1)
  end
end
request = function()
  number = (number * 7919 + 1) %% #requests
  return requests[number + 1]
end
"""
"""Made beforehand, because the generator shares the cores with the service."""


class Turn(NamedTuple):
    """The figures of one run of the generator."""

    per_s: float
    cpu_us: float
    writer_share: float


class Service(NamedTuple):
    """A running service: its URL and its processes, the supervisor first."""

    url: str
    processes: Sequence[Served]


@contextmanager
def service(workers: int, folder: Path) -> Iterator[Service]:
    """A service over an own SQLite file, until the block ends."""
    program = Path(sys.executable).with_name("sdstore")
    command = [str(program), "serve", "--port", "0", "--json"]
    command += ["--data-dir", str(folder), "--workers", str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            pids = [process.pid, *map(int, children)]
            _fill(url)
            yield Service(url, [Served(url, pid) for pid in pids])
        finally:
            process.terminate()


def _fill(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for start in range(0, MESSAGES, BATCH):
            items = [
                wire.PublishItem(
                    frame=encode(
                        Message(f"m{n}", f"c{n % 50}", lamport_timestamp=n, content=os.urandom(240))
                    )
                )
                for n in range(start, start + BATCH)
            ]
            body = wire.PublishBatch(items=items).SerializeToString()
            headers = {"content-type": "application/x-protobuf"}
            client.post("/v1/messages/batch", content=body, headers=headers).raise_for_status()


def turn(running: Service, script: Path, seconds: float) -> Turn:
    """One run of wrk against a service."""
    before = [each.cpu_s() for each in running.processes]
    command = ["wrk", "-t2", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "-s", str(script), running.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in shown:
        raise RuntimeError(shown)
    spent_s = [each.cpu_s() - was_s for each, was_s in zip(running.processes, before, strict=True)]
    [count] = re.findall(r"(\d+) requests in", shown)
    [per_s] = re.findall(r"Requests/sec: +([\d.]+)", shown)
    cpu_s = sum(spent_s)
    # The supervisor, the tracker of its resources, the worker that writes, those that read.
    writer_s = spent_s[2] if len(spent_s) > 2 else 0.0
    return Turn(float(per_s), cpu_s / int(count) * 1e6, writer_s / max(cpu_s, 1e-9))


def main() -> None:
    """Measure and print."""
    if shutil.which("wrk") is None:
        raise SystemExit("bench.workers needs wrk: apt-get install wrk")
    is_quick = "--quick" in sys.argv
    counts = (1, 2) if is_quick else (1, 2, 4)
    rounds, seconds = (3, 2.0) if is_quick else (7, 4.0)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as closing:
        script = Path(scratch) / "look-ups.lua"
        script.write_text(LOOK_UPS % MESSAGES)
        services = {
            count: closing.enter_context(service(count, Path(scratch) / str(count)))
            for count in counts
        }
        for each in services.values():
            turn(each, script, 1.0)
        turns: dict[int, list[Turn]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count, each in services.items():
                turns[count].append(turn(each, script, seconds))
        one_per_s = statistics.median(each.per_s for each in turns[1])
        rows = [_row(count, turns[count], one_per_s, services[count]) for count in counts]
    publish("workers", "look-ups by ID of a SQLite node", rows)


def _row(count: int, turns: Sequence[Turn], one_per_s: float, running: Service) -> dict[str, Any]:
    per_s = statistics.median(each.per_s for each in turns)
    return {
        "workers": count,
        "per s": round(per_s),
        "ratio": round(per_s / one_per_s, 2),
        "cpu us": round(statistics.median(each.cpu_us for each in turns), 1),
        "writer %": round(100 * statistics.median(each.writer_share for each in turns), 1),
        "own MiB": round(sum(each.memory_bytes() for each in running.processes) / MIB),
    }


if __name__ == "__main__":
    in_scratch(main)
