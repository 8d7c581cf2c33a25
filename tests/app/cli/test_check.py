"""`check --deep` and `reindex` on databases whose pages are damaged."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from app.limits import DEFAULT_LIMITS
from app.store.sqlite import writing_alone
from app.store.store import Store
from bench.postgres_server import own_postgres
from tests.support.cli import Result, cli
from tests.support.publications import content_frame
from tests.support.snapshots import conversation, fill_store
from tests.support.stores import entry_of

MESSAGES = 2_000
DAMAGES_FAST, DAMAGES_SLOW = 24, 600
INDEXES = (
    "messages_by_id",
    "messages_by_channel_and_id",
    "messages_by_digest",
    "messages_in_log_order",
    "messages_in_arrival_order",
)
# Columns that nothing else in the database repeats or proves: docs/store.md says so.
UNPROVED = {
    "messages": {"received_at_ms"},
    "lost_content": {"found_at_ms"},
    "missing_references": {"message_id"},
    "store_meta": {"value"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in one file, without damage, with pages that were freed."""
    path = tmp_path_factory.mktemp("whole") / "sdstore.db"
    fill_store(f"sqlite:///{path}", conversation(seed=3), MESSAGES)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE gone AS SELECT * FROM frames LIMIT 500")
        connection.execute("DROP TABLE gone")
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    copy = tmp_path / "sdstore.db"
    copy.write_bytes(whole.read_bytes())
    return copy


def page_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:18], "big")


def leaves_of(path: Path, name: str) -> list[int]:
    """The leaf pages of an index or table, in order (SQLite's file format, section 1.6)."""
    with closing(sqlite3.connect(path)) as connection:
        [[root]] = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", [name])
    data, size = path.read_bytes(), page_bytes(path)

    def below(number: int) -> Iterator[int]:
        page = data[(number - 1) * size : number * size]
        if page[0] not in (2, 5):
            yield number
            return
        for cell in range(int.from_bytes(page[3:5], "big")):
            at = int.from_bytes(page[12 + 2 * cell : 14 + 2 * cell], "big")
            yield from below(int.from_bytes(page[at : at + 4], "big"))
        yield from below(int.from_bytes(page[8:12], "big"))

    return list(below(root))


def overwrite(path: Path, page: int, change: Callable[[bytearray], None]) -> None:
    size = page_bytes(path)
    data = bytearray(path.read_bytes())
    content = data[(page - 1) * size : page * size]
    change(content)
    data[(page - 1) * size : page * size] = content
    path.write_bytes(data)


def garbage(content: bytearray) -> None:
    content[:] = random.Random(1).randbytes(len(content))


def one_bit(content: bytearray) -> None:
    """In the row number at the end of the page's first key, which is shorter than 128 bytes."""
    cell = int.from_bytes(content[8:10], "big")
    assert content[0] == 10
    assert content[cell] < 128
    content[cell + content[cell]] ^= 4


def check(path: Path, *options: str) -> Result:
    return cli("check", "--deep", "--database", f"sqlite:///{path}", *options)


def ids_served(path: Path) -> int:
    """How many of the messages are found by their IDs and with their frames."""

    async def count() -> int:
        store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
        try:
            publications = conversation(seed=3)
            entries = [entry_of(next(publications).frame) for _ in range(MESSAGES)]
            found = [
                await store.entries.find(e.message.message_id, e.message.channel_id)
                for e in entries
            ]
            return sum(each is not None for each in found)
        finally:
            await store.close()

    return asyncio.run(count())


