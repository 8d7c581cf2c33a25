"""The node as an MVDS peer, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from app.access.callers import Caller
from app.errors import Code, Problem
from app.mvds import MvdsCall
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from app.server.settings import Settings
from sdstore.client import AsyncStoreClient
from sdstore.client.exchange import MvdsMode
from sdstore.mvds import Acknowledged, Deliver, Payload
from sdstore.mvds import Message as MvdsMessage
from sdstore.mvds import decode as decode_payload
from sdstore.mvds import encode as encode_payload
from sdstore.participant import AsyncMvdsSession
from sdstore.participant.mvds import STORE, message_of
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, Message
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores

CHANNEL = "a/b c"


def content(number: int, channel_id: str = CHANNEL) -> Message:
    return Message(f"m{number}", channel_id, lamport_timestamp=number, content=b"c%d" % number)


def mvds(number: int, channel_id: str = CHANNEL, dialect: Dialect = Dialect.V2) -> MvdsMessage:
    return message_of(encode(content(number, channel_id), dialect))


def told(payload: Payload) -> str:
    """What a payload holds: "OFFER 2, MESSAGE 1"."""
    counts = {
        "ACK": payload.acks,
        "OFFER": payload.offers,
        "REQUEST": payload.requests,
        "MESSAGE": payload.messages,
    }
    return ", ".join(f"{name} {len(each)}" for name, each in counts.items() if each) or "nothing"


@dataclass
class Peer:
    """A peer without state: a test writes each payload by hand."""

    node: RunningNode
    name: str = "ada"
    channels: list[str] = field(default_factory=lambda: [CHANNEL])
    mode: str = "interactive"

    def post(self, raw: bytes = b"", **headers: str) -> Any:
        return self.node.http.post(
            f"/v1/mvds/{self.name}",
            params={"channel_id": self.channels, "mode": self.mode},
            content=raw,
            headers={**PROTOBUF, **headers},
        )

    def sends(self, **fields: Any) -> Payload:
        answer = self.post(encode_payload(Payload(**{k: tuple(v) for k, v in fields.items()})))
        assert answer.status_code == 200, answer.text
        return decode_payload(answer.content)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path) as running:
        yield running


def stored_count(node: RunningNode) -> int:
    return len(node.http.get("/v1/feed").json()["messages"])


# ---- the flows


def test_a_message_goes_to_the_node_in_interactive_mode_step_by_step(node: RunningNode) -> None:
    ada, message = Peer(node), mvds(1)
    assert ada.sends(offers=[message.message_id]) == Payload(requests=(message.message_id,))
    assert stored_count(node) == 0
    assert ada.sends(messages=[message]) == Payload(acks=(message.message_id,))
    assert node.http.get("/v1/messages?message_id=m1").status_code == 200
    assert told(ada.sends()) == "nothing"


def test_a_message_goes_to_the_node_in_batch_mode_in_one_exchange(node: RunningNode) -> None:
    ada, message = Peer(node, mode="batch"), mvds(1)
    assert ada.sends(messages=[message]) == Payload(acks=(message.message_id,))
    assert told(ada.sends()) == "nothing"


def test_a_message_comes_from_the_node_in_interactive_mode_step_by_step(node: RunningNode) -> None:
    ada, message = Peer(node), mvds(1)
    node.publish(content(1))
    assert ada.sends() == Payload(offers=(message.message_id,))
    assert ada.sends(requests=[message.message_id]) == Payload(messages=(message,))
    assert told(ada.sends(acks=[message.message_id])) == "nothing"
    assert [told(ada.sends()) for _ in range(5)] == ["nothing"] * 5


def test_a_message_comes_from_the_node_in_batch_mode_until_it_is_acknowledged(
    node: RunningNode,
) -> None:
    ada, message = Peer(node, mode="batch"), mvds(1)
    node.publish(content(1))
    flow = [told(ada.sends()) for _ in range(7)]
    # Every third epoch: `MvdsOptions.retry_epochs_first`.
    assert flow == ["MESSAGE 1", "nothing", "nothing"] * 2 + ["MESSAGE 1"]
    assert told(ada.sends(acks=[message.message_id])) == "nothing"
    assert [told(ada.sends()) for _ in range(5)] == ["nothing"] * 5


def test_peers_hear_of_each_others_messages_through_the_node(node: RunningNode) -> None:
    ada, bob, message = Peer(node, mode="batch"), Peer(node, "bob", mode="batch"), mvds(1)
    assert told(bob.sends()) == "nothing"
    assert ada.sends(messages=[message]) == Payload(acks=(message.message_id,))
    assert bob.sends() == Payload(messages=(message,))
    assert told(ada.sends()) == "nothing", "what a peer sent is not sent back to it"


# ---- frames


def test_an_offer_of_a_message_that_the_node_has_is_acknowledged(node: RunningNode) -> None:
    ada, bob, message = Peer(node), Peer(node, "bob"), mvds(1)
    ada.sends(messages=[message])
    assert bob.sends(offers=[message.message_id]).acks == (message.message_id,)


def test_refused_frames_are_acknowledged_counted_and_not_kept(node: RunningNode) -> None:
    ada = Peer(node)
    group = CHANNEL.encode()
    no_frame = MvdsMessage(group, 1, b"\xff\xff")
    other_channel = replace(mvds(2, "another"), group_id=group)
    assert set(ada.sends(messages=[no_frame, other_channel]).acks) == {
        no_frame.message_id,
        other_channel.message_id,
    }
    assert stored_count(node) == 0
    metrics = node.http.get("/metrics").text
    assert 'sdstore_mvds_messages_total{outcome="refused"} 2.0' in metrics


# ---- state


@pytest.mark.parametrize("offered_at", ["before", "after"])
def test_state_survives_a_restart(tmp_path: Path, stores: Stores, offered_at: str) -> None:
    url = stores.new_url()
    message = mvds(1)
    with running_node(tmp_path, database_url=url) as node:
        node.publish(content(1))
        assert told(Peer(node).sends()) == "OFFER 1"
        if offered_at == "before":
            assert told(Peer(node).sends(requests=[message.message_id])) == "MESSAGE 1"
    with running_node(tmp_path, database_url=url) as node:
        ada = Peer(node)
        if offered_at == "after":
            assert ada.sends(requests=[message.message_id]) == Payload(messages=(message,))
        # Sent in the epoch before: due again in the third one after it.
        assert [told(ada.sends()) for _ in range(3)] == ["nothing", "nothing", "MESSAGE 1"]
        assert told(ada.sends(acks=[message.message_id])) == "nothing"
    with running_node(tmp_path, database_url=url) as node:
        assert [told(Peer(node).sends()) for _ in range(4)] == ["nothing"] * 4


@pytest.mark.anyio
async def test_nothing_is_acknowledged_if_the_node_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = mvds(1)
    asked = MvdsCall(
        caller=Caller("local"),
        peer_id="ada",
        channel_ids=[CHANNEL],
        payload=encode_payload(Payload(messages=(message,))),
        interactive=True,
    )

    async def fail(*_: object, **__: object) -> None:
        raise Problem(Code.DISK_FULL, "full")

    async with Node.open(Settings(data_dir=tmp_path)) as node:
        with monkeypatch.context() as patched:
            patched.setattr(node.ingest.committer, "submit", fail)
            with pytest.raises(Problem) as failed:
                await node.mvds.exchange(asked)
        assert failed.value.code is Code.DISK_FULL
        assert await node.mvds.exchange(replace(asked, payload=b"")) == b""
        assert decode_payload(await node.mvds.exchange(asked)).acks == (message.message_id,)


@pytest.mark.anyio
async def test_of_two_exchanges_at_once_one_is_written(tmp_path: Path) -> None:
    asked = MvdsCall(
        caller=Caller("local"), peer_id="ada", channel_ids=[CHANNEL], payload=b"", interactive=True
    )
    async with Node.open(Settings(data_dir=tmp_path)) as node:
        state = await node.store.mvds.read("local", "ada")
        await node.mvds.exchange(asked)
        with pytest.raises(Problem) as failed:
            await node.ingest.committer.call(lambda: node.store.mvds.write(state, {}, {}))
        assert failed.value.code is Code.SYNC_BUSY


# ---- bounds


def test_a_peer_that_was_away_gets_the_window_and_no_more(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, mvds_records_per_peer_max=10)
    with running_node(tmp_path, limits) as node:
        for number in range(1, 31):
            node.publish(content(number))
        ada = Peer(node)
        offers = ada.sends().offers
        assert offers == tuple(mvds(number).message_id for number in range(21, 31))
        node.publish(content(31))
        assert told(ada.sends()) == "nothing", "the peer has all the records that it may have"
        assert ada.sends(acks=offers).offers == (mvds(31).message_id,)


def test_the_peer_that_was_silent_for_longest_makes_room_for_a_new_one(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, mvds_peers_max=2)
    with running_node(tmp_path, limits) as node:
        node.publish(content(1))
        ada, bob, eve = (Peer(node, name) for name in ("ada", "bob", "eve"))
        assert [told(each.sends()) for each in (ada, bob, ada, eve)] == [
            "OFFER 1",
            "OFFER 1",
            "nothing",
            "OFFER 1",
        ]
        assert told(ada.sends()) == "nothing", "known still"
        assert told(bob.sends()) == "OFFER 1", "forgotten, so it begins again"


@pytest.mark.parametrize(
    ("name", "channels", "raw", "headers", "status", "code"),
    [
        ("ada", [CHANNEL], b"\xff\xff", {}, 400, "invalid_body"),
        ("ada", [CHANNEL], b"\x00" * (4 * 1024 * 1024 + 1), {}, 413, "body_too_large"),
        ("ada", [CHANNEL], b"\x0a\x00" * 50_001, {}, 413, "too_many_items"),
        ("ada", [str(n) for n in range(101)], b"", {}, 413, "too_many_items"),
        ("ada", [], b"", {}, 400, "invalid_parameter"),
        ("a" * 257, [CHANNEL], b"", {}, 400, "invalid_parameter"),
        ("ada", [CHANNEL], b"\x0a\x00", {"content-type": "text/x"}, 415, "unsupported_media_type"),
    ],
    ids=str,
)
def test_what_is_beyond_the_bounds_is_refused(
    shared: RunningNode,
    name: str,
    channels: list[str],
    raw: bytes,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    answer = Peer(shared, name, channels).post(raw, **headers)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


# ---- the participant


class Kept(dict[bytes, MvdsMessage]):
    """What a participant keeps."""

    def find(self, message_id: bytes) -> MvdsMessage | None:
        return self.get(message_id)

    def is_known(self, message_id: bytes) -> bool:
        return message_id in self


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["interactive", "batch"])
async def test_an_asyncio_session_carries_messages_to_the_node_and_back(
    node: RunningNode, mode: MvdsMode
) -> None:
    async with AsyncStoreClient(node.url) as client:
        ours, theirs = Kept(), Kept()
        ada = AsyncMvdsSession(client, "ada", [CHANNEL], ours, mode=mode)
        bob = AsyncMvdsSession(client, "bob", [CHANNEL], theirs, mode=mode)
        message = mvds(1)
        ours[message.message_id] = message
        ada.node.send(message)
        effects = [each for _ in range(3) for each in await ada.exchange()]
        assert Acknowledged(STORE, message.message_id) in effects
        for effect in [each for _ in range(3) for each in await bob.exchange()]:
            if isinstance(effect, Deliver):
                theirs[effect.message.message_id] = effect.message
                bob.node.processed(effect.message.message_id)
        assert theirs == ours
