"""The range bar: the mutual interest from its oldest to its newest end, coloured by state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from app.cli.output import human_bytes, stderr
from sdstore.sync.report import SegmentState

BAR_CELLS = 40
BAR_CELLS_MIN = 10
BESIDE_BAR_CELLS = 70  # title, percentage, figures and time
# Told apart by shape too: colours are off where NO_COLOR is set, and not everybody sees them.
_LOOKS = {
    SegmentState.IN_SYNC: ("█", "green"),
    SegmentState.SYNCING: ("▒", "yellow"),
    SegmentState.DONT_HAVE: ("░", "cyan"),
}
_UNKNOWN = ("·", "dim")


class RangeBarColumn(ProgressColumn):
    """Draws the field `segments` of a task."""

    def __init__(self, cells: int) -> None:
        super().__init__(Column(width=cells, no_wrap=True))
        self._cells = cells

    def render(self, task: Task) -> Text:
        """The bar."""
        return range_bar(task.fields.get("segments", ()), self._cells)


def range_bar(segments: Sequence[Mapping[str, Any]], cells: int = BAR_CELLS) -> Text:
    """Segments `{"state", "share"}` as a line of `cells` characters.

    A cell shows the state at its middle.
    """
    bar = Text()
    ends = list(accumulate(float(segment["share"]) for segment in segments))
    position = 0
    for cell in range(cells):
        middle = (cell + 0.5) / cells
        while position < len(ends) and ends[position] < middle:
            position += 1
        known = position < len(ends)
        look = _LOOKS[SegmentState(segments[position]["state"])] if known else _UNKNOWN
        bar.append(*look)
    return bar


def sync_progress() -> Progress:
    """A live display of one session on stderr; nothing without a terminal."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        RangeBarColumn(max(BAR_CELLS_MIN, min(BAR_CELLS, console.width - BESIDE_BAR_CELLS))),
        TextColumn("{task.percentage:>5.1f} %"),
        TextColumn("{task.fields[figures]}", style="dim"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def figures_of(progress: Mapping[str, Any]) -> str:
    """Entries and bytes so far."""
    received, sent = progress["entries_received"], progress["entries_sent"]
    up, down = human_bytes(progress["bytes_up"]), human_bytes(progress["bytes_down"])
    return f"↓ {received:,} ({down})  ↑ {sent:,} ({up})"
