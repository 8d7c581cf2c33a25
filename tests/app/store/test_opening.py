"""Opening: schemas old and new, one writer, what a database is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, text

import app.store.schema
from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from app.store.database import SchemaTooNewError, StoreBusyError, UnsupportedDatabaseError
from app.store.schema import SCHEMA_REVISION, metadata
from app.store.sqlite import SqliteDatabase
from app.store.store import Store
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, Stores, entry_of

pytestmark = pytest.mark.anyio

LOCK_AND_WAIT = """
import asyncio, sys
from app.server.limits import DEFAULT_LIMITS
from app.store.store import Store
async def main():
    store = await Store.open(sys.argv[1], DEFAULT_LIMITS)
    store.begin_writing()
    print("writing", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


async def test_a_new_database_is_made_in_a_new_folder(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite:///{tmp_path}/new/store.db", DEFAULT_LIMITS)
    assert await store.arrivals.watermark() == (0, 0)
    await store.close()


async def test_a_database_keeps_its_name_and_its_entries(stores: Stores) -> None:
    url = stores.new_url()
    first = await Store.open(url, DEFAULT_LIMITS)
    first.begin_writing()
    first.writer.write([entry_of(content_frame(1))])
    name = first.database_id
    await first.close()
    again = await Store.open(url, DEFAULT_LIMITS)
    assert again.database_id == name
    assert await again.entries.find("message-000001", "channel") is not None
    await again.close()


async def test_sqlite_waits_for_the_disk_at_each_commit(tmp_path: Path) -> None:
    database = SqliteDatabase.open(f"sqlite:///{tmp_path}/store.db")
    database.begin_writing()
    assert database._writer is not None
    found = [
        database._writer.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous")
    ]
    assert found == ["wal", 2]  # 2 is FULL: the log is synced before a commit returns
    database.close_now()


async def test_a_snapshot_shows_nothing_that_is_committed_while_it_lasts(stores: Stores) -> None:
    async with stores.open() as store:
        store.writer.write([entry_of(content_frame(1))])
        async with store.snapshot() as frozen:
            [before] = await frozen.channels.after(None, 9)
            store.writer.write([entry_of(content_frame(2), b"hint")])
            assert await frozen.channels.after(None, 9) == [before]
            assert await frozen.arrivals.watermark() == (1, 0)
            assert await frozen.entries.find("message-000002", None) is None
            assert await frozen.entries.find("message-000001", None) is not None
            page = await frozen.channels.page("channel", after=None, limit=9, bytes_max=BYTES_MAX)
            assert [entry.seq for entry in page.entries] == [1]
            assert await store.arrivals.watermark() == (2, 1)
        async with store.snapshot() as frozen:
            assert await frozen.arrivals.watermark() == (2, 1)


async def test_two_databases_have_two_names(tmp_path: Path) -> None:
    names = set()
    for name in ("a", "b"):
        store = await Store.open(f"sqlite:///{tmp_path}/{name}.db", DEFAULT_LIMITS)
        names.add(store.database_id)
        await store.close()
    assert len(names) == 2


async def test_a_schema_from_the_future_is_refused_and_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    await (await Store.open(url, DEFAULT_LIMITS)).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNewError, match="9999"):
        await Store.open(url, DEFAULT_LIMITS)
    with engine.begin() as connection:
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    engine.dispose()
    assert found == "9999"


@pytest.mark.parametrize("url", ["mysql://localhost/x", "sqlite://", "nonsense"])
async def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(UnsupportedDatabaseError):
        await Store.open(url, DEFAULT_LIMITS)


async def test_a_second_writer_of_one_file_is_refused_while_readers_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    await (await Store.open(url, DEFAULT_LIMITS)).close()
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop
        [sys.executable, "-c", LOCK_AND_WAIT, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        store = await Store.open(url, DEFAULT_LIMITS)
        assert await store.arrivals.watermark() == (0, 0)
        with monkeypatch.context() as at_once:
            at_once.setattr("app.store.sqlite.WRITER_LOCK_WAIT_S", 0.05)
            with pytest.raises(StoreBusyError, match="another process"):
                store.begin_writing()
        with pytest.raises(Problem) as refused:
            store.writer.write([entry_of(content_frame(1))])
        assert refused.value.code is Code.STORE_UNAVAILABLE
        other.kill()
        other.wait()
        # The lock dies with its process.
        store.begin_writing()
        assert store.writer.write([entry_of(content_frame(1))])[0].is_new
        await store.close()


def test_the_migrations_make_the_tables_that_the_code_describes(tmp_path: Path) -> None:
    migrated, described = (create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in "ab")
    app.store.schema.migrate(str(migrated.url))
    metadata.create_all(described)
    tables = [_tables(engine) for engine in (migrated, described)]
    tables[0].pop("alembic_version")
    assert tables[0] == tables[1]


def _tables(engine: Engine) -> dict[str, list[object]]:
    """SQLite's description of each table and its indexes, which does not depend on their statements."""
    with engine.connect() as connection:

        def rows(pragma: str, name: str) -> list[tuple[object, ...]]:
            return [tuple(row) for row in connection.exec_driver_sql(f"PRAGMA {pragma}({name})")]

        found: dict[str, list[object]] = {}
        for (name,) in connection.exec_driver_sql(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ):
            indexes = sorted(row[1:] for row in rows("index_list", name))
            columns = [rows("index_xinfo", str(index[0])) for index in indexes]
            found[name] = [rows("table_list", name), rows("table_xinfo", name), indexes, columns]
    engine.dispose()
    return found


def test_the_code_expects_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(app.store.schema.migrations_folder()))
    assert ScriptDirectory.from_config(config).get_current_head() == SCHEMA_REVISION
