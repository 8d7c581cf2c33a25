"""Spot checks find a false proof between two nodes, and nothing between two that only differ by news."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from app.audit import Findings, Kind
from app.federation import spotchecks
from app.federation.spotchecks import SpotChecks
from app.limits import DEFAULT_LIMITS
from app.node import Node
from recon.index import RangeIndex
from sdstore.sync.report import SyncOutcome
from sdstore.sync.spotcheck import Verdict
from tests.support.federation import (
    InProcessPeer,
    Remembered,
    local_of,
    message,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)

LIMITS = replace(DEFAULT_LIMITS, audit_peer_interval_s=0, audit_part_elements_max=100)
COUNT = 300
CHECKS_MAX = 60


def lose_one(node: Node) -> None:
    """Take an element out of a node's index, and leave the sums of the index as they are."""
    index = node.index
    columns = index.elements.state.snapshot.slice(0, len(index.elements))
    kept = columns.take(np.arange(len(columns)) != 150)
    index.elements = RangeIndex()
    index.elements.insert(kept.orders, kept.ids, kept.groups)
    index._views, _ = index._caches()


class Pair:
    """Two nodes; the first one checks the other after each session."""

    def __init__(self, one: Node, two: Node) -> None:
        self.one = one
        self.local = local_of(one)
        self.peer = InProcessPeer(two)
        self.memory = Remembered()
        self.findings = Findings()
        self.checks = SpotChecks(one.index, self.findings, LIMITS)

    async def sync(self) -> int:
        """A session and the check after it; the bytes that the check took."""
        report = await sync_with_peer(
            self.local, self.peer, self.one.interests.current, memory=self.memory
        )
        assert report.outcome is SyncOutcome.IN_SYNC
        assert report.proved
        before = self.peer.bytes_up + self.peer.bytes_down
        self.memory.value = await self.checks.after_proof(
            "two", "http://two", self.memory.value, self.local, self.peer
        )
        return self.peer.bytes_up + self.peer.bytes_down - before

    @property
    def verdicts(self) -> Counter[Verdict]:
        """Of all checks."""
        return self.checks.checked["two"].verdicts


@pytest.mark.parametrize("channels", [(), ("c1", "c2")])
@pytest.mark.parametrize("loser", [0, 1])
def test_a_false_proof_is_found_and_everything_is_compared(
    tmp_path: Path, channels: tuple[str, ...], loser: int
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {"channels": channels}, {}) as nodes:
            one, two = nodes
            messages = [message(n, f"c{1 + n % 2}") for n in range(COUNT)]
            await publish(one, messages)
            await publish(two, messages)
            pair = Pair(one, two)
            await pair.sync()
            assert pair.verdicts == {Verdict.EQUAL: 1}
            lose_one(nodes[loser])
            for _ in range(CHECKS_MAX):
                if pair.findings.counts[Kind.PEER]:
                    break
                assert await pair.sync() <= 400
            assert pair.verdicts[Verdict.FALSE_PROOF] == 1
            assert pair.verdicts[Verdict.DIFFERENT] == 1
            assert not pair.memory.value.baselines
            pair.peer.requests.clear()
            report = await sync_with_peer(
                pair.local, pair.peer, one.interests.current, memory=pair.memory
            )
            # SQL has what the index lost, so the element counts as missing in each pass.
            missing = bool(report.missing_here), bool(report.missing_there)
            assert missing == ((True, False), (False, True))[loser]
            assert not any(each.since for each in pair.peer.requests if each.total)

    run(scenario())


def test_a_peer_that_seems_falsely_proved_again_and_again_costs_a_whole_session_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns)
    monkeypatch.setattr(spotchecks, "time", clock)

    async def finds_a_false_proof(*_: object) -> tuple[Verdict, None]:
        return Verdict.FALSE_PROOF, None

    monkeypatch.setattr(spotchecks, "check_part", finds_a_false_proof)

    async def scenario() -> list[bool]:
        nonlocal now_s
        has_baseline = []
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            for node in (one, two):
                await publish(node, [message(n) for n in range(COUNT)])
            pair = Pair(one, two)
            for pause_s in (0, 60, 3_530, 20):
                now_s += pause_s
                await pair.sync()
                has_baseline.append(bool(pair.memory.value.baselines))
        return has_baseline

    assert run(scenario()) == [False, True, True, False]


def test_a_pair_that_differs_by_news_has_no_false_proof(tmp_path: Path) -> None:
    async def scenario() -> None:
        seed = Random().randrange(2**32)
        print("seed", seed)
        world = Random(seed)
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n, f"c{n % 3}") for n in range(100)])
            pair = Pair(one, two)
            for number in range(100, 100 + CHECKS_MAX):
                # What comes after the session is news of the check, at any Lamport timestamp.
                report = await sync_with_peer(
                    pair.local, pair.peer, one.interests.current, memory=pair.memory
                )
                assert report.proved
                if world.random() < 0.8:
                    lamport = world.randrange(200)
                    news = message(number, f"c{number % 3}", lamport_timestamp=lamport)
                    await publish(world.choice((one, two)), [news])
                pair.memory.value = await pair.checks.after_proof(
                    "two", "http://two", pair.memory.value, pair.local, pair.peer
                )
            assert pair.verdicts[Verdict.FALSE_PROOF] == 0
            assert pair.verdicts[Verdict.EQUAL] > 5
            assert pair.verdicts[Verdict.DIFFERENT] > 5
            assert pair.findings.open() == []

    run(scenario())
