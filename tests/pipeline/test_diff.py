"""`snapshot diff` against sets in memory, and what it needs to run."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.cli.output import Exit
from pipeline import diff as diffs
from pipeline import manifest as manifests
from pipeline.columns import ENTRY_KEYS
from pipeline.diff import diff
from pipeline.manifest import EntryRange, FileRecord, Summary, entries_path
from tests.support.cli import cli

FIRST_VERSION = Path(__file__).parents[1] / "fixtures" / "snapshots" / "1"
CHANNELS = ("", "é", "general", "\U0001f600")
Row = tuple[str, int, str, bytes]
"""(channel ID, Lamport timestamp, message ID, digest)."""


def some_rows(world: random.Random, count: int) -> list[Row]:
    clocks = (-(2**63), -1, 0, 7, 2**63 - 1)
    return [
        (
            world.choice(CHANNELS),
            world.choice((world.choice(clocks), world.randrange(500))),
            world.randbytes(4).hex(),
            world.choice((bytes(30), b"\xff" * 30, world.randbytes(30))) + world.randbytes(2),
        )
        for _ in range(count)
    ]


def write_side(folder: Path, rows: list[Row], file_rows: int) -> Path:
    """A snapshot of these rows, with the columns that a comparison reads."""
    ranges: list[EntryRange] = []
    for start in range(0, len(rows), file_rows):
        portion = rows[start : start + file_rows]
        first, last = start + 1, start + len(portion)
        path = entries_path("2026-01-01", first, last)
        channels, clocks, names, digests = zip(*portion, strict=True)
        columns = {
            "seq": range(first, last + 1),
            "received_at": [0] * len(portion),
            "channel_id": channels,
            "message_id": names,
            "lamport_timestamp": clocks,
            "digest": digests,
            "frame_hash": digests,
        }
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        arrays = [pa.array(columns[each.name], each.type) for each in ENTRY_KEYS]
        pq.write_table(pa.Table.from_arrays(arrays, schema=ENTRY_KEYS), folder / path, 100)
        content = "".join(sorted(each.hex() for each in digests))
        file = FileRecord(path, 1, "00" * 32)
        ranges.append(
            EntryRange("2026-01-01", first, last, len(portion), content, 0, 0, "", "", 0, 0, file)
        )
    made = replace(
        manifests.load(FIRST_VERSION),
        entries=Summary(len(rows), folder.name),
        entry_ranges=tuple(ranges),
        claims=Summary(0, ""),
        claim_ranges=(),
    )
    folder.mkdir(exist_ok=True)
    (folder / manifests.FILE_NAME).write_bytes(made.to_bytes())
    return folder


@pytest.mark.parametrize("bucket_rows", [10, 2**18])
@pytest.mark.parametrize("seed", range(12))
def test_a_diff_of_random_snapshots_is_the_difference_of_their_sets(
    seed: int, bucket_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffs, "_BUCKET_ROWS", bucket_rows)
    world = random.Random(seed)
    rows = list({row[3]: row for row in some_rows(world, world.choice((0, 5, 600)))}.values())
    shared = world.randrange(len(rows) + 1)  # the files at the beginning are equal
    sides: list[list[Row]] = []
    for _ in range(2):
        kept = [row for row in rows[shared:] if world.random() > world.choice((0, 0.1, 0.6))]
        world.shuffle(kept)
        sides.append([*rows[:shared], *kept])
    file_rows = world.choice((7, 100, 1_000))
    folders = [write_side(tmp_path / name, its, file_rows) for name, its in zip("ab", sides)]  # noqa: B905
    found = diff(folders[0], folders[1], 20)
    for only, (mine, theirs) in zip(
        (found.left_only, found.right_only), (sides, sides[::-1]), strict=True
    ):
        expected = [row for row in mine if row not in set(theirs)]
        assert only.count == len(expected)
        assert [tuple(row.values()) for row in only.rows] == expected[:20]
    is_equal = set(sides[0]) == set(sides[1])
    assert (found.ranges == (), found.ranges_count == 0) == (is_equal, is_equal)
    for channel in CHANNELS:
        its = [each for each in found.ranges if each.channel_id == channel]
        assert len(its) <= diffs.RANGES_PER_CHANNEL
        assert all(one.lamport_last < other.lamport_first for one, other in pairwise(its))
        for side, other, name in ((0, 1, "left_count"), (1, 0, "right_count")):
            clocks = [
                row[1] for row in sides[side] if row[0] == channel and row not in sides[other]
            ]
            for clock in clocks:
                [each] = [x for x in its if x.lamport_first <= clock <= x.lamport_last]
                assert getattr(each, name) > 0
        lone = sum(row[0] == channel for row in set(sides[0]) ^ set(sides[1]))
        assert sum(each.left_count + each.right_count for each in its) >= lone
        net = sum(each.left_count - each.right_count for each in its)
        assert net == sum(r[0] == channel for r in sides[0]) - sum(
            r[0] == channel for r in sides[1]
        )
    assert [each.channel_id for each in found.ranges] == sorted(x.channel_id for x in found.ranges)


@pytest.mark.parametrize("damage", ["missing", "not Parquet", "a page", "a digest of 31 bytes"])
def test_a_damaged_file_that_a_diff_reads_is_named(tmp_path: Path, damage: str) -> None:
    rows = some_rows(random.Random(2), 300)
    folder, other = write_side(tmp_path / "a", rows, 100), write_side(tmp_path / "b", rows[:99], 99)
    path = folder / manifests.load(folder).entry_ranges[1].file.path
    if damage == "missing":
        path.unlink()
    elif damage == "not Parquet":
        path.write_bytes(b"PAR1")
    elif damage == "a page":
        content = bytearray(path.read_bytes())
        content[4:900] = b"\xff" * 896
        path.write_bytes(content)
    else:
        table = pq.read_table(path, partitioning=None)
        at = table.column_names.index("digest")
        short = pa.array([each[:31] for each in table["digest"].to_pylist()], pa.binary())
        pq.write_table(table.set_column(at, "digest", short), path)
    result = cli("snapshot", "diff", folder, other)
    assert result.code == Exit.NO
    assert result.out == ""
    assert result.err.startswith(f"sdstore: damaged_snapshot: {path} cannot be read: ")
