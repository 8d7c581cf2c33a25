"""The graphs and tables of docs/ordering.md are those of the tests and of the simulation."""

import pytest

from tests.support.ordering_page import PAGE, PARTS, page

PARTS_OF_EXAMPLES = [name for name in PARTS if name != "measured"]
RUN = "run: python -m tests.support.ordering_page"


def test_the_graphs_and_the_chat_are_those_of_the_code() -> None:
    assert page(*PARTS_OF_EXAMPLES) == PAGE.read_text(encoding="utf-8"), RUN


@pytest.mark.slow
def test_the_measured_table_is_that_of_the_simulation() -> None:
    assert page("measured") == PAGE.read_text(encoding="utf-8"), RUN
