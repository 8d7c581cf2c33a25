"""Below the disk watermark the node takes no messages, goes on serving, and recovers by itself."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import Code, Problem
from app.ingest import door as module
from app.ingest.door import DiskWatermark
from app.ingest.prepare import Publication
from app.server.limits import MIB
from app.server.node import Node
from recon.initiator import hello_request
from sdstore.sds.codec import encode
from sdstore.sync.report import SyncOutcome
from sdstore.wire.recon_pb2 import ReconResponse
from tests.support.disks import grow, small_disk
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
from tests.support.server import running_node


class Disk:
    """The disk of every folder."""

    free_bytes = 1_000 * MIB

    def statvfs(self, folder: Path) -> SimpleNamespace:  # noqa: ARG002
        return SimpleNamespace(f_bavail=self.free_bytes, f_frsize=1)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(module, "os", disk)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    return disk


def test_it_is_low_below_the_bound_and_good_again_with_a_margin(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    watermark = DiskWatermark(Path(), 160 * MIB)
    steps = [(160, False), (159, True), (165, True), (170, False), (169, False), (100, True)]
    with caplog.at_level(logging.INFO):
        for free, is_low in steps:
            disk.free_bytes = free * MIB
            assert watermark.is_low is is_low, free
            assert watermark.is_low is is_low
    # Each change once.
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert (
        "159.0 MiB free; messages are refused below 160.0 (disk_free_min_bytes), and taken again from 170.0"
        in caplog.records[0].message
    )
    disk.free_bytes = 0
    assert not DiskWatermark(Path(), 0).is_low


def test_a_folder_that_cannot_be_looked_at_refuses_nothing(tmp_path: Path) -> None:
    assert not DiskWatermark(tmp_path / "absent", MIB).is_low


def test_a_node_refuses_messages_and_serves_what_it_has(tmp_path: Path, disk: Disk) -> None:
    first, second = message(1), message(2)
    with running_node(tmp_path) as node:
        assert node.publish(first).status_code == 201
        disk.free_bytes = MIB
        refused = node.publish(second)
        assert (refused.status_code, refused.json()["code"]) == (507, "disk_full")
        batch = node.http.post(
            "/v1/messages/batch",
            content=b'{"message": {"message_id": "x", "channel_id": "c", "lamport_timestamp": "1", "content": "eA=="}}\n',
            headers={"content-type": "application/x-ndjson"},
        )
        assert batch.json()["outcomes"][0]["problem"]["code"] == "disk_full"
        assert node.http.get(f"/v1/messages/{first.message_id}").status_code == 200
        ready = node.http.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert "disk_free_min_bytes" in ready.json()["refuses_messages"]
        assert "sdstore_disk_low 1.0" in node.http.get("/metrics").text
        disk.free_bytes = 1_000 * MIB
        assert node.publish(second).status_code == 201
        assert "refuses_messages" not in node.http.get("/readyz").json()


def test_a_push_is_refused_as_policy_and_offered_again_when_there_is_room(
    tmp_path: Path, disk: Disk
) -> None:
    async def check() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n) for n in range(20)])
            await publish(two, [message(n) for n in range(10, 30)])
            memory = Remembered()
            low(two, is_low=True)
            report = await sync(one, two, memory)
            assert report.outcome is SyncOutcome.IN_SYNC, report
            assert report.entries_received == 10  # what it has, it serves
            hello = await InProcessPeer(two).recon(hello_request().SerializeToString())
            assert memory.value.policy == ReconResponse.FromString(hello).policy
            assert {each["lacked_by"] for each in report.set_aside} == {"there"}
            assert len(await holdings(two)) == 20
            low(two, is_low=False)
            report = await sync(one, two, memory)
            assert report.outcome is SyncOutcome.IN_SYNC, report
            assert not report.set_aside
            assert await holdings(one) == await holdings(two)

    run(check())


def test_a_sync_into_a_low_disk_is_no_fault_of_the_peer(tmp_path: Path, disk: Disk) -> None:
    async def check() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, [message(n) for n in range(5)])
            low(one, is_low=True)
            report = await sync(one, two, Remembered())
            assert (report.outcome, report.code) == (SyncOutcome.LOCAL_FAULT, Code.DISK_FULL)
            with pytest.raises(Problem, match="disk_free_min_bytes"):
                await one.ingest.door.publish(Publication(encode(message(9))))
            low(one, is_low=False)
            assert (await sync(one, two, Remembered())).outcome is SyncOutcome.IN_SYNC
            assert await holdings(one) == await holdings(two)

    run(check())


def low(node: Node, *, is_low: bool) -> None:
    """Only one of the nodes has a low disk."""
    node.ingest.door.watermark = DiskWatermark(Path(), 2_000 * MIB if is_low else 0)


async def sync(one: Node, two: Node, memory: Remembered):  # type: ignore[no-untyped-def]
    return await sync_with_peer(
        local_of(one), InProcessPeer(two), one.federation.interests.current, memory=memory
    )


def test_a_real_disk_never_fills_up(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        running_node(
            tmp_path / "data",
            database_url=f"sqlite:///{disk}/sdstore.db",
            disk_free_min_bytes=800_000,
        ) as node,
    ):
        codes = set()
        for number in range(200):
            codes.add(node.publish(message(number, content=os.urandom(10_000))).status_code)
        assert codes == {201, 507}
        left = os.statvfs(disk)
        assert left.f_bavail * left.f_frsize > 400_000
        assert node.http.get("/v1/messages/" + message(0).message_id).status_code == 200
        assert node.http.get("/readyz").status_code == 200


@pytest.mark.parametrize("was_stopped", [True, False], ids=["stopped", "killed"])
def test_a_node_that_starts_on_a_full_disk_serves_what_it_has_and_says_what_it_needs(
    tmp_path: Path, was_stopped: bool
) -> None:
    """Without room for the index of the log (stopped), or for any journal (killed)."""
    settings = {"disk_free_min_bytes": 100_000}
    with small_disk(tmp_path / "disk") as disk:
        grow(disk, "4m")
        with running_node(tmp_path / "data", **settings) as node:
            for number in (*range(2, 60), 0):
                stored = node.publish(message(number, content=os.urandom(10_000)))
                assert stored.status_code == 201
            if not was_stopped:
                shutil.copytree(tmp_path / "data", disk / "data")
        if was_stopped:
            shutil.copytree(tmp_path / "data", disk / "data")
        (disk / "data/sdstore.db-writer-journal").unlink(missing_ok=True)
        filler = (disk / "filler").open("wb", buffering=0)
        with filler, suppress(OSError):
            while True:
                filler.write(bytes(4_096))
        assert os.statvfs(disk).f_bavail == 0
        with running_node(disk / "data", **settings) as node:
            assert node.http.get("/v1/messages/m0").json()["message"]["message_id"] == "m0"
            ready = node.http.get("/readyz")
            assert ready.status_code == 200
            assert (
                "0.0 MiB free; messages are refused below 0.1" in ready.json()["refuses_messages"]
            )
            assert node.publish(message(1)).status_code == 507
            (disk / "filler").unlink()
            patience_s = time.monotonic() + 30
            while (status := node.publish(message(1)).status_code) != 201:
                assert time.monotonic() < patience_s, status
                time.sleep(0.05)
        with running_node(disk / "data", **settings) as node:
            assert node.http.get("/v1/messages/m1").status_code == 200