@pytest.mark.parametrize("change", [garbage, one_bit])
@pytest.mark.parametrize("index", INDEXES)
def test_a_deep_check_names_a_damaged_index_and_a_reindex_mends_it(
    damaged: Path, index: str, change: Callable[[bytearray], None]
) -> None:
    leaves = leaves_of(damaged, index)
    overwrite(damaged, leaves[len(leaves) // 2], change)
    result = check(damaged)
    assert (result.code, "Traceback" in result.err) == (1, False)
    assert f"index {index}: " in result.err
    assert result.out.endswith(": damaged, not all messages were checked\n")
    assert f"sdstore reindex --database sqlite:///{damaged}" in result.err
    report = check(damaged, "--json").json
    assert (report["sound"], report["advice"] != []) == (False, True)

    mended = cli("reindex", "--database", f"sqlite:///{damaged}", "--json")
    assert (mended.code, mended.json["rows_left_out"]) == (0, {})
    assert check(damaged).code == 0
    assert ids_served(damaged) == MESSAGES
    assert [each.name for each in damaged.parent.glob("*rebuilding*")] == []


def test_a_deep_check_finds_a_claim_whose_channel_is_not_that_of_its_entry(tmp_path: Path) -> None:
    path = tmp_path / "sdstore.db"
    store = asyncio.run(Store.open(f"sqlite:///{path}", DEFAULT_LIMITS))
    store.begin_writing()
    store.writer.write([entry_of(content_frame(1), b"hint")])
    asyncio.run(store.close())
    assert check(path).code == 0
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE published_claims SET channel_no = channel_no + 1")
        connection.commit()
    result = check(path)
    assert (result.code, "its channel differs from its entry" in result.err) == (1, True)


def test_a_reindex_leaves_out_frames_that_cannot_be_read_and_keeps_the_old_file(
    damaged: Path,
) -> None:
    leaves = leaves_of(damaged, "frames")
    overwrite(damaged, leaves[len(leaves) // 2], garbage)
    before = damaged.read_bytes()
    result = check(damaged)
    assert result.code == 1
    assert "table frames: " in result.err
    mended = cli("reindex", "--database", f"sqlite:///{damaged}", "--json").json
    left_out = mended["rows_left_out"]["frames"]
    assert 1 <= left_out <= 100
    assert damaged.with_name("sdstore.db.damaged").read_bytes() == before
    with closing(sqlite3.connect(damaged)) as connection:
        [[frames]] = connection.execute("SELECT count(*) FROM frames")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert frames == MESSAGES - left_out


def test_a_reindex_that_would_lose_messages_is_refused_and_changes_nothing(damaged: Path) -> None:
    leaves = leaves_of(damaged, "messages")
    overwrite(damaged, leaves[len(leaves) // 2], garbage)
    before = damaged.read_bytes()
    assert "table messages: " in check(damaged).err
    result = cli("reindex", "--database", f"sqlite:///{damaged}")
    assert (result.code, result.err.count("\n")) == (6, 1)
    assert "table messages cannot be rebuilt" in result.err
    assert damaged.read_bytes() == before
    assert [each.name for each in damaged.parent.glob("*rebuilding*")] == []


def test_a_reindex_is_refused_while_a_node_writes(damaged: Path) -> None:
    with writing_alone(damaged):
        result = cli("reindex", "--database", f"sqlite:///{damaged}")
    assert (result.code, "another process writes" in result.err) == (6, True)


def damages(path: Path, world: random.Random) -> str:
    """Damage one page, as disks do: a bit, a stretch, a page of noise, of zeros, of another place."""
    size = page_bytes(path)
    pages = path.stat().st_size // size
    page = world.randrange(1, pages + 1)
    kind = world.choice(["bit", "bit", "stretch", "noise", "zeros", "elsewhere"])

    def change(content: bytearray) -> None:
        if kind == "bit":
            content[world.randrange(size)] ^= 1 << world.randrange(8)
        elif kind == "stretch":
            start = world.randrange(size)
            content[start : start + 64] = world.randbytes(len(content[start : start + 64]))
        elif kind == "noise":
            content[:] = world.randbytes(size)
        elif kind == "zeros":
            content[:] = bytes(size)
        else:
            other = world.randrange(pages) * size
            content[:] = path.read_bytes()[other : other + size]

    overwrite(path, page, change)
    return f"{kind} in page {page}"


def content_of(path: Path) -> dict[str, list[Any]]:
    """All rows of all tables, without the columns that nothing proves."""
    with closing(sqlite3.connect(path)) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        found: dict[str, list[Any]] = {}
        for table in tables:
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            columns = ", ".join(each for each in names if each not in UNPROVED.get(table, ()))
            found[table] = connection.execute(
                f"SELECT {columns} FROM {table} ORDER BY 1"
            ).fetchall()
        return found


def damage_and_check(whole: Path, folder: Path, seed: int) -> None:
    """One damage: found, or without consequence; in either case in words."""
    copy = folder / "sdstore.db"
    for each in folder.iterdir():
        each.unlink()
    copy.write_bytes(whole.read_bytes())
    what = f"seed {seed}: {damages(copy, random.Random(seed))}"
    try:
        result = check(copy, "--json")
    except Exception:  # noqa: BLE001 - to say which seed it was
        pytest.fail(f"{what}: {traceback.format_exc()}")
    assert result.code in (0, 1), f"{what}: {result.code} {result.err}"
    assert "Traceback" not in result.err, f"{what}: {result.err}"
    report = json.loads(result.out)
    assert report["sound"] == (result.code == 0), what
    if result.code == 1:
        assert report["damages"], what
    else:
        assert content_of(copy) == content_of(whole), f"{what}: the check found nothing"


def test_whatever_page_is_damaged_a_deep_check_finds_it_or_it_does_not_matter(
    whole: Path, tmp_path: Path
) -> None:
    first = random.randrange(10**9)
    for seed in range(first, first + DAMAGES_FAST):
        damage_and_check(whole, tmp_path, seed)


@pytest.mark.slow
def test_hundreds_of_damaged_pages_are_found_or_do_not_matter(whole: Path, tmp_path: Path) -> None:
    for seed in range(DAMAGES_SLOW):
        damage_and_check(whole, tmp_path, seed)


def test_a_file_without_a_header_is_damaged_and_one_that_may_not_be_read_a_fault(
    damaged: Path, tmp_path: Path
) -> None:
    overwrite(damaged, 1, garbage)
    assert check(damaged).code == 1
    folder = tmp_path / "folder"
    folder.mkdir()
    assert check(folder).code == 1  # there is no file of that name


def test_postgresql_checks_its_indexes_where_amcheck_is_installed(tmp_path: Path) -> None:
    with own_postgres() as server:
        asyncio.run(fill(server.url))
        arguments = ("check", "--deep", "--json", "--database", server.url)
        report = cli(*arguments).json
        assert report["sound"]
        assert "CREATE EXTENSION amcheck" in report["unchecked"][0]
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION amcheck")
            assert cli(*arguments).json["unchecked"] == []
            # Rows that an index does not have: they came while it was switched off.
            ready = (
                "UPDATE pg_index SET indisready = %s WHERE indexrelid = 'messages_by_id'::regclass"
            )
            connection.execute(ready, [False])
            asyncio.run(fill(server.url, first=100))
            connection.execute(ready, [True])
        result = cli(*arguments)
        assert result.code == 1
        assert result.json["damages"][0].startswith("index messages_by_id: ")
        assert cli("reindex", "--database", server.url).code == 0
        assert cli(*arguments).code == 0


async def fill(url: str, first: int = 0) -> None:
    store = await Store.open(url, DEFAULT_LIMITS)
    try:
        store.begin_writing()
        store.writer.write([entry_of(content_frame(n)) for n in range(first, first + 100)])
    finally:
        await store.close()
