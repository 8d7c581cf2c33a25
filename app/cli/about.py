"""Verbs about the program itself: version, openapi; and the reference of all verbs in docs/cli.md.

`python -m app.cli.about docs/cli.md` brings that file up to date; a test compares them.
"""

from __future__ import annotations

import json
import platform
import sqlite3
import sys
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import typer

from app.cli.interrupts import loading
from app.cli.options import AsJson
from app.cli.output import print_json, stdout
from app.cli.program import MODULES, app
from recon.limits import PROTOCOL_VERSION
from sdstore.sds.codec import DECODER_VERSION

verbs = typer.Typer()


@verbs.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of sdstore, the protocol, the decoder, Python and SQLite."""
    versions = {
        "sdstore": version_of("sdstore"),
        "recon_protocol": PROTOCOL_VERSION,
        "decoder": DECODER_VERSION,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    if as_json:
        print_json(versions)
        return
    name, number = next(iter(versions.items()))
    others = list(versions.items())[1:]
    details = ", ".join(f"{each.replace('_', ' ')} {value}" for each, value in others)
    stdout().print(f"[bold]{name}[/] {number} ({details})")


@verbs.command()
def openapi(as_json: AsJson = False) -> None:
    """Print the OpenAPI document of the HTTP interface; --json prints it on one line."""
    with loading():
        from app.http.application import openapi_document  # noqa: PLC0415 - a second of imports

    if as_json:
        print_json(openapi_document())
    else:
        sys.stdout.write(json.dumps(openapi_document(), indent=2, ensure_ascii=False) + "\n")


# --- the reference in docs/cli.md ----------------------------------------------------------------

MARK = "<!-- written by app.cli.about: do not edit below -->\n"


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
    """The document with its reference part up to date."""
    head, _, _ = document.partition(MARK)
    return f"{head}{MARK}\n{reference()}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
