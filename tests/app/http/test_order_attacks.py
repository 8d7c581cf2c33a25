"""A channel of 10^5 messages is ordered for many sets of writers while an honest client is served.

The node is a process with the default limits.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from bench.frame_workloads import small_frames
from bench.loading import load_file
from sdstore.client import Options, Retry, StoreClient
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.attacked import Attacked, attacked_node, honest_waits

CHANNEL = "chat"
MESSAGES = 100_000
WRITERS = [f"writer {n}" for n in range(9)]
MEMORY_MIB_MAX = 640
"""That of other attacks, and half as much as the cache of orders."""


def conversation() -> Iterator[bytes]:
    """Each message refers to its writer's last one and to two of the newest; some come late."""
    rng = random.Random(1)
    newest: list[str] = []
    last: dict[str, str] = {}
    for number in range(MESSAGES):
        writer = rng.choice(WRITERS)
        causes = {*newest[-rng.randint(1, 3) :], *([last[writer]] if writer in last else [])}
        message_id = f"m{rng.getrandbits(256):064x}"  # of no scheme that we could check
        newest = [*newest[-4:], message_id]
        last[writer] = message_id
        history = tuple(map(HistoryEntry, sorted(causes)))
        yield encode(Message(message_id, CHANNEL, writer, number, history, content=b"hi"))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ordered")
    frames = [*islice(small_frames(10), 10), *conversation()]
    load_file(folder / "sdstore.db", ((frame, ()) for frame in frames))
    return folder


@pytest.fixture
def node(data_dir: Path) -> Iterator[Attacked]:
    with attacked_node(data_dir) as running:
        yield running


def cpu_s(node: Attacked) -> float:
    """CPU seconds that the process has used."""
    fields = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_large_channel_is_ordered_in_several_calls_while_others_are_served(
    node: Attacked,
) -> None:
    url = f"http://127.0.0.1:{node.port}"
    seen: list[str] = []

    def read() -> None:
        with StoreClient(url, options=Options(retry=Retry(attempts_max=10))) as client:
            after = None
            while True:
                page = client.order(CHANNEL, WRITERS, after=after, limit=1_000)
                seen.extend(each.message_id for each in page.items)
                after = page.next
                if after is None:
                    return

    reader = threading.Thread(target=read)
    reader.start()
    waits = honest_waits(node, 2)
    reader.join(200)
    print(f"peak {node.peak_mib:.0f} MiB, {cpu_s(node):.1f} s of CPU, {waits}")
    assert len(seen) == len(set(seen)) == MESSAGES
    assert node.peak_mib < MEMORY_MIB_MAX
    waits.check()
