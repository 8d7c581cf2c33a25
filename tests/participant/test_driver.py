"""Participants that talk through store nodes: real sockets, real nodes, and a network with faults."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdstore.client import StoreClient
from sdstore.participant import ParticipantFile, follower
from sdstore.participant.events import BackfillProgress, Connection, DriverError
from sdstore.participant.persistence import CURSOR_KEY, MemoryPersistence
from sdstore.sds.codec import encode
from sdstore.sds.effects import (
    Acknowledged,
    Deliver,
    Effect,
    Ephemeral,
    GaveUp,
    Lost,
    Save,
    StoredRemotely,
)
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from sdstore.wire import store_pb2 as wire
from tests.support.chatting import SMALL, InOrder, Network, joined
from tests.support.server import RunningNode, running_node


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def url(shared_node: RunningNode) -> str:
    return shared_node.url


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A channel of this test's own."""
    return {"channel_id": request.node.name}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run to the end; nothing of the driver is left then."""

    async def checked() -> None:
        await scenario
        for _ in range(100):
            await asyncio.sleep(0)  # the event loop closes generators in tasks of its own
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(checked())


def texts(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def test_two_participants_chat(url: str, place: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with joined([url], "ada", **place) as ada, joined([url], "bob", **place) as bob:
            message_id = await ada.channel.send(b"hello")
            await bob.until(lambda bob: bob.texts == [b"hello"])
            assert bob.deliveries[0].message.message_id == message_id
            await bob.channel.send(b"hello, ada")
            await ada.until(lambda ada: ada.texts == [b"hello, ada"])
            await ada.until(lambda ada: Acknowledged(message_id) in ada.events)
            assert StoredRemotely(message_id) in ada.events
            assert ada.channel.status.is_synced

    run(scenario())


def test_after_a_short_absence_one_page_brings_what_was_missed(
    url: str, place: dict[str, Any]
) -> None:
    async def scenario() -> None:
        file = MemoryPersistence()
        async with joined([url], "ada", **place) as ada:
            async with joined([url], "bob", file, **place) as bob:
                await ada.channel.send(b"0")
                await bob.until(lambda bob: bob.texts == texts(1))
            for text in texts(5, 1):
                await ada.channel.send(text)
            await ada.driver.outbox.emptied()
            network = Network()
            async with joined([url], "bob", file, network=network, **place) as bob:
                # Nobody refers to the last message, and nobody says anything more.
                await bob.until(lambda bob: bob.texts == texts(5, 1))
            assert network.counts == {
                "POST /v1/live": 1,
                "GET /v1/channels/messages": 1,
            }

    run(scenario())


def test_participants_that_follow_different_stores_hear_each_other(
    url: str, place: dict[str, Any], tmp_path: Path
) -> None:
    async def scenario(urls: list[str]) -> None:
        async with (
            joined(urls, "ada", draw=InOrder(), **place) as ada,
            joined(urls[::-1], "bob", draw=InOrder(), **place) as bob,
        ):
            homes = {each.store_url for each in ada.of(Connection) + bob.of(Connection)}
            assert homes == set(urls)
            message_id = await ada.channel.send(b"hello")
            await ada.channel.send(b"typing", ephemeral=True)
            await bob.until(lambda bob: bob.texts == [b"hello"])
            await bob.until(lambda bob: bob.of(Ephemeral))
            await bob.channel.send(b"hello, ada")
            await ada.until(lambda ada: Acknowledged(message_id) in ada.events)
            assert [each.path for each in (*ada.deliveries, *bob.deliveries)] == urls
            # A copy that cannot be made holds up nothing.
            ada.driver.stores.all[1].client.publish_batch = broken  # type: ignore[method-assign]
            await ada.channel.send(b"not copied")
            await ada.until(lambda ada: len(ada.of(StoredRemotely)) == 2)

    async def broken(_: Any) -> Any:
        await asyncio.sleep(3_600)

    with running_node(tmp_path) as other:
        run(scenario([url, other.url]))


def chain(channel_id: str, count: int) -> list[bytes]:
    """Frames of messages that each refer to the two before."""
    frames = []
    for number in range(count):
        causes = tuple(HistoryEntry(f"m{each}") for each in range(max(number - 2, 0), number))
        message = Message(f"m{number}", channel_id, "carol", 1_000 + number, causes, content=b"x")
        frames.append(encode(message))
    return frames


def test_a_missing_chain_of_1000_comes_from_another_store_in_few_calls(
    url: str, place: dict[str, Any], tmp_path: Path
) -> None:
    frames = chain(place["channel_id"], 1_001)

    async def scenario(other: str) -> None:
        with StoreClient(other) as store:
            list(store.publish_batch(frames[:-1]))
        network = Network()
        draw = InOrder()
        async with joined([url, other], "bob", network=network, draw=draw, **place) as bob:
            before = network.counts.copy()
            with StoreClient(url) as store:
                store.publish(frames[-1])
            await bob.until(lambda bob: len(bob.texts) == 1_001)
            assert [each.message.message_id for each in bob.deliveries] == [
                f"m{number}" for number in range(1_001)
            ]
            assert network.counts - before == {
                "POST /v1/messages/lookup": 2,  # one of each store
                "POST /v1/messages/ancestors": 2,
            }

    with running_node(tmp_path) as other:
        run(scenario(other.url))


def test_after_a_long_absence_the_log_is_backfilled(
    url: str, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "MISSED_MESSAGES_MAX", 50)

    async def scenario() -> None:
        file = MemoryPersistence()
        async with joined([url], "ada", **place) as ada:
            async with joined([url], "bob", file, **place) as bob:
                await ada.channel.send(b"0")
                await bob.until(lambda bob: bob.texts == texts(1))
            await asyncio.gather(*(ada.channel.send(text) for text in texts(60, 1)))
            await ada.driver.outbox.emptied()
            network = Network()
            late = {"network": network, **place}
            async with joined([url], "bob", file, **late) as bob:
                await bob.until(lambda bob: len(bob.texts) == 60)
                assert bob.texts == texts(60, 1)
                assert [each.number for each in bob.deliveries] == list(range(2, 62))
                assert bob.of(BackfillProgress)[-1].progress.entries_received >= 10
            assert network.counts["POST /v1/recon"] > 0
            network.counts.clear()
            async with joined([url], "bob", file, **late) as bob:
                assert network.counts == {
                    "POST /v1/live": 1,
                    "GET /v1/channels/messages": 1,
                }

    run(scenario())


def test_a_cursor_that_the_store_no_longer_accepts_leads_to_a_backfill(
    url: str, place: dict[str, Any], tmp_path: Path
) -> None:
    async def scenario(other: str) -> None:
        file = MemoryPersistence()
        async with joined([url], "ada", **place) as ada:
            async with joined([url], "bob", file, **place):
                pass
            with StoreClient(other) as store:
                foreign = str(store.feed().next).encode()
            [key] = [key for key in file.state(place["channel_id"]) if key.startswith(CURSOR_KEY)]
            assert key == CURSOR_KEY + url
            file.save_all({place["channel_id"]: [Save(((key, foreign),))]})
            await ada.channel.send(b"hello")
            await ada.driver.outbox.emptied()
            network = Network()
            async with joined([url], "bob", file, network=network, **place) as bob:
                await bob.until(lambda bob: bob.texts == [b"hello"])
            assert network.counts["POST /v1/recon"] > 0
            assert file.state(place["channel_id"])[key] != foreign

    with running_node(tmp_path) as other:
        run(scenario(other.url))


def test_a_catch_up_that_fails_goes_on_with_another_store(
    url: str, place: dict[str, Any], tmp_path: Path
) -> None:
    frames = chain(place["channel_id"], 300)

    async def scenario(other: str) -> None:
        for each in (url, other):
            with StoreClient(each) as store:
                list(store.publish_batch(frames))
        network = Network()
        port = httpx.URL(url).port

        def failing(request: httpx.Request) -> httpx.Response | None:
            is_second = network.counts["POST /v1/recon"] >= 2
            return httpx.Response(500) if request.url.port == port and is_second else None

        network.answer = failing
        draw = InOrder()
        file = MemoryPersistence()
        async with joined([url, other], "bob", file, network=network, draw=draw, **place) as bob:
            await bob.until(lambda bob: len(bob.texts) == 300)
            assert [each.message.message_id for each in bob.deliveries] == [
                f"m{number}" for number in range(300)
            ]
            offline = [each for each in bob.of(Connection) if each.state == "offline"]
            assert {each.store_url for each in offline} == {url}
        cursors = [key for key in file.state(place["channel_id"]) if key.startswith(CURSOR_KEY)]
        assert cursors == [CURSOR_KEY + other], "a cursor is kept only after a catch-up"

    with running_node(tmp_path) as other:
        run(scenario(other.url))


def test_causes_too_far_back_for_a_walk_are_backfilled(
    url: str, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frames = chain(place["channel_id"], 400)
    monkeypatch.setattr("sdstore.participant.stores.WALKS_MAX", 1)

    async def scenario(other: str) -> None:
        with StoreClient(other) as store:
            list(store.publish_batch(frames[:-1]))
        network = Network()
        draw = InOrder()
        async with joined([url, other], "bob", network=network, draw=draw, **place) as bob:
            network.counts.clear()
            with StoreClient(url) as store:
                store.publish(frames[-1])
            await bob.until(lambda bob: len(bob.texts) == 400)
            assert network.counts["POST /v1/recon"] > 0
            assert network.counts["POST /v1/messages/ancestors"] == 1

    with running_node(tmp_path) as other:
        run(scenario(other.url))


def test_content_that_one_store_lost_comes_from_another(
    url: str, place: dict[str, Any], tmp_path: Path
) -> None:
    message = Message("lost", place["channel_id"], "carol", 1, content=b"here after all")

    async def scenario(other: str) -> None:
        file = MemoryPersistence()
        async with joined([url], "bob", file, **place):
            pass
        with StoreClient(other) as store:
            store.publish(message)
        page = wire.MessagePage(left_out=[entry_digest(message)]).SerializeToString()
        network = Network()

        def lost(request: httpx.Request) -> httpx.Response | None:
            is_page = request.url.path == "/v1/channels/messages"
            return httpx.Response(200, content=page) if is_page else None

        network.answer = lost
        draw = InOrder()
        async with joined([url, other], "bob", file, network=network, draw=draw, **place) as bob:
            await bob.until(lambda bob: bob.texts == [b"here after all"])

    with running_node(tmp_path) as other:
        run(scenario(other.url))


def test_while_no_store_answers_nothing_is_lost_or_given_up(
    url: str, place: dict[str, Any]
) -> None:
    frames = chain(place["channel_id"], 2)
    hasty = replace(SMALL, lost_after_ms=120_000, attempts_max=3, clock_step_max_ms=60_000)

    async def scenario() -> None:
        now_ms = 1_763_000_000_000
        network = Network()
        bobs = {"network": network, "participant": hasty, "clock_ms": lambda: now_ms, **place}
        async with joined([url], "bob", **bobs) as bob:
            with StoreClient(url) as store:
                store.publish(frames[1])
                await bob.until(lambda bob: bob.channel.status.waiting)
                network.is_down = True
                network.cut()
                await bob.until(lambda bob: not bob.is_online)
                sent = await bob.channel.send(b"from bob")
                for _ in range(10):
                    now_ms += 60_000
                    await bob.ticks(2)
                assert not bob.of(Lost) + bob.of(GaveUp)
                store.publish(frames[0])
            network.is_down = False
            await bob.until(lambda bob: len(bob.texts) == 2)
            await bob.until(lambda bob: StoredRemotely(sent) in bob.events)
            assert not bob.of(Lost) + bob.of(GaveUp)
            # With a store, time passes again.
            for _ in range(20):
                now_ms += 60_000
                await bob.ticks(2)
            await bob.until(lambda bob: GaveUp(sent) in bob.events)

    run(scenario())


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_store_is_left_alone_for_as_long_as_it_asks(
    url: str, place: dict[str, Any], status: int
) -> None:
    async def scenario() -> None:
        network = Network()
        refused_at_s: list[float] = []

        def busy(request: httpx.Request) -> httpx.Response | None:
            if request.url.path == "/v1/messages/batch" and not refused_at_s:
                refused_at_s.append(time.monotonic())
                return httpx.Response(status, headers={"retry-after": "1"})
            return None

        network.answer = busy
        async with joined([url], "ada", network=network, **place) as ada:
            message_id = await ada.channel.send(b"hello")
            await ada.until(lambda ada: StoredRemotely(message_id) in ada.events)
            assert time.monotonic() - refused_at_s[0] >= 1
            assert network.counts["POST /v1/messages/batch"] == 2

    run(scenario())


def test_an_application_that_confirms_gets_nothing_twice(url: str, place: dict[str, Any]) -> None:
    async def scenario() -> None:
        file = MemoryPersistence()
        seen: list[Deliver] = []
        async with joined([url], "ada", **place) as ada:
            for number in range(4):
                async with joined([url], "bob", file, **place) as bob:
                    network_texts = texts(25, 25 * number)
                    for text in network_texts:
                        await ada.channel.send(text)
                    if number % 2:  # stop at any moment
                        await bob.until(lambda bob: bob.texts)
                    else:
                        await bob.until(lambda bob: len(bob.texts) >= 25)
                seen += bob.deliveries
            async with joined([url], "bob", file, **place) as bob:
                await bob.until(lambda bob: len(seen) + len(bob.texts) >= 100)
                seen += bob.deliveries
        assert [each.number for each in seen] == list(range(1, 101))
        assert [each.message.content for each in seen] == texts(100)

    run(scenario())


def test_a_burst_is_published_in_batches(url: str, place: dict[str, Any]) -> None:
    async def scenario() -> None:
        network = Network()
        async with joined([url], "ada", network=network, **place) as ada:
            await asyncio.gather(*(ada.channel.send(text) for text in texts(500)))
            await ada.until(lambda ada: len(ada.of(StoredRemotely)) == 500)
            assert network.counts["POST /v1/messages/batch"] <= 3

    run(scenario())


class Recorded(MemoryPersistence):
    """Fails as it is told to, and knows which messages were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        self.saves_count = 0

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.saves_count += 1
        super().save_all(effects)


