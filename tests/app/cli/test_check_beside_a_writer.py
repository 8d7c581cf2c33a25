"""`check` while another process publishes: no difference that is only time is called damage."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from app.store import sqlite as sqlite_module
from app.store.database import UnusableFileError
from tests.support.cli import Result, cli
from tests.support.stores import SqliteStores, Stores


def sqlite_fault() -> sqlite3.Error:
    """SQLite's error if a reader never sees a complete header of the log."""
    fault = sqlite3.OperationalError("locking protocol")
    fault.sqlite_errorcode = sqlite3.SQLITE_PROTOCOL
    return fault


ROOT = Path(__file__).parents[3]
PUBLISH_UNTIL_KILLED = ROOT / "tests/app/ingest/publish_until_killed.py"
CHECKS = 3
MESSAGES_BEFORE = 300


@contextmanager
def publishing(url: str, folder: Path) -> Iterator[None]:
    """Another process publishes to eight channels inside the block, and did so for a while before."""
    printed = folder / "acknowledged"
    with (
        printed.open("wb") as output,
        subprocess.Popen(
            [sys.executable, str(PUBLISH_UNTIL_KILLED), url, "1"], stdout=output, cwd=ROOT
        ) as process,
    ):
        try:
            while printed.stat().st_size < 65 * MESSAGES_BEFORE:
                assert process.poll() is None
                time.sleep(0.01)
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.fixture
def url(stores: Stores) -> str:
    """A new store; on PostgreSQL with the extension that checks its structure."""
    made = stores.new_url()
    if stores.kind == "postgres":
        execute(made, "CREATE EXTENSION amcheck")
    return made


def execute(url: str, statement: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def check(url: str, *options: str) -> Result:
    return cli("check", *options, "--json", "--database", url)


def test_a_sound_store_is_found_sound_while_it_is_published_to(url: str, tmp_path: Path) -> None:
    entries: list[int] = []
    with publishing(url, tmp_path):
        for options in [(), ("--deep",)] * CHECKS:
            result = check(url, *options)
            assert (result.code, result.err) == (0, "")
            report = result.json
            assert (report["sound"], report["damages"], report["unchecked"]) == (True, [], [])
            entries.append(report["entries"])
    assert entries == sorted(entries)
    assert entries[0] < entries[-1]


DAMAGES = {
    "UPDATE channels SET count = count + 1 WHERE channel_no = 2": "messages by its row",
    "DELETE FROM frames WHERE seq = 77": "its content is lost",
    "UPDATE messages SET id_key = 1 WHERE seq = 88": "its ID differs from the indexed one",
}


def test_a_damaged_store_is_found_damaged_while_it_is_published_to(
    url: str, tmp_path: Path
) -> None:
    with publishing(url, tmp_path):
        for statement in DAMAGES:
            execute(url, statement)
        report, deep = check(url).json, check(url, "--deep").json
    assert ["messages by its row" in each for each in report["damages"]] == [True]
    # Each damage is named once, and nothing else is.
    assert (report["sound"], deep["sound"]) == (False, False)
    assert [sum(text in each for each in deep["damages"]) for text in DAMAGES.values()] == [1, 1, 1]
    assert len(deep["damages"]) == len(DAMAGES)


@pytest.mark.parametrize("error", [UnusableFileError("unable to open"), sqlite_fault()])
def test_a_database_that_cannot_be_read_now_is_a_fault_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    url = SqliteStores(tmp_path).new_url()

    read = sqlite_module._connect, sqlite_module._fetch
    opened: list[Path] = []

    def connect(path: Path) -> sqlite3.Connection:
        opened.append(path)
        if len(opened) > 1 and isinstance(error, UnusableFileError):
            raise error
        return read[0](path)

    def fetch(connection: sqlite3.Connection, text: str, arguments: Sequence[Any]) -> list[Any]:
        if len(opened) > 1:
            raise error
        return read[1](connection, text, arguments)

    monkeypatch.setattr(sqlite_module, "_connect", connect)
    monkeypatch.setattr(sqlite_module, "_fetch", fetch)
    result = check(url)
    assert (result.code, result.out) == (6, "")
    assert "damaged" not in result.err
