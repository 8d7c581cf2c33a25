"""Against implementations that others wrote, both ways; what they say is said byte for byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from recon.negentropy import Negentropy
from tests.support.negentropy import (
    Record,
    assert_learned,
    records_of,
    talk,
    two_sets,
)
from tests.support.node import NodeProcess, node_process, node_project

CLIENTS = ("nostr-tools", "welshman")
SERVER = "welshman"
FRAME_LIMITS_BYTES = ((0, 4096), (4096, 0), (4096, 4096), (60_000, 60_000))

SMALL_COUNTS = (0, 1, 31, 32, 33, 600, 700)
"""Around the place where lists turn into splits, and splits of splits."""

LARGE_COUNTS = (500, 2500)
"""Enough for several frames, of lists or of fingerprints."""

SMALL_SETS = 700
LARGE_SETS = 25
SLOW_FACTOR = 12


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with node_process(node_project(Path(__file__).parent / "peer") / "peer.mjs") as process:
        yield process


@dataclass
class Other:
    """Another project's implementation as client or server."""

    node: NodeProcess
    name: str
    records: list[Record]
    limit_bytes: int = 0

    def __post_init__(self) -> None:
        items = [(timestamp, found.hex()) for timestamp, found in self.records]
        self.node.call(op="open", peer=self.name, limit=self.limit_bytes, items=items)

    def initiate(self) -> bytes:
        return bytes.fromhex(self.node.call(op="initiate")["message"])

    def reconcile(self, message: bytes) -> tuple[bytes | None, list[bytes], list[bytes]]:
        step = self.node.call(op="answer", message=message.hex())
        following = None if step["message"] is None else bytes.fromhex(step["message"])
        return following, _ids(step["have"]), _ids(step["need"])

    def respond(self, message: bytes) -> bytes:
        return bytes.fromhex(self.node.call(op="answer", message=message.hex())["message"])


def _ids(texts: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


@dataclass
class ClientTwins:
    """Two clients over one set that must say the same."""

    one: Negentropy
    other: Other

    def initiate(self) -> bytes:
        message = self.one.initiate()
        assert message == self.other.initiate()
        return message

    def reconcile(self, message: bytes) -> tuple[bytes | None, list[bytes], list[bytes]]:
        following, have_ids, need_ids = self.one.reconcile(message)
        same, other_have_ids, other_need_ids = self.other.reconcile(message)
        assert (following, have_ids) == (same, other_have_ids)
        assert sorted(need_ids) == sorted(other_need_ids)
        return following, have_ids, need_ids


@dataclass
class ServerTwins:
    """Two servers over one set that must say the same."""

    one: Negentropy
    other: Other

    def respond(self, message: bytes) -> bytes:
        answer = self.one.respond(message)
        assert answer == self.other.respond(message)
        return answer


def check_client_says_the_same(node: NodeProcess, name: str, seed: int) -> None:
    client, server = two_sets(Random(seed), SMALL_COUNTS)
    twins = ClientTwins(Negentropy(records_of(client)), Other(node, name, client))
    assert_learned(talk(twins, Negentropy(records_of(server))), client, server)


def check_server_says_the_same(node: NodeProcess, seed: int) -> None:
    client, server = two_sets(Random(seed), SMALL_COUNTS)
    twins = ServerTwins(Negentropy(records_of(server)), Other(node, SERVER, server))
    assert_learned(talk(Negentropy(records_of(client)), twins), client, server)


def check_their_client(
    node: NodeProcess, name: str, limits_bytes: tuple[int, int], seed: int
) -> None:
    client, server = two_sets(Random(seed), LARGE_COUNTS)
    near = Other(node, name, client, limits_bytes[0])
    far = Negentropy(records_of(server), limits_bytes[1])
    assert_learned(talk(near, far, *limits_bytes), client, server)


def check_their_server(node: NodeProcess, limits_bytes: tuple[int, int], seed: int) -> None:
    client, server = two_sets(Random(seed), LARGE_COUNTS)
    near = Negentropy(records_of(client), limits_bytes[0])
    far = Other(node, SERVER, server, limits_bytes[1])
    assert_learned(talk(near, far, *limits_bytes), client, server)


@pytest.mark.parametrize("name", CLIENTS)
def test_our_client_sends_the_bytes_that_other_clients_send(node: NodeProcess, name: str) -> None:
    for seed in range(SMALL_SETS):
        check_client_says_the_same(node, name, seed)


def test_our_server_answers_the_bytes_that_another_server_answers(node: NodeProcess) -> None:
    for seed in range(SMALL_SETS):
        check_server_says_the_same(node, seed)


@pytest.mark.parametrize("limits_bytes", FRAME_LIMITS_BYTES)
@pytest.mark.parametrize("name", CLIENTS)
def test_other_clients_learn_both_differences_from_our_server_in_frames(
    node: NodeProcess, name: str, limits_bytes: tuple[int, int]
) -> None:
    for seed in range(LARGE_SETS):
        check_their_client(node, name, limits_bytes, seed)


@pytest.mark.parametrize("limits_bytes", FRAME_LIMITS_BYTES)
def test_our_client_learns_both_differences_from_another_server_in_frames(
    node: NodeProcess, limits_bytes: tuple[int, int]
) -> None:
    for seed in range(LARGE_SETS):
        check_their_server(node, limits_bytes, seed)


@pytest.mark.slow
def test_thousands_of_sets_make_every_server_answer_the_same_bytes(node: NodeProcess) -> None:
    for seed in range(SMALL_SETS, SMALL_SETS * SLOW_FACTOR):
        check_server_says_the_same(node, seed)
