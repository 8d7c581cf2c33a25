"""The engine agrees with the plain first version, and both with Python's sets."""

from __future__ import annotations

from hypothesis import given, settings

from recon.elements import Bound, Range
from tests.recon.oracle import Element, Oracle, differences
from tests.recon.test_sync import ELEMENTS, crowd
from tests.support.recon_talk import reconcile, set_of, summary_of, view_of


@settings(deadline=None, max_examples=80)
@given(ELEMENTS, ELEMENTS, ELEMENTS)
def test_engine_and_oracle_name_the_same_differences(
    common: set[Element], ours: set[Element], theirs: set[Element]
) -> None:
    mine, yours = common | ours, common | theirs
    have, need, _ = differences(Oracle(mine), Oracle(yours))
    out = reconcile(mine, yours)
    assert (out.have, out.need) == (have, need) == (mine - yours, yours - mine)


def test_any_range_of_a_view_holds_what_the_oracle_says_and_equal_sets_have_equal_hashes() -> None:
    elements = crowd(5, 3000, 300)
    oracle, view, other = Oracle(set(elements)), view_of(elements, 500), view_of(elements[::-1])
    for place in range(0, 3000, 37):
        low, high = sorted((elements[place], elements[(place * 7 + 11) % 3000]))
        lower, upper = (Bound(o, int.from_bytes(i[:8], "big")) for o, i in (low, high))
        span = Range(lower, upper)
        edges = ((low[0], low[1][:8]), (high[0], high[1][:8]))
        assert set_of(*view.elements(span)) == set(oracle.slice(edges))
        assert summary_of(view, span) == summary_of(other, span)
        assert summary_of(view, span)[1] == oracle.summary(edges)[1]
