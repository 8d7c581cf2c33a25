"""Attacks on a node over PostgreSQL: a limited reader's dear queries delay nobody."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from app.access.callers import Scope
from app.access.tokens import TokenFile
from bench.frame_workloads import small_frames
from sdstore.client import StoreClient
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.attacked import attack_with, attacked_node, honest_waits
from tests.support.stores import PostgresStores

CHANNEL = "chat"
MESSAGES = 2_000
ATTACKERS = 16


@pytest.mark.parametrize("what", ["ancestors", "order", "pages"])
def test_a_limited_reader_with_dear_queries_delays_nobody(
    postgres_stores: PostgresStores, tmp_path: Path, what: str
) -> None:
    _, token = TokenFile(tmp_path / "tokens.json").create(scopes=[Scope.READ], channels=[CHANNEL])
    head = f"HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
    numbers = count()
    paths = {
        "ancestors": f"/v1/messages/m{MESSAGES - 1}/ancestors?limit=1000",
        "order": f"/v1/channels/{CHANNEL}/order?indexer=w",
        "pages": f"/v1/channels/{CHANNEL}/messages?limit=1000",
    }

    def request() -> bytes:
        end = next(numbers) if what == "order" else ""
        return f"GET {paths[what]}{end} {head}".encode()

    answers: Counter[bytes] = Counter()

    def attack() -> None:
        while not node.stopped.is_set():
            with node.connect() as connection:
                try:
                    while not node.stopped.is_set():
                        connection.sendall(request() * 8)
                        answers[connection.recv(1 << 20)[:12]] += 1
                except OSError:
                    continue

    with attacked_node(tmp_path, "--database", postgres_stores.new_url()) as node:
        with StoreClient(f"http://127.0.0.1:{node.port}") as client:
            client.publish_batch([next(small_frames(1)), *map(written, range(MESSAGES))])
        honest_waits(node, 0.1)
        attackers = attack_with([attack] * ATTACKERS)
        waits = honest_waits(node, 1.0)
        node.stopped.set()
        for attacker in attackers:
            attacker.join(60)
    print(waits, answers.most_common(5))
    assert any(each.startswith(b"HTTP/1.1 200") for each in answers), answers.most_common(5)
    waits.check()


def written(number: int) -> bytes:
    causes = tuple(HistoryEntry(f"m{each}") for each in range(max(number - 3, 0), number))
    message = Message(f"m{number}", CHANNEL, "w", number + 1, causes, content=b"x")
    return encode(message)
