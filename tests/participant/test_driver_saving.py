"""What an application hears when its participants cannot be saved, and what is true then."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdstore.client import StoreClient
from sdstore.participant import (
    DriverError,
    ParticipantDriver,
    ParticipantFile,
    ParticipantFileError,
    SavedAgain,
    Unsaved,
)
from sdstore.sds.effects import StoredRemotely
from tests.support.chatting import QUICK as QUICK_DRIVER
from tests.support.chatting import SMALL, Network, joined
from tests.support.disks import grow, small_disk
from tests.support.server import RunningNode, running_node

QUICK = replace(QUICK_DRIVER, close_s=0.05)
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def place(request: pytest.FixtureRequest, shared_node: RunningNode) -> dict[str, Any]:
    """A store, and a channel of this test's own."""
    return {"urls": [shared_node.url], "channel_id": request.node.name}


@pytest.fixture(autouse=True)
def quick_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdstore.participant.driver.SAVE_RETRY_S", 0.02)
    monkeypatch.setattr("sdstore.participant.follower.UNSAVED_PAUSE_S", 0.02)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ParticipantFile]:
    with ParticipantFile(tmp_path / "bob.db") as opened:
        yield opened


def fill(file: ParticipantFile) -> None:
    """SQLite reports a full disk from now on."""
    [pages] = file._database.raw.execute("PRAGMA page_count").fetchone()
    file._database.raw.execute(f"PRAGMA max_page_count = {pages}")


def make_room(file: ParticipantFile) -> None:
    file._database.raw.execute("PRAGMA max_page_count = 1073741823")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


CONTENT = b"x" * 20_000  # does not fit a page that SQLite has free


def test_an_application_hears_of_a_full_disk_and_of_room_and_nothing_leaves_meanwhile(
    file: ParticipantFile, place: dict[str, Any]
) -> None:
    async def scenario() -> None:
        network = Network()
        async with (
            joined(**place, name="ada") as ada,
            joined(**place, name="bob", persistence=file, network=network) as bob,
        ):
            fill(file)
            network.counts.clear()
            sending = asyncio.create_task(bob.channel.send(CONTENT))
            await ada.channel.send(CONTENT)
            await bob.until(lambda bob: bob.of(Unsaved))
            await asyncio.sleep(0.3)
            [unsaved] = bob.of(Unsaved)
            assert unsaved.code == "disk_full"
            assert "bob.db" in unsaved.detail
            assert not sending.done()
            assert (bob.texts, ada.texts) == ([], [])
            assert network.counts["POST /v1/messages/batch"] == 0
            make_room(file)
            await bob.until(lambda bob: bob.texts == [CONTENT])
            assert bob.of(SavedAgain) == [SavedAgain()]
            message_id = await sending
            await bob.until(lambda bob: StoredRemotely(message_id) in bob.events)
            await ada.until(lambda ada: ada.texts == [CONTENT])

    run(scenario())


def test_the_end_of_a_driver_says_if_the_last_changes_are_not_saved(file: ParticipantFile) -> None:
    async def scenario() -> None:
        driver = ParticipantDriver([NOWHERE], file, options=QUICK)
        await driver.__aenter__()
        channel = await driver.join("garden", "bob", SMALL)
        fill(file)
        sending = asyncio.create_task(channel.send(CONTENT))
        await asyncio.sleep(0.1)
        with pytest.raises(DriverError, match=r"bob\.db could not be written") as ended:
            await driver.__aexit__(None, None, None)
        assert ended.value.code == "unsaved"
        with pytest.raises(DriverError) as refused:
            await sending
        assert refused.value.code == "unsaved"
        # The file keeps the message until it is closed, so a new driver begins with it or refuses.
        async with ParticipantDriver([NOWHERE], file, options=QUICK) as driver:
            with pytest.raises(ParticipantFileError, match="disk_full"):
                await driver.join("garden", "bob", SMALL)
            make_room(file)
            channel = await driver.join("garden", "bob", SMALL)
            assert len(channel.log) == 1  # type: ignore[arg-type]
            assert channel.status.unacknowledged == 1

    run(scenario())


@pytest.mark.parametrize("end", ["leave", "close", "cancel"])
def test_a_send_whose_message_was_saved_at_the_end_returns_its_id(
    file: ParticipantFile, end: str
) -> None:
    async def scenario() -> None:
        driver = ParticipantDriver([NOWHERE], file, options=QUICK)
        await driver.__aenter__()
        channel = await driver.join("garden", "bob", SMALL)
        await channel.send(b"first")
        sending = asyncio.create_task(channel.send(b"second"))
        await asyncio.sleep(0)  # it has begun
        if end == "leave":
            await channel.leave()
        kind = asyncio.CancelledError if end == "cancel" else None
        await driver.__aexit__(kind, None, None)
        assert file.log("garden").frame(await sending) is not None

    run(scenario())


