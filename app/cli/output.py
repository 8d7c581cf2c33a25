"""How verbs talk: results on stdout, everything else on stderr, bars on a terminal only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 1_000_000
"""Width without a terminal: wider than any row, so that tables fold none."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


class _Console(Console):
    """Leaves a broken pipe to `program.run`; Rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """The console of results; without a terminal it neither colours nor folds lines."""
    console = _Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def stderr() -> Console:
    """The console of notes, bars and errors."""
    return _Console(stderr=True, soft_wrap=True, highlight=False)


def print_json(document: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()  # a pipe's reader acts on each document when it is there


def print_error(text: str, console: Console | None = None) -> None:
    """One line on stderr; `console` is that of a bar which is being drawn."""
    line = " ".join(text.split())
    message = Text.assemble(("sdstore: ", "bold red"), printable(line))
    with suppress(OSError):  # where stderr takes nothing, the exit code has to do
        (console or stderr()).print(message)


def print_note(text: str, console: Console | None = None) -> None:
    """A remark on stderr; `console` is that of a bar which is being drawn."""
    with suppress(OSError):
        (console or stderr()).print(printable(text), style="dim", markup=False)


def table(*headings: str, rows: Iterable[Iterable[str]], right: Iterable[str] = ()) -> Table:
    """A plain table; the columns named in `right` are right-aligned."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        grid.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        # Cells are text from anywhere: never markup.
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def progress_bar() -> Progress:
    """A bar on stderr that is drawn on a terminal only, and gone when it is done."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def human_bytes(count: float) -> str:
    """Bytes with three digits or so, as in 34.1 kB."""
    for unit in _UNITS:
        if count < 1_000 or unit == _UNITS[-1]:
            break
        count /= 1_000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def counted(count: int, singular: str, plural: str) -> str:
    """A number with its noun."""
    return f"{count:,} {singular if count == 1 else plural}"


def printable(text: str) -> str:
    """Text that cannot move the cursor or fake a line: control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
