"""A file that `sdstore backfill` appends to, and a node that does not answer as one would wish."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import app.cli.filestore as filestore
import app.recon.endpoint as recon_endpoint
import sdstore.client.backfill as client_backfill
import sdstore.sync.moves as moves
from app.cli.files import FileFormat
from app.node import Node
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse
from tests.support.cli import cli
from tests.support.federation import InProcessPeer, message, open_nodes, publish

COUNT = 60


def backfilled(
    peer: InProcessPeer, file: Path, patch: pytest.MonkeyPatch
) -> asyncio.Task[SyncReport]:
    """The backfill of channel "c" from this peer."""
    patch.setattr(client_backfill, "StoreTransport", lambda *_, **__: peer)
    work = filestore.backfill_file("http://peer", "c", file, FileFormat.NDJSON, lambda _: None)
    return asyncio.create_task(work)


def test_bad_hints_of_a_peer_cost_no_message_and_the_file_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adds_bad_hints(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        for item in response.items:
            item.entry.hints.extend([b"", bytes(5_000), *(b"%d" % n for n in range(100))])
        return response

    file = tmp_path / "file.ndjson"

    async def scenario() -> SyncReport:
        async with open_nodes(tmp_path, {}) as (node,):
            await publish(node, [message(n, "c") for n in range(COUNT)])
            return await backfilled(InProcessPeer(node, adds_bad_hints), file, monkeypatch)

    assert asyncio.run(scenario()).entries_received == COUNT
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(line["retrieval_hints"]) for line in lines] == [16] * COUNT
    result = cli("import", file, "--data-dir", tmp_path / "two")
    assert (result.code, result.err) == (0, "")
    assert cli("check", "--data-dir", tmp_path / "two", "--json").json["entries"] == COUNT


class _Expiring(InProcessPeer):
    """Draws a new nonce when the fourth fetch arrives: three were answered."""

    def __init__(self, node: Node, patch: pytest.MonkeyPatch) -> None:
        super().__init__(node)
        self.nonce = b"1" * 16
        self.fetches = 0
        patch.setattr(recon_endpoint, "responder_nonce", lambda *_: self.nonce)
        patch.setattr(recon_endpoint, "nonce_is_fresh", lambda given, *_: given == self.nonce)

    async def recon(self, request: bytes) -> bytes:
        self.fetches += ReconRequest.FromString(request).HasField("fetch")
        if self.fetches == 4:
            self.nonce = b"2" * 16
        return await super().recon(request)


def test_a_nonce_that_expires_during_a_backfill_adds_no_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.ndjson"
    monkeypatch.setattr(moves, "MOVE_BYTES_MAX", 1_000)

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}) as (node,):
            messages = [message(n, "c") for n in range(COUNT)]
            hints = {each.message_id: (b"a hint",) for each in messages}
            await publish(node, messages, hints)
            peer = _Expiring(node, monkeypatch)
            report = await backfilled(peer, file, monkeypatch)
            assert peer.fetches > 4
            assert (report.outcome, report.entries_received) == (SyncOutcome.IN_SYNC, COUNT)

    asyncio.run(scenario())
    ids = [json.loads(line)["message"]["message_id"] for line in file.read_text().splitlines()]
    assert sorted(ids) == sorted(f"m{n}" for n in range(COUNT))


def test_messages_of_a_backfill_that_is_under_way_are_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.ndjson"
    monkeypatch.setattr(moves, "MOVE_BYTES_MAX", 1_000)
    lines_seen: list[int] = []

    def looks(request: ReconRequest, response: ReconResponse) -> ReconResponse:
        if request.HasField("fetch"):
            lines_seen.append(file.read_bytes().count(b"\n"))
        return response

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}) as (node,):
            await publish(node, [message(n, "c") for n in range(COUNT)])
            await backfilled(InProcessPeer(node, looks), file, monkeypatch)

    asyncio.run(scenario())
    assert len(lines_seen) > 3
    assert lines_seen[1:] == sorted({*lines_seen[1:]})
