"""`sdstore serve --database postgresql://… --workers N`: several processes, one node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import command, process
from tests.support.server import PROTOBUF
from tests.support.stores import PostgresStores

SECONDS_MAX = 60


@contextmanager
def serving(database_url: str, data_dir: Path, workers: int) -> Iterator[tuple[int, str]]:
    """The process and the URL of a node of several workers."""
    arguments = ("--port", 0, "--database", database_url, "--data-dir", data_dir, "--json")
    with subprocess.Popen(
        command("serve", *arguments, "--workers", workers), stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        try:
            yield running.pid, json.loads(running.stdout.readline())["url"]
        finally:
            running.kill()


def workers_of(pid: int) -> set[int]:
    """The processes below one that run a node."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    }


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def publish(url: str, number: int) -> int:
    frame = encode(Message(f"m{number}", "c", lamport_timestamp=number, content=b"hi"))
    # A connection of its own: any worker may take it.
    return httpx.post(
        f"{url}/v1/messages", content=frame, headers=PROTOBUF, trust_env=False, timeout=30
    ).status_code


def found(url: str) -> list[int]:
    page = httpx.get(f"{url}/v1/feed?limit=1000", trust_env=False, timeout=30).json()
    return [int(item["message"]["lamport_timestamp"]) for item in page["messages"]]


def test_workers_are_one_node_and_one_that_is_killed_is_replaced(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    with serving(postgres_stores.new_url(), tmp_path, 2) as (pid, url):
        first = workers_of(pid)
        assert len(first) == 2
        assert {publish(url, number) for number in range(20)} == {201}
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(workers_of(pid) - {victim}) == 2)
        assert {publish(url, number) for number in range(20, 40)} == {201}
        assert {json.dumps(found(url)) for _ in range(6)} == {json.dumps([*range(40)])}
        last = workers_of(pid)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(is_running(each) for each in (pid, *last)))


def test_workers_end_with_the_process_that_started_them(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    with serving(postgres_stores.new_url(), tmp_path, 2) as (pid, url):
        assert publish(url, 1) == 201
        workers = workers_of(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, workers)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_database_that_cannot_be_reached_ends_the_service_with_a_word(
    workers: int, tmp_path: Path
) -> None:
    ended = process(
        "serve", "--port", 0, "--data-dir", tmp_path, "--workers", workers,
        "--database", "postgresql://user:secret@127.0.0.1:1/nowhere",
    )  # fmt: skip
    assert ended.code == 6
    assert "store_unavailable" in ended.err
    assert "secret" not in ended.err + ended.out


def test_several_workers_on_a_file_are_refused(tmp_path: Path) -> None:
    ended = process("serve", "--port", 0, "--data-dir", tmp_path, "--workers", 2)
    assert ended.code == 2
    assert "PostgreSQL" in ended.err
    assert not list(tmp_path.iterdir())
