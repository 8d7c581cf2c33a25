"""The reference part of docs/cli.md, written from the verbs themselves.

`python -m app.cli.reference docs/cli.md` brings the file up to date; a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from app.cli.program import MODULES, app

MARK = "<!-- written by app.cli.reference: do not edit below -->\n"


def reference() -> str:
    """Every verb of this package as Markdown, in the order of `sdstore --help`."""
    group = typer.main.get_command(app)
    context = group.make_context("sdstore", [], resilient_parsing=True)
    return "\n".join(
        line
        for name in MODULES
        for line in _verb(name, group.get_command(context, name), context)  # type: ignore[attr-defined]
    )


def _verb(name: str, command: Any, parent: Any) -> Iterator[str]:
    context = type(parent)(command, info_name=name, parent=parent)
    if hasattr(command, "commands"):
        for each, below in command.commands.items():
            yield from _verb(f"{name} {each}", below, parent)
        return
    yield f"## {name}"
    yield ""
    yield command.help or ""
    yield ""
    yield f"    sdstore {name} {' '.join(command.collect_usage_pieces(context))}"
    yield ""
    rows = [param.get_help_record(context) for param in command.get_params(context)]
    yield "| | |"
    yield "|---|---|"
    for record in rows:
        if record is not None:
            yield "| `{}` | {} |".format(*(" ".join(each.split()) for each in record))
    yield ""


def updated(document: str) -> str:
    """The document with its reference part written anew."""
    head, _, _ = document.partition(MARK)
    return f"{head}{MARK}\n{reference()}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
