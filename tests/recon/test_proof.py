"""The closing comparison and the root of idle pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.errors import RemoteProtocolError
from recon.proof import closing_request, idle_root, tells_equality
from recon.responder import respond
from sdstore.wire.recon_pb2 import ReconResponse
from tests.recon.test_sync import crowd
from tests.support.recon_talk import view_of

ELEMENTS = crowd(1, 40, 2**40)
SETS = st.sets(st.sampled_from(sorted(ELEMENTS)))


@settings(deadline=None, max_examples=100)
@given(ours=SETS, theirs=SETS)
def test_the_closing_comparison_tells_equal_sets_from_all_others(
    ours: set[tuple[int, bytes]], theirs: set[tuple[int, bytes]]
) -> None:
    for other in (theirs, ours):
        response = respond(view_of(sorted(other)), closing_request(view_of(sorted(ours))))
        assert tells_equality(response) == (ours == other)


def test_an_answer_to_nothing_is_no_proof() -> None:
    with pytest.raises(RemoteProtocolError):
        tells_equality(ReconResponse())


def test_a_root_depends_on_the_count_and_on_every_word() -> None:
    words = np.arange(4, dtype=np.uint64)
    roots = {idle_root(1, words), idle_root(2, words)}
    roots |= {idle_root(1, words + (np.arange(4) == place).astype(np.uint64)) for place in range(4)}
    assert {len(root) for root in roots} == {32}
    assert len(roots) == 6
