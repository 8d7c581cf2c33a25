"""Background tasks continue after any fault, and end with the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS
from app.node import Node
from app.recon.index import NodeIndex
from app.settings import Settings
from app.store.entryrows import FrameReader
from app.store.peerrows import PeerRows
from sdstore.sds.codec import encode
from sdstore.sds.model import Message

pytestmark = pytest.mark.anyio

QUICK = replace(
    DEFAULT_LIMITS,
    index_save_interval_s=0,
    audit_delay_s=0,
    audit_interval_s=0,
    audit_percent_max=100,
)


def failing_once(method: Callable[..., Any], calls: list[bool]) -> Callable[..., Any]:
    """The method, but that it fails at its second call with an error of no known kind."""

    async def fail_once(self: Any, *arguments: Any) -> Any:
        calls.append(True)
        if len(calls) == 2:
            raise ValueError("not enough values to unpack")
        return await method(self, *arguments)

    return fail_once


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (FrameReader, "follow_marks"),
        (FrameReader, "verify"),
        (NodeIndex, "save"),
        (NodeIndex, "catch_up"),
    ],
)
async def test_background_work_goes_on_after_a_fault_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    monkeypatch.setattr("app.lostcontent.MARKS_INTERVAL_S", 0.02)
    # An empty store has been read at once, and is not read again soon.
    monkeypatch.setattr("app.node.INDEX_FOLLOW_S", 0.02)
    monkeypatch.setattr("app.audit.PASS_REST_S_MIN", 0.02)
    calls: list[bool] = []
    monkeypatch.setattr(owner, method, failing_once(getattr(owner, method), calls))
    async with Node.open(Settings(data_dir=tmp_path), QUICK):
        for _ in range(250):
            if len(calls) > 3:
                break
            await asyncio.sleep(0.02)
        assert len(calls) > 3, "the task has ended"


async def test_no_loop_of_a_peer_outlives_a_node_that_could_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_self: PeerRows) -> list[str]:
        raise ValueError("the database is damaged")

    monkeypatch.setattr(PeerRows, "read", fail)
    before = asyncio.all_tasks()
    with pytest.raises(ValueError, match="damaged"):
        async with Node.open(Settings(data_dir=tmp_path, peers=["http://127.0.0.1:9"])):
            pass
    assert asyncio.all_tasks() == before


async def test_the_index_follows_what_is_published_before_a_session_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.node.INDEX_FOLLOW_S", 0.02)
    async with Node.open(Settings(data_dir=tmp_path)) as node:
        for start in (0, 100):
            messages = [
                Message(f"m{start + n}", "c", lamport_timestamp=n, content=b"x") for n in range(100)
            ]
            await node.door.publish_many([Publication(encode(each)) for each in messages])
            for _ in range(250):
                if len(node.index.elements) == start + 100:
                    break
                await asyncio.sleep(0.02)
            assert len(node.index.elements) == start + 100
