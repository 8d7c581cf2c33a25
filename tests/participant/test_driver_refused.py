"""Messages that stores refuse, withhold or cannot store now: what their authors and readers learn."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.access.callers import Authorizer, Caller, Scope
from recon.agreement import Interest
from sdstore.participant.events import DriverError
from sdstore.participant.persistence import MemoryPersistence
from sdstore.sds.codec import decode
from sdstore.sds.effects import Acknowledged, Lost, StoredRemotely
from sdstore.sds.log import ParticipantLog
from sdstore.sds.model import SHA256_MESSAGE, Dialect, HistoryEntry, Message, entry_digest
from tests.support.chatting import SMALL, App, InOrder, Network, joined
from tests.support.server import RunningNode, running_node

POLICY = "tests.support.refusing:Words"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path / "refusing", policy=POLICY) as running:
        yield running


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def told(app: App, name: str) -> list[Any]:
    """The events of a class."""
    return [each for each in app.events if type(each).__name__ == name]


def history(log: ParticipantLog, message_id: str) -> list[str]:
    message, _ = decode(log.frame(message_id) or b"")
    return [entry.message_id for entry in message.causal_history]


def release(node: RunningNode, log: ParticipantLog, message_id: str) -> None:
    message, _ = decode(log.frame(message_id) or b"")
    digest = entry_digest(message).hex()
    assert node.http.post(f"/v1/quarantine/{digest}/release").status_code == 200


def made(content: bytes, *causes: str, channel_id: str = "garden") -> Message:
    """A message whose ID verifies."""
    past = tuple(HistoryEntry(each) for each in causes)
    message = Message("", channel_id, "ada", 7, past, content=content)
    return replace(message, message_id=SHA256_MESSAGE.make(message))


# ---- refused and withheld


@pytest.mark.parametrize("content", [b"bad", b"odd"])
def test_readers_go_on_at_once_after_a_message_that_no_store_takes(
    node: RunningNode, content: bytes
) -> None:
    async def scenario() -> None:
        async with joined([node.url], "ada") as ada, joined([node.url], "bob") as bob:
            # The second one is written before the answer about the first one.
            refused, named = await asyncio.gather(
                ada.channel.send(content), ada.channel.send(b"good")
            )
            await bob.until(lambda bob: bob.texts == [b"good"])
            assert bob.deliveries[0].after_gap == (refused,)
            assert history(ada.channel.log, named) == [refused]
            await ada.until(lambda ada: told(ada, "Rejected"))
            [rejected] = told(ada, "Rejected")
            code = "policy_refused" if content == b"bad" else "quarantined"
            assert (rejected.message_id, rejected.code) == (refused, code)
            for text in (b"1", b"2", b"3"):
                assert refused not in history(ada.channel.log, await ada.channel.send(text))
            await bob.until(lambda bob: len(bob.texts) == 4)

    run(scenario())


def test_a_message_that_an_operator_releases_arrives_late(node: RunningNode) -> None:
    async def scenario() -> None:
        async with joined([node.url], "ada") as ada, joined([node.url], "bob") as bob:
            odd, _ = await asyncio.gather(ada.channel.send(b"odd"), ada.channel.send(b"good"))
            await bob.until(lambda bob: bob.texts == [b"good"])
            assert [each.message_id for each in bob.of(Lost)] == [odd]
            release(node, ada.channel.log, odd)
            await bob.until(lambda bob: bob.texts == [b"good", b"odd"])
            assert bob.deliveries[-1].is_late
            assert bob.channel.status.lost == 0
            await bob.channel.send(b"seen")
            await ada.until(lambda ada: Acknowledged(odd) in ada.events)

    run(scenario())


def test_what_one_store_of_two_refuses_is_neither_rejected_nor_skipped(
    node: RunningNode, tmp_path: Path
) -> None:
    async def scenario(urls: list[str]) -> None:
        network = Network()
        both: dict[str, Any] = {"draw": InOrder()}
        async with (
            joined(urls, "ada", **both) as ada,
            joined(urls, "bob", network=network, **both) as bob,
            joined(urls, "eve", **both) as eve,
        ):
            network.ports_down = {httpx.URL(urls[1]).port}
            bad, _ = await asyncio.gather(ada.channel.send(b"bad"), ada.channel.send(b"good"))
            await ada.until(lambda ada: StoredRemotely(bad) in ada.events)
            assert not told(ada, "Rejected")
            # She may have asked the second store before it had the message; then it came late.
            await eve.until(lambda eve: sorted(eve.texts) == [b"bad", b"good"])
            # The first store says that it refuses the message; the second one is silent.
            await bob.until(lambda bob: bob.channel.status.waiting == 1)
            await asyncio.sleep(0.5)
            assert bob.texts == []
            network.ports_down = set()
            await bob.until(lambda bob: bob.texts == [b"bad", b"good"])
            assert bob.of(Lost) == []

    with running_node(tmp_path / "accepting") as other:
        run(scenario([node.url, other.url]))


def test_an_ordered_message_is_sent_when_a_store_has_it_and_void_when_all_refuse_it(
    node: RunningNode,
) -> None:
    async def scenario() -> None:
        ordered = replace(SMALL, ordered=True)
        file = MemoryPersistence()
        async with joined([node.url], "ada", file, participant=ordered) as ada:
            first = await ada.channel.send(b"first")
            assert node.http.get(f"/v1/messages/{first}").status_code == 200
            for content in (b"odd", b"bad"):
                with pytest.raises(DriverError, match="rejected"):
                    await ada.channel.send(content)
            assert len(ada.channel.log) == 1
            # An operator can release nothing that would be a second message after the first one.
            assert node.http.get("/v1/quarantine").json()["messages"] == []
        async with joined([node.url], "ada", file, participant=ordered) as ada:
            again = await ada.channel.send(b"second")
            assert history(ada.channel.log, again) == [first]

    run(scenario())


def test_a_participant_stops_waiting_at_once_for_a_message_that_its_store_has_retired(
    node: RunningNode,
) -> None:
    first = made(b"first")
    gone = made(b"gone", first.message_id)
    heir = made(b"heir", gone.message_id)
    for each in (first, gone, heir):
        node.publish(each).raise_for_status()
    retired = {"message_id": gone.message_id, "reason": "a test"}
    node.http.post("/v1/retirements", json=retired).raise_for_status()

    async def scenario() -> None:
        async with joined([node.url], "bob", draw=InOrder()) as bob:
            await bob.until(lambda bob: bob.texts == [b"first", b"heir"])
            assert bob.of(Lost) == [Lost(gone.message_id, "retired")]

    run(scenario())


def test_a_store_tells_why_it_lacks_a_message_only_if_its_id_verifies(node: RunningNode) -> None:
    bad, odd, stolen = made(b"bad"), made(b"odd"), replace(made(b"good"), content=b"bad")
    heir = made(b"heir", bad.message_id, odd.message_id, stolen.message_id)
    assert [node.publish(each).status_code for each in (bad, odd, stolen)] == [403, 403, 403]
    node.publish(heir)
    wanted = [each.message_id for each in (bad, odd, stolen)]
    asked = {"message_ids": wanted, "channel_id": "garden"}
    found = node.http.post("/v1/messages/lookup", json=asked).json()["missing"]
    assert [each.get("state") for each in found] == ["refused", "withheld", None]
    walked = node.http.get(f"/v1/messages/{heir.message_id}/ancestors").json()
    assert (walked["refused"], walked["withheld"]) == ([bad.message_id], [odd.message_id])
    gaps = node.http.get("/v1/channels/garden/gaps").json()["gaps"]
    states = {each["message_id"]: each["state"] for each in gaps}
    assert [states[each] for each in wanted] == ["refused", "withheld", "missing"]
    for message_id, code in zip(wanted, ("refused", "withheld", "not_found"), strict=True):
        answer = node.http.get(f"/v1/messages/{message_id}")
        assert (answer.status_code, answer.json()["code"]) == (404, code)
    other = node.http.post("/v1/messages/lookup", json={**asked, "channel_id": "elsewhere"})
    assert {each.get("state") for each in other.json()["missing"]} == {None}
    # Stored after all, it is simply there; dropped, it is refused.
    digest = entry_digest(odd).hex()
    assert node.http.delete(f"/v1/quarantine/{digest}").status_code == 204
    assert node.http.get(f"/v1/messages/{odd.message_id}").json()["code"] == "refused"


class _Readers(Authorizer):
    """Callers read the channels below "garden"."""

    def identify(self, client_host: str, headers: Any) -> Caller:  # noqa: ARG002
        scopes = frozenset({Scope.OPEN, Scope.READ, Scope.PUBLISH})
        channels = Interest.make(prefixes=frozenset({"garden"}))
        everything = Interest.make(everything=True)
        return Caller("reader", scopes, channels, publishable=everything)


def test_only_readers_of_a_channel_are_told_of_its_messages(tmp_path: Path) -> None:
    here, there = made(b"bad"), made(b"bad", channel_id="secret")
    with running_node(tmp_path, policy=POLICY, authorizer=_Readers()) as node:
        assert [node.publish(each).status_code for each in (here, there)] == [403, 403]
        codes = [
            node.http.get(f"/v1/messages/{each.message_id}").json()["code"]
            for each in (here, there)
        ]
        assert codes == ["refused", "not_found"]


def test_an_id_that_a_store_met_as_that_of_a_sync_message_is_not_waited_for(
    node: RunningNode,
) -> None:
    async def scenario() -> None:
        sync = Message("s1", "garden", "", 5)
        assert node.publish(sync, Dialect.V1).status_code == 202
        async with joined([node.url], "bob") as bob:
            named = Message("m1", "garden", "", 6, (HistoryEntry("s1"),), content=b"hello")
            node.publish(named, Dialect.V1)
            await bob.until(lambda bob: bob.texts == [b"hello"])
            assert bob.deliveries[0].after_gap == ()
            assert bob.channel.status.missing == bob.channel.status.lost == 0

    run(scenario())


# ---- sync messages of version 1


# ---- what cannot be stored now
