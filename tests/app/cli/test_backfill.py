"""A file that `sdstore backfill` appends to, and a node that does not answer as one would wish."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest

from app.cli.files import ExistingMessages, format_of_name
from sdstore.client import StoreClient
from sdstore.participant import ParticipantFile
from sdstore.sds.codec import decode, encode
from tests.support.cli import cli, command
from tests.support.federation import message
from tests.support.server import RunningNode, running_node

COUNT = 60
SEED = 20_261_122


@pytest.mark.parametrize("suffix", ["ndjson", "ldp"])
def test_a_file_that_was_cut_anywhere_is_completed(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(SEED)
    file = tmp_path / f"file.{suffix}"
    with running_node(tmp_path / "data") as node:
        publish_frames(node, range(COUNT))
        arguments = ("backfill", "c", "--into", file, "--node", node.url, "--json")
        assert cli(*arguments).json["entries_received"] == COUNT
        whole = file.read_bytes()
        # Never inside the first message: what holds no message could be another file.
        for cut in [
            len(whole) - 1,
            *(rng.randrange(len(whole) // 4, len(whole)) for _ in range(5)),
        ]:
            file.write_bytes(whole[:cut])
            result = cli(*arguments)
            assert (result.code, result.json["outcome"]) == (0, "in_sync"), (SEED, cut)
            assert result.json["entries_received"] <= COUNT
            assert ids_in(file) == [f"m{n}" for n in range(COUNT)], (SEED, cut)


@pytest.mark.slow
def test_a_backfill_that_is_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, count = tmp_path / "file.ldp", 6_000
    with running_node(tmp_path / "data") as node:
        publish_frames(node, range(count), random.Random(SEED).randbytes(1_500))
        arguments = ("backfill", "c", "--into", file, "--node", node.url, "--json")
        with subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL) as backfill:
            while not file.exists() or not file.stat().st_size:
                assert backfill.poll() is None
                time.sleep(0.001)
            backfill.kill()
        before = len(ids_in(file))
        assert 0 < before < count
        assert cli(*arguments).json["entries_received"] == count - before
    assert ids_in(file) == sorted({f"m{n}" for n in range(count)}, key=lambda each: int(each[1:]))


@pytest.mark.parametrize("suffix", ["ndjson", "ldp"])
def test_a_file_with_messages_of_another_channel_is_refused_and_not_changed(
    tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"file.{suffix}"
    with running_node(tmp_path / "data") as node:
        publish_frames(node, range(COUNT))
        node.publish(message(1, "other"))
        file.touch()
        assert cli("backfill", "c", "--into", file, "--node", node.url).code == 0
        whole = file.read_bytes()
        result = cli("backfill", "other", "--into", file, "--node", node.url)
    assert result.code == 4
    assert f"foreign_file: {file} holds messages of channel 'c'" in result.err
    assert file.read_bytes() == whole


@pytest.mark.parametrize("name", ["file.sqlite", "file.ndjson"])
def test_a_participants_file_is_refused_and_not_changed(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    ParticipantFile(file).close()
    whole = file.read_bytes()
    result = cli("backfill", "c", "--into", file, "--node", "http://127.0.0.1:1")
    assert result.code == 2
    assert f"invalid_parameter: {file} is an SQLite database" in result.err
    assert file.read_bytes() == whole


def publish_frames(node: RunningNode, numbers: range, content: bytes = b"content") -> None:
    with StoreClient(node.url) as client:
        some = (encode(message(n, "c", content=content)) for n in numbers)
        assert all(each.outcome == "stored" for each in client.publish_batch(some))


def ids_in(file: Path) -> list[str]:
    """The IDs of a file's messages, ordered by Lamport timestamp; a torn end is left out."""
    found = [decode(each.frame)[0] for each in ExistingMessages(file, format_of_name(file))]
    return [each.message_id for each in sorted(found, key=lambda each: each.lamport_timestamp or 0)]
