"""Output of results: a table on the terminal and the same rows as CSV."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
WIDE_COLUMNS = 200


def publish(name: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Print `rows` under `title` and write them to bench/results/NAME.csv; gives that path.

    The columns are the keys of the first row, in its order; floats are shown with three digits.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    columns = list(rows[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    console = Console()
    # Into a file or a pipe a table is never squeezed.
    (console if console.is_terminal else Console(width=WIDE_COLUMNS)).print(table)
    return path


def _cell(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
