"""Two stores are equal after one undisturbed sync, and answer the same hints."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import Code, Problem
from app.federation.peer import Peer, PeerOrigin
from app.recon import endpoint as recon_endpoint
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
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
from tests.support.stores import Stores

CHANNELS = ("a", "ab", "b", "", "a/b")
numbers = st.integers(0, 40)
contents = st.dictionaries(st.tuples(st.sampled_from(CHANNELS), numbers), st.integers(0, 2))
interests = st.fixed_dictionaries(
    {},
    optional={
        "channels": st.lists(st.sampled_from(CHANNELS), max_size=3),
        "channel_prefixes": st.lists(st.sampled_from(("a", "b", "ab")), max_size=2),
    },
)
hints = st.dictionaries(numbers, st.lists(st.binary(min_size=1, max_size=8), max_size=3))


async def sync(one: Node, two: Node, **options: Any) -> SyncReport:
    return await sync_with_peer(
        local_of(one), InProcessPeer(two), one.federation.interests.current, **options
    )


async def load(node: Node, content: dict[Any, int], hints: dict[int, list[bytes]]) -> None:
    """Messages by (channel, number); the variant number makes different ones under one ID."""
    messages = [
        message(number, channel, content=b"%d" % variant)
        for (channel, number), variant in content.items()
    ]
    await publish(node, messages, {f"m{n}": tuple(found) for n, found in hints.items()})


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=False
)
@given(contents, contents, hints, hints, interests, interests)
def test_both_hold_what_either_held_within_the_mutual_interest(
    stores: Stores,
    left: dict[Any, int],
    right: dict[Any, int],
    left_hints: dict[int, list[bytes]],
    right_hints: dict[int, list[bytes]],
    left_interest: dict[str, Any],
    right_interest: dict[str, Any],
) -> None:
    async def scenario(folder: Path) -> None:
        ends = [
            interest | {"database_url": stores.new_url()}
            for interest in (left_interest, right_interest)
        ]
        async with open_nodes(folder, *ends) as (one, two):
            await load(one, left, left_hints)
            await load(two, right, right_hints)
            before = (await holdings(one), await holdings(two))
            report = await sync(one, two)
            assert report.outcome is SyncOutcome.IN_SYNC, report
            mutual = one.federation.interests.current.intersect(two.federation.interests.current)
            for node, held in zip((one, two), before, strict=True):
                wanted = {k: v for k, v in held.items() if not mutual.matches(k[0])}
                for side in before:
                    for key, its_hints in side.items():
                        if mutual.matches(key[0]):
                            wanted[key] = wanted.get(key, frozenset()) | its_hints
                assert await holdings(node) == wanted

    with tempfile.TemporaryDirectory() as folder:
        run(scenario(Path(folder)))


def test_a_second_sync_finds_nothing_and_costs_one_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n) for n in range(60)])
            await publish(two, [message(n) for n in range(40, 100)])
            memory = Remembered()
            first = await sync(one, two, memory=memory)
            assert (first.entries_received, first.entries_sent) == (40, 40)
            assert (first.missing_here, first.missing_there) == (40, 40)
            second = await sync(one, two, memory=memory)
            assert second.outcome is SyncOutcome.IN_SYNC
            assert (second.requests, second.rounds) == (1, 1)
            assert (second.missing_here, second.missing_there, second.entries_received) == (0, 0, 0)

    run(scenario())


def test_what_local_policy_refuses_is_fetched_once_and_not_again(tmp_path: Path) -> None:
    strict = replace(DEFAULT_LIMITS, frame_bytes_max=2_000)

    async def scenario() -> None:
        async with (
            open_nodes(tmp_path / "a", {}, limits=strict) as (one,),
            open_nodes(tmp_path / "b", {}) as (two,),
        ):
            big = message(5, content=bytes(5_000))
            await publish(two, [big, *(message(n) for n in range(10, 30))])
            memory = Remembered()
            first = await sync(one, two, memory=memory)
            assert (first.entries_received, first.entries_refused) == (20, 1)
            assert first.outcome is SyncOutcome.IN_SYNC
            again = await sync(one, two, memory=memory)
            assert (again.entries_received, again.entries_refused) == (0, 0)
            assert again.bytes_down < 5_000

    run(scenario())


class _Expiring(InProcessPeer):
    """Draws a new nonce when it is first pushed something, and stores nothing of that request."""

    nonces = itertools.cycle([b"1" * 16, b"2" * 16])

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(node)
        self.nonce = next(self.nonces)
        self._expires_left = 1
        monkeypatch.setattr(recon_endpoint, "responder_nonce", lambda *_: self.nonce)
        monkeypatch.setattr(recon_endpoint, "nonce_is_fresh", lambda n, *_: n == self.nonce)

    async def recon(self, request: bytes) -> bytes:
        if ReconRequest.FromString(request).push and self._expires_left:
            self._expires_left -= 1
            self.nonce = next(self.nonces)
        return await super().recon(request)


def test_a_nonce_that_expires_costs_no_push_and_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n) for n in range(50)])
            await publish(two, [message(n) for n in range(45)])
            peer = _Expiring(two, monkeypatch)
            report = await sync_with_peer(local_of(one), peer, one.federation.interests.current)
            assert (report.outcome, report.detail) == (SyncOutcome.IN_SYNC, "")
            assert (report.missing_there, report.entries_sent) == (5, 5)
            refused, again = [each for each in peer.requests if each.push]
            assert refused.push == again.push
            assert refused.session.responder_nonce != again.session.responder_nonce
            assert await holdings(one) == await holdings(two)

    run(scenario())


def test_a_sync_that_did_not_happen_says_nothing_about_its_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}) as (one,):

            def is_busy(*_: object) -> None:
                raise Problem(Code.SYNC_BUSY, "a sync is under way")

            one.federation.peers._start = is_busy  # type: ignore[method-assign]
            peer = Peer("dead", httpx.URL("http://127.0.0.1:1/"), PeerOrigin.ADDED)
            one.federation.peers._peers[peer.peer_id] = peer
            one.federation.peers._begin(peer)
            one.federation.peers._schedule.add(peer.peer_id, 0.0, failures=3)
            while peer.next_sync_at_ms is None:  # noqa: ASYNC110 - set by each attempt
                await asyncio.sleep(0.01)
            assert peer.failures == 3

    run(scenario())


@pytest.mark.slow
def test_stores_that_are_written_all_the_time_never_blame_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}, {}) as nodes:
            numbers = itertools.count()
            memories: dict[tuple[int, int], Remembered] = {}
            reports: list[SyncReport] = []
            asked, is_over = asyncio.Event(), asyncio.Event()

            def wake(_: ReconRequest, response: ReconResponse) -> ReconResponse:
                asked.set()
                asked.clear()
                return response

            async def write(node: Node) -> None:
                # A batch for each answer of any node: as many on a slow machine as on a fast one.
                while not is_over.is_set():
                    batch = [message(next(numbers)) for _ in range(5)]
                    hints = {each.message_id: (each.message_id.encode(),) for each in batch}
                    await publish(node, batch, hints)
                    await asked.wait()

            async def meet(one: int, two: int) -> None:
                memory = memories.setdefault((one, two), Remembered())
                local, interest = local_of(nodes[one]), nodes[one].federation.interests.current
                for _ in range(10):
                    peer = InProcessPeer(nodes[two], wake)
                    reports.append(await sync_with_peer(local, peer, interest, memory=memory))

            writers = [asyncio.create_task(write(node)) for node in nodes]
            pairs = [(0, 1), (1, 0), (1, 2), (2, 0)]
            await asyncio.gather(*(meet(*pair) for pair in pairs))
            is_over.set()
            asked.set()
            await asyncio.gather(*writers)
            assert {(each.outcome, each.detail) for each in reports} == {(SyncOutcome.IN_SYNC, "")}
            assert {each.set_aside_count for each in reports} == {0}
            for _ in range(2):
                for one, two in pairs:
                    report = await sync(nodes[one], nodes[two], memory=memories[one, two])
            assert (report.outcome, report.set_aside_count) == (SyncOutcome.IN_SYNC, 0)
            assert await holdings(nodes[0]) == await holdings(nodes[1]) == await holdings(nodes[2])

    run(scenario())
