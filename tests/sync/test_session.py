"""Sessions over a replica in memory: no node, no SQL, no HTTP, no SDS."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from recon.agreement import Interest, is_own_nonce
from recon.limits import ID_BYTES, NONCE_BYTES
from sdstore.sync.driver import sync_with_peer
from sdstore.sync.memory import RETRY_FACTOR, RETRY_S_MIN, PeerMemory
from sdstore.sync.report import Progress, SyncCode, SyncError, SyncOutcome, SyncReport
from sdstore.sync.session import LOST_FETCHED_MAX
from sdstore.sync.steps import LostPage, Prepared, Stored
from sdstore.wire.recon_pb2 import PUSH_REFUSED, ReconRequest, ReconResponse
from tests.support.memory_sync import EVERYTHING, MemoryPeer, MemoryReplica, content, element_of

CONTENTS = [content(n, "some text") for n in range(3_000)]


def synced(
    ours: MemoryReplica,
    peer: MemoryPeer,
    memory: PeerMemory | None = None,
    seen: list[Progress] | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[SyncReport, PeerMemory]:
    """One session of a replica that keeps no order of arrival; a minute would be a fault."""
    changed = (seen if seen is not None else []).append
    session = sync_with_peer(
        ours, peer, EVERYTHING, memory=memory or PeerMemory(), changed=changed, now_s=clock()
    )
    return asyncio.run(asyncio.wait_for(session, 60))


def test_two_sets_heal_and_each_item_is_read_once() -> None:
    ours, theirs = MemoryReplica(CONTENTS[:2_000]), MemoryReplica(CONTENTS[500:])
    peer, seen = MemoryPeer(theirs), list[Progress]()
    report, memory = synced(ours, peer, seen=seen)
    assert (report.outcome, report.detail, report.proved) == (SyncOutcome.IN_SYNC, "", True)
    assert (report.entries_received, report.entries_sent) == (1_000, 500)
    assert ours.contents == theirs.contents == set(CONTENTS)
    assert ours.prepared_count == 1_000
    assert seen[-1].in_sync_percent == 100.0
    again, _ = synced(ours, peer, memory)
    assert (again.outcome, again.proved, again.requests) == (SyncOutcome.IN_SYNC, True, 1)


def test_what_is_remembered_of_a_peer_survives_as_json() -> None:
    ours = MemoryReplica(CONTENTS[:100], refuses=lambda raw: raw == CONTENTS[150])
    lost = CONTENTS[7]
    ours.lose(lost)
    theirs = MemoryReplica(CONTENTS[10:200])
    theirs.add(lost)
    theirs.lose(lost)
    peer = MemoryPeer(theirs)
    _, memory = synced(ours, peer)
    text = json.dumps(memory.document())
    again = PeerMemory.of(json.loads(text))
    assert again == memory
    assert (len(again.lost_asked), len(again.asides[0].elements)) == (1, 1)
    report, _ = synced(ours, peer, again)
    assert (report.set_aside_count, report.requests) == (1, 1)


def test_a_refused_item_is_set_aside_and_the_others_arrive() -> None:
    odd = CONTENTS[50]
    ours = MemoryReplica(CONTENTS[:20], refuses=lambda raw: raw == odd)
    peer = MemoryPeer(MemoryReplica(CONTENTS[:100]))
    report, memory = synced(ours, peer)
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
    assert ours.contents == set(CONTENTS[:100]) - {odd}
    element_id = element_of(odd).element_id.hex()
    assert report.set_aside == (
        {"id": element_id, "kind": "entry", "lacked_by": "here", "code": "not_wanted"},
    )
    again, _ = synced(ours, peer, memory)
    assert (again.entries_received, again.entries_refused) == (0, 0)


def test_a_lost_item_that_one_peer_lacks_is_asked_of_another() -> None:
    lost = CONTENTS[3]
    ours, poor = MemoryReplica(CONTENTS[:50]), MemoryReplica(CONTENTS[:50])
    ours.lose(lost)
    poor.lose(lost)
    report, _ = synced(ours, MemoryPeer(poor))
    assert (report.outcome, report.mended, report.lost_here) == (SyncOutcome.IN_SYNC, 0, 1)
    report, _ = synced(ours, MemoryPeer(MemoryReplica(CONTENTS[:50])))
    assert (report.mended, report.lost_here) == (1, 0)
    assert lost in ours.contents


class Failing(MemoryReplica):
    """The disk is full after the first batch."""

    commits_left = 1

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        self.commits_left -= 1
        if self.commits_left < 0:
            raise SyncError("disk_full", "no room left")
        return await super().commit(prepared)


def test_a_commit_that_fails_loses_nothing() -> None:
    ours, theirs = Failing(CONTENTS[:10]), MemoryReplica(CONTENTS)
    broken, memory = synced(ours, MemoryPeer(theirs))
    assert (broken.outcome, broken.code) == (SyncOutcome.LOCAL_FAULT, "disk_full")
    assert len(ours.contents) == 10 + broken.entries_received
    assert 0 < broken.entries_received < len(CONTENTS) - 10
    assert broken.set_aside_count == 0
    ours.commits_left = len(CONTENTS)
    mended, _ = synced(ours, MemoryPeer(theirs), memory)
    assert (mended.outcome, mended.proved) == (SyncOutcome.IN_SYNC, True)
    assert broken.entries_received + mended.entries_received == len(CONTENTS) - 10
    assert ours.contents == set(CONTENTS)


class Breaking(MemoryPeer):
    """Ends the session with an error of the transport."""

    def __init__(self, replica: MemoryReplica, error: Exception) -> None:
        super().__init__(replica)
        self._error = error

    async def recon(self, request: bytes) -> bytes:
        if len(self.requests) == 2:
            raise self._error
        return await super().recon(request)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (SyncCode.OVERLOADED, SyncOutcome.PARTIAL),
        (SyncCode.PEER_UNREACHABLE, SyncOutcome.PEER_FAULT),
        (SyncCode.FORBIDDEN, SyncOutcome.REFUSED),
        ("anything else", SyncOutcome.LOCAL_FAULT),
    ],
)
def test_an_error_of_the_driver_says_who_is_at_fault(code: str, outcome: SyncOutcome) -> None:
    peer = Breaking(MemoryReplica(CONTENTS), SyncError(code, "why"))
    report, _ = synced(MemoryReplica(), peer)
    assert (report.outcome, report.code, report.detail) == (outcome, code, "why")


def test_an_error_that_is_not_the_drivers_is_no_report() -> None:
    with pytest.raises(ZeroDivisionError):
        synced(MemoryReplica(), Breaking(MemoryReplica(CONTENTS), ZeroDivisionError()))


class Lying(MemoryPeer):
    """Serves other content under the name that was asked for."""

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        response = await super()._answer(request)
        for item in response.items:
            item.entry.frame += b"!"
        return response


def test_content_under_a_wrong_name_is_a_fault_of_the_peer_and_is_not_stored() -> None:
    ours = MemoryReplica()
    report, _ = synced(ours, Lying(MemoryReplica(CONTENTS[:5])))
    assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, SyncCode.PEER_MISBEHAVED)
    assert ours.contents == set()
    assert len(element_of(CONTENTS[0]).element_id) == ID_BYTES


class Overstating(MemoryPeer):
    """Holds something that it does not show, by the total that it states."""

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        response = await super()._answer(request)
        if response.HasField("total"):
            response.total.count += 1
        return response


def test_sets_are_not_proved_equal_while_the_peer_states_another_total() -> None:
    ours = MemoryReplica(CONTENTS[:60])
    report, _ = synced(ours, Overstating(MemoryReplica(CONTENTS[20:80])))
    assert (report.outcome, report.proved) == (SyncOutcome.PEER_FAULT, False)
    assert ours.contents == set(CONTENTS[:80])


def test_a_peer_that_shows_no_difference_and_states_another_total_is_at_fault() -> None:
    class Splitting(Overstating):
        """Takes its ranges apart as if they differed; their parts are equal."""

        async def _answer(self, request: ReconRequest) -> ReconResponse:
            if request.total and request.ranges.hashes:
                request.ranges.hashes = bytes(len(request.ranges.hashes))
            return await super()._answer(request)

    report, _ = synced(MemoryReplica(CONTENTS), Splitting(MemoryReplica(CONTENTS)))
    assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, SyncCode.PEER_MISBEHAVED)
    assert "do not explain the total" in report.detail


def test_a_peer_to_which_more_comes_than_it_looks_at_is_accused_of_nothing() -> None:
    theirs = MemoryReplica(CONTENTS[20:80])
    theirs.news_max = 0
    more = iter(CONTENTS[80:])
    peer = MemoryPeer(theirs, asked=lambda _: theirs.add(next(more)))
    report, _ = synced(MemoryReplica(CONTENTS[:60]), peer)
    assert (report.outcome, report.detail, report.proved) == (SyncOutcome.IN_SYNC, "", False)
    assert len(peer.requests) <= 12
    assert theirs.contents >= set(CONTENTS[:80])


@pytest.mark.parametrize("restarts_count", [2, 3])
def test_a_peer_may_be_started_anew_twice_before_it_answers(restarts_count: int) -> None:
    def start_anew(_: ReconRequest) -> None:
        if (number := len(peer.requests)) <= 1 + restarts_count:
            peer.nonce = number.to_bytes(NONCE_BYTES)

    peer = MemoryPeer(MemoryReplica(CONTENTS[:9]), asked=start_anew)
    report, _ = synced(MemoryReplica(), peer)
    assert (report.outcome is SyncOutcome.IN_SYNC) == (restarts_count == 2), report


def test_a_node_recognises_the_nonces_of_its_sessions() -> None:
    peer = MemoryPeer(MemoryReplica(CONTENTS[:9]))
    asyncio.run(sync_with_peer(MemoryReplica(), peer, EVERYTHING, nonce_secret=bytes(32)))
    nonces = {each.session.initiator_nonce for each in peer.requests} - {b""}
    assert [is_own_nonce(each, bytes(32)) for each in nonces] == [True]


class Withholding(MemoryPeer):
    """Names an element and never serves it."""

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        response = await super()._answer(request)
        del response.items[-1:]
        return response


def test_an_element_that_is_named_and_not_served_is_a_fault_of_the_peer() -> None:
    ours = MemoryReplica(CONTENTS[:10])
    report, _ = synced(ours, Withholding(MemoryReplica(CONTENTS[:40])))
    assert (report.outcome, report.proved) == (SyncOutcome.PEER_FAULT, False)
    assert "did not serve" in report.detail


class Refusing(MemoryPeer):
    """Takes nothing, and says so by its policy 1."""

    policy = 1

    async def _answer(self, request: ReconRequest) -> ReconResponse:
        pushed = len(request.push)
        if self.policy == 1:
            del request.push[:]
        response = await super()._answer(request)
        if self.policy == 1:
            response.push_outcomes.extend([PUSH_REFUSED] * pushed)
        return response


def test_a_peer_with_a_new_policy_is_offered_again_what_it_refused() -> None:
    ours, theirs = MemoryReplica(CONTENTS[:30]), MemoryReplica(CONTENTS[:25])
    peer = Refusing(theirs)
    first, memory = synced(ours, peer)
    assert (first.outcome, first.proved, first.set_aside_count) == (SyncOutcome.IN_SYNC, True, 5)
    peer.policy = 2
    again, _ = synced(ours, peer, memory)
    assert (again.entries_sent, again.set_aside_count) == (5, 0)
    assert theirs.contents == ours.contents


def test_a_peer_whose_policy_keeps_changing_is_accused_of_nothing() -> None:
    ours, theirs = MemoryReplica(CONTENTS[:300]), MemoryReplica(CONTENTS[100:400])

    def changes(_: ReconRequest) -> None:
        theirs.policy += 1

    report, memory = synced(ours, MemoryPeer(theirs, asked=changes))
    assert (report.outcome, report.code) == (SyncOutcome.PARTIAL, SyncCode.OVERLOADED)
    assert "a policy changed" in report.detail
    assert not report.proved
    report, _ = synced(ours, MemoryPeer(theirs), memory)
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)


class Paged(MemoryReplica):
    """Names the entries with lost content a page at a time."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        super().__init__(contents)
        self.pages_count = 0

    async def lost(self, interest: Interest, after: int, limit: int) -> LostPage:
        """See `Replica`."""
        self.pages_count += 1
        found = (await super().lost(interest, after, limit)).elements
        page = found[after : after + limit]
        following = after + limit if after + limit < len(found) else 0
        return LostPage(page, following, len(found))


