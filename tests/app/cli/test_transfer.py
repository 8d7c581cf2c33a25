"""Import, export, backup, migrate, check and backfill: files and stores."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from app.cli.copying import ImportProgress
from app.cli.demo import conversation, real_frames, running_node
from app.cli.files import delimited
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


def test_an_export_does_not_touch_a_file_that_is_something_else(tmp_path: Path, file: Path) -> None:
    data = tmp_path / "data"
    cli("import", file, "--data-dir", data)
    for other in (b"a diary, not messages", delimited(encode(message(1, "elsewhere")))):
        strange = tmp_path / "strange"
        strange.write_bytes(other)
        assert cli("export", strange, "--data-dir", data).code == 4
        assert strange.read_bytes() == other


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


def publish(node: str, numbers: range, channel: str = "c") -> None:
    frames = b"".join(delimited(encode(message(number, channel))) for number in numbers)
    assert cli("publish", "-", "--node", node, stdin=frames).code == 0
