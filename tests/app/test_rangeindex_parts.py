"""Parts of the node's range index: groups of interests, sums of groups, known interests."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.access.callers import Caller
from app.recon import index as index_module
from app.recon.endpoint import KnownInterests
from app.recon.index import ChannelGroups, GroupSums
from recon.errors import RemoteProtocolError
from recon.index import RangeIndex
from recon.limits import INTEREST_NAMES_MAX
from recon.session import Interest, SessionKey, interest_hash
from recon.view import View
from sdstore.sync.report import SyncOutcome
from sdstore.wire.recon_pb2 import Session
from tests.support.federation import (
    InProcessPeer,
    local_of,
    message,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)

NAMES = st.frozensets(st.text("ab/", max_size=4), max_size=5)
EVERYTHING = Interest.make(everything=True)


@settings(deadline=None, max_examples=200)
@given(known=st.lists(NAMES, max_size=3), channels=NAMES, prefixes=NAMES)
def test_an_interest_covers_the_groups_of_the_channels_it_matches(
    known: list[frozenset[str]], channels: frozenset[str], prefixes: frozenset[str]
) -> None:
    interest = Interest.make(channels=channels, prefixes=prefixes)
    groups, numbers = ChannelGroups(2), dict[str, int]()
    for names in known:
        numbers |= {name: len(numbers) + at for at, name in enumerate(names - numbers.keys())}
        groups.add(numbers)
        matching = {
            number
            for name, number in numbers.items()
            if name in channels or any(map(name.startswith, prefixes))
        }
        assert matching == {number for name, number in numbers.items() if interest.matches(name)}
        expected = {2 * n for n in matching} | {2 * n + 1 for n in matching}
        found = groups.of(interest)
        assert (found is None) == interest.everything
        assert interest.everything or groups.of(interest) == expected


def test_the_largest_interest_is_matched_with_very_many_channels_at_once() -> None:
    count = INTEREST_NAMES_MAX // 2
    interest = Interest.make(
        channels=frozenset(f"a{n:06}" for n in range(count)),
        prefixes=frozenset(f"b{n:06}" for n in range(count)),
    )
    groups = ChannelGroups(2)
    groups.add({f"{kind}{n:06}x": n for n in range(50_000) for kind in "abc"})
    start_s = time.process_time()
    assert len(groups.of(interest) or ()) == 2 * count
    # One by one, name against name, these would be 10^9 comparisons: a minute.
    assert time.process_time() - start_s < 1


@settings(deadline=None, max_examples=50)
@given(
    batches=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), max_size=5),
    wanted=st.none() | st.frozensets(st.integers(0, 12)),
)
def test_counts_and_sums_of_groups_follow_the_index(
    batches: list[list[int]], wanted: frozenset[int] | None
) -> None:
    rng, index = np.random.default_rng(1), RangeIndex()
    sums = GroupSums(index)
    ids = np.empty((0, 32), np.uint8)
    for batch in batches:
        news = rng.integers(0, 256, (len(batch), 32), dtype=np.uint8)
        index.insert(np.full(len(batch), 7, np.uint64), news, np.array(batch, np.uint32))
        mine = [wanted is None or group in wanted for group in batch]
        ids = np.concatenate((ids, news[mine]))
        assert sums.count(wanted) == len(ids)
        assert sums.sums(wanted).tolist() == ids.view("<u8").sum(axis=0, dtype=np.uint64).tolist()


CALLER = Caller("all")


def session_of(raw: bytes) -> Session:
    return Session(interest_bytes=raw)


def test_interests_are_known_by_hash_within_a_bound_of_bytes_the_oldest_forgotten() -> None:
    interests = [Interest.make(channels=frozenset([name * 1_000])) for name in "abc"]
    known = KnownInterests(bytes_max=4_000)
    names = []
    for interest in interests:
        found = known.find(session_of(interest.encode()), CALLER, EVERYTHING)
        assert found == (interest_hash(interest.encode()), interest)
        names.append(found[0])
    remembered = [
        known.find(Session(interest_hash=name), CALLER, EVERYTHING) is not None for name in names
    ]
    assert remembered == [False, True, True]


def test_a_known_interest_is_cut_to_our_own_and_a_bad_one_is_not_remembered() -> None:
    ours = Interest.make(prefixes=frozenset(["a"]))
    known = KnownInterests(bytes_max=4_000)
    found = known.find(session_of(EVERYTHING.encode()), CALLER, ours)
    assert found is not None
    assert found[1] == ours
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            known.find(session_of(b"\xff"), CALLER, ours)


def test_large_views_are_built_once_and_not_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SMALL_ELEMENTS_MAX", 20)
    monkeypatch.setattr(index_module, "VIEW_COST_MIN", 0)
    threads: list[threading.Thread] = []

    def making(index: RangeIndex, *arguments: Any) -> View:
        if len(index) > 20:
            threads.append(threading.current_thread())
            time.sleep(0.05)
        return View(index, *arguments)

    monkeypatch.setattr(index_module, "View", making)
    key, large, small = (
        SessionKey(bytes(16)),
        Interest.make(channels={"large"}),
        Interest.make(channels={"small"}),
    )

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (node, other):
            await publish(node, [message(n, "large") for n in range(50)])
            await publish(node, [message(n, "small") for n in range(20)])
            await node.index.catch_up()
            await node.index.prepare_view(key, small)
            assert threads == []
            building = [node.index.prepare_view(key, large) for _ in range(3)]
            await asyncio.gather(*building, publish(node, [message(50, "large")]))
            assert len(threads) == 1
            assert threads[0] is not threading.main_thread()
            await node.index.catch_up()
            view = node.index.view(key, large)
            assert (view, len(view)) == (node.index.view(key, large), 51)
            # A peer's requests use it too.
            report = await sync_with_peer(
                local_of(other), InProcessPeer(node), other.interests.current
            )
            assert (report.outcome, report.entries_received) == (SyncOutcome.IN_SYNC, 71)
            assert len(threads) == 2
            assert threading.main_thread() not in threads

    run(scenario())
