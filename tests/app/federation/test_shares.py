"""Which process takes and hands on which peers: the assignment alone, without clocks and databases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from app.federation.records import SILENT_S_MAX, Processes, share_of
from app.live.relay import Presence
from app.store.peerrows import LEASE_S, Lease, PeerRow

NOBODY = Lease("", 0, False)


def row(number: int, origin: str = "added") -> PeerRow:
    return PeerRow(peer_id=f"{number:016x}", url=f"http://peer-{number}", origin=origin)


class World:
    """Processes that look at the same rows in turns, as `app.federation.peers` does."""

    def __init__(self, rows: Sequence[PeerRow], settings: Mapping[str, Sequence[str]]) -> None:
        self.settings = dict(settings)
        self.rows = list(rows)
        self.holders = {each.peer_id: "" for each in rows}
        self.handed_on = 0
        self.busy: set[str] = set()

    def look(self, me: str, *, is_old: bool = False) -> None:
        """One look of a process. `is_old`: it takes free peers wherever nobody else did for a while."""
        mine = {each for each, holder in self.holders.items() if holder == me}
        rows = [
            (each, Lease(holder, 1, True) if (holder := self.holders[each.peer_id]) else NOBODY)
            for each in self.rows
        ]
        share = share_of(me, self.settings, rows, mine - self.busy)
        assert share.left & mine == {*share.surplus}
        assert not {*share.surplus} & self.busy
        self.handed_on += len(share.surplus)
        for each in share.surplus:
            self.holders[each] = ""
        for each in self.rows:
            may_hold = each.origin != "settings" or each.peer_id in self.settings[me]
            is_left = each.peer_id in share.left and not is_old
            if not self.holders[each.peer_id] and may_hold and not is_left:
                self.holders[each.peer_id] = me

    def rounds(self, count: int, world: random.Random) -> None:
        for _ in range(count):
            for name in world.sample(sorted(self.settings), len(self.settings)):
                self.look(name)

    def kill(self, name: str) -> None:
        del self.settings[name]
        self.holders = {
            each: "" if holder == name else holder for each, holder in self.holders.items()
        }

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(self.holders.values())
        return {name: counted[name] for name in self.settings}


def test_the_survivors_share_what_a_dead_process_held() -> None:
    chance = random.Random(6)
    world = World([row(n) for n in range(12)], {f"p{n}": [] for n in range(4)})
    world.rounds(3, chance)
    world.kill("p0")
    world.rounds(1, chance)
    assert world.counts == {"p1": 4, "p2": 4, "p3": 4}
    assert world.handed_on == 0


def test_a_peer_of_settings_stays_with_those_that_can_hold_it() -> None:
    settings = [row(n, "settings") for n in range(6)]
    added = [row(n) for n in range(6, 10)]
    world = World([*settings, *added], {"p0": [each.peer_id for each in settings]})
    world.look("p0")
    world.settings["p1"] = []
    world.rounds(3, random.Random(6))
    assert world.counts == {"p0": 6, "p1": 4}
    assert world.handed_on == 4


@pytest.mark.parametrize("seed", range(50))
def test_shares_settle_whatever_processes_and_settings_there_are(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"p{n}" for n in range(chance.randint(1, 6))]
    rows = [row(n, chance.choice(["added", "settings"])) for n in range(chance.randint(0, 20))]
    settings = [each.peer_id for each in rows if each.origin == "settings"]
    world = World(rows, {each: chance.sample(settings, len(settings) // 2) for each in names})
    for each in rows:  # in any hands that can hold them
        able = [n for n in names if each.origin == "added" or each.peer_id in world.settings[n]]
        world.holders[each.peer_id] = chance.choice(["", *able])
    world.rounds(len(names) + 3, chance)
    before, handed_on = dict(world.holders), world.handed_on
    world.rounds(3, chance)
    assert (world.holders, world.handed_on) == (before, handed_on), f"seed {seed}"
    for each in rows:
        can_be_held = each.origin == "added" or any(
            each.peer_id in peers for peers in world.settings.values()
        )
        assert bool(world.holders[each.peer_id]) is can_be_held, f"seed {seed}"


def test_a_process_counts_until_it_leaves_or_was_silent_for_less_than_a_lease() -> None:
    processes = Processes()
    assert not processes.heard(Presence("p", ["peer"], []), 0.0)
    assert processes.heard(Presence("p", ["peer"], ["a"]), 1.0)
    assert not processes.heard(Presence("p", ["peer"], ["a"]), 2.0)
    assert processes.reads("a", 2.0 + SILENT_S_MAX)
    assert SILENT_S_MAX < LEASE_S
    assert not processes.reads("a", 2.1 + SILENT_S_MAX)
    assert processes.live(2.1 + SILENT_S_MAX) == []
    processes.heard(Presence("p", [], ["a"]), 20.0)
    assert processes.heard(Presence("p", [], ["a"], is_leaving=True), 21.0)
    assert processes.live(21.0) == []
