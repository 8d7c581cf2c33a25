"""Every released schema still opens, and answers as it did."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from app.limits import DEFAULT_LIMITS
from app.store.schema import SCHEMA_REVISION
from app.store.store import Store
from tests.support.publications import content_frame
from tests.support.schema_fixture import FIXTURES, answers, fill, restore_postgres
from tests.support.stores import SqliteStores, Stores, entry_of

pytestmark = pytest.mark.anyio

REVISIONS = sorted(folder.name for folder in FIXTURES.iterdir())
_numbers = count()


def restored(stores: Stores, revision: str, folder: Path) -> str:
    """The URL of a copy of the fixture."""
    fixture = FIXTURES / revision
    if isinstance(stores, SqliteStores):
        path = folder / f"{next(_numbers)}.db"
        shutil.copyfile(fixture / "store.db", path)
        return f"sqlite:///{path}"
    url = stores.empty_url()
    restore_postgres(fixture / "postgres.sql", url)
    return url


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_released_schema_opens_answers_as_it_did_and_goes_on(
    stores: Stores, revision: str, tmp_path: Path
) -> None:
    told = json.loads((FIXTURES / revision / "answers.json").read_text(encoding="utf-8"))
    store = await Store.open(restored(stores, revision, tmp_path), DEFAULT_LIMITS)
    assert await answers(store) == told
    store.begin_writing()
    fill(store)
    assert await answers(store) == told
    assert store.write_group([entry_of(content_frame(1))])[0].is_new
    await store.close()


def test_the_current_schema_has_its_fixture_and_is_still_the_same(tmp_path: Path) -> None:
    assert SCHEMA_REVISION in REVISIONS
    stores = SqliteStores(tmp_path)
    current = Path(stores.new_url().removeprefix("sqlite:///"))
    assert statements(FIXTURES / SCHEMA_REVISION / "store.db") == statements(current)


def statements(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        return sorted(sql for (sql,) in rows)
