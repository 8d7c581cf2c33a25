"""Two sides reconcile; the outcome is compared with plain Python sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.errors import LocalProtocolError
from recon.events import Have, Need
from recon.initiator import Initiator, Options
from recon.limits import DEFAULT_LIMITS
from recon.view import View
from recon.worklist import RangeState
from tests.support.recon_talk import (
    HEADER,
    Element,
    collect,
    converse,
    honest,
    index_of,
    insert,
    reconcile,
    view_of,
)

IDS = st.binary(min_size=32, max_size=32) | st.integers(0, 40).map(lambda n: n.to_bytes(32, "big"))
ORDERS = st.integers(0, 6) | st.integers(0, 2**64 - 1) | st.sampled_from([2**64 - 1, 2**63])
ELEMENTS = st.sets(st.tuples(ORDERS, IDS), max_size=60)
OPTIONS = st.builds(Options, st.integers(2, 64), st.integers(0, 40))
LIMITS = st.builds(
    lambda frame, flying, ranges: replace(
        DEFAULT_LIMITS,
        request_bytes_max=frame,
        response_bytes_max=frame,
        in_flight_max=flying,
        ranges_max=ranges,
    ),
    st.sampled_from([4096, 8 << 20]),
    st.integers(1, 8),
    st.integers(1, 9) | st.just(1 << 16),
)
BATCHES = st.sampled_from([7, 300, 1 << 20])


@settings(deadline=None, max_examples=150)
@given(
    ELEMENTS, ELEMENTS, ELEMENTS, OPTIONS, LIMITS, BATCHES, st.integers(0, 99), st.integers(0, 70)
)
def test_a_session_finds_exactly_the_two_differences(
    common: set[Element],
    ours: set[Element],
    theirs: set[Element],
    options: Options,
    limits: object,
    batch: int,
    seed: int,
    recent: int,
) -> None:
    mine, yours = common | ours, common | theirs
    out = reconcile(
        mine, yours, options=options, limits=limits, batch=batch, seed=seed, recent=recent
    )
    assert out.done
    assert out.have == mine - yours
    assert out.need == yours - mine


def crowd(seed: int, count: int, orders_max: int, head_bytes: int = 32) -> list[Element]:
    """Many elements; few distinct orders make ties, few head bytes make inseparable ones."""
    rng = np.random.default_rng(seed)
    orders = rng.integers(0, orders_max, count, dtype=np.uint64).tolist()
    ids = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    ids[:, head_bytes:-8] = 0
    return list(zip(orders, map(bytes, ids), strict=True))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), rounds=st.lists(st.integers(0, 60), max_size=6))
def test_what_both_held_at_the_start_ends_equal_though_both_grow_meanwhile(
    seed: int, rounds: list[int]
) -> None:
    everything = crowd(seed, 1500, 800)
    ours, theirs, later = set(everything[:1000]), set(everything[200:1200]), everything[1200:]
    mine, yours = index_of(ours), index_of(theirs)
    my_view = View(mine, HEADER.key())
    your_view = View(yours, HEADER.key())

    def grow() -> None:
        count = rounds.pop() if rounds else 0
        for index in (mine, yours):
            insert(index, [later.pop() for _ in range(min(count, len(later)))])
        my_view.refresh()

    limits = replace(DEFAULT_LIMITS, request_bytes_max=4096, response_bytes_max=4096)
    out = converse(Initiator(my_view, HEADER, limits=limits), honest(your_view), between=grow)
    collect(out, my_view, your_view)
    assert out.done
    assert ours - theirs <= out.have
    assert theirs - ours <= out.need
    assert not out.have & theirs
    assert not out.need & ours


def test_an_empty_side_costs_one_round_trip() -> None:
    everything = set(crowd(2, 5000, 5000))
    for ours, theirs in ((set(), everything), (everything, set()), (set(), set())):
        out = reconcile(ours, theirs)
        assert out.rounds == 1
        assert out.bytes < 400
        assert (out.have, out.need) == (ours, theirs)


def test_progress_rises_to_everything_in_sync_or_lacking() -> None:
    everything = crowd(3, 4000, 4000)
    mine, yours = view_of(everything[:3900]), view_of(everything[100:])
    initiator = Initiator(mine, HEADER)
    assert initiator.progress.elements[RangeState.IN_SYNC] == 0
    shares = []
    converse(initiator, honest(yours), between=lambda: shares.append(initiator.progress))
    in_sync = [progress.elements[RangeState.IN_SYNC] for progress in shares]
    assert in_sync == sorted(in_sync)
    assert in_sync[-1] > 2000
    for progress in shares:
        assert abs(sum(s.share for s in progress.segments) - 1) < 1e-9


def test_recent_arrivals_with_old_clocks_are_found_in_the_first_answer() -> None:
    everything = sorted(crowd(4, 20_000, 2**40))
    late = everything[5000:5010]
    base = [e for e in everything if e not in set(late)]
    index = index_of(base)
    insert(index, late)
    mine = View(index, HEADER.key())
    out = converse(Initiator(mine, HEADER, recent=10), honest(view_of(base)))
    assert out.rounds == 1
    assert sum(len(e.ids) for e in out.events if isinstance(e, Have)) == 10
    assert not any(isinstance(e, Need) for e in out.events)


def test_no_limit_lets_more_ranges_in_than_have_numbers() -> None:
    with pytest.raises(LocalProtocolError):
        replace(DEFAULT_LIMITS, ranges_max=65_537)
