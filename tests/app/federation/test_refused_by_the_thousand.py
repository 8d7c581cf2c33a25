"""A peer holds messages that this node's policy refuses: one, or far more than can be set aside."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import replace
from pathlib import Path

import pytest

import sdstore.sync.differences as differences_module
from app.ingest.policy import ACCEPT, Candidate, Verdict, refuse
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from sdstore.sds.model import Message
from sdstore.sync.report import SyncOutcome
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

POLICY = "tests.app.federation.test_refused_by_the_thousand:NoSpam"
PATIENT = replace(DEFAULT_LIMITS, policy_call_s_max=30)  # on a busy machine
GOOD_COUNT = 20
SHARE_MIB_MAX = 500  # of memory that a session takes beside a million refused messages


class NoSpam:
    """Refuses spam."""

    revision = "1"

    def __call__(self, candidate: Candidate) -> Verdict:
        content = candidate.message.content or b""
        return refuse("spam", "it is spam") if content.startswith(b"spam") else ACCEPT


def spam(number: int) -> Message:
    return message(number, content=b"spam %d" % number)


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def good_ones_arrive(one: Node, two: Node, spam_count: int) -> None:
    """Messages among and behind all the spam, on both sides of it, and those that come later."""
    for start in range(0, spam_count, 5_000):
        await publish(two, map(spam, range(start, min(start + 5_000, spam_count))))
    step = spam_count // (GOOD_COUNT - 1)
    good = [message(n * step, content=b"good %d" % n) for n in range(GOOD_COUNT)]
    await publish(two, good)
    await publish(one, [message(-5, content=b"ours")])
    peer, memory = InProcessPeer(two), Remembered()
    before_mib = peak_mib()
    report = await sync_with_peer(
        local_of(one), peer, one.federation.interests.current, memory=memory
    )
    assert len(await holdings(one)) == GOOD_COUNT + 1
    assert report.entries_sent == 1
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), report
    assert report.set_aside_count == spam_count
    assert peak_mib() - before_mib < SHARE_MIB_MAX
    # Later sessions fetch none of it again, and bring what is new.
    await publish(two, [message(spam_count // 2, content=b"good, later"), spam(spam_count)])
    peer.requests.clear()
    report = await sync_with_peer(
        local_of(one), peer, one.federation.interests.current, memory=memory
    )
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), report
    assert (report.entries_received, report.entries_refused) == (1, 1)
    assert report.set_aside_count == spam_count + 1
    assert len(peer.requests) < 5


def test_good_messages_arrive_in_the_first_session_however_many_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences_module, "SET_ASIDE_MAX", 1_000)

    async def scenario() -> None:
        async with open_nodes(tmp_path, {"policy": POLICY}, {}, limits=PATIENT) as (one, two):
            await good_ones_arrive(one, two, 12_000)

    run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_good_messages_arrive_in_the_first_session_beside_a_million_that_are_refused(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {"policy": POLICY}, {}, limits=PATIENT) as (one, two):
            await good_ones_arrive(one, two, 1_000_000)

    asyncio.run(scenario())
