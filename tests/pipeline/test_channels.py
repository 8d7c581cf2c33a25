"""The channels table, as it is compared with what the entries give."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.tables import ChannelRow, different_channels, write_channels

ROWS = [ChannelRow(name, 3, bytes(32), 1, 9) for name in ("", "a", "b", "ä", "𐐷")]


@pytest.mark.parametrize(
    ("computed", "different"),
    [
        (ROWS, []),
        (ROWS[1:], [""]),
        (ROWS[:-1], ["𐐷"]),
        ([*ROWS, ChannelRow("🙂", 1, bytes(32), 0, 0)], ["🙂"]),
        ([ROWS[0], ROWS[1]._replace(lamport_last=8), *ROWS[2:]], ["a"]),
        ([*ROWS[:2], ROWS[2]._replace(root=b"\1" * 32), *ROWS[3:]], ["b"]),
        ([], ["", "a", "b", "ä", "𐐷"]),
    ],
)
def test_a_row_that_is_not_the_same_is_named(
    tmp_path: Path, computed: list[ChannelRow], different: list[str]
) -> None:
    write_channels(tmp_path, iter(ROWS))
    assert different_channels(tmp_path, 10, iter(computed)) == different
    assert different_channels(tmp_path, 2, iter(computed)) == different[:2]


def test_a_stored_row_is_not_its_own_counterpart(tmp_path: Path) -> None:
    write_channels(tmp_path, iter([ROWS[1], ROWS[1]]))
    assert different_channels(tmp_path, 10, iter([])) == ["a"]
    assert different_channels(tmp_path, 10, iter([ROWS[1]])) == ["a"]
