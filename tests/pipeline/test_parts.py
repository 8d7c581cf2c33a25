"""The parts that need no Spark: roots, manifest, plan, publication, lineage, graphs, Java."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from app.roots import root
from pipeline import manifest
from pipeline.columns import digest_array, readme
from pipeline.database import DatabaseError, open_database, shown
from pipeline.manifest import (
    SCHEMA_VERSION,
    EntryRange,
    ExportEnd,
    FileRecord,
    Manifest,
    ManifestError,
    Parent,
    PublishError,
    Summary,
    draft_of,
    entries_path,
    keep_only,
    list_snapshots,
    load,
    prune_snapshots,
    published,
    share_file,
    write_file,
)
from pipeline.session import java_home
from tests.support.cli import cli

FIRST_VERSION = Path(__file__).parents[1] / "fixtures" / "snapshots" / "1"


def entry_range(first: int, count: int, day: str = "2026-01-01") -> EntryRange:
    last = first + count - 1
    file = FileRecord(entries_path(day, first, last), count * 100, "00" * 32)
    return EntryRange(day, first, last, count, "11" * 32, count * 80, 0, "a", "b", 1, 2, file)


MANIFEST = Manifest(
    snapshot_id="ab" * 16,
    created_at="2026-01-01T00:00:00+00:00",
    software="sdstore 0",
    decoder_version=1,
    database_id="cd" * 8,
    parent=Parent("ef" * 16, "é"),
    channel_ids=("", "é\u2028\U0001f600"),
    watermark=ExportEnd(9, 3, "55" * 8, "66" * 8),
    entries=Summary(9, "22" * 32),
    claims=Summary(0, "33" * 32),
    entry_ranges=(entry_range(1, 9),),
    claim_ranges=(),
    channels=FileRecord("channels.parquet", 1, "44" * 32),
)


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True, max_size=50))
@settings(deadline=None)
def test_a_root_is_blake3_over_the_sorted_digests_each_once(digests: list[bytes]) -> None:
    twice = [b"x", *digests, *digests[:2]]
    column = pa.array(twice, pa.binary())[1:]  # a slice: buffers begin elsewhere
    assert root(digest_array(column)) == blake3(b"".join(sorted(digests))).digest()


def test_digests_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        digest_array(pa.array([bytes(32), bytes(31)], pa.binary()))


def test_a_manifest_survives_its_own_json() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert json.loads(MANIFEST.to_bytes())["entries"]["count"] == 9


def test_any_changed_byte_of_a_manifest_is_noticed() -> None:
    raw = MANIFEST.to_bytes()
    for position in range(len(raw)):
        for bit in (0x01, 0x20):
            changed = bytearray(raw)
            changed[position] ^= bit
            with pytest.raises(ManifestError):
                Manifest.from_bytes(bytes(changed))


def test_a_manifest_of_a_later_version_is_refused(tmp_path: Path) -> None:
    later = SCHEMA_VERSION + 1
    with pytest.raises(ManifestError, match=f"unknown schema version {later}"):
        Manifest.from_bytes(replace(MANIFEST, schema_version=later).to_bytes())
    with pytest.raises(ManifestError, match="is not a snapshot"):
        load(tmp_path)


def with_path(path: str) -> Manifest:
    """A manifest whose only file of entries lies at `path`."""
    [each] = MANIFEST.entry_ranges
    return replace(MANIFEST, entry_ranges=(replace(each, file=replace(each.file, path=path)),))


@pytest.mark.parametrize(
    "lie",
    [
        with_path("/etc/passwd"),
        with_path("entries/day=2026-01-01/../../../secret.parquet"),
        with_path(entries_path("2026-01-02", 1, 9)),
        replace(MANIFEST, channels=replace(MANIFEST.channels, path="../channels.parquet")),
        replace(MANIFEST, documents=(FileRecord("run.sh", 1, "00" * 32),)),
        replace(MANIFEST, entry_ranges=(entry_range(1, 9, "../.."),)),
        replace(MANIFEST, entries=Summary(8, "22" * 32)),
        replace(MANIFEST, entry_ranges=(entry_range(1, 5), entry_range(5, 4))),
        replace(MANIFEST, entry_ranges=(entry_range(1, 9), entry_range(10, 0))),
    ],
)
def test_a_sealed_manifest_that_contradicts_itself_is_refused(lie: Manifest) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(lie.to_bytes())


def test_a_folder_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "snapshot"
    with pytest.raises(ZeroDivisionError), published(target) as folder:
        write_file(folder, "a/b", bytes(1 // 0))
    assert list(tmp_path.iterdir()) == []
    left_over = tmp_path / ".snapshot.partial" / "entries"
    left_over.mkdir(parents=True)  # as a killed process leaves it
    (left_over / "half").touch()
    with published(target) as folder:
        (folder / "a").mkdir()
        draft_of(folder / "a" / "b").touch()  # as a killed task leaves it
        draft_of(folder / "c").touch()
        record = write_file(folder, "a/b", b"content")
        keep_only(folder, {"a/b"})
        with pytest.raises(PublishError, match="another process"), published(target):
            pass
    assert sorted(p.name for p in target.rglob("*")) == ["a", "b"]
    assert record == FileRecord("a/b", 7, blake3(b"content").hexdigest())
    with pytest.raises(PublishError, match="exists"), published(target):
        pass


def test_pruning_keeps_the_newest_and_takes_nothing_from_them(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        write_file(tmp_path / name, "data", b"shared") if name == "a" else share_file(
            tmp_path / "a", tmp_path / name, "data"
        )
        made = replace(MANIFEST, created_at=f"2026-01-0{number + 1}", parent=None)
        write_file(tmp_path / name, "manifest.json", made.to_bytes())
    write_file(tmp_path / "broken", "manifest.json", b"{}")
    assert prune_snapshots(tmp_path, 2) == [tmp_path / "a"]
    assert [each.folder.name for each in list_snapshots(tmp_path)] == ["broken", "b", "c"]
    assert (tmp_path / "c" / "data").read_bytes() == b"shared"


def test_a_pruned_snapshot_has_lost_its_name_for_good_before_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "old", "manifest.json", MANIFEST.to_bytes())
    newer = replace(MANIFEST, created_at="2026-01-01T00:00:00.001+00:00")
    write_file(tmp_path / "a", "manifest.json", newer.to_bytes())  # newer, though not by its name
    hidden = tmp_path / ".old.pruned"
    synced: list[Path] = []

    def sync(folder: Path) -> None:
        assert (hidden / "manifest.json").exists()
        synced.append(folder)

    monkeypatch.setattr(manifest, "sync_path", sync)
    assert prune_snapshots(tmp_path, 1) == [tmp_path / "old"]
    assert synced == [tmp_path]
    assert not hidden.exists()


def test_pruning_removes_what_killed_exports_left_and_nothing_of_live_ones(tmp_path: Path) -> None:
    left_over = tmp_path / ".killed.partial"
    write_file(left_over, "entries/half", b"")
    (left_over / ".lock").touch()
    (tmp_path / ".of-somebody-else.partial").mkdir()
    with published(tmp_path / "live") as folder:
        write_file(folder, "data", b"")
        assert [(each.folder, each.manifest) for each in list_snapshots(tmp_path)] == [
            (left_over, None)
        ]
        assert "`prune` removes it" in str(list_snapshots(tmp_path)[0].fault)
        assert prune_snapshots(tmp_path, 1) == [left_over]
        assert list_snapshots(tmp_path) == []
        assert not left_over.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".of-somebody-else.partial", "live"]
    assert (tmp_path / "live" / "data").exists()


def test_the_readme_of_a_snapshot_explains_every_column() -> None:
    text = readme()
    for column in ("causal_history", "frame_hash", "claim_id", "lamport_first"):
        assert f"| `{column}` |" in text


def test_java_that_is_there_is_used_and_else_the_wheel(tmp_path: Path) -> None:
    without_java = {"PATH": str(tmp_path)}
    home = java_home(without_java, tmp_path)
    assert home is not None
    answer = subprocess.run(
        [f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert 'version "17' in answer.stderr
    assert java_home({"JAVA_HOME": home, "PATH": ""}, tmp_path) == home


def test_the_command_line_starts_without_spark() -> None:
    """Nobody waits for Spark, or needs it, to be told how a verb is used."""
    code = (
        "import sys; from app.cli.program import run; run(['snapshot', '--help']);"
        "sys.exit(bool({'pyspark', 'pyarrow', 'pandas'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == 0
    assert b"restore" in ended.stdout


def test_snapshots_with_equal_roots_are_equal_without_spark_or_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FIRST_VERSION, tmp_path / "copy")
    for name in ("pyspark", "pyspark.errors", "py4j", "py4j.protocol"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=AssertionError("a process starts")))
    started = time.process_time()
    for other in (FIRST_VERSION, tmp_path / "copy"):
        result = cli("snapshot", "diff", FIRST_VERSION, other)
        assert (result.code, result.out, result.err) == (0, "equal\n", "")
        report = cli("snapshot", "diff", FIRST_VERSION, other, "--json").json
        assert (report["equal"], report["ranges_count"]) == (True, 0)
        assert report["left_only"] == report["right_only"] == {"count": 0, "rows": []}
    assert time.process_time() - started < 4
    assert cli("snapshot", "diff", FIRST_VERSION, tmp_path / "nowhere").code == 1


def test_a_file_that_is_no_store_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "junk.db").write_bytes(b"junk" * 1_000)
    with pytest.raises(DatabaseError, match="is not a store"):
        open_database(f"sqlite:///{tmp_path / 'junk.db'}")
    with pytest.raises(DatabaseError, match="there is no database"):
        open_database(f"sqlite:///{tmp_path / 'nothing.db'}")
    assert shown("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
