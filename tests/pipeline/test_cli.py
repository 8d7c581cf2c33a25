"""What verbs print, in the session that all tests share."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.cli.exits import Exit
from pipeline import cli
from pipeline import manifest as manifests
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "opened", lambda *_, **__: nullcontext(spark))


def test_a_restore_in_json_counts_what_was_refused(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(snapshot, tmp_path / "copy")
    lost = manifests.load(snapshot).entry_ranges[0]
    (tmp_path / "copy" / lost.file.path).write_bytes(b"PAR1")
    url = f"sqlite:///{tmp_path / 'new.db'}"
    code = cli.restore(tmp_path / "copy", database=url, unverified=True, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert code == Exit.PARTIAL
    assert answer["refused"] == {"unreadable_rows": lost.count}
    assert answer["written_count"] == 3_000 - lost.count
    assert answer["database"] == url


def test_a_difference_of_many_ranges_is_counted_and_its_beginning_listed(
    snapshot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pipeline.diff.RANGES_MAX", 3)
    url = f"sqlite:///{tmp_path / 'sdstore.db'}"
    fill_store(url, conversation(seed=1), 10)
    code = cli.diff(str(snapshot), url, limit=2, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert code == Exit.NO
    assert answer["equal"] is False
    assert len(answer["ranges"]) == 3 < answer["ranges_count"]
    assert answer["left_only"]["count"] == 2_990
    assert len(answer["left_only"]["rows"]) == 2
