"""Sessions over the news: a pair that was proved equal compares only what arrived since."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import sdstore.sync.comparison as comparison_module
import sdstore.sync.content as content_module
import sdstore.sync.differences as proof_module
import sdstore.sync.session as session_module
from recon.agreement import Interest
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.sync.driver import sync_with_peer
from sdstore.sync.memory import WHOLE_S_MAX, PeerMemory
from sdstore.sync.report import (
    DEFAULT_LIMITS,
    SyncCode,
    SyncError,
    SyncLimits,
    SyncOutcome,
    SyncReport,
)
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse
from tests.support.lying_peer import Forgetful
from tests.support.memory_sync import EVERYTHING, MemoryPeer, MemoryReplica, content, element_of

Result = tuple[SyncReport, PeerMemory]


def synced(
    ours: MemoryReplica,
    peer: MemoryPeer,
    memory: PeerMemory | None = None,
    interest: Interest = EVERYTHING,
    limits: SyncLimits = DEFAULT_LIMITS,
    clock: Callable[[], float] = time.time,
    draw: Callable[[int], bytes] = os.urandom,
) -> Result:
    """One session; a minute would be a fault."""
    peer.requests.clear()
    session = sync_with_peer(
        ours,
        peer,
        interest,
        memory=memory or PeerMemory(),
        arrivals=ours,
        limits=limits,
        now_s=clock(),
        draw=draw,
    )
    return asyncio.run(asyncio.wait_for(session, 60))


def contents(first: int, last: int, text: str = "") -> list[bytes]:
    """One element for each number."""
    return [content(n, text) for n in range(first, last)]


def proved_pair(count: int = 300) -> tuple[MemoryReplica, MemoryReplica, MemoryPeer, PeerMemory]:
    """Two equal replicas, and the memory of the session that proved them so."""
    ours, theirs = MemoryReplica(contents(0, count)), MemoryReplica(contents(0, count))
    peer = MemoryPeer(theirs)
    report, memory = synced(ours, peer)
    assert report.proved
    assert memory.baseline_over(EVERYTHING.encode()) is not None
    return ours, theirs, peer, memory


def was_over_news(peer: MemoryPeer) -> bool:
    """Whether the last session compared news, and nothing else."""
    compared = [each for each in peer.requests if each.total or each.HasField("ranges")]
    return bool(compared) and all(each.since for each in compared)


def test_a_proved_pair_compares_only_what_arrived_since_and_moves_it_in_three_trips() -> None:
    ours, theirs, peer, memory = proved_pair(3_000)
    for raw in contents(500, 510, "ours"):
        ours.add(raw)
    for raw in contents(2_000, 2_010, "theirs"):
        theirs.add(raw)
    report, memory = synced(ours, peer, memory)
    assert (report.outcome, report.proved, report.requests) == (SyncOutcome.IN_SYNC, True, 3)
    assert (report.entries_received, report.entries_sent) == (10, 10)
    assert was_over_news(peer)
    assert ours.contents == theirs.contents
    assert report.elements == len(ours.held)
    # What was moved arrived after the receiver's mark, and does not travel back.
    report, _ = synced(ours, peer, memory)
    assert (report.requests, report.entries_received, report.entries_sent) == (1, 0, 0)
    assert report.missing_here == report.missing_there == 0
    assert was_over_news(peer)


def test_empty_news_prove_an_idle_pair_equal_in_one_small_round_trip() -> None:
    ours, _, peer, memory = proved_pair()
    up, down = peer.bytes_up, peer.bytes_down
    report, memory = synced(ours, peer, memory)
    assert (report.requests, report.proved, report.elements) == (1, True, 300)
    assert peer.bytes_up - up + peer.bytes_down - down <= 300


def test_a_pair_that_is_never_equal_at_one_moment_still_gets_marks() -> None:
    """Before each answer something arrives on both sides: no two totals of one moment agree."""
    ours, theirs = MemoryReplica(contents(0, 500)), MemoryReplica(contents(250, 750))
    counter = iter(range(10_000))

    def arrive(_: ReconRequest) -> None:
        ours.add(content(next(counter), "ours, meanwhile"))
        theirs.add(content(next(counter), "theirs, meanwhile"))

    peer = MemoryPeer(theirs, asked=arrive)
    memory = PeerMemory()
    for number in range(4):
        before = ours.contents | theirs.contents
        report, memory = synced(ours, peer, memory)
        assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), number
        assert ours.contents >= before, number
        assert theirs.contents >= before, number
        assert was_over_news(peer) is (number > 0)
        assert report.requests <= (4 if number else 10), number


def test_what_reaches_the_peer_during_a_pass_is_news_of_the_next_session() -> None:
    ours, theirs = MemoryReplica(contents(0, 3_000)[::3]), MemoryReplica(contents(0, 3_000))
    meanwhile = contents(0, 3_000, "meanwhile")[::10]

    def arrive(request: ReconRequest) -> None:
        if request.HasField("ranges") and not request.mark:  # it has given its mark
            for raw in meanwhile:
                theirs.add(raw)

    peer = MemoryPeer(theirs, asked=arrive)
    report, memory = synced(ours, peer)
    assert (report.proved, report.entries_received) == (True, 2_000)
    assert theirs.contents >= set(meanwhile)
    assert not ours.contents & set(meanwhile)
    peer.asked = lambda _: None
    report, _ = synced(ours, peer, memory)
    assert (report.proved, report.entries_received) == (True, len(meanwhile))
    assert was_over_news(peer)
    assert ours.contents == theirs.contents


# --- everything is compared again --------------------------------------------------------------------


def _restored_there(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    theirs.restore(MemoryReplica(contents(0, 200)))
    for raw in contents(400, 600):  # the numbers after the copy belong to others now
        theirs.add(raw)


def _restored_here(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    ours.restore(MemoryReplica(contents(0, 200)))
    for raw in contents(400, 600):
        ours.add(raw)


def _row_lost_there(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    theirs.lose_row(element_of(content(100)))


def _row_lost_here(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    ours.lose_row(element_of(content(100)))


def _policy_there(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    theirs.policy = 1


def _policy_here(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    ours.policy = 1


def _secret_there(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    theirs.secret = b"of another node that took its address"


def _too_much_there(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    theirs.news_max = 5
    for raw in contents(300, 306):
        theirs.add(raw)


def _too_much_here(ours: MemoryReplica, theirs: MemoryReplica, _: MemoryPeer) -> None:
    ours.news_max = 5
    for raw in contents(300, 306):
        ours.add(raw)


@pytest.mark.parametrize(
    "change",
    [
        _restored_there,
        _restored_here,
        _row_lost_there,
        _row_lost_here,
        _policy_there,
        _policy_here,
        _secret_there,
        _too_much_there,
        _too_much_here,
    ],
)
def test_a_mark_that_fails_on_either_side_leads_to_a_whole_session(
    change: Callable[[MemoryReplica, MemoryReplica, MemoryPeer], None],
) -> None:
    ours, theirs, peer, memory = proved_pair()
    asyncio.run(theirs.catch_up())
    asyncio.run(ours.catch_up())
    change(ours, theirs, peer)
    held = ours.contents | theirs.contents
    report, memory = synced(ours, peer, memory)
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
    assert ours.contents == theirs.contents == held
    assert not was_over_news(peer)
    report, _ = synced(ours, peer, memory)
    assert (report.requests, was_over_news(peer)) == (1, True)


@pytest.mark.parametrize("at", [0, 5, 11, 12, 23])
def test_a_forged_mark_is_not_believed(at: int) -> None:
    ours, theirs, peer, memory = proved_pair()
    theirs.add(content(5, "theirs"))
    [baseline] = memory.baselines
    forged = bytearray(baseline.peer)
    forged[at] ^= 1
    memory = replace(memory, baselines=(replace(baseline, peer=bytes(forged)),))
    report, _ = synced(ours, peer, memory)
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
    assert ours.contents == theirs.contents
    assert not was_over_news(peer)


def test_what_a_session_brought_and_a_backup_lacks_comes_again() -> None:
    """The copy is younger than the mark and older than what arrived after it."""
    ours, theirs, peer, memory = proved_pair()
    asyncio.run(ours.catch_up())
    backup = copy.deepcopy(ours.__dict__ | {"_refuses": None})
    theirs.add(content(9, "theirs"))
    _, memory = synced(ours, peer, memory)
    ours.__dict__.update(backup | {"_refuses": ours._refuses})
    report, _ = synced(ours, peer, memory)
    assert (report.proved, report.entries_received, was_over_news(peer)) == (True, 1, False)
    assert ours.contents == theirs.contents


@pytest.mark.parametrize("refusing", ["here", "there"])
def test_what_was_set_aside_and_is_forgotten_is_found_again(refusing: str) -> None:
    ours, theirs, peer, memory = proved_pair()
    odd = content(9, "odd")
    refuser, holder = (ours, theirs) if refusing == "here" else (theirs, ours)
    refuser._refuses = lambda raw: raw == odd
    holder.add(odd)
    report, memory = synced(ours, peer, memory)
    assert (report.proved, report.set_aside_count, was_over_news(peer)) == (True, 1, True)
    report, memory = synced(ours, peer, memory)
    assert (report.proved, report.set_aside_count, was_over_news(peer)) == (True, 1, True)
    refuser._refuses = lambda _: False
    report, memory = synced(ours, peer, replace(memory, asides=()))
    assert (report.proved, was_over_news(peer)) == (True, False)
    assert odd in refuser.contents


def test_what_could_not_be_sent_is_sent_in_the_session_after_it_is_mended() -> None:
    ours, theirs, peer, memory = proved_pair()
    lost = content(9, "lost")
    ours.add(lost)
    ours.lose(lost)
    for requests_count in (2, 1):  # the first one asks for it, too
        report, memory = synced(ours, peer, memory)
        assert (report.proved, report.set_aside_count) == (True, 1)
        assert len(peer.requests) == requests_count
    assert was_over_news(peer)
    ours.add(lost)  # published here again
    report, memory = synced(ours, peer, memory)
    assert (report.proved, report.entries_sent, report.set_aside_count) == (True, 1, 0)
    assert theirs.contents == ours.contents


def test_refusals_of_a_policy_that_changes_meanwhile_are_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer has a new policy, up to the second push; from then on the peer takes everything."""
    monkeypatch.setattr(content_module, "MOVE_ELEMENTS_MAX", 2)
    ours, theirs, _, memory = proved_pair()
    pushes = 0

    def change(request: ReconRequest) -> None:
        nonlocal pushes
        pushes += bool(request.push)
        theirs.policy += bool(request.push) and pushes <= 2

    theirs._refuses = lambda _: pushes < 2
    for raw in contents(300, 305):
        ours.add(raw)
    report, _ = synced(ours, MemoryPeer(theirs, asked=change), memory)
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
    assert report.entries_refused > 0
    assert report.set_aside_count == 0
    assert theirs.contents == ours.contents


