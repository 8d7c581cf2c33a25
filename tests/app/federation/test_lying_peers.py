"""Against any peer, the session ends with a report and stores nothing wrong."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sdstore.sync.comparison as comparison_module
from app.errors import Code
from app.server.node import Node
from recon.agreement import Interest, SessionHeader
from recon.elements import Bound, bound_bytes, order_of_lamport
from recon.index import RangeIndex
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from recon.responder import respond
from recon.view import View
from sdstore.participant.backfill import LogReplica
from sdstore.sds.codec import decode, encode
from sdstore.sds.log import MemoryLog
from sdstore.sds.model import Message, claim_id, entry_digest
from sdstore.sync import driver
from sdstore.sync.comparison import Mode
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, Item, ReconRequest, ReconResponse
from tests.support.federation import (
    InProcessPeer,
    Mangle,
    Remembered,
    holdings,
    local_of,
    message,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)

chance = random.Random(7)


def serves_nothing(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    del response.items[:]
    return response


def serves_half(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    del response.items[: (len(response.items) + 1) // 2]
    return response


def serves_half_under_many_hints(request: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in serves_half(request, response).items:
        item.entry.hints.extend(b"%d" % n for n in range(16))
    return response


def serves_everything_twice(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    response.items.extend(list(response.items))
    return response


def serves_backwards(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    items = list(response.items)[::-1]
    del response.items[:]
    response.items.extend(items)
    return response


def serves_the_end_again_and_again(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    if response.items:
        del response.items[:-1]
        response.truncated = True
        response.resume = bytes([128]) + bytes(7) + chance.randbytes(8)
    return response


def serves_what_was_not_asked_for(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    if response.items:
        frame = encode(message(50, content=b"never asked for"))
        response.items.append(Item(entry=Item.Entry(frame=frame)))
    return response


def serves_other_content(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in response.items:
        item.entry.frame = item.entry.frame.replace(b"content", b"forgery")
    return response


def serves_sync_messages(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in response.items:
        item.entry.frame = encode(Message("sync", "c", lamport_timestamp=1))
    return response


def serves_empty_items(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in response.items:
        item.Clear()
    return response


def serves_a_flood_of_nothing(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    response.items.extend([Item()] * 65_537)
    return response


def serves_claims_alone(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    """Every claim, and none of the entries."""
    claims = [
        (item.order, claim_id(item.id, hint), item.id, hint)
        for item in response.items
        for hint in item.entry.hints
    ]
    del response.items[:]
    for order, _, digest, hint in sorted(claims):
        response.items.append(Item(claim=Item.Claim(digest=digest, hint=hint), order=order))
    return response


def serves_claims_on_nothing(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in response.items:
        item.claim.digest, item.claim.hint = bytes(32), b"%d" % item.order
    return response


def says_that_other_elements_are_absent(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    for item in response.items:
        item.absent.reason = recon_pb2.LOST
        item.id = chance.randbytes(32)
    return response


def says_that_all_is_equal(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    answers = response.answers
    if answers.answered:
        response.answers.CopyFrom(Answers(answered=answers.answered))
    return response


def says_that_all_is_equal_and_no_total(
    request: ReconRequest, response: ReconResponse
) -> ReconResponse:
    says_that_all_is_equal(request, response).ClearField("total")
    return response


def names_another_entry(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    """Content under the name of another element that was asked for."""
    if len(response.items) > 1:
        first, second = response.items[:2]
        first.entry.frame, second.entry.frame = second.entry.frame, first.entry.frame
    return response


def cuts_without_progress(request: ReconRequest, response: ReconResponse) -> ReconResponse:
    if request.HasField("fetch"):
        del response.items[:]
        response.truncated = True
        response.resume = bytes(15) + b"\x01"
    return response


def cuts_and_serves_again(request: ReconRequest, response: ReconResponse) -> ReconResponse:
    if request.HasField("fetch"):
        del response.items[1:]
        response.truncated = True
        response.resume = bytes(8) + chance.randbytes(8)
    return response


def resumes_nowhere(request: ReconRequest, response: ReconResponse) -> ReconResponse:
    if request.HasField("fetch"):
        response.truncated = True
        response.resume = b"?"
    return response


def tells_no_outcomes(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    del response.push_outcomes[:]
    return response


def tells_unknown_outcomes(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    outcomes = [77] * len(response.push_outcomes)
    del response.push_outcomes[:]
    raw = response.SerializeToString()
    return ReconResponse.FromString(raw + b"\x52" + bytes([len(outcomes), *outcomes]))


def expires_for_ever(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    response.status = recon_pb2.NONCE_EXPIRED
    response.responder_nonce = chance.randbytes(16)
    return response


def gives_short_nonces(_: ReconRequest, __: ReconResponse) -> ReconResponse:
    return ReconResponse(
        status=recon_pb2.NONCE_EXPIRED, version=PROTOCOL_VERSION, responder_nonce=b"short"
    )


def knows_no_interest(request: ReconRequest, response: ReconResponse) -> ReconResponse:
    if not request.session.responder_nonce:
        return response
    return ReconResponse(status=recon_pb2.UNKNOWN_INTEREST, version=PROTOCOL_VERSION)


def has_an_unknown_status(_: ReconRequest, __: ReconResponse) -> ReconResponse:
    return ReconResponse.FromString(b"\x08\x63")


def denies_our_version_and_speaks_it(_: ReconRequest, __: ReconResponse) -> ReconResponse:
    return ReconResponse(status=recon_pb2.UNSUPPORTED_VERSION, version=PROTOCOL_VERSION)


def cuts_columns(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    response.answers.hashes = response.answers.hashes[:-1]
    response.answers.short_ids = response.answers.short_ids[:-1]
    response.answers.counts = response.answers.counts[:-1]
    return response


def answers_nothing(_: ReconRequest, response: ReconResponse) -> ReconResponse:
    response.answers.Clear()
    return response


def has_another_set_every_time(request: ReconRequest, response: ReconResponse) -> ReconResponse:
    """Never equal, always something to split: the peer draws new elements for every request."""
    if not request.HasField("ranges"):
        return response
    count = 3_000
    index = RangeIndex()
    index.insert(
        np.array([chance.randrange(1 << 63, (1 << 63) + 200) for _ in range(count)], np.uint64),
        np.frombuffer(chance.randbytes(32 * count), np.uint8).reshape(-1, 32),
        np.zeros(count, np.uint32),
    )
    header = SessionHeader(
        request.session.initiator_nonce,
        request.session.responder_nonce,
        b"",
    )
    answer = respond(View(index, header.key()), request)
    answer.policy, answer.mark = response.policy, response.mark
    return answer


LIARS: list[Mangle] = [
    serves_nothing,
    serves_half,
    serves_half_under_many_hints,
    serves_everything_twice,
    serves_backwards,
    serves_the_end_again_and_again,
    serves_what_was_not_asked_for,
    serves_other_content,
    serves_sync_messages,
    serves_empty_items,
    serves_a_flood_of_nothing,
    serves_claims_on_nothing,
    serves_claims_alone,
    says_that_other_elements_are_absent,
    says_that_all_is_equal,
    says_that_all_is_equal_and_no_total,
    names_another_entry,
    tells_unknown_outcomes,
    cuts_without_progress,
    cuts_and_serves_again,
    resumes_nowhere,
    tells_no_outcomes,
    expires_for_ever,
    gives_short_nonces,
    knows_no_interest,
    has_an_unknown_status,
    denies_our_version_and_speaks_it,
    cuts_columns,
    answers_nothing,
    has_another_set_every_time,
]


async def load(one: Node, two: Node) -> None:
    """Interleaved, so that no range is empty on one side: all of such a range would be wanted."""
    await publish(one, [message(n) for n in range(200) if n % 4 < 3])
    await publish(two, [message(n) for n in range(200) if n % 4 > 1], {"m151": (b"hint",)})


@pytest.mark.parametrize("liar", LIARS, ids=lambda each: each.__name__)
def test_a_liar_is_found_out_and_leaves_no_trace(tmp_path: Path, liar: Mangle) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await load(one, two)
            honest = await holdings(one) | await holdings(two)
            memory = Remembered()
            report = await sync_with_peer(
                local_of(one),
                InProcessPeer(two, liar),
                one.federation.interests.current,
                memory=memory,
            )
            assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, Code.PEER_MISBEHAVED)
            assert report.detail
            assert report.requests < 200
            assert (await holdings(one)).keys() <= honest.keys()
            healed = await sync_with_peer(
                local_of(one), InProcessPeer(two), one.federation.interests.current
            )
            assert healed.outcome is SyncOutcome.IN_SYNC
            assert (await holdings(one)).keys() == honest.keys()

    run(scenario())


def test_a_peer_that_refuses_us_is_told_from_one_that_is_at_fault(tmp_path: Path) -> None:
    def refuses(_: ReconRequest, __: ReconResponse) -> ReconResponse:
        return ReconResponse(status=recon_pb2.REFUSED, version=PROTOCOL_VERSION)

    report = _sync_with(tmp_path, refuses)
    assert (report.outcome, report.code) == (SyncOutcome.REFUSED, Code.FORBIDDEN)


def test_a_peer_that_serves_drop_by_drop_is_left_when_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = replace(DEFAULT_LIMITS, seconds_base=0.5, seconds_per_credit_mib=0.0)
    monkeypatch.setattr(comparison_module, "RECON_LIMITS", hasty)

    def drips(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        if len(response.items) > 1:
            second, _ = decode(response.items[1].entry.frame)
            del response.items[1:]
            response.truncated = True
            order = order_of_lamport(second.lamport_timestamp or 0)
            response.resume = bound_bytes(Bound(order, int.from_bytes(entry_digest(second)[:8])))
            time.sleep(0.1)
        return response

    report = _sync_with(tmp_path, drips)
    assert (report.outcome, report.code) == (SyncOutcome.PARTIAL, Code.RECON_BUDGET_SPENT)
    assert 1 < report.entries_received < 20


@pytest.mark.parametrize("contacts", [0, 1], ids=["at first contact", "under way"])
def test_a_peer_of_another_version_is_no_liar(tmp_path: Path, contacts: int) -> None:
    seen: list[ReconRequest] = []

    def is_upgraded(request: ReconRequest, response: ReconResponse) -> ReconResponse:
        seen.append(request)
        upgraded = ReconResponse(status=recon_pb2.UNSUPPORTED_VERSION, version=99)
        return response if len(seen) <= contacts else upgraded

    report = _sync_with(tmp_path, is_upgraded)
    assert (report.outcome, report.code) == (SyncOutcome.REFUSED, Code.PEER_VERSION)


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"<html>", b"\x08"], ids=["ff", "html", "cut"])
def test_garbage_is_a_fault_of_the_peer(tmp_path: Path, garbage: bytes) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}) as (one,):
            report = await sync_with_peer(
                local_of(one), _Garbage(one, garbage), one.federation.interests.current
            )
            assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, Code.PEER_MISBEHAVED)

    run(scenario())


def test_bad_hints_beside_a_good_frame_do_not_cost_the_message(tmp_path: Path) -> None:
    def adds_bad_hints(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        for item in response.items:
            item.entry.hints.extend([b"", bytes(5_000), *(b"%d" % n for n in range(100))])
        return response

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, [message(1)])
            peer = InProcessPeer(two, adds_bad_hints)
            report = await sync_with_peer(local_of(one), peer, one.federation.interests.current)
            assert report.entries_received == 1
            # What counts as received is what was kept, and the rest is said.
            [hints] = (await holdings(one)).values()
            assert (report.claims_received, report.claims_refused) == (len(hints), 102 - len(hints))
            assert (await holdings(one)).keys() == (await holdings(two)).keys()

    run(scenario())


class _Mirror(InProcessPeer):
    """Holds nothing: has us answer our own questions, in a session under the same nonces."""

    def __init__(self, victim: Node) -> None:
        super().__init__(victim)
        self.refusals = 0

    async def recon(self, request: bytes) -> bytes:
        answer = await super().recon(request)
        self.refusals += ReconResponse.FromString(answer).status == recon_pb2.REFUSED
        return answer


def test_a_peer_that_has_us_answer_our_own_questions_learns_no_total(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}) as (one,):
            await publish(one, [message(n) for n in range(100)])
            peer = _Mirror(one)
            ourselves = local_of(one, one.recon.endpoint.nonce_secret)
            report = await sync_with_peer(ourselves, peer, one.federation.interests.current)
            assert (report.outcome, report.proved) == (SyncOutcome.REFUSED, False)
            assert peer.refusals == 1
            other = await sync_with_peer(
                local_of(one), _Mirror(one), one.federation.interests.current
            )
            assert other.outcome is SyncOutcome.IN_SYNC  # another node with the same content

    run(scenario())


class _Garbage(InProcessPeer):
    def __init__(self, node: Node, garbage: bytes) -> None:
        super().__init__(node)
        self._garbage = garbage

    async def recon(self, _request: bytes) -> bytes:
        return self._garbage


def _sync_with(folder: Path, mangle: Mangle, *, hints_per_entry: int = 0) -> SyncReport:
    async def scenario() -> SyncReport:
        async with open_nodes(folder, {}, {}) as (one, two):
            await load(one, two)
            if hints_per_entry:
                hints = tuple(b"%d" % n for n in range(hints_per_entry))
                new = [message(n) for n in range(300, 320)]
                await publish(two, new, {each.message_id: hints for each in new})
            peer = InProcessPeer(two, mangle)
            return await sync_with_peer(local_of(one), peer, one.federation.interests.current)

    report: SyncReport = run(scenario())
    return report


@pytest.mark.parametrize("outside", ["channel", "window"])
def test_a_peer_that_serves_what_was_not_wanted_plants_nothing(
    tmp_path: Path, outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares everything that it has, under the key of the mutual interest."""

    async def scenario() -> None:
        wanted = Interest.make(channels=frozenset(["c"]), lamport_from=5)
        everything = Interest.make(everything=True)
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            planted = message(7, "foreign") if outside == "channel" else message(1)
            await publish(two, [message(6), planted])
            for name in ("view", "prepare_view", "elements_to_hash"):
                honest = getattr(two.recon.index, name)
                monkeypatch.setattr(
                    two.recon.index, name, lambda key, _, __=(), f=honest: f(key, everything)
                )
            report = await sync_with_peer(local_of(one), InProcessPeer(two), wanted)
            assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, Code.PEER_MISBEHAVED)
            assert "outside the interest" in report.detail
            assert planted.message_id not in [name for _, name, _ in await holdings(one)]
            log = await LogReplica.open("c", MemoryLog())
            report, _ = await driver.sync_with_peer(
                log, InProcessPeer(two), wanted, mode=Mode.FETCH
            )
            assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, Code.PEER_MISBEHAVED)
            assert "outside the interest" in report.detail

    run(scenario())
