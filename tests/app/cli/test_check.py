"""`check --deep` and `reindex` on databases whose pages are damaged."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from app.server.limits import DEFAULT_LIMITS
from app.store import integrity
from app.store.sqlite import writing_alone
from app.store.store import Store
from bench.postgres_server import own_postgres
from tests.support.cli import Result, cli
from tests.support.damaged_stores import (
    Whole,
    content_of,
    miss_of,
    overwrite,
    page_bytes,
    write_store,
)
from tests.support.publications import content_frame
from tests.support.server import running_node
from tests.support.snapshots import conversation, fill_store
from tests.support.stores import entry_of

MESSAGES = 2_000
DAMAGES_FAST, DAMAGES_SLOW = 24, 600
DAMAGES_PER_STORE = 200
RECOVERIES = 4
INDEXES = (
    "messages_by_id",
    "messages_by_channel_and_id",
    "messages_by_digest",
    "messages_in_log_order",
    "messages_in_arrival_order",
)


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
    # SQLite names an index if rows are missing from it, and gives up at a page that it cannot read.
    assert f"index {index}: " in result.err or "table messages: " in result.err
    assert result.out.endswith(": damaged, not all messages were checked\n")
    assert f"sdstore reindex --database sqlite:///{damaged}" in result.err
    report = check(damaged, "--json").json
    assert (report["sound"], report["advice"] != []) == (False, True)

    mended = cli("reindex", "--database", f"sqlite:///{damaged}", "--json")
    assert (mended.code, mended.json["left_out"]) == (0, None)
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


@pytest.mark.parametrize("table", ["frames", "messages", "channels"])
def test_a_reindex_of_a_damaged_table_keeps_what_can_be_read_and_the_old_file(
    damaged: Path, table: str
) -> None:
    leaves = leaves_of(damaged, table)
    overwrite(damaged, leaves[len(leaves) // 2], garbage)
    before = damaged.read_bytes()
    result = check(damaged)
    assert (result.code, f"table {table}: " in result.err) == (1, True)
    mended = cli("reindex", "--database", f"sqlite:///{damaged}", "--json").json["left_out"]
    left_out = 0 if table == "channels" else MESSAGES - mended["messages_count"]
    assert table == "channels" or 1 <= left_out <= 100
    assert Path(mended["old_file"]).read_bytes() == before
    assert check(damaged).code == 0
    assert ids_served(damaged) == MESSAGES - left_out
    assert [each.name for each in damaged.parent.glob("*rebuilding*")] == []


def test_a_reindex_keeps_numbers_times_and_the_arrival_order_if_no_row_is_lost(
    full: Whole, tmp_path: Path
) -> None:
    path = tmp_path / "sdstore.db"
    path.write_bytes(full.path.read_bytes())
    leaves = leaves_of(path, "messages_by_digest")
    overwrite(path, leaves[0], garbage)
    assert cli("reindex", "--database", f"sqlite:///{path}", "--json").json["left_out"] is None
    assert content_of(path) == content_of(full.path)


def test_rows_that_contradict_their_frames_are_left_out_and_nothing_else_is(
    full: Whole, tmp_path: Path
) -> None:
    path = tmp_path / "sdstore.db"
    path.write_bytes(full.path.read_bytes())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE messages SET digest = zeroblob(32) WHERE seq = 5")
        connection.execute("UPDATE messages SET lamport = 77, received_at_ms = 12 WHERE seq = 6")
        connection.execute("UPDATE published_claims SET hint = zeroblob(32) WHERE claim_no = 7")
        connection.execute("DELETE FROM missing_references")
    before = content_of(full.path)
    assert check(path).code == 1
    left_out = cli("reindex", "--database", f"sqlite:///{path}", "--json").json["left_out"]
    assert (left_out["messages_count"], left_out["unreadable_count"]) == (
        len(before["messages"]) - 1,
        1,
    )
    assert check(path).code == 0
    after = content_of(path)
    for table, kept in (("frames", -1), ("published_claims", None), ("met_ids", 0)):
        assert kept is None or len(after[table]) == len(before[table]) + kept
    assert set(elements_of(path, "published_claims")) < set(
        elements_of(full.path, "published_claims")
    )
    with closing(sqlite3.connect(path)) as connection:
        times = connection.execute("SELECT DISTINCT received_at_ms FROM messages ORDER BY 1")
        assert times.fetchall() == [(12,), (1_767_225_600_000,)]
        [peer] = connection.execute("SELECT url, memory FROM peers").fetchall()
        assert peer == ("http://127.0.0.1:1", None)
        [[missing]] = connection.execute("SELECT count(*) FROM missing_references")
        assert missing >= len(before["missing_references"])


def elements_of(path: Path, table: str) -> list[bytes]:
    with closing(sqlite3.connect(path)) as connection:
        return [each for (each,) in connection.execute(f"SELECT element_id FROM {table}")]


def flip_pages(path: Path, world: random.Random, share: float) -> None:
    """Damage a share of the pages, but not the first: a bit, or all of a page."""
    size, data = page_bytes(path), bytearray(path.read_bytes())
    pages = len(data) // size
    for page in world.sample(range(1, pages), int(pages * share)):
        if world.random() < 0.5:
            data[page * size + world.randrange(size)] ^= 1 << world.randrange(8)
        else:
            data[page * size : (page + 1) * size] = world.randbytes(size)
    path.write_bytes(data)


def test_a_store_whose_schema_is_damaged_loses_nothing(full: Whole, tmp_path: Path) -> None:
    path = tmp_path / "sdstore.db"
    shutil.copyfile(full.path, path)
    size, data = page_bytes(path), bytearray(path.read_bytes())
    last_leaf = int.from_bytes(data[108:112])
    data[(last_leaf - 1) * size : last_leaf * size] = random.Random(1).randbytes(size)
    path.write_bytes(data)
    result = cli("reindex", "--database", f"sqlite:///{path}")
    assert result.code == 0, result.err
    assert check(path).code == 0
    assert content_of(path) == content_of(full.path)


@pytest.mark.parametrize("number", range(RECOVERIES))
def test_a_store_with_damaged_pages_is_rebuilt_and_a_sync_brings_back_the_rest(
    full: Whole, tmp_path: Path, number: int
) -> None:
    seed = random.randrange(10**9)
    print("seed", seed)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copyfile(full.path, tmp_path / name / "sdstore.db")
    path = tmp_path / "a" / "sdstore.db"
    whole = content_of(path)
    flip_pages(path, random.Random(seed), (0.01, 0.05)[number % 2])
    result = cli("reindex", "--database", f"sqlite:///{path}")
    assert (result.code, "Traceback" in result.err) == (0, False), result.err
    # What is left to do is marked: content that a sync brings back.
    report = check(path, "--json").json
    assert len(report["damages"]) == report["lost"], report
    with running_node(tmp_path / "a") as node, running_node(tmp_path / "b") as peer:
        session = node.http.post("/v1/syncs", json={"peer_url": peer.url}).json()
        document: dict[str, Any] = {}
        ends_s = time.monotonic() + 60
        while document.get("state") != "finished":
            assert time.monotonic() < ends_s, document
            time.sleep(0.05)
            document = node.http.get(f"/v1/syncs/{session['id']}").json()
        assert document["report"]["outcome"] == "in_sync", document
    assert check(path).code == 0
    after = content_of(path)
    for table, column in (("messages", 9), ("published_claims", 6)):
        assert {row[column] for row in after[table]} == {row[column] for row in whole[table]}
    assert sorted(after["frames"], key=str) != []


def test_a_reindex_is_refused_while_a_node_writes(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.sqlite.WRITER_LOCK_WAIT_S", 0.05)
    with writing_alone(damaged):
        result = cli("reindex", "--database", f"sqlite:///{damaged}")
    assert (result.code, "another process writes" in result.err) == (6, True)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A store with rows in every table; another one in each run, whose seed a failure names."""
    return write_store(tmp_path_factory.mktemp("full"), random.randrange(10**6))