def test_a_list_that_leaves_an_element_out_proves_no_news_equal() -> None:
    class Hiding(MemoryPeer):
        """As an accident of hashes would: one element of its news is not named."""

        async def recon(self, request: bytes) -> bytes:
            raw = await super().recon(request)
            if not self.requests[-1].since:
                return raw
            response = ReconResponse.FromString(raw)
            if response.answers.short_ids:
                response.answers.short_ids = response.answers.short_ids[:-6]
                response.answers.counts = b"\x02"
            return response.SerializeToString()

    ours, theirs, _, memory = proved_pair()
    peer = Hiding(theirs)
    for raw in contents(5, 7, "theirs"):
        theirs.add(raw)
    ours.add(content(8, "ours"))
    _, memory = synced(ours, peer, memory)
    report, _ = synced(ours, MemoryPeer(theirs), memory)
    assert report.proved
    assert ours.contents == theirs.contents


def test_everything_is_compared_again_after_a_day_at_most() -> None:
    ours, theirs, peer, memory = proved_pair()
    # An accident of hashes: both sides take different sets for equal.
    asyncio.run(theirs.catch_up())
    hidden = content(123, "hidden")
    theirs.add(hidden)
    asyncio.run(theirs.catch_up())
    [baseline] = memory.baselines
    false = replace(baseline, peer=theirs.mark(EVERYTHING))
    memory = replace(memory, baselines=(false,))
    report, memory = synced(ours, peer, memory)
    assert (report.proved, hidden in ours.contents) == (True, False)
    now = time.time()
    for later, is_found in ((WHOLE_S_MAX - 100, False), (WHOLE_S_MAX + 1, True)):
        report, memory = synced(ours, peer, memory, clock=lambda later=later: now + later)
        assert (report.proved, hidden in ours.contents) == (True, is_found)


