"""No route shows, changes or names anything that the caller's grants do not cover.

Each route of the table has attempts: ways in which a caller limited to one channel could reach
another. A route without any fails the test, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from app.access.callers import EVERY_SCOPE, Caller, Scope
from app.server.limits import DEFAULT_LIMITS
from recon.agreement import Interest, SessionHeader, interest_hash
from recon.elements import WHOLE
from recon.events import Need
from recon.fetch import pack_fetch
from sdstore import mvds
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.store_pb2 import PublishBatch, PublishItem
from tests.app.http.test_recon import columns, hand_shake, request_in
from tests.support.routes import ROUTES, Route
from tests.support.server import PROTOBUF, RunningNode, running_node

MINE, THEIRS = "mine", "SECRET channel"
HINT = bytes(32)
SHARED_IN_THEIRS = Message("shared", THEIRS, lamport_timestamp=1, content=b"SECRET first")
ONLY_THEIRS = Message(
    "theirs", THEIRS, lamport_timestamp=2, content=b"SECRET", causal_history=(HistoryEntry("x"),)
)
SHARED_IN_MINE = Message("shared", MINE, lamport_timestamp=3, content=b"open")
LAST_IN_MINE = Message(
    "last", MINE, lamport_timestamp=4, content=b"last", causal_history=(HistoryEntry("shared"),)
)
SECRET_DIGESTS = [entry_digest(SHARED_IN_THEIRS), entry_digest(ONLY_THEIRS)]
BASE64 = re.compile(rb"[A-Za-z0-9_-]{16,}")
JSON = {"content-type": "application/json"}


class ByHeader:
    """The caller that a header names: all grants, one channel or prefix, all but one scope, none."""

    def identify(self, _client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        name, _, without = headers.get(b"x-caller", b"all").decode().partition(" without ")
        scopes = EVERY_SCOPE - {without} if without != "any" else frozenset[Scope]()
        channels = None
        if name == "limited":
            channels = Interest.make(channels=frozenset([MINE, "nothing here"]))
        if name == "limited by prefix to nothing":
            channels = Interest.make(prefixes=frozenset(["nothing here"]))
        if name == "limited by prefix":
            channels = Interest.make(prefixes=frozenset(["min", "nothing here", MINE[:2] + "X"]))
        return Caller(f"{name} {without}", frozenset(Scope(each) for each in scopes), channels)


@dataclass(frozen=True)
class Attempt:
    """A request of the limited caller; `asked` may stand in the answer, because it was said."""

    path: str
    status: int = 200
    body: bytes | Callable[[RunningNode, str], bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[bytes, ...] = ()
    shows: bytes = b""


def recon_body(**fields: Any) -> Callable[[RunningNode, str], bytes]:
    """A request of a session over everything."""

    def body(node: RunningNode, limited: str) -> bytes:
        header = limited_hand_shake(node, limited)
        return request_in(header, **fields).SerializeToString()

    return body


def limited_hand_shake(node: RunningNode, limited: str = "limited") -> SessionHeader:
    node.http.headers["x-caller"] = limited
    try:
        return hand_shake(node)
    finally:
        del node.http.headers["x-caller"]


FETCH_ALL = pack_fetch([Need(WHOLE, None, 1_000)])
PEER = "/v1/peers/0123456789abcdef"
ADMIN_ONLY = {
    "POST /v1/reload": [Attempt("/v1/reload", 403)],
    "PUT /v1/recon/interests": [Attempt("/v1/recon/interests", 403, b'{"all": true}', JSON)],
    "DELETE /v1/recon/interests": [Attempt("/v1/recon/interests", 403)],
    "GET /v1/peers": [Attempt("/v1/peers", 403)],
    "POST /v1/peers": [Attempt("/v1/peers", 403, b'{"url": "http://127.0.0.1:9"}', JSON)],
    "GET /v1/peers/{peer_id}": [Attempt(PEER, 403)],
    "DELETE /v1/peers/{peer_id}": [Attempt(PEER, 403)],
    "GET /v1/peers/{peer_id}/status": [Attempt(f"{PEER}/status", 403)],
    "POST /v1/peers/{peer_id}/sync": [Attempt(f"{PEER}/sync", 403)],
    "GET /v1/syncs": [Attempt("/v1/syncs", 403)],
    "POST /v1/syncs": [Attempt("/v1/syncs", 403, b'{"peer_url": "http://127.0.0.1:9"}', JSON)],
    "GET /v1/syncs/{sync_id}": [Attempt("/v1/syncs/1", 403)],
    "GET /v1/syncs/{sync_id}/events": [Attempt("/v1/syncs/1/events", 403)],
    "GET /v1/tokens": [Attempt("/v1/tokens", 403)],
    "POST /v1/tokens": [Attempt("/v1/tokens", 403, b'{"scopes": ["read"]}', JSON)],
    "GET /v1/retirements": [Attempt("/v1/retirements", 403)],
    "POST /v1/retirements": [Attempt("/v1/retirements", 403)],
    "GET /v1/retention": [Attempt("/v1/retention", 403)],
    "POST /v1/retention/dry-run": [Attempt("/v1/retention/dry-run", 403)],
    "GET /v1/quarantine": [Attempt("/v1/quarantine", 403)],
    "GET /v1/quarantine/{digest}": [Attempt("/v1/quarantine/00", 403)],
    "POST /v1/quarantine/{digest}/release": [Attempt("/v1/quarantine/00/release", 403)],
    "DELETE /v1/quarantine/{digest}": [Attempt("/v1/quarantine/00", 403)],
    "DELETE /v1/tokens/{token_id}": [Attempt("/v1/tokens/0123456789ab", 403)],
}


def mvds_into_theirs() -> bytes:
    frame = encode(Message("n", THEIRS, lamport_timestamp=9, content=b"x"))
    return mvds.encode(mvds.Payload(messages=(mvds.Message(MINE.encode(), 9, frame),)))


def relayed_into_theirs() -> bytes:
    frame = encode(Message("n", THEIRS, content=b"x"))
    return PublishBatch(items=[PublishItem(frame=frame)]).SerializeToString()


ATTEMPTS: dict[str, list[Attempt]] = ADMIN_ONLY | {
    "GET /v1/messages/{message_id}": [
        Attempt("/v1/messages/shared", shows=b'"variants":[]'),
        Attempt("/v1/messages/theirs", 404),
        Attempt(f"/v1/messages/shared?digest={SECRET_DIGESTS[0].hex()}", 404),
        Attempt("/v1/messages/shared", headers={"accept": "application/x-protobuf"}),
    ],
    "GET /v1/messages/{message_id}/ancestors": [
        Attempt("/v1/messages/theirs/ancestors", 404),
        Attempt("/v1/messages/shared/ancestors"),
        Attempt("/v1/messages/last/ancestors", shows=b'"message_id":"shared"'),
    ],
    "POST /v1/messages/ancestors": [
        Attempt(
            "/v1/messages/ancestors",
            403,
            b'{"channel_id": "SECRET channel", "heads": ["theirs"]}',
            JSON,
        )
    ],
    "GET /v1/entries/{digest}": [
        Attempt(f"/v1/entries/{digest.hex()}", 404) for digest in SECRET_DIGESTS
    ],
    "POST /v1/entries": [
        Attempt(
            "/v1/entries",
            body=b'{"digests": ["%s"]}' % SECRET_DIGESTS[0].hex().encode(),
            headers=JSON,
            asked=(SECRET_DIGESTS[0],),
            shows=b'"missing"',
        )
    ],
    "POST /v1/messages": [
        Attempt(
            "/v1/messages",
            403,
            encode(Message("n", THEIRS, lamport_timestamp=9, content=b"x")),
            PROTOBUF,
        )
    ],
    "POST /v1/messages/batch": [
        Attempt(
            "/v1/messages/batch",
            body=b'{"message": {"message_id": "n", "channel_id": "SECRET channel",'
            b' "lamport_timestamp": "9", "content": "eA=="}}',
            headers={"content-type": "application/x-ndjson"},
            shows=b'"outcome":"refused"',
        )
    ],
    "POST /v1/messages/lookup": [
        Attempt("/v1/messages/lookup", 403, b'{"message_ids": ["theirs"]}', JSON),
        Attempt(
            "/v1/messages/lookup",
            403,
            b'{"message_ids": ["theirs"], "channel_id": "SECRET channel"}',
            JSON,
        ),
        Attempt(
            "/v1/messages/lookup",
            body=b'{"retrieval_hints": ["%s"], "channel_id": "mine"}' % HINT.hex().encode(),
            headers=JSON,
            shows=b'"missing":[{"retrieval_hint"',
        ),
    ],
    "GET /v1/hints/{hint}": [Attempt(f"/v1/hints/{HINT.hex()}", shows=b'"messages":[]')],
    "GET /v1/channels": [
        Attempt("/v1/channels", shows=b'"channel_id":"mine"'),
        Attempt("/v1/channels?limit=1", shows=b'"channel_id":"mine"'),
        Attempt("/v1/channels?prefix=SECRET", shows=b'"channels":[]'),
    ],
    "GET /v1/channels/{channel_id}": [Attempt(f"/v1/channels/{quote(THEIRS)}", 403)],
    "GET /v1/channels/{channel_id}/messages": [
        Attempt(f"/v1/channels/{quote(THEIRS)}/messages", 403)
    ],
    "GET /v1/channels/{channel_id}/gaps": [Attempt(f"/v1/channels/{quote(THEIRS)}/gaps", 403)],
    "GET /v1/channels/{channel_id}/order": [
        Attempt(f"/v1/channels/{quote(THEIRS)}/order?indexer=a", 403),
        Attempt("/v1/channels/mine/order?include=messages", shows=b'"message_id":"last"'),
    ],
    "GET /v1/channels/{channel_id}/live": [
        Attempt(f"/v1/channels/{quote(THEIRS)}/live", 403),
        Attempt(f"/v1/channels/{quote(THEIRS)}/live?indexer=a", 403),
    ],
    "GET /v1/feed": [
        Attempt("/v1/feed", shows=b'"message_id":"last"'),
        Attempt("/v1/feed?limit=1", shows=b'"message_id":"shared","channel_id":"mine"'),
    ],
    "GET /v1/live": [],  # a stream: a test of its own below
    "POST /v1/live": [
        Attempt("/v1/live", 403, b'{"channels": ["mine", "SECRET channel"]}', JSON),
        Attempt("/v1/live", 403, b'{"prefixes": ["SECRET chan"]}', JSON),
        Attempt("/v1/live", 403, b'{"channels": ["mine"], "prefixes": [""]}', JSON),
    ],
    "GET /v1/relay": [],  # a stream: in tests/app/federation/test_relay.py
    "POST /v1/relay": [
        Attempt("/v1/relay", body=relayed_into_theirs(), headers=PROTOBUF, shows=b'"forbidden"'),
    ],
    "POST /v1/recon": [
        Attempt("/v1/recon", body=recon_body(fetch=FETCH_ALL), headers=PROTOBUF, shows=b"open"),
    ],
    "GET /v1/recon/interests": [Attempt("/v1/recon/interests", shows=b'"all":false')],
    "POST /v1/negentropy": [
        Attempt(
            f"/v1/negentropy?channel_id={quote(THEIRS)}",
            403,
            b"\x61\x00\x00\x00",
            {"content-type": "application/octet-stream"},
        )
    ],
    "POST /v1/mvds/{peer_id}": [
        Attempt(f"/v1/mvds/ada?channel_id=mine&channel_id={quote(THEIRS)}", 403, headers=PROTOBUF),
        Attempt(f"/v1/mvds/ada?channel_id={quote(THEIRS)}&channel_id=mine", 403, headers=PROTOBUF),
        Attempt("/v1/mvds/ada?channel_id=mine&mode=batch", headers=PROTOBUF, shows=b"open"),
        # A frame of another channel in a group that the caller may use is refused.
        Attempt("/v1/mvds/ada?channel_id=mine", body=mvds_into_theirs(), headers=PROTOBUF),
    ],
    "GET /v1/info": [Attempt("/v1/info")],
    "GET /livez": [Attempt("/livez")],
    "GET /readyz": [Attempt("/readyz")],
    "GET /metrics": [Attempt("/metrics", 403)],
    "GET /openapi.json": [Attempt("/openapi.json")],
    "GET /docs": [Attempt("/docs")],
    "GET /docs/{name}": [Attempt("/docs/start.js")],
}


def name_of(route: Route) -> str:
    return f"{route.method} {route.template}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node"), authorizer=ByHeader()) as running:
        hinted = {**PROTOBUF, "retrieval-hint": HINT.hex()}
        for message in (SHARED_IN_THEIRS, ONLY_THEIRS):
            published = running.http.post("/v1/messages", content=encode(message), headers=hinted)
            assert published.status_code == 201
        for message in (SHARED_IN_MINE, LAST_IN_MINE):
            assert running.publish(message).status_code == 201
        yield running


def shown(raw: bytes) -> bytes:
    """An answer with everything in it that is base64, as cursors and contents are, beside it."""
    decoded = []
    for found in BASE64.findall(raw):
        for cut in (found, found[: len(found) // 4 * 4]):
            try:
                decoded.append(urlsafe_b64decode(cut + b"=" * (-len(cut) % 4)))
            except ValueError:
                continue
    return raw + b"".join(decoded)


def assert_no_secret(raw: bytes, asked: tuple[bytes, ...] = ()) -> None:
    everything = shown(raw)
    assert b"SECRET" not in everything
    for digest in set(SECRET_DIGESTS) - set(asked):
        assert digest not in everything
        assert digest.hex().encode() not in everything


def count_of_theirs(node: RunningNode) -> int:
    count: int = node.http.get(f"/v1/channels/{quote(THEIRS)}").json()["count"]
    return count


@pytest.mark.parametrize("limited", ["limited", "limited by prefix"])
@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_no_route_leads_a_limited_caller_out_of_its_channels(
    node: RunningNode, route: Route, limited: str
) -> None:
    assert name_of(route) in ATTEMPTS, "say how a limited caller could leave its channels here"
    for attempt in ATTEMPTS[name_of(route)]:
        body = attempt.body(node, limited) if callable(attempt.body) else attempt.body
        headers = {**attempt.headers, "x-caller": limited}
        answer = node.http.request(route.method, attempt.path, content=body, headers=headers)
        assert (attempt.path, answer.status_code) == (attempt.path, attempt.status), answer.text
        raw_headers = b"\n".join(b"%s: %s" % pair for pair in answer.headers.raw)
        assert_no_secret(raw_headers + answer.content, attempt.asked)
        assert attempt.shows in answer.content
    assert count_of_theirs(node) == 2


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_every_route_demands_its_scope_and_the_channel_that_is_named(
    node: RunningNode, route: Route
) -> None:
    path = re.sub(r"\{\w+\}", "x", route.template)

    def status(caller: str, query: str = "") -> int:
        headers = {"x-caller": caller}
        return node.http.request(route.method, path + query, headers=headers).status_code

    named = f"?channel_id={quote(THEIRS)}"
    if "{channel_id}" in route.template:
        path, named = route.template.replace("{channel_id}", quote(THEIRS)), ""
    assert status("limited", named) == 403
    if route.scope is not Scope.OPEN:
        assert status("all without any") == 403
        assert status(f"all without {route.scope}") == 403


def pushed(node: RunningNode, caller: str, *items: wire.Item) -> list[int]:
    node.http.headers["x-caller"] = caller
    try:
        request = request_in(hand_shake(node), push=items)
        raw = node.http.post("/v1/recon", content=request.SerializeToString(), headers=PROTOBUF)
    finally:
        del node.http.headers["x-caller"]
    return list(wire.ReconResponse.FromString(raw.content).push_outcomes)


def entry_item(message: Message) -> wire.Item:
    return wire.Item(entry=wire.Item.Entry(frame=encode(message)))


def test_reconciliation_pushes_into_covered_channels_only(node: RunningNode) -> None:
    into_theirs = Message("pushed", THEIRS, lamport_timestamp=9, content=b"x")
    into_mine = Message("pushed", MINE, lamport_timestamp=9, content=b"x")
    claims = [
        wire.Item(claim=wire.Item.Claim(digest=digest, hint=b"pushed hint"))
        for digest in (SECRET_DIGESTS[0], entry_digest(SHARED_IN_MINE), bytes(32))
    ]
    items = [entry_item(into_theirs), entry_item(into_mine), *claims]
    outcomes = pushed(node, "limited", *items)
    # A claim on what the caller may not read is answered as one on what is not here.
    assert outcomes == [
        wire.PUSH_REFUSED,
        wire.STORED,
        wire.NO_ENTRY,
        wire.STORED,
        wire.NO_ENTRY,
    ]
    assert count_of_theirs(node) == 2
    hinted = node.http.get(f"/v1/hints/{b'pushed hint'.hex()}").json()["messages"]
    assert [each["message"]["channel_id"] for each in hinted] == [MINE]


def test_an_interest_that_another_caller_sent_is_not_remembered_for_a_limited_one(
    node: RunningNode,
) -> None:
    everything = Interest.make(everything=True).encode()
    header = hand_shake(node)
    request = request_in(header, fetch=FETCH_ALL)
    raw = node.http.post("/v1/recon", content=request.SerializeToString(), headers=PROTOBUF)
    assert len(columns(wire.ReconResponse.FromString(raw.content))[0]) >= 4
    limited = limited_hand_shake(node)
    by_hash = request_in(limited, fetch=FETCH_ALL)
    by_hash.session.interest_hash = interest_hash(everything)
    headers = {**PROTOBUF, "x-caller": "limited"}
    answer = node.http.post("/v1/recon", content=by_hash.SerializeToString(), headers=headers)
    assert_no_secret(answer.content)


def test_mvds_peers_of_two_callers_with_one_name_are_two_peers(node: RunningNode) -> None:
    def exchange(caller: str, **fields: tuple[bytes, ...]) -> mvds.Payload:
        answer = node.http.post(
            "/v1/mvds/same?channel_id=mine",
            content=mvds.encode(mvds.Payload(**fields)),
            headers={**PROTOBUF, "x-caller": caller},
        )
        return mvds.decode(answer.content)

    offers = exchange("all").offers
    assert offers
    assert exchange("limited", acks=offers).offers == offers
    assert exchange("all", requests=offers).messages


# ---- as if the store held nothing else


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningNode, RunningNode]]:
    """A node with one channel, and one that has many messages of others before, between and behind."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        running_node(folder / "alone", authorizer=ByHeader()) as alone,
        running_node(folder / "crowded", authorizer=ByHeader()) as crowded,
    ):
        for number in range(4):
            publish_hinted(alone, mine(number))
            for other in range(20):
                publish_hinted(crowded, theirs(20 * number + other))
            publish_hinted(crowded, mine(number))
        publish_hinted(crowded, theirs(1_000))
        yield alone, crowded


