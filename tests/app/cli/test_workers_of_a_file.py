"""`sdstore serve --workers N` over SQLite as processes: one that writes beside N that read."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.app.cli.test_workers import (
    children_of,
    found,
    is_running,
    publish,
    serving,
    wait_until,
)
from tests.support.cli import process
from tests.support.server import PROTOBUF


@contextmanager
def service(data_dir: Path, *more: object) -> Iterator[tuple[int, str]]:
    """The process and the URL of a service with two readers."""
    with serving(f"sqlite:///{data_dir}/sdstore.db", data_dir, 2, *more) as (pid, url):
        wait_until(lambda: set(workers(url).values()) == {"serving"})
        yield pid, url


def workers(url: str) -> dict[str, str]:
    """The workers' states; empty while the service is not ready."""
    answer = httpx.get(f"{url}/readyz", trust_env=False, timeout=30).json()
    found: dict[str, str] = answer.get("workers", {})
    return found


def open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # the process has ended
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # the file was closed meanwhile
                found.add(str(each.readlink()))
    return found


def pid_of(supervisor: int, data_dir: Path, *, writes: bool) -> int:
    """The process that writes, or one that does not: only the first has the lock's file open."""
    lock, index = f"{data_dir}/sdstore.db-writer", f"{data_dir}/sdstore.db-shm"
    return next(
        child
        for child in children_of(supervisor)
        if index in (files := open_files(child)) and (lock in files) is writes
    )


class Publisher(Thread):
    """Publishes until told to stop, and knows what was acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[int] = []
        self.statuses: set[int] = set()
        self._url = url
        self._stopped = Event()

    def run(self) -> None:
        # A connection for each request: any reader may take it.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(
            base_url=self._url, headers=PROTOBUF, trust_env=False, timeout=60, limits=limits
        ) as client:
            self._publish(client)

    def _publish(self, client: httpx.Client) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            frame = encode(Message(f"m{number}", "c", lamport_timestamp=number, content=b"hi"))
            try:
                answer = client.post("/v1/messages", content=frame)
            except httpx.TransportError:
                self.statuses.add(0)
                continue
            self.statuses.add(answer.status_code)
            if answer.is_success:
                self.acknowledged.append(number)
            else:
                assert int(answer.headers["retry-after"]) > 0
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def kill_rounds(data_dir: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    with service(data_dir) as (pid, url):
        publisher = Publisher(url)
        publisher.start()
        try:
            for _ in range(rounds):
                time.sleep(rng.uniform(0.05, 0.5))
                before = len(publisher.acknowledged)
                victim = pid_of(pid, data_dir, writes=True)
                os.kill(victim, signal.SIGKILL)
                # Reads go on, on the readers that were there.
                page = httpx.get(f"{url}/v1/feed?limit=1", trust_env=False, timeout=30)
                assert page.status_code == 200, seed
                wait_until(lambda before=before: len(publisher.acknowledged) > before + 3)  # type: ignore[misc]
        finally:
            publisher.stop()
        assert publisher.statuses <= {200, 201, 503}, seed
        kept = {
            int(item["message"]["lamport_timestamp"])
            for each in pages(url)
            for item in each["messages"]
        }
        assert kept >= set(publisher.acknowledged), seed


def pages(url: str) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        page = httpx.get(f"{url}/v1/feed?limit=500{after}", trust_env=False, timeout=30).json()
        if not page["messages"]:
            return
        yield page
        after = f"&after={page['next']}"


def test_a_writer_that_is_killed_is_replaced_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    kill_rounds(tmp_path, rounds=1, seed=random.SystemRandom().getrandbits(32))


@pytest.mark.slow
def test_a_writer_that_is_killed_many_times_loses_nothing_acknowledged(tmp_path: Path) -> None:
    # Each pause before the next process is twice as long as the last.
    kill_rounds(tmp_path, rounds=3, seed=random.SystemRandom().getrandbits(32))


@pytest.mark.slow
def test_a_reader_that_is_killed_is_replaced_and_reads_what_was_written_meanwhile(
    tmp_path: Path,
) -> None:
    with service(tmp_path) as (pid, url):
        assert publish(url, 1) == 201
        victim = pid_of(pid, tmp_path, writes=False)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not is_running(victim))
        assert publish(url, 2) == 201
        assert {json.dumps(found(url)) for _ in range(8)} == {"[1, 2]"}
        wait_until(lambda: all_are_up(url))


def all_are_up(url: str) -> bool:
    """Whether each worker, the writer among them, reports its metrics to one that is asked."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    return all(f'sdstore_worker_up{{worker="{number}"}} 1.0' in text for number in range(3))


@pytest.mark.slow
def test_a_service_that_drains_takes_messages_until_its_readers_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDSTORE_DRAIN_S", "4")
    with service(tmp_path) as (pid, url):
        everybody = [pid, *children_of(pid)]
        assert publish(url, 1) == 201
        # A process manager can signal each process.
        os.kill(pid_of(pid, tmp_path, writes=True), signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        assert httpx.get(f"{url}/readyz", trust_env=False, timeout=30).status_code == 503
        assert publish(url, 2) == 201
        wait_until(lambda: not any(map(is_running, everybody)))
    assert process("check", "--data-dir", tmp_path).code == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log


@pytest.mark.slow
def test_ctrl_c_ends_the_service_without_draining(tmp_path: Path) -> None:
    with service(tmp_path) as (pid, url):
        assert publish(url, 1) == 201
        everybody = [*children_of(pid), pid]
        began_s = time.monotonic()
        for each in everybody:  # a terminal signals all of them
            os.kill(each, signal.SIGINT)
        wait_until(lambda: not any(map(is_running, everybody)))
        # Draining alone would take three seconds; a busy machine some of it.
        assert time.monotonic() - began_s < 20


@pytest.mark.slow
def test_the_workers_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with service(tmp_path) as (pid, _):
        everybody = children_of(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, everybody)))


@pytest.mark.slow
def test_a_file_that_was_deleted_is_not_made_again_by_a_worker_that_is_replaced(
    tmp_path: Path,
) -> None:
    with service(tmp_path) as (pid, url):
        assert publish(url, 1) == 201
        kept = tmp_path / "kept"
        (tmp_path / "sdstore.db").rename(kept)
        assert publish(url, 2) == 503
        os.kill(pid_of(pid, tmp_path, writes=True), signal.SIGKILL)
        time.sleep(2)
        assert not (tmp_path / "sdstore.db").exists()
        assert publish(url, 3) == 503
        kept.rename(tmp_path / "sdstore.db")
        wait_until(lambda: set(workers(url).values()) == {"serving"})
        assert publish(url, 4) == 201
        assert found(url) == [1, 4]


@pytest.mark.slow
def test_backup_and_check_work_beside_the_workers_and_a_second_service_is_refused(
    tmp_path: Path,
) -> None:
    with service(tmp_path) as (_, url):
        assert publish(url, 1) == 201
        assert process("backup", tmp_path / "copy.db", "--data-dir", tmp_path).code == 0
        assert process("check", "--data-dir", tmp_path).code == 0
        second = process("serve", "--port", 0, "--data-dir", tmp_path, "--workers", 2)
        assert second.code == 6
        assert "data_dir_in_use" in second.err
        assert publish(url, 2) == 201
