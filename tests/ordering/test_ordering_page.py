"""The tables of docs/ordering.md are those of the tests and of the simulation, and its graphs confirm what it says."""

import pytest

from tests.ordering.test_examples import TWO_QUORUMS, WORST_CASE, ordered
from tests.support.ordering_page import PAGE, page

RUN = "run: python -m tests.support.ordering_page"


def test_the_chat_is_that_of_the_code() -> None:
    assert page("chat") == PAGE.read_text(encoding="utf-8"), RUN


@pytest.mark.parametrize(
    ("graph", "confirmed"),
    [(TWO_QUORUMS, []), ("a0, b0: a0, c0: b0", ["a0"]), (WORST_CASE, ["a0"])],
)
def test_a_graph_of_the_page_confirms_what_it_says(graph: str, confirmed: list[str]) -> None:
    assert f"`{graph}`" in PAGE.read_text(encoding="utf-8")
    assert ordered(graph).confirmed == confirmed


@pytest.mark.slow
def test_the_measured_table_is_that_of_the_simulation() -> None:
    assert page("measured") == PAGE.read_text(encoding="utf-8"), RUN