def test_whatever_page_is_damaged_a_deep_check_finds_it_or_it_does_not_matter(
    full: Whole, tmp_path: Path
) -> None:
    first = random.randrange(10**9)
    misses = [miss_of(full, tmp_path, seed) for seed in range(first, first + DAMAGES_FAST)]
    assert "\n".join(filter(None, misses)) == ""


@pytest.mark.slow
def test_hundreds_of_damaged_pages_are_found_or_do_not_matter(tmp_path: Path) -> None:
    misses: list[str | None] = []
    for seed in range(DAMAGES_SLOW // DAMAGES_PER_STORE):
        store = write_store(tmp_path, seed, lost=3 * (seed % 2))
        damages = range(seed * DAMAGES_PER_STORE, (seed + 1) * DAMAGES_PER_STORE)
        misses += [miss_of(store, tmp_path, each) for each in damages]
    assert "\n".join(filter(None, misses)) == ""


CONTRADICTIONS = {
    "UPDATE watermark SET seq = seq - 1": "the counters (",
    "UPDATE watermark SET claim_no = claim_no - 1": "the counters (",
    "DELETE FROM watermark": "values that cannot be read",
    "DELETE FROM missing_references WHERE message_id = (SELECT min(message_id) FROM missing_references)": (
        "which is neither stored nor listed as missing"
    ),
    "UPDATE missing_references SET message_id = 'x' || message_id WHERE channel_no = 1": (
        "which is neither stored nor listed as missing"
    ),
    "INSERT INTO missing_references (channel_no, message_id) SELECT channel_no, message_id FROM messages WHERE seq = 7": (
        ": the store has this message"
    ),
    "INSERT INTO missing_references (channel_no, message_id) VALUES (99, 'x')": "'x' of channel number 99: no channel",
    "INSERT INTO lost_content VALUES (1000000, 0)": "lost content of message number 1000000: no ",
    "UPDATE messages SET arrival_sum = 9.3e111 WHERE seq = 7": "table messages: rows with values of a wrong",
}


@pytest.mark.parametrize("statement", CONTRADICTIONS)
def test_a_deep_check_finds_rows_that_contradict_others_in_a_sound_structure(
    full: Whole, tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "sdstore.db"
    path.write_bytes(full.path.read_bytes())
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount > 0
    result = check(path)
    assert (result.code, CONTRADICTIONS[statement] in result.err) == (1, True), result.err


def test_a_row_that_claims_to_be_longer_than_any_is_damage(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100)
        return connection

    monkeypatch.setattr(integrity, "_read_only", read_only)
    result = check(damaged)
    assert (result.code, "damaged: file store: string or blob too big" in result.err) == (1, True)


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