class BusyError(Exception):
    code = "busy"


def test_nothing_is_delivered_or_published_before_it_is_saved(
    url: str, place: dict[str, Any]
) -> None:
    async def scenario() -> None:
        file = Recorded()
        network = Network()
        async with (
            joined([url], "ada", **place) as ada,
            joined([url], "bob", file, network=network, **place) as bob,
        ):
            file.errors = [BusyError()] * 1_000
            await ada.channel.send(b"hello")
            sending = asyncio.create_task(bob.channel.send(b"hello, ada"))
            while len(file.errors) > 995:
                await bob.ticks(1)
            assert (bob.texts, sending.done()) == ([], False)
            assert network.counts["POST /v1/messages/batch"] == 0
            file.errors.clear()
            await bob.until(lambda bob: bob.texts == [b"hello"])
            await ada.until(lambda ada: ada.texts == [b"hello, ada"])
            await sending

    run(scenario())


def test_a_persistence_that_fails_for_good_ends_the_driver(url: str, place: dict[str, Any]) -> None:
    async def scenario() -> None:
        file = Recorded()
        app = joined([url], "ada", file, **place)
        ada = await app.__aenter__()
        file.errors = [OSError("the disk is gone")]
        with pytest.raises(DriverError, match="the disk is gone"):
            await ada.channel.send(b"hello")
        with pytest.raises(DriverError, match="the disk is gone"):
            await anext(ada.channel.events())
        with pytest.raises(DriverError, match="the disk is gone") as failed:
            await app.__aexit__(None, None, None)
        assert isinstance(failed.value.__cause__, OSError)
        assert failed.value.code == "failed"

    run(scenario())


