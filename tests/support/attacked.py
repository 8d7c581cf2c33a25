"""A node as a process of its own with 10^5 entries, and an honest client beside its attackers.

The client is a process, too, so that its waits do not depend on the attackers' interpreter.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.frame_workloads import small_frames
from bench.loading import load_file
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Message
from tests.support import honest_client
from tests.support.cli import command

ENTRIES = 100_000
LARGE_ENTRIES = 1_000
"""Of 16 kB each, in a channel of their own: a page of them is as large as a reply can be."""

WINDOWS = 3
GET_P99_S_MAX = 0.25
PUBLISH_P99_S_MAX = 1.0
MEMORY_MIB_MAX = 512
HONEST_CLIENT = str(honest_client.__file__)
KNOWN_ID = decode(next(small_frames(1)))[0].message_id


def load_entries(path: Path) -> None:
    """Write the store that the attacked node serves."""
    large = (
        encode(Message(f"large {n}", "large", lamport_timestamp=n, content=os.urandom(16_000)))
        for n in range(LARGE_ENTRIES)
    )
    load_file(path, ((frame, ()) for frames in (small_frames(ENTRIES), large) for frame in frames))


@dataclass
class Attacked:
    """A node under attack: its process and its address."""

    pid: int
    port: int
    peak_mib: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)

    def connect(self, timeout_s: float = 10) -> socket.socket:
        """A connection of an attacker."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    @property
    def memory_mib(self) -> float:
        """Anonymous memory now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1_024
        raise AssertionError("the node has ended")

    @property
    def busy_s(self) -> float:
        """CPU time that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def sockets_count(self) -> int:
        """Open sockets of the process: connections, and a few of its own."""
        count = 0
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                count += str(path.readlink()).startswith("socket:")
        return count

    def watch_memory(self) -> None:
        """Keep the peak until `stopped`."""
        while not self.stopped.wait(0.05):
            with suppress(OSError):
                self.peak_mib = max(self.peak_mib, self.memory_mib)


@contextmanager
def attacked_node(data_dir: Path, *arguments: object) -> Iterator[Attacked]:
    """`sdstore serve` with the default limits over `data_dir`, until the block ends."""
    process = subprocess.Popen(
        command(
            *("serve", "--port", 0, "--data-dir", data_dir, "--json", "--log-level", "error"),
            *arguments,
        ),
        stdout=subprocess.PIPE,
        env=os.environ | {"SDSTORE_DRAIN_S": "0"},
    )
    assert process.stdout is not None
    watcher = None
    try:
        url = json.loads(process.stdout.readline())["url"]
        node = Attacked(process.pid, int(url.rpartition(":")[2]))
        watcher = threading.Thread(target=node.watch_memory)
        watcher.start()
        yield node
        node.stopped.set()
        assert process.poll() is None, "the node has ended"
    finally:
        if watcher is not None:
            node.stopped.set()
            watcher.join()
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


@dataclass(frozen=True)
class Waits:
    """The waits of an honest client, window by window."""

    get_p99_s: list[float]
    publish_p99_s: list[float]

    def check(self) -> None:
        """In the best window the node answers in time: in the others the machine may be busy."""
        assert min(self.get_p99_s) < GET_P99_S_MAX, self
        assert min(self.publish_p99_s) < PUBLISH_P99_S_MAX, self


def honest_waits(node: Attacked, window_s: float) -> Waits:
    """Let an honest client read and publish in `WINDOWS` windows."""
    done = subprocess.run(
        [sys.executable, HONEST_CLIENT, str(node.port), KNOWN_ID, str(window_s), str(WINDOWS)],
        capture_output=True,
        timeout=60 + WINDOWS * (window_s + 30),
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2_000:]
    return Waits(*json.loads(done.stdout))


def attack_with(workers: Iterable[Callable[[], None]]) -> list[threading.Thread]:
    """Run attackers until they end by themselves; what cuts them off is no failure."""

    def run(work: Callable[[], None]) -> None:
        with suppress(OSError):
            work()

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in workers]
    for thread in threads:
        thread.start()
    return threads


def eventually(is_true: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes true within so many seconds."""
    ends_s = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.05)
    return True
