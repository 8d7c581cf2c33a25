"""A message from one real node to all of a federation on loopback, each in a process of its own."""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.http_servers import as_operator
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.store_process import StoreProcess

NODES = 16
DEGREE = 3
MESSAGES = 10
INTERVAL_S = 300.0  # no cycle happens while it is measured
START_S_MAX = 180.0
SPREAD_S_MAX = 60.0


def peers_of(nodes_count: int, degree: int, seed: int) -> list[list[int]]:
    """For each node, the nodes that it and that have it as a peer: a ring, so that all are connected, and
    others at random. Each pair has the other on both sides."""
    random = Random(seed)
    peers: list[set[int]] = [set() for _ in range(nodes_count)]
    for number in range(nodes_count):
        chosen = {(number + 1) % nodes_count}
        while len(chosen) < degree - 1:
            chosen.add(random.randrange(nodes_count))
        for other in chosen - {number}:
            peers[number].add(other)
            peers[other].add(number)
    return [sorted(each) for each in peers]


@contextmanager
def federation(
    folder: Path, nodes_count: int = NODES, degree: int = DEGREE
) -> Iterator[list[httpx.Client]]:
    """Clients of nodes that run, and that have had a session with each of their peers."""
    nodes = [StoreProcess(folder / str(number)) for number in range(nodes_count)]
    for node, peers in zip(nodes, peers_of(nodes_count, degree, seed=1), strict=True):
        urls = (option for peer in peers for option in ("--peer", nodes[peer].url))
        node.options = (*urls, "--sync-interval", INTERVAL_S)
    with ExitStack() as stack:
        for node in nodes:
            node.start()
            stack.callback(node.end, signal.SIGTERM)
        clients = [
            stack.enter_context(
                httpx.Client(
                    base_url=node.url,
                    trust_env=False,
                    timeout=30,
                    headers=as_operator(node.data_dir),
                )
            )
            for node in nodes
        ]
        # A node that started before its peers retries them late: ask for what is missing.
        _until(START_S_MAX, lambda: sum(map(_is_healthy, clients)) == nodes_count)
        yield clients


def _is_healthy(client: httpx.Client) -> bool:
    peers: list[Mapping[str, Any]] = client.get("/v1/peers").json()["peers"]
    missing = [peer for peer in peers if peer["state"] != "healthy"]
    for peer in missing:
        client.post(f"/v1/peers/{peer['id']}/sync")
    return not missing


def _until(seconds_max: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds_max} s")
        time.sleep(0.05)


def seconds_to_all(clients: list[httpx.Client], number: int) -> tuple[float, float]:
    """Seconds from the publication on one node until half of the nodes, and the last one, have it."""
    name = f"spread-{number}"
    frame = encode(Message(name, "c", lamport_timestamp=number, content=b"news"))
    publisher, *others = clients[number % len(clients) :] + clients[: number % len(clients)]
    started_s = time.monotonic()
    publisher.post(
        "/v1/messages", content=frame, headers={"content-type": "application/x-protobuf"}
    ).raise_for_status()
    took_s = []
    waiting = others
    while waiting:
        still = []
        for client in waiting:
            if client.head(f"/v1/messages/{name}").is_success:
                took_s.append(time.monotonic() - started_s)
            else:
                still.append(client)
        waiting = still
        if time.monotonic() - started_s > SPREAD_S_MAX:
            raise TimeoutError(f"{len(waiting)} nodes lack {name} after {SPREAD_S_MAX} s")
        time.sleep(0.005)
    return took_s[len(took_s) // 2], took_s[-1]


def measure_nodes(messages_count: int = MESSAGES) -> dict[str, Any]:
    """The row of 16 nodes."""
    with tempfile.TemporaryDirectory() as folder, federation(Path(folder)) as clients:
        times = []
        for number in range(messages_count):
            times.append(seconds_to_all(clients, number))
            time.sleep(1.0)  # until all are quiet
    halves, lasts = zip(*times, strict=True)
    return {
        "nodes": NODES,
        "messages": messages_count,
        "half_s": round(statistics.median(halves), 3),
        "last_s": round(statistics.median(lasts), 3),
        "last_s_max": round(max(lasts), 3),
    }