def mine(number: int) -> Message:
    named = (HistoryEntry("mine 0", HINT), HistoryEntry("mine 1", HINT))
    history = named if number == 3 else ()
    content = bytes([number]) * 300_000
    return Message(f"mine {number}", MINE, "", number, history, content=content)


def theirs(number: int) -> Message:
    history = (HistoryEntry(f"theirs {number // 2}", HINT),)
    size = 800_000 if number == 0 else 1
    return Message(f"theirs {number}", THEIRS, "", number, history, content=bytes(size))


def publish_hinted(node: RunningNode, message: Message) -> None:
    hinted = {**PROTOBUF, "retrieval-hint": HINT.hex()}
    has_hint = message.message_id != "mine 0"  # which only a history gives
    headers = hinted if has_hint else PROTOBUF
    assert node.http.post("/v1/messages", content=encode(message), headers=headers).is_success


def pages(node: RunningNode, path: str) -> list[tuple[list[str], bool]]:
    """The IDs of each page, and whether another one follows."""
    found, after = [], ""
    while len(found) < 100:
        answer = node.http.get(path + after, headers={"x-caller": "limited"}).json()
        ids = [each["message"]["message_id"] for each in answer["messages"]]
        found.append((ids, answer["next"] is not None))
        if answer["next"] is None or ("feed" in path and not ids):
            break
        after = f"&after={answer['next']}"
    return found


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("path", [f"/v1/hints/{HINT.hex()}", "/v1/feed"])
def test_a_limited_caller_gets_the_pages_of_a_store_with_its_channels_alone(
    pair: tuple[RunningNode, RunningNode], path: str, limit: int
) -> None:
    alone, crowded = (pages(node, f"{path}?limit={limit}") for node in pair)
    assert crowded == alone
    assert sorted(each for ids, _ in alone for each in ids) == [f"mine {n}" for n in range(4)]


