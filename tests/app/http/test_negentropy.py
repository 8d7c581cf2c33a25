"""POST /v1/negentropy: a client of the published protocol finds what it has and what it needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from recon.negentropy import Negentropy, Records
from sdstore.sds.codec import encode
from sdstore.sds.model import Message, entry_digest
from tests.support.server import RunningNode, running_node
from tests.support.stores import Stores

OCTETS = {"content-type": "application/octet-stream"}
SKIP = bytes.fromhex("010000")
HERE = [Message(f"m{n}", "n/c", lamport_timestamp=n - 5, content=b"hi") for n in range(150)]
ONLY_THERE = [Message(f"x{n}", "n/c", lamport_timestamp=n * 7, content=b"x") for n in range(20)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node"), database_url=stores.new_url()) as running:
        for message in HERE:
            running.publish(message)
        running.publish(Message("elsewhere", "other", lamport_timestamp=3, content=b"hi"))
        frame_hint = {"content-type": "application/x-protobuf", "retrieval-hint": "abcd"}
        running.http.post("/v1/messages", content=encode(HERE[0]), headers=frame_hint)
        yield running


def records(messages: list[Message]) -> Records:
    lamports = np.array([m.lamport_timestamp for m in messages], dtype=np.int64)
    ids = np.frombuffer(b"".join(map(entry_digest, messages)), dtype=np.uint8).reshape(-1, 32)
    return Records.from_lamports(lamports, ids)


def reconcile(
    node: RunningNode, messages: list[Message], query: dict[str, str]
) -> tuple[set[bytes], set[bytes]]:
    client = Negentropy(records(messages), frame_limit_bytes=60_000)
    have: set[bytes] = set()
    need: set[bytes] = set()
    message: bytes | None = client.initiate()
    while message is not None:
        answer = node.http.post("/v1/negentropy", params=query, content=message, headers=OCTETS)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/octet-stream"
        message, have_ids, need_ids = client.reconcile(answer.content)
        have |= set(have_ids)
        need |= set(need_ids)
    return have, need


def test_a_client_learns_what_it_has_and_what_it_needs(node: RunningNode) -> None:
    have, need = reconcile(node, HERE[40:] + ONLY_THERE, {"channel_id": "n/c"})
    assert have == set(map(entry_digest, ONLY_THERE))
    assert need == set(map(entry_digest, HERE[:40]))


def test_an_unknown_channel_is_empty(node: RunningNode) -> None:
    have, need = reconcile(node, ONLY_THERE, {"channel_id": "nobody"})
    assert (have, need) == (set(map(entry_digest, ONLY_THERE)), set())


@pytest.mark.parametrize(
    ("query", "body", "code"),
    [
        ("", b"\x61", "invalid_parameter"),
        ("?channel_id=c&from_lamport=x", b"\x61", "invalid_parameter"),
        ("?channel_id=c&from_lamport=9223372036854775808", b"\x61", "invalid_parameter"),
        ("?channel_id=c", b"", "empty_body"),
        ("?channel_id=c", b"\x61\xff", "invalid_negentropy_message"),
        ("?channel_id=c", b"\x61" + SKIP * 131_073, "invalid_negentropy_message"),
        ("?channel_id=c", bytes(2_000_000), "body_too_large"),
    ],
)
def test_wrong_requests_have_their_codes(
    node: RunningNode, query: str, body: bytes, code: str
) -> None:
    answer = node.http.post(f"/v1/negentropy{query}", content=body, headers=OCTETS)
    assert answer.json()["code"] == code
