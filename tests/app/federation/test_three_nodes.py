"""Three nodes under a steady load: memory, descriptors and the write-ahead log stay flat."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from app.access.operator import token_for
from app.store.sqlite import WAL_PAGES
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from tests.app.federation.test_over_http import channels
from tests.support.federation import message
from tests.support.store_process import StoreProcess

SEED = 20_261_122
CHANNELS = 50
BATCH = 50  # four in a second: 200 messages
BATCH_S = 0.25
SAMPLE_S = 5.0
EQUAL_S_MAX = 60.0
WAL_BYTES_MAX = 2 * WAL_PAGES * 4_120  # a checkpoint starts at half of it
DESCRIPTORS_MORE_MAX = 16
BYTES_PER_MESSAGE = 110  # of memory: the index
CACHES_BYTES = 96 << 20  # SQLite's caches, of 80 MiB, fill up in the first half hour
CACHES_FULL_COUNT = 240_000  # messages: each adds 300 bytes to the writer's cache of 64 MiB
SWING_BYTES = 16 << 20  # of memory that sessions take, and collections of garbage give back


class Sample(NamedTuple):
    """What a node uses."""

    memory_bytes: int
    descriptors: int
    wal_bytes: int


@contextmanager
def three_stores(folder: Path) -> Iterator[list[StoreProcess]]:
    """Three nodes; each later one has the earlier ones as peers."""
    stores: list[StoreProcess] = []
    with ExitStack() as ending:
        for name in ("one", "two", "three"):
            peers = [option for each in stores for option in ("--peer", each.url)]
            store = StoreProcess(folder / name, "--sync-interval", 2, *peers)
            store.start()
            ending.callback(store.end, signal.SIGTERM)
            stores.append(store)
        yield stores


def sample_of(store: StoreProcess) -> Sample:
    assert store.process is not None
    process = Path(f"/proc/{store.process.pid}")
    memory_kib = int((process / "status").read_text().partition("RssAnon:")[2].split()[0])
    wal = store.data_dir / "sdstore.db-wal"
    wal_bytes = wal.stat().st_size if wal.exists() else 0
    return Sample(memory_kib << 10, len(list((process / "fd").iterdir())), wal_bytes)


def run_for(folder: Path, seconds: float) -> None:
    random, numbers = Random(SEED), count()
    samples: list[list[Sample]] = []
    with three_stores(folder) as stores, ExitStack() as closing:
        clients = [
            closing.enter_context(StoreClient(each.url, token=token_for(each.url)))
            for each in stores
        ]
        started_s = next_batch_s = time.monotonic()
        while (now_s := time.monotonic()) < started_s + seconds:
            batch = [
                PublishItem(encode(message(n, f"c{random.randrange(CHANNELS)}")))
                for n in islice(numbers, BATCH)
            ]
            outcomes = list(random.choice(clients).publish_batch(batch))
            assert all(each.error is None for each in outcomes)
            if now_s - started_s >= SAMPLE_S * len(samples):
                samples.append([sample_of(each) for each in stores])
            next_batch_s += BATCH_S
            time.sleep(max(next_batch_s - time.monotonic(), 0))
        published = next(numbers)
        deadline_s = time.monotonic() + EQUAL_S_MAX
        while True:
            held = [channels(each) for each in clients]
            if held[0] == held[1] == held[2]:
                break
            assert time.monotonic() < deadline_s, "the nodes are not equal"
            time.sleep(0.2)
        assert sum(each.count for each in clients[0].channels()) == published
    quarter = max(len(samples) // 4, 1)
    for node in zip(*samples, strict=True):
        early, late = node[quarter : 2 * quarter] or node[:1], node[-quarter:]
        print([(each.memory_bytes >> 20, each.descriptors, each.wal_bytes >> 20) for each in node])
        grown = median_memory(late) - median_memory(early)
        assert grown <= CACHES_BYTES + BYTES_PER_MESSAGE * published, (SEED, node)
        if published * 3 // 4 >= CACHES_FULL_COUNT:
            assert grown_in_last_quarter(node) <= SWING_BYTES + BYTES_PER_MESSAGE * published // 8
        descriptors = max(each.descriptors for each in early)
        assert max(each.descriptors for each in late) <= descriptors + DESCRIPTORS_MORE_MAX
        assert max(each.wal_bytes for each in node) <= WAL_BYTES_MAX


def median_memory(samples: tuple[Sample, ...]) -> float:
    return statistics.median(each.memory_bytes for each in samples)


def grown_in_last_quarter(samples: Sequence[Sample]) -> int:
    """From the lowest memory of its first half to that of its second, an eighth of the run later."""
    eighth = len(samples) // 8
    before, after = samples[-2 * eighth : -eighth], samples[-eighth:]
    return min(each.memory_bytes for each in after) - min(each.memory_bytes for each in before)


@pytest.mark.soak
def test_three_nodes_under_a_steady_load_stay_flat_and_end_equal(tmp_path: Path) -> None:
    run_for(tmp_path, 60 * float(os.environ.get("SOAK_MINUTES", "30")))
