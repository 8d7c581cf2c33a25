"""Sessions and proofs with a peer that serves an older copy of its database."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.entries import START
from app.errors import Code, Problem
from app.http.channels import CursorKind, Cursors
from app.server.node import INDEX_FILE, Node
from app.server.settings import Settings
from pipeline.database import Database, Scan, open_database
from pipeline.manifest import ExportEnd
from sdstore.sync.report import SyncOutcome
from tests.support.federation import (
    InProcessPeer,
    Remembered,
    holdings,
    local_of,
    message,
    publish,
    run,
    sync_with_peer,
)
from tests.support.server import running_node

DATABASE = "sdstore.db"


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Node]:
    """A node over `folder`, which keeps its secret, its index file and whatever else is in it."""
    async with Node.open(Settings(data_dir=folder)) as node:
        yield node


def copy_of(folder: Path, target: Path) -> None:
    target.mkdir()
    for each in folder.glob(f"{DATABASE}*"):
        shutil.copy(each, target)


def put_back(copy: Path, folder: Path) -> None:
    for each in folder.glob(f"{DATABASE}*"):
        each.unlink()
    for each in copy.iterdir():
        shutil.copy(each, folder)


@pytest.mark.parametrize("then", ["nothing", "others", "others, then the same last message"])
def test_a_proof_does_not_outlive_the_history_of_the_peer(tmp_path: Path, then: str) -> None:
    """The node stays and remembers the proof, the nonce and the interest; the peer goes back."""
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))

    async def scenario() -> None:
        memory = Remembered()
        async with opened(one) as here:
            async with opened(two) as there:
                await publish(there, [message(n) for n in range(10)])
            copy_of(two, copy)
            async with opened(two) as there:
                await publish(there, [message(n) for n in (*range(10, 14), 99)])
                for _ in range(2):  # the second one compares roots alone
                    peer = InProcessPeer(there)
                    report = await sync_with_peer(
                        local_of(here), peer, here.federation.interests.current, memory=memory
                    )
                    assert report.outcome is SyncOutcome.IN_SYNC
                assert memory.value.baselines
            newest_index = (two / INDEX_FILE).read_bytes()
            put_back(copy, two)
            async with opened(two) as there:
                if then != "nothing":
                    await publish(there, [message(n) for n in range(20, 24)])
                if then.endswith("message"):
                    await publish(there, [message(99)])
            # As after kill -9: the file is older than the database, or of a history that is gone.
            (two / INDEX_FILE).write_bytes(newest_index)
            async with opened(two) as there:
                peer = InProcessPeer(there)
                report = await sync_with_peer(
                    local_of(here), peer, here.federation.interests.current, memory=memory
                )
                assert report.outcome is SyncOutcome.IN_SYNC
                assert await holdings(here) == await holdings(there)
                assert len(await holdings(here)) == (15 if then == "nothing" else 19)

    run(scenario())


NODES, FOLLOWERS = 3, 2
numbers = st.integers(0, 11)
nodes = st.integers(0, NODES - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), nodes, numbers),
        st.tuples(st.just("publish"), nodes, numbers),
        st.tuples(st.just("backup"), nodes, numbers),
        st.tuples(st.just("restore"), nodes, numbers),
        st.tuples(st.just("sync"), nodes, nodes),
        st.tuples(st.just("poll"), st.integers(0, FOLLOWERS - 1), numbers),
        st.tuples(st.just("snapshot"), nodes, numbers),
    ),
    max_size=30,
)


class Backup(NamedTuple):
    """A copy of a running node: its database and the index file of that time."""

    database: bytes
    index: bytes | None


class World:
    """Three nodes whose databases go back and forth, two followers, and snapshots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.stacks = [AsyncExitStack() for _ in range(NODES)]
        self.backups: list[Backup] = []
        self.memories: dict[tuple[int, int], Remembered] = {}
        self.cursors: list[str | None] = [None] * FOLLOWERS
        self.seen: list[set[bytes]] = [set() for _ in range(FOLLOWERS)]
        self.snapshots: dict[tuple[str, ExportEnd], tuple[list[bytes], list[bytes]]] = {}

    def data(self, node: int) -> Path:
        return self.folder / str(node)

    async def start(self, node: int) -> None:
        opened = Node.open(Settings(data_dir=self.data(node)))
        self.nodes[node : node + 1] = [await self.stacks[node].enter_async_context(opened)]

    async def stop(self, node: int) -> None:
        await self.stacks[node].aclose()
        with closing(sqlite3.connect(self.data(node) / DATABASE)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def publish(self, node: int, number: int) -> None:
        hints = {f"m{number}": (b"hint",)} if number % 2 else {}
        await publish(self.nodes[node], [message(number)], hints)

    async def backup(self, node: int, number: int) -> None:
        await self.stop(node)
        index = self.data(node) / INDEX_FILE
        saved = index.read_bytes() if number % 2 and index.exists() else None
        self.backups.append(Backup((self.data(node) / DATABASE).read_bytes(), saved))
        await self.start(node)

    async def restore(self, node: int, number: int) -> None:
        """Any backup of any node; beside it the node's own index file, or one of any time."""
        if not self.backups:
            return
        backup = self.backups[number % len(self.backups)]
        await self.stop(node)
        (self.data(node) / DATABASE).write_bytes(backup.database)
        indexes = [each.index for each in self.backups if each.index is not None]
        if indexes and number % 3:
            (self.data(node) / INDEX_FILE).write_bytes(indexes[number % len(indexes)])
        # The process's knowledge of its peers died with it; the peers' knowledge of it did not.
        self.memories = {pair: each for pair, each in self.memories.items() if pair[0] != node}
        await self.start(node)

    async def sync(self, one: int, two: int) -> None:
        if one == two:
            return
        here, there = self.nodes[one], self.nodes[two]
        memory = self.memories.setdefault((one, two), Remembered())
        report = await sync_with_peer(
            local_of(here), InProcessPeer(there), here.federation.interests.current, memory=memory
        )
        assert report.outcome is SyncOutcome.IN_SYNC
        assert await holdings(here) == await holdings(there)

    async def poll(self, follower: int, _: int) -> None:
        """Follow the node of the same number; a follower that is refused begins anew."""
        store = self.nodes[follower].store
        cursors = Cursors.of(store)
        try:
            place = await cursors.read_arrival(store, self.cursors[follower]) or START
        except Problem as problem:
            assert problem.code in {Code.FOREIGN_CURSOR, Code.CURSOR_ROLLED_BACK}  # noqa: PT017
            place = START
        while (page := await store.channels.feed(place.number, 3, 1 << 30)).last is not None:
            place = page.last
            self.seen[follower].update(entry.digest for entry in page.entries)
        self.cursors[follower] = cursors.write(CursorKind.ARRIVAL, *place)
        everything = await store.channels.feed(0, 1_000, 1 << 30)
        assert {entry.digest for entry in everything.entries} <= self.seen[follower]

    async def snapshot(self, node: int, _: int) -> None:
        with open_database(f"sqlite:///{self.data(node) / DATABASE}") as database:
            key = database.database_id(), database.watermark()
            self.snapshots[key] = elements(database)

    async def check(self) -> None:
        """No index and no snapshot is of another history than its database."""
        for node, each in enumerate(self.nodes):
            await each.recon.index.catch_up()
            with open_database(f"sqlite:///{self.data(node) / DATABASE}") as database:
                entries, claims = elements(database)
                assert len(each.recon.index.elements) == len(entries) + len(claims)
                if entries:
                    expected = blake3(b"".join(sorted(entries))).digest()
                    assert await each.recon.index.root("c", 0) == (len(entries), expected)
                for (database_id, watermark), (its_entries, its_claims) in self.snapshots.items():
                    if database_id == database.database_id():
                        shared = (
                            entries[: watermark.seq] == its_entries
                            and claims[: watermark.claim_no] == its_claims
                        )
                        assert database.holds(watermark) is shared


def elements(database: Database) -> tuple[list[bytes], list[bytes]]:
    """Digests of entries and IDs of claims in the order of their numbers, which have no holes here."""
    rows = [row for batch in database.keys(Scan()) for row in batch.to_pylist()]
    claims = [row for batch in database.claims(Scan()) for row in batch.to_pylist()]
    return (
        [row["digest"] for row in sorted(rows, key=itemgetter("seq"))],
        [row["claim_id"] for row in sorted(claims, key=itemgetter("claim_no"))],
    )


async def play(folder: Path, script: list[tuple[str, int, int]]) -> None:
    world = World(folder)
    try:
        for node in range(NODES):
            await world.start(node)
        for name, one, two in script:
            await getattr(world, name)(one, two)
            await world.check()
        for follower in range(FOLLOWERS):
            await world.poll(follower, 0)
    finally:
        for stack in world.stacks:
            await stack.aclose()


def play_anywhere(script: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(play(Path(folder), script))


# A follower that read on, a copy put back, and as many others as were lost.
@example([("publish", 0, 1), ("backup", 0, 1), ("publish", 0, 2), ("poll", 0, 0), ("snapshot", 0, 0),
          ("restore", 0, 0), ("publish", 0, 3), ("poll", 0, 0)])  # fmt: skip
# Two nodes that were proved equal; one goes back, diverges, and has the index file of before.
@example([("publish", 0, 1), ("backup", 0, 0), ("publish", 0, 2), ("publish", 0, 4), ("sync", 1, 0),
          ("sync", 1, 0), ("backup", 0, 1), ("restore", 0, 4), ("publish", 0, 3), ("publish", 0, 4),
          ("sync", 1, 0), ("sync", 2, 0)])  # fmt: skip
@given(script=steps)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_backups_put_back_in_any_order_fool_no_follower_session_proof_or_snapshot(
    script: list[tuple[str, int, int]],
) -> None:
    play_anywhere(script)


@pytest.mark.slow
@given(script=steps)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_backups_put_back_in_any_order_fool_nobody(script: list[tuple[str, int, int]]) -> None:
    play_anywhere(script)


@pytest.mark.parametrize("damage", ["a flipped bit", "cut off", "empty", "noise", "none"])
def test_a_damaged_index_file_is_one_line_of_the_log_and_no_wrong_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with running_node(tmp_path) as node:
        for number in range(5):
            node.publish(message(number))
        before = node.http.get("/v1/channels/c").json()
    path = tmp_path / INDEX_FILE
    saved = path.read_bytes()
    flipped = saved[:-1] + bytes([saved[-1] ^ 1])
    damaged = {"a flipped bit": flipped, "cut off": saved[:-7], "empty": b"", "noise": b"x" * 500}
    path.write_bytes(damaged.get(damage, saved))
    caplog.clear()
    with running_node(tmp_path) as node:
        assert node.http.get("/v1/channels/c").json() == before
    lines = [each.getMessage() for each in caplog.records if "index" in each.getMessage()]
    said = f"{INDEX_FILE} is damaged: the index is read from SQL"
    assert lines == ([] if damage == "none" else [said])
