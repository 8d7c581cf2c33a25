"""The files that an export shares with its parent or writes again, without Spark."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline import export
from pipeline.database import Interval, Scan
from pipeline.export import ENTRIES_TABLE, Exported, Part, Route, export_tables
from pipeline.manifest import Manifest, Summary
from tests.pipeline.test_parts import MANIFEST
from tests.support.snapshots import conversation, fill_store

ROWS_MAX = 1_000


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(
        _: Any, __: str, work: Callable[[Any], Any], items: Sequence[Any], rows: Sequence[int]
    ) -> list[Any]:
        assert len(rows) == len(items)
        return [work(item) for item in items]

    monkeypatch.setattr(export, "on_cluster", here)


class Chain:
    """A store that grows, and snapshots of its entries, each the parent of the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sdstore.db"
        self.url = f"sqlite:///{self.path}"
        self.messages = conversation(seed=1)
        self.folders: list[Path] = []
        self.ranges: tuple[Any, ...] = ()
        self.count = 0

    def grow(self, count: int) -> Exported:
        """Export after `count` more messages."""
        fill_store(self.url, self.messages, count)
        self.count += count
        parent = self.folders[-1] if self.folders else None
        self.folders.append(self.path.with_name(f"{len(self.folders)}"))
        route = Route(self.url, self.folders[-1], parent, ROWS_MAX)
        scan = Scan(seq=Interval(0, self.count))
        [made] = export_tables(Mock(), route, [Part(ENTRIES_TABLE, scan, self.ranges)])
        self.ranges = made.ranges
        return made

    def manifest(self) -> Manifest:
        count = sum(each.count for each in self.ranges)
        return replace(MANIFEST, entries=Summary(count, ""), entry_ranges=self.ranges)

    def bounds(self) -> list[tuple[int, int, int]]:
        return [(each.first, each.last, each.count) for each in self.ranges]


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"rotten")])
def test_a_file_of_the_parent_that_is_gone_or_rotten_is_written_again(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    chain = Chain(tmp_path)
    chain.grow(100)
    chain.grow(10)
    before = chain.ranges
    assert chain.grow(0).bytes_written == 0
    change(chain.folders[-1] / before[0].file.path)
    assert chain.grow(0).bytes_written == before[0].file.bytes
    assert chain.ranges == before
    for each in before:
        assert (chain.folders[-1] / each.file.path).stat().st_size == each.file.bytes


def test_a_frame_that_the_store_has_lost_is_counted_and_written_once_it_is_mended(
    tmp_path: Path,
) -> None:
    chain = Chain(tmp_path)
    fill_store(chain.url, chain.messages, 50)
    with closing(sqlite3.connect(chain.path)) as connection, connection:
        [whole] = connection.execute("SELECT codec, data FROM frames WHERE seq = 7").fetchall()
        connection.execute("UPDATE frames SET data = x'00' WHERE seq = 7")
    chain.count = 50
    chain.grow(0)
    assert chain.manifest().lost_count == 1
    with closing(sqlite3.connect(chain.path)) as connection, connection:
        connection.execute("UPDATE frames SET (codec, data) = (?, ?) WHERE seq = 7", whole)
    assert chain.grow(0).bytes_written > 0
    assert chain.manifest().lost_count == 0
