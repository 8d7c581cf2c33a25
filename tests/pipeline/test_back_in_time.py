"""Snapshots and streams of a store that serves an older copy of its database."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.export import ParentMismatchError, export_snapshot
from tests.pipeline.test_source import stream_available, streamed
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class RolledBack:
    """A store with ten messages, of which a copy was made; then five more, or others, came."""

    def __init__(self, folder: Path) -> None:
        self.path, self.copy = folder / "sdstore.db", folder / "copy.db"
        self.url = f"sqlite:///{self.path}"
        fill_store(self.url, conversation(seed=1), 10)
        shutil.copy(self.path, self.copy)

    def go_on(self, seed: int, count: int, days: int = 1) -> None:
        fill_store(self.url, conversation(seed=seed), count, days=days)

    def put_back(self) -> None:
        for each in self.path.parent.glob("sdstore.db*"):
            each.unlink()
        shutil.copy(self.copy, self.path)


@pytest.mark.parametrize("then", [0, 3, 6])
def test_an_export_whose_parent_was_made_before_the_store_went_back_is_refused(
    spark: SparkSession, tmp_path: Path, then: int
) -> None:
    store = RolledBack(tmp_path)
    export_snapshot(spark, store.url, tmp_path / "early")
    store.go_on(seed=2, count=5)
    export_snapshot(spark, store.url, tmp_path / "late", parent=tmp_path / "early")
    store.put_back()
    if then:
        # Some of them arrive on the next day: the parent's files do not cover that day.
        store.go_on(seed=3, count=then, days=2)
    with pytest.raises(ParentMismatchError, match="rolled back"):
        export_snapshot(spark, store.url, tmp_path / "next", parent=tmp_path / "late")
    assert not (tmp_path / "next").exists()
    # The parent from before the copy is as good as ever.
    made = export_snapshot(spark, store.url, tmp_path / "next", parent=tmp_path / "early")
    assert made.entries.count == 10 + then


@pytest.mark.parametrize("then", [3, 6])
def test_a_stream_goes_on_only_if_the_store_still_has_what_it_read(
    spark: SparkSession, tmp_path: Path, then: int
) -> None:
    store = RolledBack(tmp_path)
    store.go_on(seed=2, count=5)
    stream_available(spark, store.url, tmp_path)
    assert streamed(spark, tmp_path).count() == 15
    store.put_back()
    store.go_on(seed=3, count=then)
    with pytest.raises(Exception, match="rolled back"):
        stream_available(spark, store.url, tmp_path)
