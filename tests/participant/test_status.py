"""A status says "all synced" only if it is so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdstore.client import StoreClient
from sdstore.participant import GaveUp, ParticipantFile, Rejected, Status, Unpublished, Unsaved
from sdstore.sds import Broadcast, Participant, ParticipantOptions
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.chatting import SMALL, App, Network, joined
from tests.support.participants import Device
from tests.support.server import running_node


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running.url


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"channel_id": request.node.name}


def said(app: App) -> str:
    """The last status that the application was told, which is the present one."""
    assert app.of(Status)[-1] == app.channel.status
    return str(app.channel.status)


def test_while_no_store_answers_the_status_says_so_and_what_waits(
    url: str, place: dict[str, Any]
) -> None:
    async def scenario() -> None:
        network = Network()
        network.is_down = True
        async with joined([url], "ada", network=network, is_online=False, **place) as ada:
            assert str(ada.channel.status) == "no store answers yet"
            await ada.until(lambda ada: str(ada.channel.status) == "no store answers (unreachable)")
            await ada.channel.send(b"hello")
            await ada.until(lambda ada: ada.channel.status.unstored)
            assert said(ada) == "no store answers (unreachable), 1 not yet stored"
            network.is_down = False
            await ada.until(lambda ada: ada.channel.status.is_synced)
            assert said(ada) == "all synced"
            network.is_down = True
            network.cut()
            await ada.until(lambda ada: "no store answers" in said(ada))

    asyncio.run(scenario())


def test_a_store_that_takes_no_messages_now_and_one_that_refuses_them_are_said(
    url: str, place: dict[str, Any]
) -> None:
    problem = {
        "type": "about:blank",
        "title": "x",
        "status": 507,
        "code": "disk_full",
        "detail": "x",
    }
    network = Network()

    def full(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(507, json=problem) if request.method == "POST" else None

    async def scenario() -> None:
        async with joined([url], "ada", network=network, **place) as ada:
            network.answer = full
            await ada.channel.send(b"hello")
            await ada.until(lambda ada: ada.of(Unpublished))
            assert said(ada) == "no store takes messages (disk_full), 1 not yet stored"
            network.answer = lambda _: None
            await ada.until(lambda ada: ada.channel.status.is_synced)
            network.answer = full
            effects = ada.channel.participant.send(b"bad", 0)
            ada.channel.apply(effects)
            [message_id] = [each.message_id for each in effects if isinstance(each, Broadcast)]
            ada.channel.apply(ada.channel.participant.rejected(message_id, "refused_here"))
            await ada.until(lambda ada: ada.of(Rejected))
            await ada.until(lambda ada: ada.channel.status.refused)
            assert "1 refused by the stores" in said(ada)

    asyncio.run(scenario())


def test_a_message_that_was_given_up_without_a_store_is_not_synced() -> None:
    options = replace(SMALL, attempts_max=1, resend_ms=1_000)
    ada = Device("ada", options)
    ada.say("hello")
    assert GaveUp in {type(each) for each in ada.wait(60)}
    assert str(ada.participant.store_status) == "1 not yet stored"
    ada.crash()
    assert str(ada.participant.store_status) == "1 not yet stored"


def test_gaps_messages_that_wait_and_deliveries_held_back_are_not_synced() -> None:
    bob = Device("bob", replace(SMALL, lost_after_ms=1_000))
    gone = Message("x", "room", "ada", 1, (HistoryEntry("gone", b"", "ada"),), content=b"x")
    bob.hear(encode(gone))
    assert str(bob.participant.status) == "1 missing, 1 waiting for their causes"
    bob.wait(10)
    assert (bob.texts, str(bob.participant.status)) == (["x"], "1 lost")
    eve = Participant("room", "eve", options=ParticipantOptions(deliveries_max=1))
    for number in range(2):
        eve.receive(encode(Message(f"m{number}", "room", "ada", number, content=b"x")), 0)
    assert str(eve.store_status) == "1 not yet delivered"
    eve.confirm(1)
    assert str(eve.store_status) == "all synced"


def test_a_backfill_in_progress_and_a_disk_that_is_full_are_said(
    url: str, place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullError(Exception):
        code = "disk_full"

    async def scenario() -> None:
        with StoreClient(url) as client:
            message = Message("m1", place["channel_id"], "eve", 1, content=b"old")
            client.publish(encode(message))
        with ParticipantFile(tmp_path / "ada.db") as file:
            async with joined([url], "ada", file, is_online=False, **place) as ada:
                await ada.until(lambda ada: "catching up" in map(str, ada.of(Status)))
                await ada.until(lambda ada: ada.channel.status.is_synced)

                def fail(_: object) -> None:
                    raise FullError

                with monkeypatch.context() as patched:
                    patched.setattr(file, "save_all", fail)
                    sending = asyncio.create_task(ada.channel.send(b"new"))
                    await ada.until(lambda ada: ada.of(Unsaved))
                    assert said(ada).startswith("nothing can be saved (disk_full)")
                await sending
                await ada.until(lambda ada: ada.channel.status.is_synced)

    asyncio.run(scenario())
