"""Sets that are hard on negentropy, and conversations over them."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from recon.negentropy import Records

Record = tuple[int, bytes]

TIMESTAMP_SPREADS = (1, 3, 100, 2**16, 2**31 - 2)
"""From one tie of everything to the widest that 32-bit implementations read."""

ROUNDS_MAX = 2000


@dataclass
class Outcome:
    """A client's results, and their cost."""

    have_ids: set[bytes]
    need_ids: set[bytes]
    rounds: int
    bytes_up: int
    bytes_down: int


def records_of(chosen: list[Record]) -> Records:
    """Columns of (timestamp, ID) pairs."""
    timestamps = np.array([timestamp for timestamp, _ in chosen], dtype=np.uint64)
    ids = np.frombuffer(b"".join(found for _, found in chosen), dtype=np.uint8)
    return Records(timestamps, ids.reshape(-1, 32))


def two_sets(random: Random, counts: tuple[int, ...]) -> tuple[list[Record], list[Record]]:
    """Two overlapping sets in random order; now and then one is empty, or both are equal."""
    spread = random.choice(TIMESTAMP_SPREADS)
    make_id = random.choice((_any_id, _alike_id, _zero_tailed_id))
    ids = {make_id(random) for _ in range(random.choice(counts))}
    records = [(random.randrange(spread), found) for found in sorted(ids)]
    random.shuffle(records)
    only_client, only_server = random.choice(
        ((0.0, 0.0), (0.01, 0.01), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.3, 0.0), (0.0, 0.3))
    )
    client, server = [], []
    for record in records:
        draw = random.random()
        if draw >= only_server:
            client.append(record)
        if draw < 1.0 - only_client:
            server.append(record)
    return client, server


class Client(Protocol):
    """The client's interface of `Negentropy`, for any implementation."""

    def initiate(self) -> bytes: ...

    def reconcile(self, message: bytes) -> tuple[bytes | None, list[bytes], list[bytes]]: ...


class Server(Protocol):
    """The server's interface of `Negentropy`, for any implementation."""

    def respond(self, message: bytes) -> bytes: ...


def talk(
    client: Client,
    server: Server,
    client_limit_bytes: int = 0,
    server_limit_bytes: int = 0,
) -> Outcome:
    """Carry messages until the client is done; every one must keep within its side's limit."""
    outcome = Outcome(set(), set(), 0, 0, 0)
    message: bytes | None = client.initiate()
    while message is not None:
        outcome.rounds += 1
        assert outcome.rounds <= ROUNDS_MAX
        assert len(message) <= (client_limit_bytes or len(message))
        answer = server.respond(message)
        assert len(answer) <= (server_limit_bytes or len(answer))
        outcome.bytes_up += len(message)
        outcome.bytes_down += len(answer)
        message, have_ids, need_ids = client.reconcile(answer)
        outcome.have_ids.update(have_ids)
        outcome.need_ids.update(need_ids)
    return outcome


def assert_learned(outcome: Outcome, client: list[Record], server: list[Record]) -> None:
    """The client knows exactly both differences."""
    ours, theirs = {found for _, found in client}, {found for _, found in server}
    assert outcome.have_ids == ours - theirs
    assert outcome.need_ids == theirs - ours


def _any_id(random: Random) -> bytes:
    return random.randbytes(32)


def _alike_id(random: Random) -> bytes:
    """IDs that differ in the last bytes only: bounds need them nearly whole.

    Fewer than eight free bytes would make different ranges have equal sums by accident.
    """
    return b"\xff" * 24 + random.randbytes(8)


def _zero_tailed_id(random: Random) -> bytes:
    """IDs that end in zeros, which a bound cannot tell from its padding."""
    return random.randbytes(8) + b"\x00" * 24