def test_cancelling_the_program_closes_everything(url: str, place: dict[str, Any]) -> None:
    async def program(ready: asyncio.Event) -> None:
        async with joined([url], "ada", **place) as ada:
            while True:
                await ada.channel.send(b"hello")
                ready.set()

    async def scenario() -> None:
        ready = asyncio.Event()
        running = asyncio.create_task(program(ready))
        await ready.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(scenario())


def test_a_file_takes_the_confirmation_in_the_transaction_of_the_application(
    url: str, place: dict[str, Any], tmp_path: Path
) -> None:
    async def scenario() -> None:
        path = tmp_path / "bob.db"
        async with joined([url], "ada", **place) as ada:
            with ParticipantFile(path) as file:
                async with joined([url], "bob", file, confirms=False, **place) as bob:
                    for text in texts(3):
                        await ada.channel.send(text)
                    await bob.until(lambda bob: len(bob.texts) == 3)
                    with file.transaction():
                        file.confirm(place["channel_id"], 2)
                    await bob.channel.send(b"hello, ada")
            await ada.until(lambda ada: ada.texts == [b"hello, ada"])
            with ParticipantFile(path) as file:
                async with joined([url], "bob", file, **place) as again:
                    await ada.channel.send(b"3")
                    await again.until(lambda bob: len(bob.texts) == 2)
                    assert again.texts == texts(2, 2)
                    assert [each.number for each in again.deliveries] == [3, 4]
                    assert len(file.log(place["channel_id"])) == 5

    run(scenario())