def test_a_caller_without_channels_is_not_told_that_a_hint_or_a_feed_goes_on(
    pair: tuple[RunningNode, RunningNode],
) -> None:
    _, crowded = pair
    headers = {"x-caller": "limited by prefix to nothing"}
    hint = crowded.http.get(f"/v1/hints/{HINT.hex()}?limit=1", headers=headers).json()
    assert (hint["messages"], hint["next"]) == ([], None)
    feed = crowded.http.get("/v1/feed", headers=headers).json()
    again = crowded.http.get(f"/v1/feed?after={feed['next']}", headers=headers).json()
    assert (feed["messages"], again["messages"], again["next"]) == ([], [], feed["next"])


def test_no_cursor_shows_what_has_arrived(pair: tuple[RunningNode, RunningNode]) -> None:
    _, crowded = pair
    paths = (
        "/v1/feed?limit=1",
        f"/v1/hints/{HINT.hex()}?limit=1",
        "/v1/channels/mine/messages?limit=1",
        "/v1/channels/mine/messages?limit=1&order=arrival",
    )
    for path in paths:
        token = crowded.http.get(path, headers={"x-caller": "limited"}).json()["next"]
        assert not any(name in shown(token.encode()) for name in (b"arrival", b"hint", b"log")), (
            path
        )