PROGRAM = """
import asyncio, sys
from sdstore.participant import ParticipantDriver, ParticipantFile

async def main(url, path, channel_id):
    with ParticipantFile(path) as file:
        print("opened", flush=True)
        async with ParticipantDriver([url], file) as driver:
            channel = await driver.join(channel_id, "bob")
            sending = asyncio.create_task(send(channel))
            async for event in channel.events():
                print(type(event).__name__, getattr(event, "code", ""), flush=True)

async def send(channel):
    for number in range(1_000_000):
        print("sent", await channel.send(b"%d" % number + bytes(20_000)), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Program:
    """A participant in a process of its own that sends without end; its lines are read by a thread."""

    def __init__(self, url: str, path: Path, channel_id: str) -> None:
        command = [sys.executable, "-c", PROGRAM, url, str(path), channel_id]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def sent(self) -> set[str]:
        return {line.split()[1] for line in list(self.lines) if line.startswith("sent ")}

    def count(self, text: str) -> int:
        """Lines that contain it."""
        return sum(text in line for line in list(self.lines))

    def end(self) -> None:
        """kill -9, unless it has ended."""
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def program(url: str, path: Path, channel_id: str) -> Iterator[Program]:
    running = Program(url, path, channel_id)
    try:
        yield running
    finally:
        running.end()


def until(condition: Callable[[], object], *shown: Program) -> None:
    """Wait; fails with the last lines of programs."""
    until_s = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < until_s, [each.lines[-10:] for each in shown]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_disk_that_is_really_full_costs_nothing_through_a_kill_and_a_restart(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        through_a_kill_and_a_restart(disk, place["urls"][0], place["channel_id"])


def through_a_kill_and_a_restart(disk: Path, url: str, channel_id: str) -> None:
    place = (url, disk / "bob.db", channel_id)

    def stored() -> set[str]:
        with StoreClient(url) as store:
            return {each.message.message_id for each in store.messages(channel_id)}

    with program(*place) as first:
        until(lambda: first.count("Unsaved disk_full"), first)
        before = first.sent
        grow(disk, "4m")
        until(lambda: first.count("SavedAgain") and len(first.sent) > len(before) + 10, first)
        until(lambda: first.count("Unsaved disk_full") > first.count("SavedAgain"), first)
    # On the full disk the file does not open, or the program hears of it.
    with program(*place) as again:
        until(lambda: again.count("disk_full"), again)
    grow(disk, "64m")
    with program(*place) as last:
        until(lambda: len(last.sent) >= 20, last)
    with ParticipantFile(disk / "bob.db") as file:
        log = file.log(channel_id)
        assert all(log.contains(each) for each in first.sent | again.sent | last.sent)
        assert all(log.contains(each) for each in stored()), "it is saved before it is published"


def test_a_message_with_a_key_is_sent_once_also_over_a_crash(tmp_path: Path) -> None:
    path, left = tmp_path / "ada.db", tmp_path / "left.db"

    async def sent(path: Path, *keys: str) -> list[str]:
        with ParticipantFile(path) as file:
            async with ParticipantDriver([NOWHERE], file, options=QUICK) as driver:
                channel = await driver.join("garden", "ada", SMALL)
                twice = [channel.send(key.encode(), key=key) for key in keys * 2]
                ids = await asyncio.gather(*twice)
                for end in ("", "-wal"):  # what a program leaves that is killed here
                    shutil.copy(f"{path}{end}", f"{left}{end}")
                assert ids[: len(keys)] == ids[len(keys) :]
                for message_id, key in zip(ids, keys, strict=False):
                    assert channel.message(message_id).content == key.encode()
                newest = channel.newest(len(channel.log))
                assert {each.message_id for each in newest} >= set(ids)
                assert len(newest) == len(channel.log)
                return ids[: len(keys)]

    first = asyncio.run(sent(path, "order 1", "order 2"))
    assert len(set(first)) == 2
    path = left.rename(tmp_path / "again.db")
    Path(f"{left}-wal").rename(f"{path}-wal")
    assert asyncio.run(sent(path, "order 2", "order 1", "order 3"))[:2] == first[::-1]
