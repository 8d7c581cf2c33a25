"""In channels that demand bound senders, callers write only as senders that their token is bound to, on every route."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest

from app.access.callers import EVERY_SCOPE, Binding, Caller, Scope, SenderGrant
from app.access.tokens import HOLDS_AFTER_S, TokenFile
from app.ingest.policy import ACCEPT, Candidate, Verdict
from sdstore import mvds
from sdstore.sds.codec import encode, to_json
from sdstore.sds.model import Message, entry_digest
from sdstore.wire import recon_pb2 as recon_wire
from sdstore.wire import store_pb2 as wire
from tests.app.federation.test_relay import links_up
from tests.app.http.test_live import live
from tests.app.http.test_recon import hand_shake, request_in
from tests.support.server import PROTOBUF, RunningNode, running_node

ROOM, FREE = "/rooms/1", "/free/1"

BINDINGS: Mapping[str, tuple[SenderGrant, ...]] = {
    "unbound": (),
    "bound": (SenderGrant("ada", "*"),),
    "bound by prefix": (SenderGrant("ad*", "/rooms/*"),),
    "bound to any": (SenderGrant("*", ROOM),),
    "bound to another": (SenderGrant("bob", "*"), SenderGrant("ada!", "*"), SenderGrant("ad", "*")),
    "bound elsewhere": (SenderGrant("ada", "/rooms/2"), SenderGrant("ada", "/other/*")),
    "vouching": (),
}


class ByHeader:
    """The caller that a header names, bound as in the table, perhaps without one scope."""

    def identify(self, _host: str, headers: Mapping[bytes, bytes]) -> Caller:
        name, _, lacks = headers.get(b"x-caller", b"vouching").decode().partition(" without ")
        scopes = EVERY_SCOPE - ({Scope.READ, Scope.SYNC} if lacks else set())
        return Caller(name, scopes, senders=BINDINGS[name], vouches=name == "vouching")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("node")
    with running_node(folder, authorizer=ByHeader(), bound_senders=["/rooms/"]) as opened:
        yield opened


# ---- the ways in: each returns None for a message that was taken, or why not


Way = Callable[[RunningNode, Message, str], str | None]
REFUSED = "sender_not_yours"


def as_json(node: RunningNode, message: Message, caller: str) -> str | None:
    body = orjson.dumps({"message": to_json(message)})
    headers = {"content-type": "application/json", "x-caller": caller}
    return code_of(node.http.post("/v1/messages", content=body, headers=headers))


def as_frame(node: RunningNode, message: Message, caller: str) -> str | None:
    headers = {**PROTOBUF, "x-caller": caller}
    return code_of(node.http.post("/v1/messages", content=encode(message), headers=headers))


def in_a_batch(node: RunningNode, message: Message, caller: str) -> str | None:
    return of_batch(node, "/v1/messages/batch", message, caller)


def by_relay(node: RunningNode, message: Message, caller: str) -> str | None:
    return of_batch(node, "/v1/relay", message, caller)


def by_recon(node: RunningNode, message: Message, caller: str) -> str | None:
    item = recon_wire.Item(entry=recon_wire.Item.Entry(frame=encode(message)))
    node.http.headers["x-caller"] = caller
    try:
        body = request_in(hand_shake(node), push=[item]).SerializeToString()
        raw = node.http.post("/v1/recon", content=body, headers=PROTOBUF)
    finally:
        del node.http.headers["x-caller"]
    [outcome] = recon_wire.ReconResponse.FromString(raw.content).push_outcomes
    return REFUSED if outcome == recon_wire.PUSH_REFUSED else None


def by_mvds(node: RunningNode, message: Message, caller: str) -> str | None:
    carried = mvds.Message(message.channel_id.encode(), 1, encode(message))
    node.http.post(
        "/v1/mvds/someone",
        params={"channel_id": message.channel_id},
        content=mvds.encode(mvds.Payload(messages=(carried,))),
        headers={**PROTOBUF, "x-caller": caller},
    ).raise_for_status()
    return None if is_here(node, message) else REFUSED


def code_of(answer: Any) -> str | None:
    return None if answer.is_success else str(answer.json()["code"])


def of_batch(node: RunningNode, path: str, message: Message, caller: str) -> str | None:
    batch = wire.PublishBatch(items=[wire.PublishItem(frame=encode(message))])
    headers = {**PROTOBUF, "x-caller": caller}
    answer = node.http.post(path, content=batch.SerializeToString(), headers=headers)
    [outcome] = answer.json()["outcomes"]
    return str(outcome["problem"]["code"]) if "problem" in outcome else None


def is_here(node: RunningNode, message: Message) -> bool:
    return node.http.get(f"/v1/entries/{entry_digest(message).hex()}").status_code == 200


STORING: tuple[Way, ...] = (as_json, as_frame, in_a_batch, by_recon, by_mvds)
PASSING: tuple[Way, ...] = (as_json, as_frame, in_a_batch, by_relay)
KINDS: Mapping[str, tuple[dict[str, Any], tuple[Way, ...]]] = {
    "content": ({"lamport_timestamp": 1, "content": b"x"}, STORING),
    "sync": ({"lamport_timestamp": 1}, PASSING),
    "ephemeral": ({"content": b"x"}, PASSING),
}
WRITES = ("bound", "bound by prefix", "bound to any", "vouching")


@pytest.mark.parametrize("sender_id", ["ada", ""], ids=["ada", "no sender"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", BINDINGS)
def test_who_may_write_does_not_depend_on_the_way(
    node: RunningNode, caller: str, kind: str, sender_id: str
) -> None:
    fields, ways = KINDS[kind]
    allowed = WRITES if sender_id else ("bound to any", "vouching")
    for way in ways:
        for channel_id in (ROOM, FREE):
            name = f"{caller} {kind} {sender_id} {way.__name__} {channel_id}"
            message = Message(name, channel_id, sender_id, **fields)
            is_taken = channel_id == FREE or caller in allowed
            assert (name, way(node, message, caller)) == (name, None if is_taken else REFUSED)
            if kind == "content":
                assert is_here(node, message) is is_taken, name


@pytest.mark.parametrize("way", STORING)
def test_a_member_can_broadcast_the_message_of_another_again(node: RunningNode, way: Way) -> None:
    original = Message(f"again {way.__name__}", ROOM, "ada", 7, content=b"hello")
    as_frame(node, original, "bound")
    newer = replace(original, bloom_filter=b"\1" * 64)  # as members do: with their own filter
    assert way(node, newer, "bound to another") is None
    changed = replace(original, content=b"forged")
    assert way(node, changed, "bound to another") == REFUSED
    if way is not by_mvds:  # those need the right to read for themselves
        unreadable = way(node, newer, "unbound without read") if way is not by_recon else REFUSED
        assert unreadable == REFUSED


def test_a_batch_keeps_what_is_the_callers_own(node: RunningNode) -> None:
    senders = ["ada", "bob", "ada"]
    items = [
        wire.PublishItem(frame=encode(Message(f"mixed {n}", ROOM, each, 1, content=b"x")))
        for n, each in enumerate(senders)
    ]
    body = wire.PublishBatch(items=items).SerializeToString()
    headers = {**PROTOBUF, "x-caller": "bound"}
    outcomes = node.http.post("/v1/messages/batch", content=body, headers=headers).json()
    assert [each["outcome"] for each in outcomes["outcomes"]] == ["stored", "refused", "stored"]


# ---- tokens and peers


def token_of(folder: Path, **grants: Any) -> str:
    _, text = TokenFile(folder / "tokens.json").create(
        scopes=[Scope.READ, Scope.PUBLISH, Scope.SYNC], **grants
    )
    return text


def publish_as(node: RunningNode, token: str, message: Message) -> str | None:
    headers = {**PROTOBUF, "authorization": f"Bearer {token}"}
    return code_of(node.http.post("/v1/messages", content=encode(message), headers=headers))


def test_tokens_made_over_http_and_in_the_file_bind_and_vouch(tmp_path: Path) -> None:
    with running_node(tmp_path, bound_senders=["*"]) as node:
        body = {
            "scopes": ["publish"],
            "senders": [{"sender": "ada"}, {"sender": "bots/*", "channels": "/rooms/*"}],
        }
        made = node.http.post("/v1/tokens", json=body).json()
        assert made["senders"] == [
            {"sender": "ada", "channels": "*"},
            {"sender": "bots/*", "channels": "/rooms/*"},
        ]
        bridge = token_of(tmp_path, vouches=True)
        time.sleep(HOLDS_AFTER_S)
        content = {"lamport_timestamp": 1, "content": b"x"}
        for number, (token, channel_id, sender, code) in enumerate(
            [
                (made["token"], FREE, "ada", None),
                (made["token"], ROOM, "bots/7", None),
                (made["token"], FREE, "bots/7", REFUSED),
                (made["token"], ROOM, "adam", REFUSED),
                (bridge, ROOM, "anybody", None),
            ]
        ):
            message = Message(f"m{number}", channel_id, sender, **content)  # type: ignore[arg-type]
            assert publish_as(node, token, message) == code
        # A program on this machine has no credentials that could be bound; its operator vouches.
        plain = node.http.post(
            "/v1/messages",
            content=encode(Message("plain", ROOM, "ada", **content)),  # type: ignore[arg-type]
            headers=PROTOBUF,
        )
        assert code_of(plain) == REFUSED


def test_a_peer_offers_again_what_was_refused_once_its_token_vouches(tmp_path: Path) -> None:
    message = Message("m", ROOM, "ada", 1, content=b"x")
    with (
        running_node(tmp_path / "one", bound_senders=["*"]) as one,
        running_node(tmp_path / "two") as two,
    ):
        two.publish(message)
        peer = two.http.post(
            "/v1/peers", json={"url": one.url, "token": token_of(tmp_path / "one")}
        )
        peer_id = peer.json()["id"]
        report = synced(two, peer_id)
        assert (report["outcome"], is_here(one, message)) != ("failed", True)
        assert not is_here(one, message)
        assert two.http.get(f"/v1/peers/{peer_id}/status").json()["divergence"]["set_aside_there"]
        token = token_of(tmp_path / "one", vouches=True)
        time.sleep(HOLDS_AFTER_S)
        two.http.post("/v1/peers", json={"url": one.url, "token": token})
        synced(two, peer_id)
        assert is_here(one, message)


def test_a_node_vouches_for_what_it_fetches_from_its_peers(tmp_path: Path) -> None:
    message = Message("m", ROOM, "ada", 1, content=b"x")
    with (
        running_node(tmp_path / "one", bound_senders=["*"]) as one,
        running_node(tmp_path / "two") as two,
    ):
        two.publish(message)
        peer_id = one.http.post("/v1/peers", json={"url": two.url}).json()["id"]
        synced(one, peer_id)
        assert is_here(one, message)


def synced(node: RunningNode, peer_id: str) -> dict[str, Any]:
    """The report of a session of our own that has ended."""
    while True:
        started = node.http.post(f"/v1/peers/{peer_id}/sync", json={})
        if started.status_code != 409:
            break
        time.sleep(0.02)
    path = f"/v1/syncs/{started.json()['id']}"
    while (sync := node.http.get(path).json())["state"] != "finished":
        time.sleep(0.02)
    return dict(sync)


class Noting:
    """A policy that accepts everything, and notes what it was told of it."""

    revision = "1"
    seen: ClassVar[list[tuple[str, str, str, Binding]]] = []

    def __call__(self, candidate: Candidate) -> Verdict:
        self.seen.append(
            (candidate.message.message_id, candidate.way, candidate.caller, candidate.binding)
        )
        return ACCEPT


def test_the_policy_sees_who_brings_a_message_by_which_path_and_what_binds_it(
    tmp_path: Path,
) -> None:
    content = {"lamport_timestamp": 1, "content": b"x"}
    with running_node(
        tmp_path, authorizer=ByHeader(), policy=f"{__name__}:Noting", bound_senders=["/rooms/"]
    ) as node:
        ways = (as_frame, in_a_batch, by_recon, by_mvds)
        for number, way in enumerate(ways):
            message = Message(f"{number}", FREE, "ada", **content)  # type: ignore[arg-type]
            assert way(node, message, "bound") is None
        as_frame(node, Message("u", FREE, "ada", **content), "unbound")  # type: ignore[arg-type]
        as_frame(node, Message("v", ROOM, "ada", **content), "vouching")  # type: ignore[arg-type]
        as_frame(node, Message("no", ROOM, "ada", **content), "unbound")  # type: ignore[arg-type]
    assert Noting.seen == [
        ("0", "http", "bound", Binding.BOUND),
        ("1", "batch", "bound", Binding.BOUND),
        ("2", "recon", "bound", Binding.BOUND),
        ("3", "mvds", "bound", Binding.BOUND),
        ("u", "http", "unbound", Binding.UNBOUND),
        ("v", "http", "vouching", Binding.VOUCHED),
    ]


def test_a_node_vouches_for_what_a_peer_relays_to_it(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "two") as two,
        running_node(tmp_path / "one", bound_senders=["*"], peers=[two.url]) as one,
        live(one) as events,
    ):
        links_up(one, 1)
        two.publish(Message("typing", ROOM, "ada", content=b"..."))
        assert next(events).message_id == "typing"
