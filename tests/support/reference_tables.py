"""docs/limits.md and docs/settings.md, made from the code: `python -m tests.support.reference_tables`."""

import dataclasses
from pathlib import Path

from pydantic_core import PydanticUndefined

import recon.limits
from app.limits import limits_table
from app.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"

_LIMITS_HEAD = """# Limits

Every queue, loop, cache and reply of a node has a bound. `sdstore serve --show-limits` prints this table;
a test compares it with the code. A value equal to its bound is accepted.
"""
_RECON_HEAD = """
## The reconciliation engine

Per session and per message; `docs/recon-protocol.md` says what happens at each.
"""
_SETTINGS_HEAD = """# Settings

Defaults < a TOML file (`--config FILE`) < environment (`SDSTORE_` and the name in capitals) < flags. An unknown
name is an error in every layer. `sdstore serve --show-config` prints each value and where it came from.
"""


def limits_page() -> str:
    """The page of all bounds."""
    node = _table("bound", "value", "unit", "reason", rows=limits_table())
    engine = _table(
        "bound",
        "value",
        rows=[
            (field.name, getattr(recon.limits.DEFAULT_LIMITS, field.name))
            for field in dataclasses.fields(recon.limits.Limits)
        ],
    )
    return f"{_LIMITS_HEAD}\n{node}{_RECON_HEAD}\n{engine}"


def settings_page() -> str:
    """The page of all settings."""
    rows = []
    for name, field in Settings.model_fields.items():
        made = field.default is PydanticUndefined
        default = "sqlite:///DATA_DIR/sdstore.db" if made else str(field.default)
        rows.append((name, default, f"SDSTORE_{name.upper()}", field.description or ""))
    return f"{_SETTINGS_HEAD}\n{_table('name', 'default', 'environment', 'means', rows=rows)}"


def _table(*head: str, rows: list[tuple[object, ...]] | list[tuple[str, int, str, str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    (DOCS / "limits.md").write_text(limits_page())
    (DOCS / "settings.md").write_text(settings_page())
