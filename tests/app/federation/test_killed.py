"""Kill -9 of either side in the middle of a session: after a restart nothing is lost, and both are equal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count, islice
from pathlib import Path
from random import Random

import pytest

from app.access.operator import token_for
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from tests.app.federation.test_over_http import channels, finished
from tests.support.federation import message
from tests.support.store_process import StoreProcess

SEED = 20_261_122
NEW_EACH = 2_000  # a session of half a second: long enough to be seen running
TRIES_MAX = 10  # of one round: a session can end before the kill


@contextmanager
def two_stores(folder: Path) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    """Two nodes as processes, killed at the end."""
    stores = StoreProcess(folder / "one"), StoreProcess(folder / "two")
    try:
        for each in stores:
            each.start()
        yield stores
    finally:
        for each in stores:
            if each.process is not None:
                each.end(signal.SIGKILL)


def kill_and_heal(folder: Path, rounds: int, new_each: int = NEW_EACH) -> None:
    """Rounds of: publish on both sides, sync, kill one side in mid-session, start it, sync again."""
    random, numbers = Random(SEED), count()
    acknowledged = {"one": 0, "two": 0}
    unequal_count = tries = 0
    with two_stores(folder) as (one, two):
        for number in range(rounds):
            killed = (two, one)[number % 2]
            for _ in range(TRIES_MAX):
                for store, name in ((one, "one"), (two, "two")):
                    acknowledged[name] += publish_new(store, numbers, new_each)
                tries += 1
                if killed_in_mid_session(one, two, killed, random):
                    break
                killed.start()
            else:
                pytest.fail(f"seed {SEED}: {TRIES_MAX} sessions had ended before the kill")
            killed.start()
            with (
                StoreClient(one.url, token=token_for(one.url)) as first,
                StoreClient(two.url, token=token_for(two.url)) as second,
            ):
                unequal_count += channels(first) != channels(second)
                report = finished(first, first.start_sync(two.url).id)
                assert report["outcome"] == "in_sync", (SEED, number, report)
                assert channels(first) == channels(second), (SEED, number)
                held = sum(each.count for each in first.channels())
                assert held == sum(acknowledged.values()), (SEED, number)
    print(f"{rounds} kills in {tries} sessions; {unequal_count} left the nodes unequal")
    # Other kills come after the last entry: between its commit and the proof.
    assert unequal_count >= rounds // 8, SEED


def publish_new(store: StoreProcess, numbers: Iterator[int], new_each: int) -> int:
    """Publish new messages; returns how many were acknowledged."""
    items = [PublishItem(encode(message(n, f"c{n % 5}"))) for n in islice(numbers, new_each)]
    with StoreClient(store.url, token=token_for(store.url)) as client:
        outcomes = list(client.publish_batch(items))
    assert all(each.error is None for each in outcomes)
    return len(outcomes)


def killed_in_mid_session(
    one: StoreProcess, two: StoreProcess, killed: StoreProcess, random: Random
) -> bool:
    """Kill a side during a session of the first with the second; False if the session had ended."""
    with closing(StoreClient(one.url, token=token_for(one.url))) as client:
        sync_id = client.start_sync(two.url).id
        deadline_s = time.monotonic() + 20
        while True:
            sync = client.sync(sync_id)
            progress = sync.document["progress"]
            moved = progress["entries_received"] or progress["entries_sent"]
            if moved or sync.state == "finished":
                break
            assert time.monotonic() < deadline_s, SEED
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        was_running = client.sync(sync_id).state == "running"
    killed.end(signal.SIGKILL)
    return was_running


def test_either_side_can_be_killed_in_mid_session(tmp_path: Path) -> None:
    kill_and_heal(tmp_path, 2)


@pytest.mark.slow
def test_either_side_can_be_killed_in_mid_session_25_times(tmp_path: Path) -> None:
    kill_and_heal(tmp_path, 25)
