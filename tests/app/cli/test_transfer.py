"""Import, export, backup, migrate, check and backfill: files and stores."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from app.cli.copying import ImportProgress
from app.cli.files import delimited
from app.demo.run import conversation, real_frames, running_node
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import entry_digest
from tests.support.cli import cli, command
from tests.support.federation import message

# One frame an entry: a rebroadcast with another bloom filter is the same one.
ITEMS = list(
    {
        entry_digest(decode(item.frame)[0]): item
        for item in reversed([*conversation(600, 3), *real_frames()])
    }.values()
)
FILE = b"".join(delimited(item.frame) for item in ITEMS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of frames in every dialect."""
    path = tmp_path / "messages.ldp"
    path.write_bytes(FILE)
    return path


def entries_of(data_dir: Path) -> int:
    count = cli("check", "--data-dir", data_dir, "--json").json["entries"]
    assert isinstance(count, int)
    return count


def test_what_is_exported_and_imported_is_the_same_store(tmp_path: Path, file: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert cli("import", file, "--data-dir", one).code == 0
    again = tmp_path / "again.ldp"
    assert cli("export", again, "--data-dir", one).code == 0
    assert again.read_bytes() == FILE
    assert cli("import", again, "--data-dir", two).code == 0
    assert entries_of(one) == entries_of(two) == len(ITEMS)
    assert cli("check", "--deep", "--data-dir", two).code == 0


def test_ndjson_keeps_messages_and_hints(tmp_path: Path) -> None:
    with running_node(tmp_path / "one") as node:
        for number in range(3):
            frame = encode(message(number))
            cli(
                "publish",
                "-",
                "--format",
                "frame",
                "--hint",
                f"0{number}",
                "--node",
                node,
                stdin=frame,
            )
    file = tmp_path / "all.ndjson"
    assert cli("export", file, "--data-dir", tmp_path / "one").code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["retrieval_hints"] for line in lines] == [["00"], ["01"], ["02"]]
    assert cli("import", file, "--data-dir", tmp_path / "two").code == 0
    with running_node(tmp_path / "two") as node:
        assert cli("hint", "01", "--node", node, "--json").json["message"]["message_id"] == "m1"


