"""The parts that need no Spark: roots, manifest, plan, publication, lineage, graphs, Java."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date, timedelta
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console
from rich.progress import Progress

from app.roots import root
from pipeline import manifest, steps
from pipeline.cli import reason_of
from pipeline.columns import digest_array, readme
from pipeline.database import DatabaseError, open_database, shown
from pipeline.export import merged_tail
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
from pipeline.queries import shape_of
from pipeline.report import page, pictures
from pipeline.restore import stretches
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


def test_ranges_that_overlap_are_restored_together() -> None:
    """Between two days a clock may go back and forth."""
    a, b, c, d = (entry_range(first, count) for first, count in ((1, 10), (2, 3), (10, 5), (15, 1)))
    assert list(stretches([d, c, b, a])) == [[a, b, c], [d]]
    assert list(stretches([])) == []


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


def test_many_small_exports_make_few_files_and_rewrite_little() -> None:
    ranges: list[EntryRange] = []
    rewritten = next_seq = 0
    for _ in range(1_000):
        tail = merged_tail(ranges, 10, 131_072)
        count = 10 + sum(each.count for each in tail)
        rewritten += count
        first = tail[0].first if tail else next_seq
        ranges = [*ranges[: len(ranges) - len(tail)], entry_range(first, count)]
        next_seq += 10
    assert sum(each.count for each in ranges) == 10_000
    assert len(ranges) <= 12
    assert rewritten <= 10_000 * 12


def test_only_ranges_of_one_day_are_merged() -> None:
    ranges = [entry_range(1, 5, "2026-01-01"), entry_range(6, 5, "2026-01-02")]
    assert merged_tail(ranges, 100, 131_072) == ranges[1:]
    assert merged_tail(ranges, 0, 131_072) == []


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


@given(st.lists(st.lists(st.integers(0, 14), max_size=3), max_size=15))
@settings(deadline=None, max_examples=200)
def test_depth_and_width_are_those_of_a_plain_search(parents: list[list[int]]) -> None:
    """Against an oracle, with cycles, self-references and parents that are not there."""
    edges = [(child, p) for child, named in enumerate(parents) for p in named or [-1]]
    children, targets = (np.array([e[i] for e in edges], np.int64) for i in (0, 1))
    known = {
        child: {p for p in named if p != child and p < len(parents)}
        for child, named in enumerate(parents)
    }
    levels: dict[int, int] = {}
    while settled := {
        child: 1 + max((levels[p] for p in named), default=0)
        for child, named in known.items()
        if child not in levels and named <= levels.keys()
    }:
        levels |= settled
    widths = [list(levels.values()).count(level) for level in levels.values()]
    shape = shape_of(children, targets)
    assert shape.depth == max(levels.values(), default=0)
    assert shape.width == max(widths, default=0)
    assert shape.cyclic_count == len(known) - len(levels)


def test_names_of_channels_are_drawn_as_they_are() -> None:
    names = ["a$^$b", "_", "\u6f22", "long " * 100]
    activity = pa.table(
        {
            "channel_id": names,
            "day": pa.array([0] * len(names), pa.date32()),
            "messages": [1] * len(names),
            "frame_bytes": [1] * len(names),
        }
    )
    nothing = activity.slice(0, 0)
    drawn = pictures({"activity": activity, "lags": nothing, "graphs": nothing}, "a$^$b")
    assert drawn.keys() == {"messages"}  # and nobody was warned of anything


def report_tables(days: int, channels: int, width: int = 2) -> dict[str, pa.Table]:
    """Tables as a report has them, for so many days and channels."""
    rows = [
        {
            "channel_id": f"channel {number}",
            "day": date(2026, 1, 1) + timedelta(day),
            "messages": 10,
        }
        for number in range(channels)
        for day in range(days)
    ]
    activity = pa.Table.from_pylist([{**row, "frame_bytes": 3_000} for row in rows])
    lags = [{**row, "lag_s_median": 2.0, "lag_s_p95": 4_000.0} for row in rows]
    graphs = [
        {"channel_id": f"channel {number}", "messages": 10, "depth": 5 + number, "width": width}
        for number in range(channels)
    ]
    return {
        "activity": activity,
        "lags": pa.Table.from_pylist(lags),
        "graphs": pa.Table.from_pylist(graphs),
    }


def test_a_picture_that_one_day_cannot_show_is_left_out() -> None:
    assert pictures(report_tables(1, 3), "s").keys() == {"messages", "lags", "graphs"}
    assert pictures(report_tables(2, 3), "s").keys() == {"messages", "growth", "lags", "graphs"}


def texts_of(name: str, tables: dict[str, pa.Table], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that is written in a picture."""
    figures: list[Figure] = []

    def keep(figure: Figure, sink: BytesIO, **_: object) -> None:
        figure.draw_without_rendering()
        figures.append(figure)

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        names = list(pictures(tables, "monday, exported 2026-01-05 12:00 UTC"))
    return [text.get_text() for text in figures[names.index(name)].findobj(Text) if text.get_text()]