# --- the law, in random worlds -----------------------------------------------------------------------
#
# When a session ends in sync, both sides hold everything that either held at its start, over the mutual
# interest, except for what a side refuses. A mark that hid a difference would break it.

WORLDS_SEED = 20_261_122
INTERESTS = (
    EVERYTHING,
    EVERYTHING,
    Interest.make(everything=True, lamport_from=-(1 << 63) + 20),
    Interest.make(everything=True, lamport_to=-(1 << 63) + 60),
)


class World:
    """Two replicas, what third parties bring them, and a connection that breaks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.number = 0
        self.ours = MemoryReplica(refuses=lambda raw: self.refuses(self.ours, raw))
        self.theirs = MemoryReplica(refuses=lambda raw: self.refuses(self.theirs, raw))
        self.theirs.secret = b"the secret of the other replica"
        self.peer = BreakingPeer(self)
        self.memories = [PeerMemory()]
        self.rules_of_disputes = 0  # our policy when the last memory was made
        self.backups: list[tuple[MemoryReplica, MemoryReplica]] = []
        self.news_count = 0
        self.busy_max = 40  # elements that arrive before one answer

    def refuses(self, replica: MemoryReplica, raw: bytes) -> bool:
        """Every fifth element, by rules that change with the policy."""
        side = b"a" if replica is self.ours else b"b"
        return bytes([replica.policy % 5]) == bytes([sum(raw + side) % 5])

    def arrive(self, count: int) -> None:
        """Third parties bring new elements to one side or to both."""
        for _ in range(count):
            self.number += 1
            raw = content(self.rng.randrange(80), f"element {self.number}")
            sides = self.rng.choice(
                [[self.ours], [self.theirs], [self.ours, self.theirs], [self.theirs, self.ours]]
            )
            for each in sides:
                each.add(raw)
            if self.rng.random() < 0.2:  # what one side lacked comes another way
                held = sorted(self.ours.contents | self.theirs.contents)
                self.rng.choice([self.ours, self.theirs]).add(self.rng.choice(held))

    def meddle(self) -> None:
        """Something goes wrong, or changes, between two sessions."""
        rng, memory = self.rng, self.memories[-1]
        side = rng.choice([self.ours, self.theirs])
        asyncio.run(side.catch_up())
        match rng.randrange(12):
            case 0:
                self.backups.append((side, copy.copy(side)))
                self.backups[-1][1].__dict__.update(_copied(side))
            case 1 if self.backups:
                side, backup = rng.choice(self.backups)
                side.__dict__.update(_copied(backup))
            case 2:
                side.policy = rng.randrange(5)
            case 3 if side.held:
                side.lose_row(rng.choice(sorted(each for each in side.arrived if each)))
            case 4:
                self.memories.append(rng.choice(self.memories))
                self.rules_of_disputes = -1
            case 5 if memory.baselines:
                *others, last = memory.baselines
                raw = bytearray(last.peer)
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                forged = replace(last, peer=bytes(raw))
                self.memories.append(replace(memory, baselines=(*others, forged)))
            case 6:
                self.peer.own_interest = rng.choice(INTERESTS)
            case 7:
                side.news_max = rng.choice([3, 30, 1_000])
            case 8:
                self.retire(side)
            case _:
                pass

    def retire(self, side: MemoryReplica) -> None:
        """A few, or everything."""
        held = sorted(side.contents)
        for raw in self.rng.sample(held, min(len(held), self.rng.choice([1, 5, 1_000]))):
            side.retire(raw)

    def sync(self, *, is_undisturbed: bool = False) -> SyncReport:
        """A session; checks the law if it ends in sync."""
        rng = self.rng
        interest = EVERYTHING if is_undisturbed else rng.choice(INTERESTS)
        self.peer.breaks_at = 0 if is_undisturbed else rng.choice([0, 0, rng.randrange(1, 8)])
        self.peer.arrivals_max = 0 if is_undisturbed else rng.choice([0, 2, self.busy_max])
        if self.rules_of_disputes != self.ours.policy:
            # New rules begin with a new process, which knows no disputes.
            self.memories.append(replace(self.memories[-1], asides=()))
        mutual = interest.intersect(self.peer.own_interest)
        held = self.ours.contents | self.theirs.contents
        # So that a seed gives the same world again.
        last = self.memories[-1]
        report, memory = synced(self.ours, self.peer, last, interest, draw=rng.randbytes)
        self.memories.append(memory)
        self.rules_of_disputes = self.ours.policy
        self.news_count += report.proved and was_over_news(self.peer)
        if report.outcome is SyncOutcome.IN_SYNC:
            due = {raw for raw in held if mutual.window.holds(element_of(raw).order)}
            for side in (self.ours, self.theirs):
                known = {raw for raw in due if element_of(raw) in side.retired}
                assert not side.contents & known, "what was retired came back"
                lacking = due - side.contents - known
                lacking = {raw for raw in lacking if not self.refuses(side, raw)}
                assert not lacking, f"{len(lacking)} lacking: {sorted(lacking)[:3]}"
        return report


def _copied(replica: MemoryReplica) -> dict[str, object]:
    kept = {"_refuses": replica._refuses}
    rest = {key: value for key, value in replica.__dict__.items() if key not in kept}
    return copy.deepcopy(rest) | kept


class BreakingPeer(MemoryPeer):
    """Elements arrive on both sides before each answer, and the connection breaks once."""

    def __init__(self, world: World) -> None:
        super().__init__(world.theirs)
        self.world = world
        self.breaks_at = 0
        self.arrivals_max = 0

    async def recon(self, request: bytes) -> bytes:
        rng, self.breaks_at = self.world.rng, self.breaks_at - 1
        self.world.arrive(rng.randint(0, self.arrivals_max))
        error = SyncError(SyncCode.PEER_UNREACHABLE, "the connection broke")
        if self.breaks_at == 0 and rng.random() < 0.5:
            raise error
        raw = await super().recon(request)
        if self.breaks_at == 0:
            raise error
        return raw


def run_world(seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> World:
    """One world to its end, where both sides must hold the same."""
    world = World(seed)
    # Small batches, so that there are many moments to break a session at, and a small bound.
    batch, moved = world.rng.choice([4, 1_024]), world.rng.choice([15, 65_536])
    world.busy_max = min(world.busy_max, batch // 2)
    monkeypatch.setattr(content_module, "MOVE_ELEMENTS_MAX", batch)
    for module in (proof_module, comparison_module):
        monkeypatch.setattr(module, "MOVED_MAX", moved)
    monkeypatch.setattr(session_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(session_module, "RETIRED_NAMED_MAX", world.rng.choice([2, 20, 4_096]))
    try:
        for _ in range(steps):
            world.arrive(world.rng.randint(0, 12))
            world.meddle()
            world.sync()
        world.peer.own_interest = EVERYTHING
        for _ in range(2):
            report = world.sync(is_undisturbed=True)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), report
    except AssertionError as error:
        raise AssertionError(f"world {seed}: {error}") from error
    return world


def test_no_world_loses_what_a_mark_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    news = [run_world(WORLDS_SEED + n, 10, monkeypatch).news_count for n in range(10)]
    assert sum(news) > 24, "most sessions should compare news"


@pytest.mark.slow
def test_no_world_loses_what_a_mark_covers_in_many_worlds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    until, seed = time.monotonic() + 20, WORLDS_SEED + 1_000
    while time.monotonic() < until:
        run_world(seed, 25, monkeypatch)
        seed += 1


@pytest.mark.parametrize(
    "number",
    [1_157],  # the peer refused under a policy that an interrupted session did not remember
)
def test_worlds_that_failed_once_hold(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    run_world(WORLDS_SEED + number, 25, monkeypatch)


def test_a_false_proof_lasts_until_everything_is_compared_again_within_a_day() -> None:
    """A whole session of an equal pair is one small request, so no other check is needed in between."""
    ours, theirs = Forgetful(), Forgetful()
    for n in range(1_000):
        frame = encode(Message(f"m{n}", "c", lamport_timestamp=n, content=b"content"))
        ours.add(frame)
        theirs.add(frame)
    peer = MemoryPeer(theirs)
    _, memory = synced(ours, peer)
    dropped = theirs.arrived[500]
    assert dropped is not None
    theirs.forget([dropped])
    report, memory = synced(ours, peer, memory)
    assert (report.proved, was_over_news(peer), len(theirs.contents)) == (True, True, 999)
    a_day_later_s = time.time() + WHOLE_S_MAX
    report, memory = synced(ours, peer, memory, clock=lambda: a_day_later_s)
    assert (report.proved, report.entries_sent, len(theirs.contents)) == (True, 1, 1_000)
    up, down = peer.bytes_up, peer.bytes_down
    report, _ = synced(ours, peer)
    assert (report.proved, was_over_news(peer), report.requests) == (True, False, 2)
    assert peer.bytes_up - up + peer.bytes_down - down <= 600
