"""A checkpoint gives the same index, or none at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from recon.checkpoint import read_checkpoint, write_checkpoint
from recon.errors import LocalProtocolError
from recon.index import RangeIndex
from recon.view import View
from tests.recon.test_sync import crowd
from tests.support.recon_talk import HEADER, index_of, insert, summary_of


def everything(index: RangeIndex) -> tuple[bytes, int]:
    return summary_of(View(index, HEADER.key()))


@pytest.mark.parametrize("head_bytes", [1, 32])
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_what_was_written_is_read_and_grows_on(tmp_path: Path, count: int, head_bytes: int) -> None:
    elements = list(dict.fromkeys(crowd(1, count, 900, head_bytes)))
    index = index_of(elements, batch=700)
    write_checkpoint(tmp_path / "base", index.state.snapshot, b"stamp 7")
    read = read_checkpoint(tmp_path / "base")
    assert read is not None
    assert read.stamp == b"stamp 7"
    assert everything(read.index) == everything(index)
    assert insert(read.index, elements) == 0
    more = crowd(2, 600, 900)
    assert insert(read.index, more) == insert(index, more) == 600
    assert everything(read.index) == everything(index)


def test_groups_survive(tmp_path: Path) -> None:
    index = RangeIndex()
    for group in (7, 9):
        insert(index, crowd(group, 400, 50), group)
    write_checkpoint(tmp_path / "base", index.state.snapshot, b"")
    read = read_checkpoint(tmp_path / "base")
    assert read is not None
    for groups in ([7], [9], [7, 9], [8]):
        views = [View(i, HEADER.key(), groups) for i in (index, read.index)]
        assert summary_of(views[0]) == summary_of(views[1])


def test_any_flipped_bit_any_cut_and_any_addition_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "base"
    write_checkpoint(path, index_of(crowd(3, 40, 40)).state.snapshot, b"s")
    good = path.read_bytes()
    damaged = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 3)]
    for raw in (*damaged, good[:-1], good[:50], b"", good + b"\0"):
        path.write_bytes(raw)
        assert read_checkpoint(path) is None
    path.write_bytes(good)
    assert read_checkpoint(path) is not None
    assert read_checkpoint(tmp_path / "absent") is None


def test_a_stamp_is_not_a_place_for_data(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError):
        write_checkpoint(tmp_path / "base", RangeIndex().state.snapshot, b"x" * 5000)
