"""The range bar."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.cli.output import (
    age_text,
    figures_of,
    human_bytes,
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


def test_states_can_be_told_apart_without_colours() -> None:
    segments = [{"state": state, "share": 0.25} for state in (HAVE, SYNCING, MISSING)]
    assert range_bar(segments, 8).plain == "██▒▒░░··"


def test_a_bar_without_segments_is_all_unknown() -> None:
    assert range_bar([], 4).plain == "····"


def test_missing_stretches_fill_up_in_order_as_their_content_arrives() -> None:
    bar = [(MISSING, 0.2), (HAVE, 0.3), (SYNCING, 0.1), (MISSING, 0.4)]
    assert filled(bar, 0.0) == bar
    assert filled(bar, 0.2) == [(HAVE, 0.2), *bar[1:]]
    states_half_way = [state for state, _ in filled(bar, 0.4)]
    assert states_half_way == [HAVE, HAVE, SYNCING, HAVE, MISSING]
    assert MISSING not in {state for state, _ in filled(bar, 5.0)}


@given(st.lists(st.tuples(states, st.floats(0.01, 1)), max_size=20), st.floats(0, 2))
def test_filling_keeps_the_length(bar: list[tuple[SegmentState, float]], arrived: float) -> None:
    before, after = (sum(share for _, share in each) for each in (bar, filled(bar, arrived)))
    assert after == pytest.approx(before)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (34_100, "34.1 kB"), (5e12, "5.0 TB")],
)
def test_bytes_are_written_with_a_unit(count: float, text: str) -> None:
    assert human_bytes(count) == text


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


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-3.0, "0 s"), (59.4, "59 s"), (60.0, "1 min"), (86_399.0, "23 h"), (9e5, "10 d")],
)
def test_an_age_has_one_unit(age_s: float, text: str) -> None:
    assert age_text(age_s) == text


def test_a_narrow_table_folds_no_column_that_is_to_stay_whole() -> None:
    rows = [("cbafd7b23bac11d5", "https://store.example/" + "long/" * 20, "59 min ago")]
    shown = StringIO()
    grid = table("ID", "URL", "in sync", rows=rows, whole=["ID", "in sync"])
    Console(file=shown, width=80, force_terminal=True).print(grid)
    assert "cbafd7b23bac11d5" in shown.getvalue()
    assert "59 min ago" in shown.getvalue()


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
