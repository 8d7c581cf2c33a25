"""What a node wants changes while it runs: sessions follow, on both sides."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from app.errors import Code, Problem
from app.federation import interests as interests_module
from app.federation.interests import InterestOrigin
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from recon.agreement import Interest
from recon.elements import order_of_lamport
from recon.limits import INTEREST_NAMES_MAX
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse
from tests.support.federation import (
    InProcessPeer,
    Remembered,
    holdings,
    local_of,
    message,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)
from tests.support.stores import PostgresStores


def claims_to_want_everything(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    if response.HasField("interest"):
        response.interest = EVERYTHING.encode()
    return response


SEED = 20_261
EVERYTHING = Interest.make(everything=True)


def channels(*names: str, **window: int) -> Interest:
    """An interest in some channels."""
    return Interest.make(channels=frozenset(names), **window)


async def sync(one: Node, peer: InProcessPeer, memory: Remembered) -> SyncReport:
    """One session, as a node starts it."""
    return await sync_with_peer(
        local_of(one),
        peer,
        one.federation.interests.current,
        memory=memory,
        current_interest=lambda: one.federation.interests.current,
    )


async def held(node: Node) -> set[str]:
    """The message IDs that a node has."""
    return {key[1] for key in await holdings(node)}


@pytest.mark.parametrize("side", [0, 1])
def test_a_wider_interest_of_either_side_is_filled_by_the_next_session(
    tmp_path: Path, side: int
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            wider = (one, two)[side]
            await wider.federation.interests.set(channels("a"))
            await publish(one, [message(1, "a"), message(2, "b")])
            await publish(two, [message(3, "a"), message(4, "b")])
            peer, memory = InProcessPeer(two), Remembered()
            for _ in range(2):  # the second is over marks, and the peer's interest is remembered
                assert (await sync(one, peer, memory)).proved
            assert (await held(one), await held(two)) == ({"m1", "m2", "m3"}, {"m1", "m3", "m4"})
            await wider.federation.interests.set(channels("a", "b"))
            report = await sync(one, peer, memory)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            assert await held(one) == await held(two) == {"m1", "m2", "m3", "m4"}

    run(scenario())


class Changing(InProcessPeer):
    """A peer during whose n-th answer (from 0) a side changes what it wants."""

    def __init__(self, node: Node, changed: Node, at: int, interest: Interest) -> None:
        super().__init__(node)
        self._change = changed, at, interest

    async def recon(self, request: bytes) -> bytes:
        changed, at, interest = self._change
        answer = await super().recon(request)
        if len(self.requests) == at + 1:
            await changed.federation.interests.set(interest)
        return answer


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("is_wider", [False, True])
def test_a_change_in_mid_session_is_followed_by_that_session(
    tmp_path: Path, side: int, at: int, is_wider: bool
) -> None:
    first, then = (channels("a"), EVERYTHING) if is_wider else (EVERYTHING, channels("a"))

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await (one, two)[side].federation.interests.set(first)
            await publish(one, [message(n, "ab"[n % 2]) for n in range(150)])
            await publish(two, [message(n, "ab"[n % 2]) for n in range(100, 300)])
            peer, memory = Changing(two, (one, two)[side], at, then), Remembered()
            report = await sync(one, peer, memory)
            assert report.outcome is SyncOutcome.IN_SYNC, report
            # The initiator's own change is followed before the session ends.
            if side == 0 and one.federation.interests.current == then and is_wider:
                assert await held(one) == await held(two) == {f"m{n}" for n in range(300)}
            if (one, two)[side].federation.interests.current == then:
                report = await sync(one, InProcessPeer(two), memory)
                assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            mutual = one.federation.interests.current.intersect(two.federation.interests.current)
            mine, theirs = await holdings(one), await holdings(two)
            assert {key for key in mine if mutual.matches(key[0])} == {
                key for key in theirs if mutual.matches(key[0])
            }
            # A narrowed side takes what was on its way, and asks for nothing more.
            assert {f"m{n}" for n in range(0, 300, 2)} <= set(await held(one)) & set(
                await held(two)
            )

    run(scenario())


def test_a_push_of_an_unwanted_channel_is_set_aside_and_a_publication_of_it_is_taken(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await two.federation.interests.set(channels("a", lamport_from=5))
            hints = {"m3": (b"of an unwanted one",), "m7": (b"of a wanted one",)}
            await publish(one, [message(n, c) for n in (3, 7) for c in "ab"], hints)
            peer = InProcessPeer(two, claims_to_want_everything)
            report = await sync(one, peer, Remembered())
            assert report.outcome is SyncOutcome.IN_SYNC
            assert (report.entries_sent, report.entries_refused) == (1, 3)
            assert {key[:2] for key in await holdings(two)} == {("a", "m7")}
            await publish(two, [message(9, "b")])
            assert await held(two) == {"m7", "m9"}

    run(scenario())


def test_an_interest_is_kept_and_wins_over_the_settings_until_it_is_reset(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {"channels": ["a"]}) as (node,):
            assert node.federation.interests.state.origin is InterestOrigin.SETTINGS
            marks_policy = node.federation.interests.policy
            await node.federation.interests.set(channels("b"))
            assert node.federation.interests.policy != marks_policy
        async with open_nodes(tmp_path, {"channels": ["c"]}) as (node,):
            assert node.federation.interests.current == channels("b")
            node.federation.interests.configure(channels("d"))
            assert node.federation.interests.current == channels("b")
            await node.federation.interests.reset()
            assert node.federation.interests.current == channels("d")
            assert node.federation.interests.state.origin is InterestOrigin.SETTINGS
        async with open_nodes(tmp_path, {"channels": ["a"]}) as (node,):
            assert node.federation.interests.state.document()["origin"] == "settings"
            assert node.federation.interests.policy == marks_policy

    run(scenario())


def test_processes_over_one_database_know_a_change_within_a_second(
    tmp_path: Path, postgres_stores: PostgresStores
) -> None:
    async def scenario() -> None:
        url = {"database_url": postgres_stores.new_url()}
        async with open_nodes(tmp_path, url, url) as (one, two):
            heard: list[Interest] = []
            two.federation.interests.listeners.append(
                lambda: heard.append(two.federation.interests.current)
            )
            for interest in (channels("a"), EVERYTHING):
                await one.federation.interests.set(interest)
                changed_s = time.monotonic()
                while two.federation.interests.current != interest:
                    assert time.monotonic() - changed_s < 10  # a loaded machine is slower
                    await asyncio.sleep(0.01)
            assert heard == [channels("a"), EVERYTHING]
            assert two.federation.interests.policy == one.federation.interests.policy
            assert interests_module.LOOK_S < 1

    run(scenario())


def test_interests_have_bounds(tmp_path: Path) -> None:
    longest = DEFAULT_LIMITS.channel_id_bytes_max
    allowed = [
        channels("x" * longest),
        channels(*map(str, range(INTEREST_NAMES_MAX))),
        channels(),
        Interest.make(everything=True, lamport_from=-(2**63), lamport_to=2**63 - 1),
    ]
    refused = [
        (channels("x" * (longest + 1)), Code.INVALID_PARAMETER),
        (Interest.make(prefixes=frozenset({"é" * longest})), Code.INVALID_PARAMETER),
        (channels(*map(str, range(INTEREST_NAMES_MAX + 1))), Code.TOO_MANY_ITEMS),
        (channels(*(f"{n:0256}" for n in range(8_000))), Code.TOO_MANY_ITEMS),
        (channels("a", lamport_from=5, lamport_to=5), Code.INVALID_PARAMETER),
    ]

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}) as (node,):
            for interest in allowed:
                await node.federation.interests.set(interest)
                await node.federation.interests.look()
                assert node.federation.interests.current == interest
            for interest, code in refused:
                with pytest.raises(Problem) as error:
                    await node.federation.interests.set(interest)
                assert error.value.code is code
                assert node.federation.interests.current == allowed[-1]

    run(scenario())


def test_no_random_world_whose_interests_change_loses_anything(tmp_path: Path) -> None:
    """Both sides change what they want, between sessions and during them, while messages arrive."""

    async def scenario() -> None:
        for seed in range(SEED, SEED + 4):
            async with open_nodes(tmp_path / str(seed), {}, {}) as (one, two):
                await changing_world(seed, one, two)

    run(scenario())


def random_interest(random: Random) -> Interest:
    """Everything, a prefix, or a list; sometimes with a window. Some come again and again."""
    low, high = sorted(random.sample(range(70), 2))
    names = random.sample([f"c{n}" for n in range(4)], random.randrange(5))
    return Interest.make(
        everything=random.random() < 0.3,
        channels=frozenset(names),
        prefixes=frozenset({"c"} if random.random() < 0.1 else ()),
        lamport_from=low if random.random() < 0.3 else None,
        lamport_to=high if random.random() < 0.3 else None,
    )


async def changing_world(seed: int, one: Node, two: Node, sessions: int = 10) -> None:
    """Sessions while interests change; when they rest, both hold everything of the mutual interest."""
    random, wanted = Random(seed), [EVERYTHING]

    async def happen() -> None:
        for node in (one, two):
            numbers = [random.randrange(70) for _ in range(random.randrange(8))]
            hints = {f"m{n}": (b"hint %d" % random.randrange(90),) for n in numbers}
            await publish(node, [message(n, f"c{n % 4}") for n in numbers], hints)
            if random.random() < 0.2:
                wanted.append(node.federation.interests.current)
                again = random.random() < 0.5
                await node.federation.interests.set(
                    random.choice(wanted) if again else random_interest(random)
                )

    class Restless(InProcessPeer):
        async def recon(self, request: bytes) -> bytes:
            await happen()
            answer = await super().recon(request)
            await happen()
            return answer

    memory = Remembered()
    for number in range(sessions):
        await happen()
        report = await sync(one, Restless(two), memory)
        # A session follows some changes, not any number of them; none is a fault of the peer.
        assert report.outcome in (SyncOutcome.IN_SYNC, SyncOutcome.PARTIAL), (seed, number, report)
        if number % 3:
            continue
        still = InProcessPeer(two)
        for _ in range(2):  # the first can find that everything changed
            report = await sync(one, still, memory)
            assert report.outcome is SyncOutcome.IN_SYNC, (seed, number, report)
        mutual = one.federation.interests.current.intersect(two.federation.interests.current)
        mine, theirs = [
            {
                key: claims
                for key, claims in (await holdings(node)).items()
                if mutual.matches(key[0]) and mutual.window.holds(order_of_lamport(int(key[1][1:])))
            }
            for node in (one, two)
        ]
        assert mine == theirs, (seed, number, mutual)
