"""A channel of 10^5 messages is ordered for many sets of writers while an honest client is served.

The node is a process with the default limits.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
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


def computed_bytes(node: Attacked) -> float:
    """The memory of what was ordered."""
    metrics = httpx.get(f"http://127.0.0.1:{node.port}/metrics", trust_env=False).text
    return float(metrics.partition("\nsdstore_orders_bytes ")[2].partition("\n")[0])


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


@pytest.mark.slow
def test_two_hundred_sets_of_writers_and_clients_that_hang_up_delay_nobody(node: Attacked) -> None:
    answers: Counter[tuple[int, str]] = Counter()
    sets = [[*WRITERS[:3], f"x{n}"] for n in range(200)]

    def ask(some: list[list[str]], patience_s: float) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{node.port}", trust_env=False) as client:
            for indexers in some:
                if node.stopped.is_set():
                    return
                query = {"channel_id": CHANNEL, "indexer": indexers}
                try:
                    answer = client.get("/v1/channels/order", params=query, timeout=patience_s)
                except httpx.TransportError:
                    answers[0, "hung up"] += 1
                    continue
                answers[answer.status_code, answer.json().get("code", "")] += 1

    attackers = [
        threading.Thread(target=ask, args=(sets[n::8], 60 if n % 2 else 0.2), daemon=True)
        for n in range(8)
    ]
    for attacker in attackers:
        attacker.start()
    waits = honest_waits(node, 2)
    node.stopped.set()
    for attacker in attackers:
        attacker.join(100)
    print(f"peak {node.peak_mib:.0f} MiB, {waits}, {answers}")
    assert answers[0, "hung up"] > 10
    assert sum(answers.values()) > 20
    assert {status for status, _ in answers} <= {0, 200, 429, 503}
    assert node.peak_mib < MEMORY_MIB_MAX
    waits.check()


@pytest.mark.slow
def test_an_order_is_not_computed_further_once_its_client_has_left(node: Attacked) -> None:
    query = {"channel_id": CHANNEL, "indexer": WRITERS}
    url = f"http://127.0.0.1:{node.port}/v1/channels/order"
    honest_waits(node, 0.1)  # the node has read its index by then
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(url, params=query, timeout=0.3, trust_env=False)
    time.sleep(0.5)  # the last step
    before = computed_bytes(node)
    time.sleep(1)
    assert computed_bytes(node) == before > 0
    assert (
        httpx.get(url, params=query, timeout=60, trust_env=False).json()["confirmed_count"] > 1_000
    )
    assert computed_bytes(node) > before
