"""The tables of bounds in docs/participant.md: `python -m tests.support.participant_page`.

They are made from the fields and constants of the code and the docstrings below them.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from sdstore.sds import (
    bloom,
    messages,
    options,
    outgoing,
    participant,
    references,
    repair,
    restoring,
)

PAGE = Path(__file__).parents[2] / "docs" / "participant.md"


def described(body: list[ast.stmt]) -> dict[str, str]:
    """Names that are assigned in a class or module, with the docstring below each."""
    found: dict[str, str] = {}
    for statement, after in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(inspect.cleandoc(text).split())
                    case _:
                        found[name] = ""
    return found


def shown(value: Any) -> str:
    """A default value as the table prints it."""
    if isinstance(value, enum.Enum):
        return f"`{value.name}`"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, repair.RepairOptions):
        return "`RepairOptions()`"
    if hasattr(value, "name"):
        return f"`{value.name}`"
    if callable(value):
        return f"`{value.__name__}`"
    return f"`{value!r}`"


def table_of_options(kind: type) -> list[str]:
    """A row for each field of an options class."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    texts = described(definition.body)
    default = kind()
    return [
        f"| `{field.name}` | {shown(getattr(default, field.name))} | {texts[field.name]} |"
        for field in fields(kind)
    ]


def table_of_constants(module: ModuleType) -> list[str]:
    """A row for each constant of a module that has a docstring."""
    texts = described(ast.parse(inspect.getsource(module)).body)
    return [
        f"| `{name}` | {shown(getattr(module, name))} | {text} |"
        for name, text in texts.items()
        if name.isupper() and text and isinstance(getattr(module, name), int | float)
    ]


def page() -> str:
    """The page with its tables made anew."""
    tables = {
        "options": table_of_options(options.ParticipantOptions),
        "repair": table_of_options(repair.RepairOptions),
        "fixed": [
            row
            for module in (
                participant,
                messages,
                restoring,
                outgoing,
                references,
                bloom,
                repair,
            )
            for row in table_of_constants(module)
        ],
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in tables.items():
        start = rf"(<!-- {name} -->\n\|[^\n]*\n\|[^\n]*\n)(?:\|[^\n]*\n)*"
        text, count = re.subn(start, lambda found: found[1] + "\n".join(rows) + "\n", text)  # noqa: B023
        assert count == 1, name
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
