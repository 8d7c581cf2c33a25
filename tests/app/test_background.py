"""Background tasks continue after any fault, and end with the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.federation.records import Records
from app.recon.index import NodeIndex
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from app.server.settings import Settings
from app.server.supervisor import Supervisor
from app.store.entryrows import FrameReader
from app.store.recovery import LostContent
from app.store.store import Store
from tests.support.server import running_node

pytestmark = pytest.mark.anyio

QUICK = replace(
    DEFAULT_LIMITS,
    index_save_interval_s=0,
    frames_read_interval_s=0,
    frames_read_percent_max=100,
)


def failing_once(method: Callable[..., Any], calls: list[bool]) -> Callable[..., Any]:
    """The method, but that it fails at its second call with an error of no known kind."""

    async def fail_once(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(True)
        if len(calls) == 2:
            raise ValueError("not enough values to unpack")
        return await method(self, *arguments, **named)

    return fail_once


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (FrameReader, "follow_marks"),
        (LostContent, "_read_all"),
        (NodeIndex, "save"),
        (NodeIndex, "catch_up"),
        (Store, "kept_interest"),
        (Records, "write"),
    ],
)
async def test_background_work_goes_on_after_a_fault_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    monkeypatch.setattr("app.store.recovery.MARKS_INTERVAL_S", 0.02)
    monkeypatch.setattr("app.store.recovery.FIRST_PASS_S", 0.0)
    # An empty store has been read at once, and is not read again soon.
    monkeypatch.setattr("app.server.node.INDEX_FOLLOW_S", 0.02)
    monkeypatch.setattr("app.store.recovery.PASS_REST_S_MIN", 0.02)
    monkeypatch.setattr("app.federation.peers.LOOK_S", 0.02)
    calls: list[bool] = []
    monkeypatch.setattr(owner, method, failing_once(getattr(owner, method), calls))
    async with Node.open(Settings(data_dir=tmp_path), QUICK):
        await until(lambda: len(calls) > 3)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not hold after 5 s")


@pytest.mark.parametrize("fault", [ValueError("odd"), asyncio.CancelledError(), None])
async def test_a_task_that_ends_in_any_way_is_logged_counted_shown_and_begun_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: BaseException | None
) -> None:
    monkeypatch.setattr("app.server.supervisor.PAUSE_S_MIN", 0.01)
    monkeypatch.setattr("app.server.supervisor.STEADY_S", 0.1)
    caplog.set_level("INFO")
    supervisor = Supervisor()
    begun = asyncio.Event()
    faults = [fault, fault, fault]

    async def work() -> None:
        if not faults:
            begun.set()
            await asyncio.sleep(60)
        elif (fault := faults.pop()) is not None:
            raise fault

    async with supervisor.keeping("weeding", work):
        await asyncio.wait_for(begun.wait(), 5)
        assert (supervisor.failures["weeding"], supervisor.failing) == (3, ["weeding"])
        await until(lambda: not supervisor.failing)
    lines = [record.getMessage() for record in caplog.records if "'weeding'" in record.getMessage()]
    assert [line.split("weeding' ")[1][:10] for line in lines] == ["failed and", "works agai"]


async def test_a_task_that_keeps_failing_is_tried_again_after_pauses_that_grow_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(60 if len(pauses) == 8 else 0)

    async def fail() -> None:
        raise ValueError("odd")

    monkeypatch.setattr("app.server.supervisor.asyncio.sleep", note)
    supervisor = Supervisor()
    async with supervisor.keeping("weeding", fail):
        while len(pauses) < 8:
            await sleep(0.001)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5]
    assert supervisor.failing == [], "an ended task fails no more"


async def test_a_failing_task_is_named_by_readyz_and_by_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_self: Store) -> None:
        raise ValueError("odd")

    monkeypatch.setattr("app.federation.interests.LOOK_S", 0.02)
    with running_node(tmp_path) as node:
        monkeypatch.setattr(Store, "kept_interest", fail)
        await until(lambda: "failing_tasks" in node.http.get("/readyz").json())
        ready = node.http.get("/readyz").json()
        assert (ready["status"], ready["failing_tasks"]) == ("ready", ["interests"])
        lines = node.http.get("/metrics").text.splitlines()
    assert 'sdstore_task_failing{task="interests"} 1.0' in lines
    assert 'sdstore_task_failing{task="tokens"} 0.0' in lines
    assert any(line.startswith('sdstore_task_failures_total{task="interests"}') for line in lines)
