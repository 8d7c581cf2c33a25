"""Every released schema still opens, and answers as it did."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import text

from app.federation.client import parse_peer_url
from app.federation.peers import peer_id_of
from app.server.limits import DEFAULT_LIMITS
from app.store.entryrows import Keys
from app.store.schema import SCHEMA_REVISION, _engine
from app.store.store import Store
from tests.support.publications import content_frame
from tests.support.schema_fixture import FIXTURES, answers, fill, restore_postgres
from tests.support.stores import SqliteStores, Stores, entry_of

pytestmark = pytest.mark.anyio

EARLIER = ("0001", "0002", "0003")
"""Schemas of versions that took the ID of a sync message for the end of a gap."""

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
    told.pop("refused", None)  # digests that revisions up to 0008 kept and nothing read
    store = await Store.open(restored(stores, revision, tmp_path), DEFAULT_LIMITS)
    assert await answers(store) == told
    store.begin_writing()
    fill(store)
    assert await answers(store) == told
    assert store.writer.write([entry_of(content_frame(1))])[0].is_new
    await store.close()


@pytest.mark.parametrize("revision", [each for each in REVISIONS if each in EARLIER])
async def test_gaps_that_a_sync_message_hid_in_an_earlier_version_are_found_again(
    stores: Stores, revision: str, tmp_path: Path
) -> None:
    url = restored(stores, revision, tmp_path)
    engine = _engine(url)
    channel_id, message_id = "é", "gone"
    with engine.begin() as connection:
        # Earlier versions did this when a sync message with this ID came.
        secret = connection.execute(
            text("SELECT value FROM store_meta WHERE name = 'key_secret'")
        ).scalar_one()
        names = {"channel_id": channel_id, "message_id": message_id}
        met = {**names, "key": Keys(bytes(secret)).of_met(channel_id, message_id)}
        connection.execute(
            text("INSERT INTO met_ids VALUES (1000, :key, :channel_id, :message_id)"), met
        )
        deleted = connection.execute(
            text(
                "DELETE FROM missing_references WHERE message_id = :message_id AND channel_no ="
                " (SELECT channel_no FROM channels WHERE channel_id = :channel_id)"
            ),
            names,
        )
        assert deleted.rowcount == 1
    engine.dispose()
    store = await Store.open(url, DEFAULT_LIMITS)
    gaps = {gap.message_id: gap for gap in (await store.gaps.page(channel_id, None, 100)).gaps}
    told = json.loads((FIXTURES / revision / "answers.json").read_text(encoding="utf-8"))
    assert [*gaps] == [message_id for message_id, _ in told[f"channel {channel_id}"]["gaps"]]
    assert gaps[message_id].met_as_sync
    await store.close()


@pytest.mark.parametrize("revision", REVISIONS)
async def test_claims_of_earlier_schemas_are_found_by_hint_and_channel(
    stores: Stores, revision: str, tmp_path: Path
) -> None:
    store = await Store.open(restored(stores, revision, tmp_path), DEFAULT_LIMITS)
    everywhere = (await store.claims.page(b"published", None, 100)).entries
    for channel in await store.channels.after(None, 100):
        found = (await store.claims.page(b"published", channel.channel_id, 100)).entries
        assert found == [each for each in everywhere if each.channel_id == channel.channel_id]
    assert everywhere
    await store.close()


@pytest.mark.parametrize("revision", [each for each in REVISIONS if each < "0007"])
async def test_peers_that_an_earlier_version_kept_move_over_with_their_tokens(
    stores: Stores, revision: str, tmp_path: Path
) -> None:
    url = restored(stores, revision, tmp_path)
    kept = json.dumps(["http://a", ["http://b", "secret"]]).encode()
    engine = _engine(url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO store_meta VALUES ('peers', :kept)"), {"kept": kept})
    engine.dispose()
    store = await Store.open(url, DEFAULT_LIMITS)
    found = [each for each, _ in await store.peers.read()]
    assert [(each.peer_id, each.url, each.token) for each in found] == [
        (peer_id_of(parse_peer_url("http://a")), "http://a", ""),
        (peer_id_of(parse_peer_url("http://b")), "http://b", "secret"),
    ]
    assert {(each.origin, each.state) for each in found} == {("added", "new")}
    await store.close()


@pytest.mark.parametrize("kept", [b"", b"{", b"[1]", b"[[1, 2, 3]]", b'{"a": 1}', b"\xff"])
async def test_damaged_lists_of_peers_do_not_prevent_the_migration(
    sqlite_stores: SqliteStores, kept: bytes, tmp_path: Path
) -> None:
    url = restored(sqlite_stores, "0006", tmp_path)
    engine = _engine(url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO store_meta VALUES ('peers', :kept)"), {"kept": kept})
    engine.dispose()
    store = await Store.open(url, DEFAULT_LIMITS)
    assert await store.peers.read() == []
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