def test_an_export_is_continued_with_what_is_new(tmp_path: Path, file: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.ldp"
    cli("import", file, "--data-dir", data)
    cli("export", copy, "--data-dir", data)
    more = delimited(encode(message(1, "new")))
    cli("import", "-", "--data-dir", data, stdin=more)
    result = cli("export", copy, "--data-dir", data, "--json").json
    assert (result["messages"], result["before"]) == (1, len(ITEMS))
    assert copy.read_bytes() == FILE + more


def test_an_export_names_what_is_damaged_and_goes_on_behind_it(tmp_path: Path, file: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.ldp"
    cli("import", file, "--data-dir", data)
    # All but the last: small frames have no second copy.
    with sqlite3.connect(data / "sdstore.db") as connection:
        ((last,),) = connection.execute("SELECT max(seq) FROM messages")
        connection.execute("UPDATE frames SET data = x'00' WHERE seq < ?", (last,))
    connection.close()
    result = cli("export", copy, "--data-dir", data, "--json")
    assert result.code == 6
    assert result.json["messages"] + len(result.json["damaged"]) == len(ITEMS)
    assert copy.read_bytes().endswith(delimited(ITEMS[-1].frame))


def test_an_export_that_was_cut_off_is_completed(tmp_path: Path, file: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.ldp"
    cli("import", file, "--data-dir", data)
    for cut in (1, 1_000, len(FILE) // 2):
        copy.write_bytes(FILE[:-cut])
        assert cli("export", copy, "--data-dir", data).code == 0
        assert copy.read_bytes() == FILE


def test_an_export_does_not_touch_a_file_that_is_something_else(tmp_path: Path, file: Path) -> None:
    data = tmp_path / "data"
    cli("import", file, "--data-dir", data)
    for other in (b"a diary, not messages", delimited(encode(message(1, "elsewhere")))):
        strange = tmp_path / "strange"
        strange.write_bytes(other)
        assert cli("export", strange, "--data-dir", data).code == 4
        assert strange.read_bytes() == other


def test_an_export_with_other_channels_says_what_the_file_lacks(tmp_path: Path, file: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.ldp"
    cli("import", file, "--data-dir", data)
    one = cli("export", copy, "--channel", "chan", "--data-dir", data, "--json")
    assert (one.code, one.json["lacking"]) == (0, 0)
    assert cli("export", copy, "--channel", "chan", "--data-dir", data).code == 0
    every = cli("export", copy, "--data-dir", data, "--json")
    held = every.json["before"] + every.json["messages"]
    assert (every.code, every.json["lacking"]) == (1, len(ITEMS) - held)
    assert every.json["lacking"] > 0
    assert "foreign_file" in every.err


def test_only_the_channels_asked_for_are_exported(tmp_path: Path, file: Path) -> None:
    cli("import", file, "--data-dir", tmp_path)
    out = cli("export", "-", "--format", "ndjson", "--channel", "chan", "--data-dir", tmp_path)
    assert {line["message"]["channel_id"] for line in out.lines} == {"chan"}
    assert len(out.lines) == 2


def test_an_export_of_channels_that_the_store_does_not_have_is_1_and_leaves_no_file(
    tmp_path: Path, file: Path
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.ldp"
    cli("import", file, "--data-dir", data)
    typos = ("export", copy, "--channel", "typo", "--channel", "other", "--data-dir", data)
    for flags in ((), ("--json",)):
        result = cli(*typos, *flags)
        error = f"sdstore: not_found: sqlite:///{data / 'sdstore.db'} has no messages of channel"
        assert (result.code, result.out, result.err) == (1, "", f"{error} 'other' or 'typo'\n")
        assert not copy.exists()
    copy.write_bytes(FILE)
    assert cli(*typos).code == 1
    assert copy.read_bytes() == FILE


def test_an_export_names_the_channel_that_is_unknown_and_writes_the_others(
    tmp_path: Path, file: Path
) -> None:
    data, copy, expected = tmp_path / "data", tmp_path / "copy.ldp", tmp_path / "expected.ldp"
    cli("import", file, "--data-dir", data)
    assert cli("export", expected, "--channel", "chan", "--data-dir", data).code == 0
    both = ("--channel", "chan", "--channel", "typo", "--data-dir", data)
    result = cli("export", copy, *both)
    assert (result.code, result.out.startswith("exported 2 messages")) == (1, True)
    assert result.err.startswith("sdstore: not_found: ")
    assert result.err.endswith(" has no messages of channel 'typo'\n")
    assert copy.read_bytes() == expected.read_bytes()
    as_json = cli("export", copy, *both, "--json")
    assert (as_json.code, as_json.err) == (1, result.err)
    assert as_json.json.keys() == {"file", "messages", "bytes", "before", "lacking", "damaged"}


def test_an_empty_store_is_exported_to_an_empty_file(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.ldp"
    cli("import", "-", "--data-dir", data)
    assert cli("export", copy, "--data-dir", data).code == 0
    assert copy.read_bytes() == b""


def test_each_of_many_bad_frames_is_told_and_the_rest_is_stored(tmp_path: Path) -> None:
    """100,000 frames, one in a hundred damaged."""
    chance = random.Random(5)
    frames = [b"\x12\x08%08d\x1a\x01cP%c\xa2\x01\x03abc" % (n, n % 128) for n in range(100_000)]
    bad = set(chance.sample(range(100_000), 1_000))
    file = tmp_path / "many.ldp"
    damaged = (b"\xff" + each[1:] if number in bad else each for number, each in enumerate(frames))
    file.write_bytes(b"".join(map(delimited, damaged)))
    result = cli("import", file, "--data-dir", tmp_path / "data", "--json")
    *refused, done = result.lines
    assert result.code == 4
    assert {line["item"] - 1 for line in refused} == bad
    assert {line["code"] for line in refused} == {"malformed_frame"}
    assert done == {"outcome": "done", "counts": {"refused": 1_000, "stored": 99_000}}
    assert entries_of(tmp_path / "data") == 99_000


def test_an_import_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    file, data = tmp_path / "many.ldp", tmp_path / "data"
    items = conversation(20_000, 9)
    file.write_bytes(b"".join(delimited(item.frame) for item in items))
    importing = subprocess.Popen(command("import", file, "--data-dir", data))
    marks = data / "imports"
    deadline = time.monotonic() + 30
    while not (marks.is_dir() and list(marks.glob("*.json"))):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    importing.kill()
    importing.wait()
    kept = entries_of(data)
    assert 0 < kept < len(items)
    result = cli("import", file, "--data-dir", data)
    assert result.code == 0
    assert "continuing behind message" in result.err
    assert entries_of(data) == len(items)
    assert not list(marks.glob("*.json"))


def test_an_interrupted_import_passes_over_nothing_in_another_database_or_format(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ImportProgress, "forget", lambda _: None
    )  # as if it had been killed at the end

    def stored(database: str, *options: str) -> int:
        url = f"sqlite:///{tmp_path / database}"
        arguments = ("import", file, "--data-dir", tmp_path, "--database", url, "--json", *options)
        count = cli(*arguments).lines[-1]["counts"].get("stored", 0)
        assert isinstance(count, int)
        return count

    assert stored("one.db") == len(ITEMS)
    assert stored("two.db") == len(ITEMS)
    assert stored("two.db", "--format", "ndjson") == 0
    (tmp_path / "two.db").unlink()
    assert stored("two.db") == len(ITEMS)


def test_an_interrupted_import_begins_anew_where_the_database_went_back_in_time(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ImportProgress, "forget", lambda _: None
    )  # as if it had been killed at the end
    database, copy = tmp_path / "sdstore.db", tmp_path / "copy.db"
    cli("import", "-", "--data-dir", tmp_path, stdin=delimited(encode(message(1, "before"))))
    assert cli("backup", copy, "--data-dir", tmp_path).code == 0
    assert cli("import", file, "--data-dir", tmp_path).code == 0
    for each in tmp_path.glob("sdstore.db*"):
        each.unlink()
    copy.rename(database)
    assert cli("import", file, "--data-dir", tmp_path).code == 0
    assert entries_of(tmp_path) == len(ITEMS) + 1


@pytest.mark.parametrize("cut", [1, 2, 300])
def test_a_file_of_lines_that_was_cut_off_is_completed(
    tmp_path: Path, file: Path, cut: int
) -> None:
    data, whole, copy = tmp_path / "data", tmp_path / "whole.ndjson", tmp_path / "copy.ndjson"
    cli("import", file, "--data-dir", data)
    cli("export", whole, "--data-dir", data)
    copy.write_bytes(whole.read_bytes()[:-cut])
    assert cli("export", copy, "--data-dir", data).code == 0
    assert copy.read_bytes() == whole.read_bytes()
    copy.write_bytes(whole.read_bytes()[:-cut])
    cli("import", "-", "--data-dir", data, stdin=delimited(encode(message(1, "new"))))
    assert cli("export", copy, "--data-dir", data).code == 0
    assert cli("import", copy, "--data-dir", tmp_path / "two").code == 0
    assert entries_of(tmp_path / "two") == len(ITEMS) + 1


def test_a_file_that_was_changed_since_is_imported_anew(tmp_path: Path, file: Path) -> None:
    data = tmp_path / "data"
    cli("import", file, "--data-dir", data)
    marks = data / "imports"
    assert not list(marks.glob("*.json"))
    result = cli("import", file, "--data-dir", data, "--json")
    assert result.json["counts"] == {"duplicate": len(ITEMS)}


def test_importing_beside_a_running_node_is_refused(
    node: str, node_folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.sqlite.WRITER_LOCK_WAIT_S", 0.05)
    assert cli("channels", "--node", node).code == 0
    result = cli("import", file, "--data-dir", node_folder)
    assert result.code == 6
    assert "another process writes" in result.err


def test_a_backup_beside_a_running_node_is_a_store(tmp_path: Path, file: Path) -> None:
    copy = tmp_path / "copy.db"
    with running_node(tmp_path / "data") as node:
        cli("publish", file, "--node", node)
        assert cli("backup", copy, "--data-dir", tmp_path / "data").code == 0
    assert cli("check", "--deep", "--database", f"sqlite:///{copy}").code == 0
    assert cli("check", "--database", f"sqlite:///{copy}", "--json").json["entries"] == len(ITEMS)
    assert not list(tmp_path.glob("*.partial"))


def test_a_backup_replaces_nothing_unless_told(tmp_path: Path, file: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    cli("import", file, "--data-dir", data)
    copy.write_bytes(b"precious")
    assert cli("backup", copy, "--data-dir", data).code == 4
    assert copy.read_bytes() == b"precious"
    assert cli("backup", copy, "--data-dir", data, "--force", "--json").json["bytes"] > 10_000


def test_a_backup_never_takes_the_place_of_a_store_that_may_be_open(
    tmp_path: Path, file: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for data in (one, two):
        cli("import", file, "--data-dir", data)
    store, alias = one / "sdstore.db", tmp_path / "alias.db"
    alias.hardlink_to(store)
    for target in (store, alias, two / "sdstore.db"):
        result = cli("backup", target, "--force", "--data-dir", one)
        assert (result.code, "file_in_use" in result.err) == (2, True)
    # The draft of a copy is replaced without asking.
    partial = tmp_path / "copy.db.partial"
    partial.hardlink_to(store)
    url = f"sqlite:///{partial}"
    assert cli("backup", tmp_path / "copy.db", "--database", url).code == 2
    assert entries_of(one) == entries_of(two) == len(ITEMS)


def test_a_file_that_is_no_database_is_one_line_and_6(tmp_path: Path, file: Path) -> None:
    strange = tmp_path / "strange.db"
    strange.write_bytes(b"a diary" * 1_000)
    for verb in (
        ("check",),
        ("migrate",),
        ("backup", tmp_path / "copy.db"),
        ("import", file),
        ("export", tmp_path / "copy.ldp"),
    ):
        result = cli(*verb, "--database", f"sqlite:///{strange}", "--data-dir", tmp_path)
        assert (verb[0], result.code, result.err.count("\n")) == (verb[0], 6, 1)
        assert "store_unavailable" in result.err
    assert sorted(each.name for each in tmp_path.iterdir()) == [file.name, strange.name]


def test_migrate_says_where_the_schema_is(tmp_path: Path, file: Path) -> None:
    cli("import", file, "--data-dir", tmp_path)
    report = cli("migrate", "--data-dir", tmp_path, "--json").json
    assert report.keys() == {"database", "before", "after"}
    assert report["before"] == report["after"] is not None


def test_a_deep_check_finds_damage(tmp_path: Path, file: Path) -> None:
    cli("import", file, "--data-dir", tmp_path)
    database = sqlite3.connect(tmp_path / "sdstore.db")
    database.execute("UPDATE channels SET count = count + 1 WHERE channel_id = 'chan'")
    database.commit()
    database.close()
    result = cli("check", "--data-dir", tmp_path)
    assert result.code == 1
    assert "chan" in result.err


def test_backfill_fetches_only_what_the_file_lacks(tmp_path: Path) -> None:
    file = tmp_path / "channel.ndjson"
    with running_node(tmp_path / "data") as node:
        arguments = ("backfill", "c", "--into", file, "--node", node, "--json")
        publish(node, range(300))
        publish(node, range(5), channel="other")
        first = cli(*arguments)
        assert (first.code, first.json["entries_received"]) == (0, 300)
        publish(node, range(300, 310))
        again = cli(*arguments)
        assert (again.json["entries_received"], again.json["outcome"]) == (10, "in_sync")
        assert again.json["bytes_down"] < first.json["bytes_down"] / 2
        file.write_bytes(file.read_bytes()[:-1])
        publish(node, range(310, 311))
        assert cli(*arguments).json["entries_received"] == 1
    ids = {json.loads(line)["message"]["message_id"] for line in file.read_text().splitlines()}
    assert ids == {f"m{number}" for number in range(311)}


def test_backfill_into_frames_can_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "channel.ldp"
    with running_node(tmp_path / "data") as node:
        publish(node, range(50))
        assert cli("backfill", "c", "--into", file, "--node", node).code == 0
    assert cli("import", file, "--data-dir", tmp_path / "two").code == 0
    assert entries_of(tmp_path / "two") == 50


def publish(node: str, numbers: range, channel: str = "c") -> None:
    frames = b"".join(delimited(encode(message(number, channel))) for number in numbers)
    assert cli("publish", "-", "--node", node, stdin=frames).code == 0


def test_a_backup_to_a_place_that_cannot_be_written_is_no_fault_of_the_store(
    tmp_path: Path, file: Path
) -> None:
    assert cli("import", file, "--data-dir", tmp_path / "data").code == 0
    (tmp_path / "file").touch()
    for target in (tmp_path / "nowhere" / "x.db", tmp_path / "file" / "x.db"):
        result = cli("backup", target, "--data-dir", tmp_path / "data")
        assert (result.code, result.err.split(": ")[1]) == (6, "io_error")
        assert f"{target} cannot be written: " in result.err
