"""The tables of bounds and settings in docs/ are those of the code."""

from tests.support.reference_tables import DOCS, limits_page, settings_page

MEND = "run: python -m tests.support.reference_tables"


def test_the_page_of_limits_is_that_of_the_code() -> None:
    assert (DOCS / "limits.md").read_text() == limits_page(), MEND


def test_the_page_of_settings_is_that_of_the_code() -> None:
    assert (DOCS / "settings.md").read_text() == settings_page(), MEND
