"""Three participants, two stores that know nothing of each other, and a network that breaks at random.

Everybody restarts every few seconds. In the end everybody has every message, once and in order.
"""

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from sdstore.participant import ParticipantFile, follower
from sdstore.sds.effects import Deliver
from tests.support.chatting import SMALL, Network, joined
from tests.support.server import running_node

MESSAGES = 100
NAMES = ("ada", "bob", "eve")
EAGER = replace(
    SMALL,
    sync_ms=500,
    resend_ms=500,
    resend_possibly_ms=2_000,
    fetch_retry_ms=500,
    fetch_retry_ms_max=2_000,
)


class Person:
    """One participant with its file, its network, and all deliveries it has confirmed."""

    def __init__(self, name: str, urls: list[str], folder: Path, draw: random.Random) -> None:
        self.name = name
        self.network = Network()
        self.deliveries: list[Deliver] = []
        self.is_done = False
        self._urls = urls
        self._path = folder / f"{name}.db"
        self._draw = draw
        self._sent_count = 0

    async def live(self, people: "list[Person]") -> None:
        """Chat, stop and come back until everybody has everything."""
        while not all(each.is_done for each in people):
            with ParticipantFile(self._path) as file:
                given = {"participant": EAGER, "network": self.network}
                async with joined(self._urls, self.name, file, is_online=False, **given) as app:
                    until_s = time.monotonic() + self._draw.uniform(0.5, 3)
                    while time.monotonic() < until_s:
                        if self._sent_count < MESSAGES:
                            await app.channel.send(f"{self.name}{self._sent_count}".encode())
                            self._sent_count += 1
                        await asyncio.sleep(self._draw.uniform(0, 0.05))
            self.deliveries += app.deliveries
            self.is_done = len(self.deliveries) >= MESSAGES * (len(people) - 1)

    def check(self) -> None:
        """Every message of the others once, each one's in order, under growing numbers."""
        assert [each.number for each in self.deliveries] == list(
            range(1, MESSAGES * (len(NAMES) - 1) + 1)
        )
        texts = [each.message.content.decode() for each in self.deliveries]
        for name in NAMES:
            wanted = [f"{name}{n}" for n in range(MESSAGES)] if name != self.name else []
            assert [text for text in texts if text.startswith(name)] == wanted


async def breaking(people: list[Person], urls: list[str], draw: random.Random) -> None:
    """Break the networks until everybody has everything."""
    while not all(each.is_done for each in people):
        network = draw.choice(people).network
        chance = draw.random()
        network.is_down = chance < 0.3
        if 0.3 <= chance < 0.5:
            network.ports_down = {httpx.URL(draw.choice(urls)).port}
        if chance < 0.8:
            network.cut()
        await asyncio.sleep(draw.uniform(0.05, 0.6))
        network.is_down, network.ports_down = False, set()


@pytest.mark.slow
def test_everybody_gets_everything_once_over_a_network_that_breaks_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "MISSED_MESSAGES_MAX", 20)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)

    async def scenario(urls: list[str]) -> None:
        people = [Person(name, urls, tmp_path, random.Random(draw.random())) for name in NAMES]
        async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
            tasks.create_task(breaking(people, urls, draw))
            for each in people:
                tasks.create_task(each.live(people))
        for each in people:
            each.check()

    with running_node(tmp_path / "a") as one, running_node(tmp_path / "b") as other:
        asyncio.run(scenario([one.url, other.url]))
