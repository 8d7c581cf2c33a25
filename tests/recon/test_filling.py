"""A frame is filled in few attempts, whatever its ranges really cost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.codec import fill
from sdstore.wire.recon_pb2 import Answers

ROOM = 10_000


def filled(expected: list[int], real: list[int]) -> tuple[int, list[int]]:
    """How many ranges fit the room, and the counts that were tried."""
    tried: list[int] = []

    def build(count: int) -> Answers:
        tried.append(count)
        return Answers(hashes=bytes(sum(real[:count])))

    count, message = fill(build, np.array(expected, np.float64), ROOM)
    assert len(message.hashes) == sum(real[:count])
    return count, tried


def test_dear_ranges_before_many_cheap_ones_take_two_attempts() -> None:
    count, tried = filled([50] * 190 + [1] * 300, [60] * 190 + [0] * 300)
    assert len(tried) == 2
    assert 150 < count <= 166


def test_at_least_one_range_is_in_a_frame() -> None:
    assert filled([1, 1], [ROOM, ROOM]) == (1, [2, 1])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 600)), min_size=1, max_size=300))
def test_what_is_filled_fits_after_few_attempts(rows: list[tuple[int, int]]) -> None:
    expected, real = ([row[place] for row in rows] for place in (0, 1))
    count, tried = filled(expected, real)
    assert count == 1 or sum(real[:count]) < ROOM
    assert tried == sorted(set(tried), reverse=True)
    assert len(tried) < 12