def test_a_session_asks_for_a_bounded_number_of_lost_entries_and_the_next_one_goes_on() -> None:
    ours, theirs = Paged(CONTENTS), MemoryReplica(CONTENTS)
    for raw in CONTENTS[: 3 * LOST_FETCHED_MAX]:
        ours.lose(raw)
    memory = PeerMemory()
    for left in (2, 1, 0):
        report, memory = synced(ours, MemoryPeer(theirs), memory)
        assert (report.mended, report.lost_here) == (LOST_FETCHED_MAX, left * LOST_FETCHED_MAX)
    ours.pages_count = 0
    synced(ours, MemoryPeer(theirs), memory)
    assert ours.pages_count <= 3


def test_lost_content_that_a_peer_cannot_serve_is_asked_of_it_after_ever_longer_waits() -> None:
    ours, theirs = MemoryReplica(CONTENTS[:50]), MemoryReplica(CONTENTS[:50])
    ours.lose(CONTENTS[3])
    theirs.lose(CONTENTS[3])
    peer, memory = MemoryPeer(theirs), PeerMemory()
    now_s = time.time()
    for wait_s in (0.0, RETRY_S_MIN, RETRY_S_MIN * RETRY_FACTOR, RETRY_S_MIN * RETRY_FACTOR**2):
        for later_s, is_asked in ((wait_s - 2, False), (wait_s + 2, True)):
            if later_s < 0:
                continue
            peer.requests.clear()
            at_s = now_s + later_s
            _, memory = synced(ours, peer, memory, clock=lambda at_s=at_s: at_s)
            assert any(each.HasField("fetch") for each in peer.requests) is is_asked, wait_s
        now_s += wait_s + 2
    [asked] = memory.lost_asked
    assert abs(asked.again_at_s - at_s - RETRY_S_MIN * RETRY_FACTOR**3) < 60


def test_the_report_of_a_session_that_ends_early_claims_nothing() -> None:
    class Unreachable(MemoryPeer):
        async def recon(self, _: bytes) -> bytes:
            raise SyncError(SyncCode.PEER_UNREACHABLE, "no answer")

    report, _ = synced(MemoryReplica(CONTENTS[:10]), Unreachable(MemoryReplica()))
    nothing = SyncReport(outcome=SyncOutcome.PEER_FAULT, code=SyncCode.PEER_UNREACHABLE)
    assert replace(report, detail="", seconds=0.0, requests=0, rounds=0) == nothing
