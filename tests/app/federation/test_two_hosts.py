"""Two hosts with settings of their own over one PostgreSQL, whose processes are paused and killed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.store.peerrows import LEASE_S as REAL_LEASE_S
from tests.support.forked_nodes import LEASE_S, STEPS_COUNT, ForkedNode
from tests.support.publications import content_frame
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import PostgresStores

PROCESSES_MAX = 2  # of one host


def wait_until(is_so: Callable[[], Any], seconds: float = 30.0) -> Any:
    until_s = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < until_s
        time.sleep(0.03)
    return found


class Hosts:
    """Two hosts, each with one peer in its settings that the other's lack."""

    def __init__(self, database_url: str, folder: Path, peers: list[RunningNode]) -> None:
        self.peers = peers
        self.running: list[list[ForkedNode]] = [[], []]
        self._database_url = database_url
        self._folder = folder
        self._published_count = 0
        self._http = httpx.Client(trust_env=False, timeout=2)

    def start(self, host: int, stop_at: int | None = None) -> ForkedNode:
        """One more process of a host."""
        node = ForkedNode(
            self._folder / f"host{host}",
            stop_at,
            database_url=self._database_url,
            peers=(self.peers[host].url,),
            sync_interval_s=2.0,
        )
        self.running[host].append(node)
        return node

    def all(self) -> list[ForkedNode]:
        return [node for nodes in self.running for node in nodes]

    def kill(self, node: ForkedNode) -> None:
        node.kill()
        for nodes in self.running:
            if node in nodes:
                nodes.remove(node)

    def proceed(self) -> None:
        """Nothing is paused any more, and each host has a process."""
        self._wake()
        for host, nodes in enumerate(self.running):
            if not nodes:
                self.start(host)

    def _wake(self) -> None:
        """Let all go on; one may reach the step at which it pauses only now."""
        for node in self.all():
            node.send(signal.SIGCONT)

    def publish(self) -> None:
        """Publish one message at each process; each is acknowledged."""
        for node in self.all():
            self._published_count += 1
            frame = content_frame(self._published_count)

            wait_until(lambda node=node, frame=frame: self._published(node, frame))

    def _published(self, node: ForkedNode, frame: bytes) -> bool:
        reply = self._answer(node, "POST", "messages", content=frame, headers=PROTOBUF)
        return reply is not None and reply.status_code in (200, 201)

    def _answer(self, node: ForkedNode, method: str, path: str, **options: Any) -> Any:
        self._wake()
        try:
            return self._http.request(method, f"{node.url}/v1/{path}", **options)
        except httpx.TransportError:  # it is starting
            return None

    def show_the_peers(self) -> bool:
        """Whether each process shows the peers that live settings name, and nothing else."""
        urls = {each.url for each in self.peers}
        return all(self.shown(node) == urls for node in self.all())

    def shown(self, node: ForkedNode) -> set[str]:
        """The peers that a process shows."""
        reply = self._answer(node, "GET", "peers")
        is_told = reply is not None and reply.is_success
        return {each["url"] for each in reply.json()["peers"]} if is_told else set()

    def nothing_is_behind(self) -> bool:
        """Whether each peer has all that was acknowledged."""
        self._wake()
        counts = [
            len(each.http.get("/v1/feed?limit=1000").json()["messages"]) for each in self.peers
        ]
        return counts == [self._published_count] * len(self.peers)

    def close(self) -> None:
        for node in self.all():
            node.kill()
        self._http.close()


@pytest.fixture
def hosts(postgres_stores: PostgresStores, tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as closing:
        peers = [closing.enter_context(running_node(tmp_path / f"peer{n}")) for n in range(2)]
        hosts = Hosts(postgres_stores.new_url(), tmp_path, peers)
        closing.callback(hosts.close)
        yield hosts


def settle(hosts: Hosts) -> None:
    hosts.proceed()
    hosts.publish()  # each process answers from now on
    wait_until(hosts.show_the_peers, REAL_LEASE_S)
    wait_until(hosts.nothing_is_behind)


def test_a_peer_of_a_paused_hosts_settings_is_there_when_the_host_goes_on(hosts: Hosts) -> None:
    first = hosts.start(0)
    hosts.start(1)
    settle(hosts)
    first.send(signal.SIGSTOP)
    hosts.kill(hosts.running[1][0])
    time.sleep(1.2 * LEASE_S)
    # A host that starts meanwhile forgets nothing that the settings of the first one name.
    hosts.start(1)
    wait_until(lambda: hosts.shown(hosts.running[1][0]))
    settle(hosts)


def round_of_chaos(hosts: Hosts, world: random.Random) -> None:
    """Pause and kill processes, start others that pause at some step, and let all of them go on."""
    for nodes in hosts.running:
        for node in list(nodes):
            match world.choice(("kill", "pause", "go on", "go on")):
                case "kill":
                    hosts.kill(node)
                case "pause":
                    node.send(signal.SIGSTOP)
        while len(nodes) < PROCESSES_MAX and world.random() < 0.7:
            stop_at = world.choice((None, world.randrange(STEPS_COUNT)))
            hosts.start(hosts.running.index(nodes), stop_at)
    time.sleep(world.choice((0.0, 0.3, 1.2)) * LEASE_S)
    for node in hosts.all():
        if world.random() < 0.15:
            hosts.kill(node)
    settle(hosts)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_the_peers_of_live_settings_are_there_and_get_everything_through_pauses_and_kills(
    hosts: Hosts, count: int
) -> None:
    world = random.Random(count)
    for _ in range(count):
        round_of_chaos(hosts, world)
