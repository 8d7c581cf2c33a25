"""Participants that come back to one node at once: all become whole, and others are served meanwhile.

The node is a process with the default limits. `bench.stampede` has the participants and the figures for
500 of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from app.server.limits import DEFAULT_LIMITS
from bench.stampede import (
    SCENARIOS,
    Outcome,
    Scenario,
    come_back_together,
    stampede,
    write_store,
)
from tests.support.server import running_node

GET_P99_MS_MAX = 250.0
"""Work of the event loop while an honest client waits: its wait, if the machine does nothing else."""


def check(outcome: Outcome, scenario: Scenario) -> None:
    print(outcome.row(""))
    assert not outcome.not_whole
    assert len(outcome.returned) == scenario.participants
    assert outcome.received_count == scenario.participants * scenario.missing
    assert outcome.received_again_count == 0
    assert len(outcome.reads.waits_ms) > 10
    assert outcome.read_busy_p99_ms <= GET_P99_MS_MAX


def test_participants_that_come_back_together_are_all_whole_and_delay_no_reader(
    tmp_path: Path,
) -> None:
    scenario = Scenario(participants=20, messages=500, missing=20, within_s=0.1, drops=1)
    outcome = stampede(scenario, tmp_path)
    check(outcome, scenario)
    # Nobody is turned away: only the participants themselves break connections.
    assert outcome.refusals == {"ConnectionError": 20}


def test_participants_that_are_refused_for_want_of_room_wait_and_become_whole(
    tmp_path: Path,
) -> None:
    scenario = Scenario(participants=60, messages=500, missing=5, within_s=0.0, has_addresses=False)
    # Of 60 requests at once from one address all but a few are refused, and are due 2 s later.
    limits = replace(DEFAULT_LIMITS, requests_waiting_max=20)
    indexes, _ = write_store(tmp_path / "sdstore.db", scenario)
    with running_node(tmp_path, limits) as node:
        port = int(node.url.rpartition(":")[2])
        returned, _ = uvloop.run(come_back_together(scenario, port, indexes, seed=1))
    assert {each.refusals["503"] > 0 for each in returned} == {True, False}
    assert [each.name for each in returned if each.whole_after_s is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one channel", "50 channels", "one address"])
def test_a_hundred_participants_are_all_whole_and_delay_no_reader(
    tmp_path: Path, name: str
) -> None:
    channels = min(10, SCENARIOS[name].channels)
    scenario = replace(
        SCENARIOS[name], participants=100, channels=channels, messages=2_000, within_s=0.2
    )
    outcome = stampede(scenario, tmp_path)
    check(outcome, scenario)
    assert not outcome.refusals
