"""MVDS between a participant and two real nodes over HTTP, with a kill -9 in the middle."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from sdstore.client import ClientOptions, StoreClient, StoreError
from sdstore.client.exchange import MvdsMode, Retry
from sdstore.mvds import Deliver, MemoryState, Message
from sdstore.participant import MvdsSession
from sdstore.participant.mvds import STORE, message_of
from sdstore.sds.codec import encode
from sdstore.sds.model import Message as SdsMessage
from tests.support.store_process import StoreProcess

CHANNEL = "channel"
COUNT = 60
SECONDS_MAX = 60
EPOCHS_MAX = 300
ONCE = ClientOptions(retry=Retry(attempts_max=1))


def frames(name: str) -> list[bytes]:
    return [
        encode(SdsMessage(f"{name}{n}", CHANNEL, lamport_timestamp=n, content=bytes(100)))
        for n in range(COUNT)
    ]


def records_count(node: StoreProcess) -> int:
    with closing(sqlite3.connect(node.data_dir / "sdstore.db")) as connection:
        [[count]] = connection.execute("SELECT count(*) FROM mvds_records")
    return int(count)


@contextmanager
def two_nodes(folder: Path) -> Iterator[list[StoreProcess]]:
    nodes = [StoreProcess(folder / name) for name in ("a", "b")]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            if node.process is not None:
                node.end(signal.SIGTERM)


class Participant:
    """Keeps messages and carries them between the nodes: a session with each."""

    def __init__(self, clients: list[StoreClient], mode: MvdsMode) -> None:
        self.kept: dict[bytes, Message] = {}
        self.states = [MemoryState() for _ in clients]
        self.sessions = [
            MvdsSession(client, "ada", [CHANNEL], self, state=state, mode=mode)
            for client, state in zip(clients, self.states, strict=True)
        ]
        self.errors_count = 0

    def find(self, message_id: bytes) -> Message | None:
        return self.kept.get(message_id)

    def is_known(self, message_id: bytes) -> bool:
        return message_id in self.kept

    def keep(self, message: Message, source: MvdsSession | None = None) -> None:
        """Keep a message and send it to every node but its source."""
        self.kept[message.message_id] = message
        for session in self.sessions:
            if session is not source:
                session.node.send(message)

    def exchange(self) -> None:
        for session in self.sessions:
            try:
                effects = session.exchange()
            except StoreError:
                self.errors_count += 1
                continue
            for effect in effects:
                if isinstance(effect, Deliver):
                    self.keep(effect.message, session)
                    session.node.processed(effect.message.message_id)

    @property
    def records_count(self) -> int:
        return sum(state.count(STORE) for state in self.states)


@pytest.mark.parametrize("mode", ["interactive", "batch"])
def test_everything_arrives_and_state_drains_over_a_kill_9(tmp_path: Path, mode: MvdsMode) -> None:
    everything = {f"{name}{n}" for name in ("a", "b", "own") for n in range(COUNT)}
    began_s = time.monotonic()
    with (
        two_nodes(tmp_path) as nodes,
        StoreClient(nodes[0].url, options=ONCE) as first,
        StoreClient(nodes[1].url, options=ONCE) as second,
    ):
        assert len(list(first.publish_batch(frames("a")))) == COUNT
        assert len(list(second.publish_batch(frames("b")))) == COUNT
        participant = Participant([first, second], mode)
        for frame in frames("own"):
            participant.keep(message_of(frame))
        participant.exchange()
        assert records_count(nodes[0]) or participant.records_count, "killed in the middle"
        nodes[0].end(signal.SIGKILL)
        participant.exchange()
        assert participant.errors_count == 1
        nodes[0].start()
        for _ in range(EPOCHS_MAX):
            participant.exchange()
            if not participant.records_count and not any(records_count(each) for each in nodes):
                break
        assert [records_count(each) for each in nodes] == [0, 0]
        assert participant.records_count == 0
        assert participant.errors_count == 1
        for client in (first, second):
            assert {each.message.message_id for each in client.messages(CHANNEL)} == everything
        assert len(participant.kept) == len(everything)
    assert time.monotonic() - began_s < SECONDS_MAX
