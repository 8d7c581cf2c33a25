"""POST /v1/recon over a real socket: the hand-shake, content in both directions, bounds, budgets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.access.callers import Scope
from app.access.tokens import TokenFile
from app.recon.index import VIEW_COST_MIN
from app.server.limits import DEFAULT_LIMITS
from recon.agreement import Interest, SessionHeader, interest_hash
from recon.elements import WHOLE
from recon.events import Need
from recon.fetch import FetchQueue, pack_fetch
from recon.index import RangeIndex
from recon.initiator import hello_request
from recon.limits import PROTOCOL_VERSION
from recon.marks import MARK_BYTES_MAX
from recon.view import View
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Message, entry_digest
from sdstore.wire import recon_pb2 as wire
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores

EVERYTHING = Interest.make(everything=True).encode()
NONCE = os.urandom(16)


def ask(node: RunningNode, request: wire.ReconRequest) -> wire.ReconResponse:
    answer = node.http.post("/v1/recon", content=request.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 200, answer.text
    return wire.ReconResponse.FromString(answer.content)


def hand_shake(node: RunningNode, interest: bytes = EVERYTHING) -> SessionHeader:
    response = ask(node, hello_request())
    assert response.status == wire.NONCE_EXPIRED
    return SessionHeader(NONCE, response.responder_nonce, interest)


def request_in(header: SessionHeader, **fields: object) -> wire.ReconRequest:
    session = wire.Session(
        initiator_nonce=header.initiator_nonce,
        responder_nonce=header.responder_nonce,
        interest_bytes=header.interest,
    )
    return wire.ReconRequest(version=PROTOCOL_VERSION, session=session, **fields)  # type: ignore[arg-type]


def empty_view(header: SessionHeader) -> View:
    return View(RangeIndex(), header.key())


def fetch_all(node: RunningNode, header: SessionHeader) -> list[wire.ReconResponse]:
    """Fetch everything the node has, as an initiator that has nothing would."""
    queue = FetchQueue(empty_view(header))
    queue.add(Need(WHOLE, None, 1_000))
    responses = []
    while batch := queue.next_batch(1_000):
        response = ask(node, request_in(header, fetch=pack_fetch(batch)))
        responses.append(response)
        orders, ids = columns(response)
        resume = response.resume if response.truncated else None
        assert queue.accept(batch, orders, ids, resume).all()
        queue.settle(batch, orders, ids, resume)
    return responses


def columns(response: wire.ReconResponse) -> tuple[np.ndarray, np.ndarray]:
    rows = sorted(elements(response))
    ids = np.frombuffer(b"".join(raw for _, raw in rows), dtype=np.uint8).reshape(-1, 32)
    return np.array([order for order, _ in rows], dtype=np.uint64), ids


def elements(response: wire.ReconResponse) -> Iterator[tuple[int, bytes]]:
    for item in response.items:
        if item.HasField("entry"):
            message, _ = decode(item.entry.frame)
            assert message.lamport_timestamp is not None
            yield message.lamport_timestamp + 2**63, entry_digest(message)


def message(number: int, content: bytes = b"hi") -> Message:
    return Message(f"m{number}", f"c{number % 3}", lamport_timestamp=number, content=content)


def digests(responses: list[wire.ReconResponse]) -> set[bytes]:
    return {raw for response in responses for _, raw in elements(response)}


@pytest.fixture
def node(tmp_path: Path, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path, database_url=stores.new_url()) as running:
        yield running


def test_first_contact_brings_the_nonce_of_the_pair_and_a_forged_one_is_refused(
    node: RunningNode,
) -> None:
    header = hand_shake(node)
    assert len(header.responder_nonce) == 16
    assert hand_shake(node).responder_nonce == header.responder_nonce
    forged = SessionHeader(NONCE, os.urandom(16), EVERYTHING)
    assert ask(node, request_in(forged)).status == wire.NONCE_EXPIRED
    named = request_in(header)
    named.session.interest_hash = interest_hash(EVERYTHING)
    assert ask(node, named).status == wire.OK  # the request before told the interest
    assert ask(node, request_in(header)).status == wire.OK
    for field in ("since", "up_to"):
        long = request_in(header, total=True, **{field: bytes(MARK_BYTES_MAX + 1)})
        answer = node.http.post("/v1/recon", content=long.SerializeToString(), headers=PROTOBUF)
        assert answer.json()["fault"] == "malformed"
        forged_mark = request_in(header, total=True, **{field: bytes(MARK_BYTES_MAX)})
        assert ask(node, forged_mark).status == wire.UNKNOWN_MARK


@pytest.mark.parametrize("scopes", [None, [Scope.SYNC], [Scope.SYNC, Scope.PUBLISH]])
def test_an_interest_comes_with_the_policy_that_answers_have_under_it(
    tmp_path: Path, scopes: list[Scope] | None
) -> None:
    headers = dict(PROTOBUF)
    if scopes is not None:
        _, secret = TokenFile(tmp_path / "tokens.json").create(scopes=scopes, channels=["a", "b"])
        headers["authorization"] = f"Bearer {secret}"
    with running_node(tmp_path) as node:

        def said(request: wire.ReconRequest) -> wire.ReconResponse:
            raw = request.SerializeToString()
            answer = node.http.post("/v1/recon", content=raw, headers=headers)
            return wire.ReconResponse.FromString(answer.content)

        def both() -> tuple[int, int]:
            hello = said(hello_request())
            at = node.http.get(
                "/v1/recon/interests", headers={**headers, "accept": PROTOBUF["content-type"]}
            )
            assert hello.interest == at.content
            policies = {hello.policy}
            for nonce, since, status in (
                (bytes(16), b"", wire.NONCE_EXPIRED),
                (hello.responder_nonce, b"no mark", wire.UNKNOWN_MARK),
            ):
                header = SessionHeader(NONCE, nonce, hello.interest)
                response = said(request_in(header, total=True, since=since))
                assert response.status == status
                policies.add(response.policy)
            header = SessionHeader(NONCE, hello.responder_nonce, hello.interest)
            unknown = request_in(header)
            unknown.session.interest_hash = bytes(16)
            response = said(unknown)
            assert response.status == wire.UNKNOWN_INTEREST
            policies.add(response.policy)
            response = said(request_in(header, total=True))
            assert response.status == wire.OK
            [policy] = policies
            return policy, response.policy

        policies = [both()]
        if scopes is None:
            for channels in (["a"], ["b"], ["a"]):
                node.http.put("/v1/recon/interests", json={"channels": channels}).raise_for_status()
                policies.append(both())
        assert all(of_interest == of_answer for of_interest, of_answer in policies)
        assert len(set(policies)) == (3 if scopes is None else 1)


def test_an_interest_is_known_by_its_hash_after_it_was_sent_once(node: RunningNode) -> None:
    header = hand_shake(node)
    by_hash = request_in(header)
    by_hash.session.interest_hash = interest_hash(EVERYTHING)
    assert ask(node, by_hash).status == wire.UNKNOWN_INTEREST
    assert ask(node, request_in(header)).status == wire.OK
    assert ask(node, by_hash).status == wire.OK
    other = Interest.make(channels=frozenset({"c1"})).encode()
    by_hash.session.interest_hash = interest_hash(other)
    assert ask(node, by_hash).status == wire.UNKNOWN_INTEREST
    in_full = SessionHeader(NONCE, header.responder_nonce, other)
    assert ask(node, request_in(in_full)).status == wire.OK
    assert ask(node, by_hash).status == wire.OK


def test_another_version_is_told_the_one_spoken(node: RunningNode) -> None:
    response = ask(node, wire.ReconRequest(version=99))
    assert (response.status, response.version) == (wire.UNSUPPORTED_VERSION, PROTOCOL_VERSION)


def test_everything_can_be_fetched_with_its_hints(node: RunningNode) -> None:
    messages = [message(n) for n in range(20)]
    for each in messages:
        node.http.post(
            "/v1/messages",
            content=encode(each),
            headers={**PROTOBUF, "retrieval-hint": each.message_id.encode().hex()},
        )
    (response,) = fetch_all(node, hand_shake(node))
    hints = {
        item.entry.frame: list(item.entry.hints) for item in response.items if item.entry.frame
    }
    assert hints == {encode(each): [each.message_id.encode()] for each in messages}


def test_an_interest_bounds_what_is_served(node: RunningNode) -> None:
    for n in range(9):
        node.publish(message(n))
    interest = Interest.make(channels=frozenset({"c1"}), lamport_from=2, lamport_to=7).encode()
    served = digests(fetch_all(node, hand_shake(node, interest)))
    assert served == {entry_digest(message(n)) for n in (4,)}


def test_a_small_reply_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, recon_reply_bytes_max=5_000)
    with running_node(tmp_path, limits) as node:
        sizes = [10, 2_000, 20_000, 3_000, 10, 10, 1_500]
        for n, size in enumerate(sizes):
            node.publish(message(n, bytes(size)))
        responses = fetch_all(node, hand_shake(node))
    assert len(responses) > 2
    assert all(r.ByteSize() < 5_500 or len(r.items) == 1 for r in responses)
    assert digests(responses) == {
        entry_digest(message(n, bytes(size))) for n, size in enumerate(sizes)
    }


def test_pushed_items_enter_by_the_door_and_have_outcomes_in_order(node: RunningNode) -> None:
    node.publish(message(1))
    here, fresh, absent = (entry_digest(message(n)) for n in (1, 2, 3))
    entry, claim = wire.Item.Entry, wire.Item.Claim
    push = [
        # Without its entry: that brings its claims itself.
        wire.Item(claim=claim(digest=fresh, hint=b"\x02")),
        wire.Item(entry=entry(frame=encode(message(1)))),
        wire.Item(entry=entry(frame=encode(message(2)), hints=[b"\x01"])),
        wire.Item(entry=entry(frame=b"\xff")),
        wire.Item(claim=claim(digest=absent, hint=b"\x03")),
        wire.Item(claim=claim(digest=here, hint=b"\x04")),
    ]
    response = ask(node, request_in(hand_shake(node), push=push))
    assert list(response.push_outcomes) == [
        wire.NO_ENTRY,
        wire.DUPLICATE,
        wire.STORED,
        wire.PUSH_REFUSED,
        wire.NO_ENTRY,
        wire.STORED,
    ]
    for hint, found in (("01", "m2"), ("04", "m1")):
        page = node.http.get(f"/v1/hints/{hint}").json()["messages"]
        assert [m["message"]["message_id"] for m in page] == [found]


@pytest.mark.parametrize(
    "change",
    [
        {"initiator_nonce": b"short"},
        {"interest_bytes": b"\xff"},
        {"interest_bytes": wire.Interest(channels=["b", "a"]).SerializeToString()},
    ],
)
def test_a_request_that_breaks_the_protocol_is_refused_with_its_fault(
    node: RunningNode, change: Mapping[str, bytes]
) -> None:
    request = request_in(hand_shake(node))
    for name, value in change.items():
        setattr(request.session, name, value)
    answer = node.http.post("/v1/recon", content=request.SerializeToString(), headers=PROTOBUF)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_recon_request")
    assert answer.json()["fault"]


@pytest.mark.parametrize("fresh_interests", [False, True])
def test_fresh_session_keys_or_interests_in_a_loop_are_stopped_by_the_budget(
    tmp_path: Path, fresh_interests: bool
) -> None:
    limits = replace(DEFAULT_LIMITS, recon_view_elements_per_minute=7 * VIEW_COST_MIN // 2)
    channels = [f"c{n}" for n in range(6)] if fresh_interests else []
    with running_node(tmp_path, limits) as node:
        for n in range(30):
            node.publish(message(n))
        header = hand_shake(node)
        codes = []
        for n in range(6):
            interest = EVERYTHING
            if channels:
                interest = Interest.make(channels=frozenset(channels[: n + 1])).encode()
            nonce = NONCE if fresh_interests else os.urandom(16)
            fresh = SessionHeader(nonce, header.responder_nonce, interest)
            fetch = pack_fetch([Need(WHOLE, None, 1)])  # without a question no view is built
            raw = request_in(fresh, fetch=fetch).SerializeToString()
            codes.append(node.http.post("/v1/recon", content=raw, headers=PROTOBUF))
        refused = codes[-1]
        assert [answer.status_code for answer in codes] == [200] * 4 + [429] * 2
        assert refused.json()["code"] == "recon_budget_spent"
        assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_more_pushed_items_than_any_batch_has_are_refused_unread(node: RunningNode) -> None:
    most = DEFAULT_LIMITS.recon_push_items_max
    header = hand_shake(node)
    push = [wire.Item()] * most
    assert len(ask(node, request_in(header, push=push)).push_outcomes) == most
    request = request_in(header, push=[*push, wire.Item()])
    answer = node.http.post("/v1/recon", content=request.SerializeToString(), headers=PROTOBUF)
    assert (answer.status_code, answer.json()["fault"]) == (400, "too_many_items")


def test_the_interest_of_a_node_is_served_in_both_forms(tmp_path: Path) -> None:
    with running_node(tmp_path, channels=["b", "a"], channel_prefixes=["x/"]) as node:
        json = node.http.get("/v1/recon/interests").json()
        raw = node.http.get(
            "/v1/recon/interests", headers={"accept": "application/x-protobuf"}
        ).content
    assert json["channels"] == ["a", "b"]
    assert json["prefixes"] == ["x/"]
    expected = Interest.make(channels=frozenset({"a", "b"}), prefixes=frozenset({"x/"}))
    assert raw == expected.encode()


def test_a_mark_shows_nobody_how_much_has_arrived(node: RunningNode) -> None:
    """A caller with a part of the channels would learn from it how much is in the others."""
    header = hand_shake(node)
    mark = ask(node, request_in(header, total=True, mark=True)).mark
    newest = int.from_bytes(mark[:6], "big"), int.from_bytes(mark[6:12], "big")
    assert min(newest) > 2**32
    for bit in range(8 * len(mark)):
        forged = bytearray(mark)
        forged[bit // 8] ^= 1 << bit % 8
        answer = ask(node, request_in(header, total=True, since=bytes(forged)))
        assert answer.status == wire.UNKNOWN_MARK
