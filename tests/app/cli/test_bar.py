"""The range bar."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.cli.output import (
    figures_of,
    print_table,
    range_bar,
    sync_progress,
    table,
)
from app.server.logs import printable
from sdstore.sync.report import SegmentState, filled

states = st.sampled_from(SegmentState)
HAVE, SYNCING, MISSING = SegmentState.IN_SYNC, SegmentState.SYNCING, SegmentState.DONT_HAVE


@given(st.lists(st.tuples(states, st.floats(0, 1)), min_size=1, max_size=50), st.integers(1, 80))
def test_a_bar_is_as_long_as_asked(parts: list[tuple[SegmentState, float]], cells: int) -> None:
    total = sum(share for _, share in parts) or 1
    segments = [{"state": state, "share": share / total} for state, share in parts]
    assert len(range_bar(segments, cells)) == cells


def test_missing_stretches_fill_up_in_order_as_their_content_arrives() -> None:
    bar = [(MISSING, 0.2), (HAVE, 0.3), (SYNCING, 0.1), (MISSING, 0.4)]
    assert filled(bar, 0.0) == bar
    assert filled(bar, 0.2) == [(HAVE, 0.2), *bar[1:]]
    states_half_way = [state for state, _ in filled(bar, 0.4)]
    assert states_half_way == [HAVE, HAVE, SYNCING, HAVE, MISSING]
    assert MISSING not in {state for state, _ in filled(bar, 5.0)}


def test_what_is_printed_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[31m\r\n\u202eb") == "a\\u001b[31m\\r\\n\\u202eb"
    assert printable("канал ★") == "канал ★"


def test_a_sync_shows_all_its_figures_on_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("app.cli.output.stderr", lambda: console)
    moved = {"entries_received": 29_450, "entries_sent": 12_000}
    moved |= {"bytes_up": 687_300, "bytes_down": 1_400_000}
    pace = ["round 17", "2,336/s", "13 s left"]
    bar = sync_progress()
    bar.add_task("syncing", completed=49, segments=[], figures=figures_of(moved, *pace))
    console.print(bar.get_renderable())
    figures = ["↓ 29,450 (1.4 MB)", "↑ 12,000 (687.3 kB)", "  ".join(pace)]
    for each in ["syncing", "49.0 %", "0:00:0", *figures]:
        assert each in shown.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_an_id_in_a_table_is_never_cut_or_broken(width: int) -> None:
    rows = [("m" + "0123456789" * 6, "/garden/1/bees/proto", "ab" * 32)]
    shown = StringIO()
    grid = table("message ID", "channel", "digest", rows=rows, whole=["message ID", "digest"])
    console = Console(
        file=shown, width=width, force_terminal=True, soft_wrap=True, color_system=None
    )
    print_table(grid, console)
    for cell in rows[0]:
        assert cell in shown.getvalue()
