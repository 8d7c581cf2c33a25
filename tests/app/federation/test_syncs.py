"""The registry of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from app.errors import Code, Problem
from app.federation.client import parse_peer_url
from app.federation.peer import Peer
from app.federation.syncs import Syncs
from app.server.limits import DEFAULT_LIMITS
from sdstore.sync.report import Progress, SyncCode, SyncOutcome, SyncReport

REPORT = SyncReport(outcome=SyncOutcome.IN_SYNC)


async def _quick(_changed: Callable[[Progress], None]) -> SyncReport:
    return REPORT


async def _endless(_changed: Callable[[Progress], None]) -> SyncReport:
    await asyncio.Event().wait()
    return REPORT


def test_a_finished_session_keeps_its_report() -> None:
    async def scenario() -> None:
        sync = Syncs(DEFAULT_LIMITS).start(_quick, peer_url="http://a", channels=("c",))
        assert await sync.finished() is REPORT
        document = sync.document()
        assert document["state"] == "finished"
        assert document["report"]["outcome"] == "in_sync"
        assert document["channels"] == ["c"]

    asyncio.run(scenario())


def test_a_second_session_with_the_same_peer_is_refused_while_the_first_runs() -> None:
    async def scenario() -> None:
        syncs = Syncs(DEFAULT_LIMITS)
        syncs.start(_endless, peer_url="http://a")
        syncs.start(_quick, peer_url="http://b")
        with pytest.raises(Problem) as refusal:
            syncs.start(_quick, peer_url="http://a")
        assert refusal.value.code is Code.SYNC_BUSY
        await syncs.close()

    asyncio.run(scenario())


def test_the_oldest_finished_sessions_are_forgotten_first() -> None:
    async def scenario() -> None:
        syncs = Syncs(replace(DEFAULT_LIMITS, syncs_remembered_max=3))
        running = syncs.start(_endless, peer_url="http://running")
        for number in range(5):
            await syncs.start(_quick, peer_url=f"http://{number}").finished()
        urls = [sync.peer_url for sync in syncs.recent()]
        assert urls == ["http://4", "http://3", "http://running"]
        assert syncs.get(running.sync_id) is running
        await syncs.close()

    asyncio.run(scenario())


def test_no_session_starts_while_all_that_can_be_remembered_still_run() -> None:
    async def scenario() -> None:
        syncs = Syncs(replace(DEFAULT_LIMITS, syncs_remembered_max=2))
        for number in range(2):
            syncs.start(_endless, peer_url=f"http://{number}")
        with pytest.raises(Problem) as refusal:
            syncs.start(_endless, peer_url="http://one-more")
        assert refusal.value.code is Code.OVERLOADED
        await syncs.close()

    asyncio.run(scenario())


def test_a_session_that_breaks_still_ends_with_a_report() -> None:
    async def broken(_changed: Callable[[Progress], None]) -> SyncReport:
        raise ValueError("a bug")

    async def scenario() -> None:
        sync = Syncs(DEFAULT_LIMITS).start(broken, peer_url="http://a")
        report = await sync.finished()
        assert (report.outcome, report.code) == (SyncOutcome.LOCAL_FAULT, Code.INTERNAL_ERROR)

    asyncio.run(scenario())


def test_a_fault_of_this_node_is_logged_once_and_leaves_the_peers_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = Peer("p", parse_peer_url("http://peer.example"))
    fault = SyncReport.of_error(
        Problem(Code.TOKENS_UNAVAILABLE, "b.token does not contain a token")
    )
    caplog.set_level("INFO", "app.federation")
    for report in (fault, fault, REPORT, fault, REPORT, REPORT):
        peer.learn(report)
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    line = (
        "no sync with peer http://peer.example, by a fault of this node: "
        "tokens_unavailable: b.token does not contain a token"
    )
    assert said == [line, line]
    went_on = "syncs with peer http://peer.example go on: it is healthy"
    assert [each.getMessage() for each in caplog.records].count(went_on) == 1
    assert peer.state == "healthy"


def test_every_code_of_the_driver_is_a_documented_code_of_the_node() -> None:
    assert {str(code) for code in SyncCode} <= {str(code) for code in Code}