def test_pictures_name_the_snapshot_and_channels_in_order_and_count_in_whole_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for days, others in ((1, []), (3, ["growth"])):
        for name in ("messages", "lags", "graphs", *others):
            texts = texts_of(name, report_tables(days, 12), monkeypatch)
            assert "monday, exported 2026-01-05 12:00 UTC" in texts
            assert not [text for text in texts if "mathdefault" in text or "times10" in text]
    shown = texts_of("messages", report_tables(1, 12), monkeypatch)
    # As many messages in each channel: then by name.
    assert list(dict.fromkeys(text for text in shown if text.startswith("'channel"))) == [
        f"'channel {number}'" for number in (0, 1, 10, 11, 2, 3, 4, 5, 6)
    ]
    # One narrow channel: no tick between two whole numbers.
    ticks = [
        text for text in texts_of("graphs", report_tables(1, 1), monkeypatch) if text[0].isdigit()
    ]
    assert all(text.isdigit() for text in ticks)


def test_thousands_of_small_channels_leave_the_large_ones_their_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = report_tables(1, 5_000)
    counts = [1_000 - number if number < 9 else 10 for number in range(5_000)]
    tables["activity"] = tables["activity"].set_column(2, "messages", pa.array(counts))
    longest: list[float] = []
    drawn = Axes.barh

    def keep(axes: Axes, rows: Any, widths: Any, **options: Any) -> Any:
        longest.append(max(widths))
        return drawn(axes, rows, widths, **options)

    monkeypatch.setattr(Axes, "barh", keep)
    texts = texts_of("messages", tables, monkeypatch)
    assert longest == [1_000]
    assert "and 49,910 messages in 4,991 others" in texts


def test_a_bar_counts_rows_and_is_full_when_its_step_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_POLL_S", 0.001)
    seen: list[float] = []
    shown = Mock(spec=Progress, disable=False)
    shown.update.side_effect = lambda _, completed: seen.append(completed)
    counts = iter([0, 100, 450])
    with steps._followed(shown, "Export", lambda: next(counts, 450), 400):
        while len(seen) < 3:
            time.sleep(0.001)
    assert seen[:3] == [0, 100, 400]
    assert seen[-1] == 400


def test_a_bar_says_how_much_of_how_much() -> None:
    sink = StringIO()
    with steps.bar(Console(file=sink, force_terminal=True, width=100)) as shown:
        shown.add_task("Export", completed=65_536, total=400_000, unit="rows")
    assert "65,536 of 400,000 rows" in sink.getvalue()


def test_a_page_says_which_table_is_cut() -> None:
    table = pa.table({"channel_id": ["a", "b"]})
    assert "2 of 2 rows; all:" in page("monday", MANIFEST, {"gaps": table}, (), rows_max=3)
    assert "2 of the first 2 rows; the rest" in page(
        "monday", MANIFEST, {"gaps": table}, (), rows_max=2
    )


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


def test_of_what_spark_tells_one_line_says_why() -> None:
    report = (
        "An exception was thrown\nTraceback (most recent call last):\n"
        '  File "worker.py", line 1, in main\n    run(a: int)\n'
        "OSError: [Errno 28] No space left on device\n\n\tat org.apache.spark.Task.run\n"
    )
    assert reason_of(report) == "OSError: [Errno 28] No space left on device"
    assert reason_of("Job aborted\n\tat org.apache") == "Job aborted"


def test_a_file_that_is_no_store_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "junk.db").write_bytes(b"junk" * 1_000)
    with pytest.raises(DatabaseError, match="is not a store"):
        open_database(f"sqlite:///{tmp_path / 'junk.db'}")
    with pytest.raises(DatabaseError, match="there is no database"):
        open_database(f"sqlite:///{tmp_path / 'nothing.db'}")
    assert shown("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
