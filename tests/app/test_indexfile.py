"""The saved index: fast to read, never trusted."""

import asyncio
from pathlib import Path

import pytest

from app.entries import Outcome
from app.ingest.prepare import Publication
from app.recon.index import NodeIndex
from app.server.node import INDEX_FILE, Node
from app.server.settings import Settings
from app.store.arrivals import _entry_elements
from app.store.database import Query, Row
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Message, entry_digest


def publication(number: int, channel: str = "c") -> Publication:
    message = Message(f"m{number}", channel, lamport_timestamp=number, content=b"x")
    return Publication(encode(message), (number.to_bytes(4, "big"),))


async def publish(data_dir: Path, numbers: range) -> None:
    async with Node.open(Settings(data_dir=data_dir)) as node:
        outcomes = await node.ingest.door.publish_many([publication(number) for number in numbers])
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)


async def opened(data_dir: Path) -> tuple[int, bytes]:
    """How many elements a node has after its start, and the root of the channel."""
    async with Node.open(Settings(data_dir=data_dir)) as node:
        return len(node.recon.index.elements), await node.recon.index.root("c", 0)


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each read from SQL brought, to the index."""
    read: list[int] = []
    original = NodeIndex._read_more

    async def counted(self: NodeIndex, *ends: int) -> bool:
        before = len(self.elements)
        more = await original(self, *ends)
        read.append(len(self.elements) - before)
        return more

    monkeypatch.setattr(NodeIndex, "_read_more", counted)
    return read


def test_a_restart_reads_the_file_and_only_the_rest_from_sql(
    tmp_path: Path, rows_read: list[int]
) -> None:
    asyncio.run(publish(tmp_path, range(50)))
    rows_read.clear()
    assert asyncio.run(opened(tmp_path))[0] == 100
    assert sum(rows_read) == 0
    saved = (tmp_path / INDEX_FILE).read_bytes()
    asyncio.run(publish(tmp_path, range(50, 60)))
    (tmp_path / INDEX_FILE).write_bytes(saved)  # as after kill -9
    rows_read.clear()
    assert asyncio.run(opened(tmp_path))[0] == 120
    assert sum(rows_read) == 20


@pytest.mark.parametrize("at", [0, 20, 60, -1])
def test_a_damaged_file_is_left_aside(tmp_path: Path, rows_read: list[int], at: int) -> None:
    asyncio.run(publish(tmp_path, range(50)))
    right = asyncio.run(opened(tmp_path))
    damaged = bytearray((tmp_path / INDEX_FILE).read_bytes())
    damaged[at] ^= 1
    (tmp_path / INDEX_FILE).write_bytes(damaged)
    rows_read.clear()
    assert asyncio.run(opened(tmp_path)) == right
    assert sum(rows_read) == 100


def test_the_file_of_another_database_is_left_aside(tmp_path: Path, rows_read: list[int]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    asyncio.run(publish(one, range(50)))
    asyncio.run(publish(two, range(100, 150)))
    right = asyncio.run(opened(two))
    (two / INDEX_FILE).write_bytes((one / INDEX_FILE).read_bytes())
    rows_read.clear()
    assert asyncio.run(opened(two)) == right
    assert sum(rows_read) == 100


def test_an_older_copy_of_the_database_put_back_is_noticed(tmp_path: Path) -> None:
    asyncio.run(publish(tmp_path, range(10)))
    database = tmp_path / "sdstore.db"
    older = database.read_bytes()
    asyncio.run(publish(tmp_path, range(10, 30)))
    for rest in tmp_path.glob("sdstore.db-*"):
        rest.unlink()
    database.write_bytes(older)
    assert asyncio.run(opened(tmp_path))[0] == 20
    # The same numbers, given to other messages.
    asyncio.run(publish(tmp_path, range(100, 120)))
    assert asyncio.run(opened(tmp_path))[0] == 60


def test_the_index_never_has_a_claim_without_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries and claims are read by two statements; here a message arrives between them."""

    async def scenario() -> None:
        async with Node.open(Settings(data_dir=tmp_path)) as node:
            database = node.store.arrivals._database
            few, statements = database.few, []

            async def with_news_between(query: Query, **arguments: int) -> list[Row]:
                found = await few(query, **arguments)
                statements.append(query)
                if statements.count(_entry_elements(database.sql)) == 1:
                    await node.ingest.door.publish_many([publication(9)])
                return found

            await node.ingest.door.publish_many([publication(1)])
            await node.recon.index.catch_up()
            digest = entry_digest(decode(publication(1).frame)[0])
            await node.ingest.door.publish_claims([(digest, b"late")])
            monkeypatch.setattr(database, "few", with_news_between)
            await node.recon.index.catch_up()
            assert len(node.recon.index.elements) == 3
            await node.recon.index.catch_up()
            assert len(node.recon.index.elements) == 5

    asyncio.run(scenario())
