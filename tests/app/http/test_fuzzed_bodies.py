"""Routes that change something survive any body: a documented refusal or a success, and they go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from urllib.parse import quote

import httpx
import pytest

from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from sdstore.wire.store_pb2 import PublishBatch, PublishItem
from tests.support.server import PROTOBUF, RunningNode, running_node

WINDOW_S = 1.0
REQUESTS_MIN = 100
"""On a busy machine: among so many is each kind of answer."""
PATIENT = replace(DEFAULT_LIMITS, policy_call_s_max=30)  # on a busy machine
BODY_BYTES_MAX = 5_000
ODD = b"odd: the policy quarantines it"
JSON = {"content-type": "application/json"}
DEEP = b"[" * 2_000
NO_ITEMS = b"\x78\x01"  # one unknown field of protobuf
HARD = (
    b"",
    NO_ITEMS,
    b"\x00",
    b"null",
    b"{}",
    b"[]",
    b'"\\ud800"',
    b"1e999",
    b"NaN",
    b"\xff\xfe",
    DEEP,
)

RELAYED = PublishBatch(
    items=[
        PublishItem(frame=encode(Message("e", "c", content=b"passed on")), via=bytes(8)),
        PublishItem(
            frame=encode(
                Message("s", "c", lamport_timestamp=7, causal_history=(HistoryEntry("m"),))
            )
        ),
    ]
).SerializeToString()
INTERESTS = (
    b'{"all": true, "lamport_from": -5, "lamport_to": "9223372036854775807"}',
    b'{"channels": ["c", "\\u00e9"], "prefixes": ["/a/"], "lamport_from": "3", "lamport_to": null}',
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with pytest.MonkeyPatch.context() as patched:
        # These settings come from no file: a reload finds them again.
        patched.setattr(Settings, "read_again", lambda self: self.model_copy(deep=True))
        folder = tmp_path_factory.mktemp("node")
        with running_node(folder, PATIENT, policy="tests.app.test_policy:Words") as running:
            yield running


@pytest.fixture
def random() -> Random:
    """Seeded; pytest shows the seed if the test fails. `FUZZ_SEED` sets it."""
    seed = int(os.environ.get("FUZZ_SEED", time.time_ns()))
    print(f"FUZZ_SEED={seed}")
    return Random(seed)


def mutated(random: Random, valid: bytes) -> bytes:
    """Any bytes, a valid body, or one with pieces cut, doubled, replaced or put in."""
    kind = random.randrange(8)
    if kind == 0:
        return random.randbytes(random.randrange(200))
    if kind == 1:
        return random.choice(HARD)
    raw = bytearray(valid)
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        start = random.randrange(len(raw) + 1)
        end = min(len(raw), start + random.choice((0, 1, 1, 4, 40)))
        piece = random.choice(
            (b"", random.randbytes(1), random.choice(HARD), bytes(raw[start:end]) * 2)
        )
        raw[start:end] = piece
    return bytes(raw[:BODY_BYTES_MAX])


def assert_documented(answer: httpx.Response) -> None:
    """A success, or a problem document with a code and the status of that code."""
    if answer.status_code >= 400:
        code = answer.json()["code"]
        assert code in set(Code)
        assert answer.status_code == Problem(Code(code), "").status < 500, answer.text


def attack(node: RunningNode, random: Random, send: Callable[[], httpx.Response]) -> set[int]:
    """Send for a second; the statuses that came. Then the node serves as before."""
    statuses = set()
    ends_s, count = time.monotonic() + WINDOW_S, 0
    while time.monotonic() < ends_s or count < REQUESTS_MIN:
        count += 1
        answer = send()
        assert_documented(answer)
        statuses.add(answer.status_code)
    kept = Message(f"after {random.random()}", "c", lamport_timestamp=1, content=b"good")
    assert node.publish(kept).status_code == 201
    assert node.http.get(f"/v1/messages/{quote(kept.message_id)}").status_code == 200
    return statuses


def test_any_relayed_batch_is_answered(node: RunningNode, random: Random) -> None:
    def send() -> httpx.Response:
        headers = random.choice((PROTOBUF, PROTOBUF, PROTOBUF, JSON, {}))
        body = mutated(random, RELAYED)
        return node.http.post("/v1/relay", content=body, headers=headers)

    assert {200, 400} <= attack(node, random, send)


def test_any_interest_is_answered(node: RunningNode, random: Random) -> None:
    def send() -> httpx.Response:
        body = mutated(random, random.choice(INTERESTS))
        return node.http.put("/v1/recon/interests", content=body, headers=JSON)

    assert {200, 400} <= attack(node, random, send)
    assert node.http.delete("/v1/recon/interests").status_code == 200


def test_a_reload_with_any_body_is_answered(node: RunningNode, random: Random) -> None:
    def send() -> httpx.Response:
        return node.http.post("/v1/reload", content=mutated(random, b"{}"), headers=JSON)

    assert 200 in attack(node, random, send)


@pytest.mark.parametrize(("method", "action"), [("POST", "/release"), ("DELETE", "")])
def test_any_request_to_release_or_drop_is_answered(
    node: RunningNode, random: Random, method: str, action: str
) -> None:
    count = 0

    def send() -> httpx.Response:
        nonlocal count
        count += 1
        message = Message(f"{action} {count}", "c", lamport_timestamp=count, content=ODD)
        held = node.publish(message)
        assert (held.status_code, held.json()["code"]) == (403, "quarantined")
        (document,) = node.http.get("/v1/quarantine?limit=1").json()["messages"]
        digest = document["digest"].encode()
        if random.randrange(3):
            digest = mutated(random, digest)
        path = f"/v1/quarantine/{quote(digest[:500], safe='')}{action}"
        return node.http.request(method, path, content=mutated(random, b"{}"), headers=JSON)

    assert 400 in attack(node, random, send)