def test_a_limited_caller_is_not_told_how_much_of_the_store_is_lost_or_checked(
    node: RunningNode,
) -> None:
    assert "content" in node.http.get("/v1/info").json()
    assert "content" not in node.http.get("/v1/info", headers={"x-caller": "limited"}).json()


def test_an_offer_is_answered_alike_whether_its_message_is_in_another_channel_or_nowhere(
    node: RunningNode,
) -> None:
    def exchange(caller: str, channel: str, **fields: tuple[Any, ...]) -> mvds.Payload:
        answer = node.http.post(
            f"/v1/mvds/offers?channel_id={quote(channel)}",
            content=mvds.encode(mvds.Payload(**fields)),
            headers={**PROTOBUF, "x-caller": caller},
        )
        return mvds.decode(answer.content)

    kept = Message("by mvds", THEIRS, lamport_timestamp=9, content=b"SECRET")
    message = mvds.Message(THEIRS.encode(), 9, encode(kept))
    assert exchange("all", THEIRS, messages=(message,)).acks == (message.message_id,)
    assert exchange("all", THEIRS, offers=(message.message_id,)).acks == (message.message_id,)
    answer = exchange("limited", MINE, offers=(message.message_id, bytes(32)))
    assert answer.acks == ()
    assert set(answer.requests) == {message.message_id, bytes(32)}


def test_a_caller_with_many_mvds_peers_displaces_its_own(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, mvds_peers_max=3)
    with running_node(tmp_path, limits, authorizer=ByHeader()) as node:
        node.publish(LAST_IN_MINE)

        def offers(caller: str, peer_id: str) -> int:
            headers = {**PROTOBUF, "x-caller": caller}
            answer = node.http.post(f"/v1/mvds/{peer_id}?channel_id=mine", headers=headers)
            return len(mvds.decode(answer.content).offers)

        assert offers("all", "ada") == 1
        for number in range(6):
            assert offers("limited", f"flood {number}") == 1
        assert offers("all", "ada") == 0, "known still"
        assert offers("limited", "flood 5") == 0, "the newest ones are known"
        assert offers("limited", "flood 0") == 1
