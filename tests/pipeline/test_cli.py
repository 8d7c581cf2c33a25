"""The output of the verbs, in the session that all tests share."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from app.cli.demo import running_node
from app.cli.output import Exit
from pipeline import manifest as manifests
from tests.support.cli import cli
from tests.support.disks import small_disk
from tests.support.snapshots import conversation, fill_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verbs")]


def test_a_restore_in_json_counts_what_was_refused(snapshot: Path, tmp_path: Path) -> None:
    copy, url = tmp_path / "copy", f"sqlite:///{tmp_path / 'new.db'}"
    shutil.copytree(snapshot, copy)
    lost = manifests.load(snapshot).entry_ranges[0]
    (copy / lost.file.path).write_bytes(b"PAR1")
    result = cli("snapshot", "restore", copy, "--database", url, "--unverified", "--json")
    assert result.code == Exit.PARTIAL
    assert result.json["refused"] == {"unreadable_rows": lost.count}
    assert result.json["written_count"] == 3_000 - lost.count
    assert result.json["database"] == url


def test_a_difference_of_many_ranges_is_counted_and_its_beginning_listed(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.diff.RANGES_MAX", 3)
    url = f"sqlite:///{tmp_path / 'sdstore.db'}"
    fill_store(url, conversation(seed=1), 10)
    result = cli("snapshot", "diff", snapshot, url, "--limit", 2, "--json")
    assert result.code == Exit.NO
    assert result.json["equal"] is False
    assert len(result.json["ranges"]) == 3 < result.json["ranges_count"]
    assert result.json["left_only"]["count"] == 2_990
    assert len(result.json["left_only"]["rows"]) == 2


def no_spark(*_: object, **__: object) -> None:
    raise AssertionError("Spark was to be started")


def test_a_restore_into_a_store_that_a_node_writes_is_refused_before_spark_starts(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cli.opened", no_spark)
    with running_node(tmp_path):
        started_s = time.monotonic()
        result = cli("snapshot", "restore", snapshot, "--data-dir", tmp_path)
        assert time.monotonic() - started_s < 2
    assert result.code == Exit.LOCAL_FAULT
    assert "another process writes to" in result.err


@pytest.mark.parametrize("what", ["a folder in a file", "a disk that is read only"])
def test_a_restore_that_cannot_write_is_refused_before_spark_starts(
    what: str, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cli.opened", no_spark)
    with small_disk(tmp_path / "disk") as disk:
        if what == "a disk that is read only":
            with running_node(disk):
                pass
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            target = disk
        else:
            (disk / "file").touch()
            target = disk / "file" / "store"
        database = f"sqlite:///{target / 'sdstore.db'}"
        result = cli("snapshot", "restore", snapshot, "--database", database)
    assert result.code == Exit.LOCAL_FAULT
    assert result.err.startswith("sdstore: store_unavailable: ")
    assert str(target) in result.err


def test_a_change_in_a_copied_child_leaves_the_parent_as_it_was(
    snapshot: Path, store_url: str, tmp_path: Path
) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    shutil.copytree(snapshot, parent)
    line = ("snapshot", "export", child, "--parent", parent, "--copy", "--database", store_url)
    assert cli(*line).code == Exit.DONE
    [path, *_] = [each.file.path for each in manifests.load(parent).entry_ranges]
    with (child / path).open("r+b") as file:
        file.write(b"changed in place")
    assert cli("snapshot", "verify", child).code == Exit.NO
    assert cli("snapshot", "verify", parent).code == Exit.DONE
