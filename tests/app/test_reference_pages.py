"""The reference pages in docs/ are those of the code."""

import pytest

from tools.reference import DOCS, pages


@pytest.mark.parametrize("name", ["settings.md", "limits.md", "errors.md"])
def test_a_page_of_reference_is_that_of_the_code(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == pages()[name], "run: python -m tools.reference"