PROGRAM = """
import asyncio, sys
from sdstore.participant import ParticipantDriver, ParticipantFile

async def main(url, path, channel_id):
    with ParticipantFile(path) as file:
        async with ParticipantDriver([url], file) as driver:
            channel = await driver.join(channel_id, "ada")
            for number in range(1_000_000):
                print(await channel.send(b"%d" % number), flush=True)

try:
    asyncio.run(main(*sys.argv[1:]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
)
def test_what_was_sent_before_the_end_of_a_program_is_in_its_file_and_arrives(
    url: str, place: dict[str, Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    path = tmp_path / "ada.db"
    arguments = [sys.executable, "-c", PROGRAM, url, str(path), place["channel_id"]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Unbuffered: `communicate` passes by what `readline` has read ahead.
    with subprocess.Popen(arguments, bufsize=0, **pipes) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(50)]
        program.send_signal(number)
        out, err = program.communicate(timeout=30)
    assert (program.returncode, err) == (code, b"")
    sent = [line.decode().strip() for line in lines + out.splitlines(keepends=True)]
    sent = [each for each in sent if len(each) == 64]

    async def scenario() -> None:
        eager = replace(SMALL, resend_ms=50, resend_possibly_ms=50)
        with ParticipantFile(path) as file:
            log = file.log(place["channel_id"])
            assert len(log) - len(sent) in (0, 1), "the last one was not printed"
            async with (
                joined([url], "ada", file, participant=eager, **place),
                joined([url], "bob", **place) as bob,
            ):
                await bob.until(lambda bob: len(bob.texts) == len(log))
                assert [each.message.message_id for each in bob.deliveries][: len(sent)] == sent

    run(scenario())


def test_the_channels_of_a_driver_share_one_live_connection(url: str) -> None:
    async def scenario() -> None:
        network = Network()
        names = [f"shared {number}" for number in range(20)]
        async with (
            joined([url], "ada", channel_id=names[0], network=network) as ada,
            joined([url], "bob", channel_id=names[-1]) as bob,
        ):
            for name in names[1:]:
                await ada.driver.join(name, "ada")
            await bob.channel.send(b"hello")
            last = ada.driver._channels[names[-1]]
            async for event in last.events():
                if isinstance(event, Deliver):
                    break
            # One for the first channel, and one for all that joined since.
            assert network.counts["POST /v1/live"] <= 3

    run(scenario())
