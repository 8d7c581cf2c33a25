"""The example for js-waku, run against a node: examples/js/participant.mjs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from app.store.lookups import Lookups
from tests.support.cli import free_port
from tests.support.node import NODE, node_project
from tests.support.server import RunningNode, running_node

CHANNEL = "/room/1/with spaces & signs"
SECONDS_MAX = 60


class Participant:
    """The example in a process of its own, as somebody at a terminal uses it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def hear(self, count: int) -> list[str]:
        assert self._process.stdout is not None
        return [self._process.stdout.readline().rstrip("\n") for _ in range(count)]


@contextmanager
def participant(node: RunningNode, name: str) -> Iterator[Participant]:
    script = node_project(Path(__file__).parents[2] / "examples" / "js") / "participant.mjs"
    process = subprocess.Popen(
        [NODE, script, node.url, CHANNEL, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = Timer(SECONDS_MAX, process.kill)  # ends `hear`, if a line does not come
    killer.start()
    with process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "listening\n"
            yield Participant(process)
        finally:
            process.terminate()
            killer.cancel()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path) as running:
        yield running


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(IDs, hints) of each look-up that the node answers."""
    calls: list[tuple[int, int]] = []
    ordinary = Lookups.lookup

    async def recorded(self: Lookups, ids: Any, hints: Any, *rest: Any, **options: Any) -> Any:
        calls.append((len(ids), len(hints)))
        return await ordinary(self, ids, hints, *rest, **options)

    monkeypatch.setattr(Lookups, "lookup", recorded)
    return calls


def test_a_js_waku_participant_gets_what_it_missed_from_the_node_by_hint(
    node: RunningNode, looked_up: list[tuple[int, int]]
) -> None:
    with participant(node, "alice") as alice:
        with participant(node, "bob") as bob:
            for number in range(5):
                alice.say(f"line {number}")
            assert bob.hear(5) == [f"alice: line {number}" for number in range(5)]
            assert looked_up == []
            bob.say("bob heard")
            assert alice.hear(1) == ["bob: bob heard"]
        with participant(node, "carol") as carol:
            alice.say("the last line")
            heard = carol.hear(7)
    # js-waku counts a message as available while it still waits for its own causes, so it delivers a
    # chain that it fetched backwards in another order than that of causes.
    assert sorted(heard) == sorted(
        [
            *(f"alice: line {number}" for number in range(5)),
            "bob: bob heard",
            "alice: the last line",
        ]
    )
    page = node.http.get("/v1/channels/messages", params={"channel_id": CHANNEL}).json()
    assert [len(each["meta"]["hints"]) for each in page["messages"]] == [1] * 7
    # Each look-up is by hint alone.
    assert looked_up
    assert {ids for ids, _ in looked_up} == {0}


def test_wrong_arguments_and_a_node_that_is_down_are_errors_in_words() -> None:
    script = node_project(Path(__file__).parents[2] / "examples" / "js") / "participant.mjs"
    down = f"http://127.0.0.1:{free_port()}"
    for arguments, words in (
        ([], "usage: "),
        ([down, CHANNEL, "ada"], f"{down} does not answer: "),
    ):
        with subprocess.Popen(
            [NODE, script, *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            errors = process.stderr.read()
        assert process.returncode == 1
        assert errors.startswith(words)
        assert errors.count("\n") == 1
