"""One disputed element never blocks a pair: it is named, set aside, and costs nothing afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

import sdstore.sync.driver as driver_module
import sdstore.sync.memory as memory_module
import sdstore.sync.session as session_module
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.node import Node
from recon.agreement import Interest
from sdstore.sds.model import Message, entry_digest
from sdstore.sync.differences import SetAside
from sdstore.sync.memory import SET_ASIDE_MAX, Aside, AsideElement, LackedBy
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse
from tests.app.store.test_frames import cut, in_database
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

COUNT = 1_000
ODD = frozenset(range(50, COUNT, 100))  # ten
SMALL = replace(DEFAULT_LIMITS, frame_bytes_max=2_000)
MESSAGES = [message(n, content=bytes(3_000) if n in ODD else b"%d" % n) for n in range(COUNT)]
ODD_IDS = {entry_digest(MESSAGES[n]).hex() for n in ODD}
SHARED = [each for n, each in enumerate(MESSAGES) if n % 5 and n not in ODD]


async def sync(one: Node, peer: InProcessPeer, memory: Remembered) -> SyncReport:
    return await sync_with_peer(
        local_of(one), peer, one.federation.interests.current, memory=memory
    )


def named(report: SyncReport) -> set[str]:
    return {each["id"] for each in report.set_aside}


def codes(report: SyncReport) -> set[tuple[str, str]]:
    return {(each["lacked_by"], each["code"]) for each in report.set_aside}


async def idle_cost(folder: Path) -> tuple[int, int, int]:
    """Requests and bytes both ways of a sync between stores that were just found equal."""
    async with open_nodes(folder / "idle", {}, {}) as (one, two):
        await publish(two, MESSAGES[:3])
        peer, memory = InProcessPeer(two), Remembered()
        await sync(one, peer, memory)
        up, down = peer.bytes_up, peer.bytes_down
        report = await sync(one, peer, memory)
        return report.requests, peer.bytes_up - up, peer.bytes_down - down


async def next_cost(one: Node, peer: InProcessPeer, memory: Remembered) -> tuple[int, int, int]:
    """As `idle_cost`, after a session whose news are only what the first one moved."""
    assert (await sync(one, peer, memory)).requests == 1
    up, down = peer.bytes_up, peer.bytes_down
    report = await sync(one, peer, memory)
    assert report.outcome is SyncOutcome.IN_SYNC
    assert named(report) == ODD_IDS
    return report.requests, peer.bytes_up - up, peer.bytes_down - down


def check_alike(cost: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    """As many requests, and as many bytes but for a few: the random shift of cuts has no or some."""
    assert cost[0] == other[0]
    assert all(abs(own - others) <= 4 for own, others in zip(cost[1:], other[1:], strict=True))


async def check_a_whole_session(one: Node, peer: InProcessPeer, memory: Remembered) -> None:
    """Without a baseline the ranges are compared: they are equal, in one request."""
    memory.value = replace(memory.value, baselines=())
    report = await sync(one, peer, memory)
    assert (report.outcome, report.proved, report.requests) == (SyncOutcome.IN_SYNC, True, 1)
    assert (report.missing_here, report.missing_there, report.entries_refused) == (0, 0, 0)
    assert named(report) == ODD_IDS


def pair(
    folder: Path,
    scenario: Callable[[Node, Node], Awaitable[None]],
    one: Limits = DEFAULT_LIMITS,
    two: Limits = DEFAULT_LIMITS,
) -> None:
    async def around() -> None:
        async with (
            open_nodes(folder / "a", {}, limits=one) as (left,),
            open_nodes(folder / "b", {}, limits=two) as (right,),
        ):
            await scenario(left, right)

    run(around())


def test_entries_that_we_refuse_are_named_and_the_next_session_costs_no_more_than_an_idle_one(
    tmp_path: Path,
) -> None:
    async def scenario(one: Node, two: Node) -> None:
        await publish(one, SHARED)
        await publish(two, MESSAGES)
        peer, memory = InProcessPeer(two), Remembered()
        first = await sync(one, peer, memory)
        assert (first.outcome, first.detail) == (SyncOutcome.IN_SYNC, "")
        assert (first.proved, first.entries_refused) == (True, len(ODD))
        assert (first.set_aside_count, named(first)) == (len(ODD), ODD_IDS)
        assert codes(first) == {("here", "frame_too_large")}
        assert len(await holdings(one)) == COUNT - len(ODD)
        check_alike(await next_cost(one, peer, memory), await idle_cost(tmp_path))
        await check_a_whole_session(one, peer, memory)

    pair(tmp_path, scenario, one=SMALL)


def test_entries_that_the_peer_refuses_are_named_and_the_next_session_costs_no_more_than_an_idle_one(
    tmp_path: Path,
) -> None:
    async def scenario(one: Node, two: Node) -> None:
        await publish(one, MESSAGES)
        await publish(two, SHARED)
        peer, memory = InProcessPeer(two), Remembered()
        first = await sync(one, peer, memory)
        assert (first.outcome, first.detail) == (SyncOutcome.IN_SYNC, "")
        assert (first.proved, named(first)) == (True, ODD_IDS)
        assert codes(first) == {("there", "refused")}
        assert len(await holdings(two)) == COUNT - len(ODD)
        check_alike(await next_cost(one, peer, memory), await idle_cost(tmp_path))
        await check_a_whole_session(one, peer, memory)

    pair(tmp_path, scenario, two=SMALL)


def cuts_odd_frames(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in response.items:
        if item.id.hex() in ODD_IDS:
            item.entry.frame = item.entry.frame[:-3]
    return response


def ruin(node_folder: Path, message_ids: set[str]) -> None:
    """Cut the frames of some messages of a store that is closed."""

    def act(connection: Any) -> None:
        for seq, message_id in list(
            connection.execute(text("SELECT seq, message_id FROM messages"))
        ):
            if message_id in message_ids:
                cut(connection, "frames", seq)

    in_database(f"sqlite:///{node_folder / 'sdstore.db'}", act)


def set_clock(monkeypatch: pytest.MonkeyPatch, at_s: float) -> None:
    """Of what is remembered; the event loop has its own."""
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(time=lambda: at_s))


def ruined(folder: Path, messages: list[Message], odd: set[str]) -> None:
    """A store in `folder`/0 with these messages, the content of some lost."""

    async def load() -> None:
        async with open_nodes(folder, {}) as (node,):
            await publish(node, messages)

    run(load())
    ruin(folder / "0", odd)


def test_content_that_the_peer_has_lost_is_named_and_others_are_asked(tmp_path: Path) -> None:
    odd = {f"m{n}" for n in ODD}
    ruined(tmp_path / "b", MESSAGES, odd)

    async def scenario(one: Node, two: Node) -> None:
        await publish(one, SHARED)
        peer, memory = InProcessPeer(two), Remembered()
        first = await sync(one, peer, memory)
        assert (first.outcome, first.detail) == (SyncOutcome.IN_SYNC, "")
        assert (first.proved, named(first)) == (True, ODD_IDS)
        assert codes(first) == {("here", "lost")}
        check_alike(await next_cost(one, peer, memory), await idle_cost(tmp_path))
        await check_a_whole_session(one, peer, memory)
        async with open_nodes(tmp_path / "c", {}) as (third,):
            await publish(third, MESSAGES)
            other = await sync(one, InProcessPeer(third), Remembered())
            assert (other.entries_received, other.set_aside_count) == (len(ODD), 0)
        again = await sync(one, peer, memory)
        assert (again.outcome, again.proved) == (SyncOutcome.IN_SYNC, True)
        assert again.set_aside_count == 0

    pair(tmp_path, scenario)


async def found_lost(node: Node, count: int) -> None:
    """Until the node has read again what it could not read, and marked it."""
    while await node.store.frames.lost_count() < count:  # noqa: ASYNC110 - the store tells nobody
        await asyncio.sleep(0.02)


def test_content_lost_here_is_fetched_from_a_peer_whose_set_is_equal(tmp_path: Path) -> None:
    odd = {f"m{n}" for n in ODD}
    ruined(tmp_path / "a", MESSAGES[:200], odd)

    async def scenario(one: Node, two: Node) -> None:
        await publish(two, MESSAGES[:200])
        lost = [each for n, each in enumerate(MESSAGES[:200]) if n in ODD]
        assert await one.store.entries.by_digest([entry_digest(each) for each in lost]) == []
        await found_lost(one, len(lost))
        peer, memory = InProcessPeer(two), Remembered()
        report = await sync(one, peer, memory)
        assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
        assert (report.mended, report.lost_here) == (len(lost), 0)
        assert report.requests <= 3
        assert len(await one.store.entries.by_digest([entry_digest(each) for each in lost])) == len(
            lost
        )
        assert (await sync(one, peer, memory)).requests == 1

    pair(tmp_path, scenario)


def test_content_lost_on_both_sides_is_asked_for_once_and_then_now_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {f"m{n}" for n in ODD}
    for side in "ab":
        ruined(tmp_path / side, MESSAGES[:200], odd)

    async def scenario(one: Node, two: Node) -> None:
        lost = [entry_digest(each) for n, each in enumerate(MESSAGES[:200]) if n in ODD]
        await one.store.entries.by_digest(lost)
        await found_lost(one, len(lost))
        peer, memory = InProcessPeer(two), Remembered()
        report = await sync(one, peer, memory)
        assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
        assert (report.mended, report.lost_here) == (0, len(lost))
        idle = await sync(one, peer, memory)
        assert (idle.requests, idle.lost_here) == (1, len(lost))
        set_clock(monkeypatch, time.time() + memory_module.RETRY_S_MIN + 1)
        await publish(two, [MESSAGES[min(ODD)]])
        assert (await sync(one, peer, memory)).mended == 1

    pair(tmp_path, scenario)


def test_lost_content_that_a_peer_lacks_does_not_hide_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LOST_FETCHED_MAX", 2)
    monkeypatch.setattr(session_module, "LOST_PAGES_MAX", 1)
    ruined(tmp_path / "a", MESSAGES[:10], {f"m{n}" for n in range(10)})

    async def scenario(one: Node, two: Node) -> None:
        await publish(two, [MESSAGES[7]])
        await one.store.entries.by_digest([entry_digest(each) for each in MESSAGES[:10]])
        await found_lost(one, 10)
        memory = Remembered()
        reports = [await sync(one, InProcessPeer(two), memory) for _ in range(6)]
        assert sum(report.mended for report in reports) == 1
        await publish(two, [MESSAGES[0]])  # behind the end comes the start again
        memory.value = replace(memory.value, lost_asked=())
        reports = [await sync(one, InProcessPeer(two), memory) for _ in range(6)]
        assert sum(report.mended for report in reports) == 1

    pair(tmp_path, scenario)


def test_a_peer_is_not_asked_for_lost_content_that_it_does_not_want(tmp_path: Path) -> None:
    inside, later, outside = message(1, "b"), message(9, "b"), message(1, "a")
    ruined(tmp_path / "a", [inside, later, outside], {"m1", "m9"})

    async def scenario(one: Node, two: Node) -> None:
        digests = [entry_digest(each) for each in (inside, later, outside)]
        await one.store.entries.by_digest(digests)
        await found_lost(one, 3)
        peer, memory = InProcessPeer(two), Remembered()
        wanted = Interest.make(channels=frozenset("b"), lamport_to=8)
        await sync_with_peer(local_of(one), peer, wanted, memory=memory)
        assert memory.value.lost_waiting(time.time()) == set(digests[:1])

    pair(tmp_path, scenario)


def test_what_we_cannot_send_is_named_and_does_not_hold_the_rest(tmp_path: Path) -> None:
    ruined(tmp_path / "a", MESSAGES[:200], {f"m{n}" for n in ODD})

    async def scenario(one: Node, two: Node) -> None:
        peer, memory = InProcessPeer(two), Remembered()
        report = await sync(one, peer, memory)
        assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
        assert codes(report) == {("there", "lost")}
        assert report.entries_sent == 200 - report.set_aside_count
        await found_lost(one, report.set_aside_count)
        assert (await sync(one, peer, memory)).requests == 1

    pair(tmp_path, scenario)


def test_claims_are_set_aside_with_an_absent_entry_and_come_when_it_does(tmp_path: Path) -> None:
    def serves_no_entry(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        for item in response.items:
            hints = list(item.entry.hints)
            item.absent.reason = recon_pb2.LOST
            item.absent.hints.extend(hints)
        return response

    async def scenario(one: Node, two: Node) -> None:
        await publish(two, [message(1)], {"m1": (b"a hint", b"another")})
        await publish(one, [message(n) for n in range(2, 40)])
        memory = Remembered()
        first = await sync(one, InProcessPeer(two, serves_no_entry), memory)
        assert (first.outcome, first.proved) == (SyncOutcome.IN_SYNC, True)
        assert (codes(first), first.set_aside_count) == ({("here", "lost")}, 3)
        # A late claim on it is set aside as well, without another word.
        await publish(two, [message(1)], {"m1": (b"late",)})
        late = await sync(one, InProcessPeer(two), memory)
        assert (late.proved, late.set_aside_count) == (True, 4)
        await publish(one, [message(1)])
        again = await sync(one, InProcessPeer(two), memory)
        assert (again.outcome, again.proved) == (SyncOutcome.IN_SYNC, True)
        assert (again.claims_received, again.set_aside_count) == (3, 0)
        assert await holdings(one) == await holdings(two)

    pair(tmp_path, scenario)


def test_an_element_is_tried_again_after_a_while_and_then_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(one: Node, two: Node) -> None:
        await publish(one, SHARED[:200])
        await publish(two, [*SHARED[:200], MESSAGES[50]])
        peer, memory = InProcessPeer(two, cuts_odd_frames), Remembered()
        await sync(one, peer, memory)
        now = time.time()
        requests = []
        for minutes in (14, 16, 30, 70, 90):
            set_clock(monkeypatch, now + 60 * minutes)
            report = await sync(one, peer, memory)
            assert (report.outcome, report.set_aside_count) == (SyncOutcome.IN_SYNC, 1)
            requests.append(report.entries_refused)
        assert requests == [0, 1, 0, 0, 1]

    pair(tmp_path, scenario)


def test_what_is_set_aside_is_bounded() -> None:
    aside = SetAside(Aside(b""))
    for n in range(3):
        aside.add(AsideElement(LackedBy.HERE, n, bytes([n]) * 32, "x"), 0.0)
    assert len(aside) == 3
    assert SET_ASIDE_MAX >= 1_000


class Forgetful(InProcessPeer):
    """Acknowledges what is pushed and keeps nothing of it."""

    async def recon(self, request: bytes) -> bytes:
        asked = ReconRequest.FromString(request)
        count = len(asked.push)
        del asked.push[:]
        answer = ReconResponse.FromString(await super().recon(asked.SerializeToString()))
        answer.push_outcomes.extend([recon_pb2.STORED] * count)
        return answer.SerializeToString()


def test_a_peer_that_throws_away_what_it_acknowledged_is_found_out(tmp_path: Path) -> None:
    async def scenario(one: Node, two: Node) -> None:
        await publish(one, MESSAGES[:100])
        await publish(two, MESSAGES[:40])
        memory = Remembered()
        first = await sync(one, Forgetful(two), memory)
        assert first.missing_there == 60
        # What it acknowledged is counted in, so the next session notices that its news lack it.
        report = await sync(one, Forgetful(two), memory)
        assert report.outcome is SyncOutcome.PEER_FAULT
        assert not report.proved
        assert "acknowledged" in report.detail
        assert report.missing_there == 60

    pair(tmp_path, scenario)
