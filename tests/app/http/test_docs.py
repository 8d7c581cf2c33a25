"""docs/limits.md and docs/settings.md say what the code says."""

from __future__ import annotations

from pathlib import Path

from app.limits import limits_table
from app.settings import Settings

DOCS = Path(__file__).parents[3] / "docs"


def table_of(name: str) -> list[list[str]]:
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return rows[2:]


def test_the_table_of_limits_is_that_of_the_code() -> None:
    expected = [
        [f"`{name}`", f"{value:,}", unit, reason] for name, value, unit, reason in limits_table()
    ]
    assert table_of("limits.md") == expected


def test_the_table_of_settings_is_that_of_the_code() -> None:
    bare = Settings()
    expected = [
        [f"`{name}`", f"`{getattr(bare, name)}`", field.description]
        for name, field in Settings.model_fields.items()
    ]
    assert table_of("settings.md") == expected
