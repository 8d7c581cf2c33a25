"""Parts of the node's range index: groups of interests, sums of groups, known interests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.access.callers import Caller
from app.recon.endpoint import KnownInterests
from app.recon.index import ChannelGroups, GroupSums
from recon.agreement import Interest
from recon.errors import RemoteProtocolError
from recon.index import RangeIndex
from sdstore.wire.recon_pb2 import Session

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


def test_a_known_interest_is_cut_to_our_own_and_a_bad_one_is_not_remembered() -> None:
    ours = Interest.make(prefixes=frozenset(["a"]))
    known = KnownInterests(bytes_max=4_000)
    found = known.find(session_of(EVERYTHING.encode()), CALLER, ours)
    assert found is not None
    assert found[1] == ours
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            known.find(session_of(b"\xff"), CALLER, ours)
