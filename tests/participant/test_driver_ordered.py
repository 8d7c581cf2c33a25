"""A driver keeps the order of a channel, lets indexers vote, and keeps changes of roles over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdstore.participant import (
    DriverError,
    OrderChanged,
    OrderingError,
    ParticipantChannel,
    ParticipantFile,
    ParticipantOptions,
    channelorder,
)
from tests.support.chatting import App, joined
from tests.support.server import running_node

INDEXERS = ("ada", "bob", "cyn")


def ordered(*indexers: str) -> ParticipantOptions:
    return ParticipantOptions(bloom=None, sync_ms=0, ordered=True, indexers=indexers or INDEXERS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running.url


@pytest.fixture(autouse=True)
def quick_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channelorder, "VOTE_SLOT_MS", 200)


def confirmed(channel: ParticipantChannel) -> list[bytes]:
    """The confirmed texts, without votes."""
    messages = map(channel.message, channel.order.ordering.confirmed)
    return [each.content for each in messages if not each.is_vote]


def has(*texts: bytes) -> Callable[[App], bool]:
    return lambda app: confirmed(app.channel) == list(texts)


def test_what_one_member_says_is_confirmed_at_all_members_and_stays_so_after_a_restart(
    url: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        with ParticipantFile(tmp_path / "ada.db") as file:
            async with (
                joined([url], "ada", file, channel_id="lone", participant=ordered()) as ada,
                joined([url], "bob", channel_id="lone", participant=ordered()) as bob,
                joined([url], "cyn", channel_id="lone", participant=ordered()) as cyn,
            ):
                await ada.channel.send(b"dig")
                for each in (ada, bob, cyn):
                    await each.until(has(b"dig"))
                    assert each.of(OrderChanged)[-1].confirmed_count >= 1
                before = ada.channel.order.ordering.confirmed
        with ParticipantFile(tmp_path / "ada.db") as file:
            async with joined([url], "ada", file, channel_id="lone", participant=ordered()) as ada:
                await ada.until(lambda ada: ada.of(OrderChanged))
                assert ada.channel.order.ordering.confirmed[: len(before)] == before
                assert ada.channel.order.version[1] >= len(before)

    asyncio.run(scenario())


def test_roles_change_at_a_confirmed_message_and_stay_changed_after_a_restart(
    url: str, tmp_path: Path
) -> None:
    place: dict[str, Any] = {"channel_id": "roles", "participant": ordered()}

    async def scenario() -> None:
        files = [ParticipantFile(tmp_path / f"{name}.db") for name in ("ada", "bob")]
        async with joined([url], "ada", files[0], **place) as ada:
            async with (
                joined([url], "bob", files[1], **place) as bob,
                joined([url], "cyn", **place),
            ):
                await ada.channel.send(b"cyn leaves")
                for each in (ada, bob):
                    await each.until(has(b"cyn leaves"))
            # Only ada is left: nothing is confirmed, until one of two who are here is enough.
            await ada.channel.send(b"alone")
            waits_for = ada.channel.order.ordering.waits_for
            assert waits_for is not None
            assert set(waits_for.sender_ids) == {"bob", "cyn"}
            after = ada.channel.order.ordering.confirmed[0]
            ada.channel.change_roles(["ada"], after)
            await ada.until(has(b"cyn leaves", b"alone"))
            with pytest.raises(OrderingError, match="not_confirmed"):
                ada.channel.change_roles(["bob"], "unknown")
            before = ada.channel.order.ordering.confirmed
        async with joined([url], "ada", files[0], **place) as ada:
            await ada.until(lambda ada: ada.of(OrderChanged))
            assert ada.channel.participant.options.indexers == ("ada",)
            await ada.channel.send(b"again")
            await ada.until(has(b"cyn leaves", b"alone", b"again"))
            assert ada.channel.order.ordering.confirmed[: len(before)] == before
        # Bob has not heard of it, and changes at the same message: the same order.
        async with joined([url], "bob", files[1], **place) as bob:
            await bob.until(lambda bob: bob.of(OrderChanged))
            bob.channel.change_roles(["ada"], after)
            await bob.until(has(b"cyn leaves", b"alone", b"again"))
            assert bob.channel.order.ordering.confirmed[: len(before)] == before
        for file in files:
            file.close()

    asyncio.run(scenario())


def test_the_first_indexers_cannot_be_others_after_a_restart(url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        with ParticipantFile(tmp_path / "ada.db") as file:
            alone = ordered("ada")
            async with joined([url], "ada", file, channel_id="first", participant=alone) as ada:
                await ada.channel.send(b"mine")
                await ada.until(has(b"mine"))
        with (
            ParticipantFile(tmp_path / "ada.db") as file,
            pytest.raises(OrderingError, match="other_roles"),
        ):
            async with joined([url], "ada", file, channel_id="first", participant=ordered()):
                pass

    asyncio.run(scenario())


def test_a_channel_without_indexers_has_no_order(url: str) -> None:
    async def scenario() -> None:
        async with joined([url], "ada", channel_id="plain") as ada:
            with pytest.raises(DriverError, match="no_order"):
                _ = ada.channel.order

    asyncio.run(scenario())
