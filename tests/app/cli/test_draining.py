"""SIGTERM: the node says that it stops, goes on for a while, finishes what was begun, and exits 0."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import command
from tests.support.server import PROTOBUF
from tests.support.stores import PostgresStores

DRAIN_S = 4.0


@contextmanager
def serving(
    *arguments: object, drain_s: float = DRAIN_S
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A node as a process, and its URL."""
    with subprocess.Popen(
        command("serve", "--port", 0, "--json", "--log-level", "error", *arguments),
        stdout=subprocess.PIPE,
        env=os.environ | {"SDSTORE_DRAIN_S": str(drain_s)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def published(url: str, number: int) -> httpx.Response:
    frame = encode(Message(f"m{number}", "c", lamport_timestamp=number, content=b"hi"))
    return httpx.post(f"{url}/v1/messages", content=frame, headers=PROTOBUF, trust_env=False)


def test_a_node_that_is_told_to_stop_says_so_and_finishes_what_was_begun(tmp_path: Path) -> None:
    with serving("--data-dir", tmp_path) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        assert published(url, 1).status_code == 201
        frame = encode(Message("slow", "c", lamport_timestamp=9, content=b"hi"))
        with (
            httpx.Client(base_url=url, trust_env=False) as client,
            client.stream("GET", "/v1/live") as live,
            socket.create_connection((host, int(port)), timeout=30) as slow,
        ):
            lines = live.iter_lines()
            assert next(lines) == ": still here"
            # A request whose body is on its way when the signal comes.
            slow.sendall(
                b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/x-protobuf\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(frame), frame[:-1])
            )
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            signalled_s = time.monotonic()
            time.sleep(0.3)
            ready = httpx.get(f"{url}/readyz", trust_env=False)
            assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
            # New connections are accepted and served, and each answer is the last of its connection.
            answer = published(url, 2)
            assert (answer.status_code, answer.headers["connection"]) == (201, "close")
            assert time.monotonic() - signalled_s < DRAIN_S, "the machine is too slow for this test"
            # The live reader is given its place, and an end.
            rest = list(lines)
            last_id = [line.removeprefix("id: ") for line in rest if line.startswith("id: ")][-1]
            # The listener has closed by now; what was begun goes on.
            time.sleep(max(0.0, signalled_s + DRAIN_S + 0.5 - time.monotonic()))
            slow.sendall(frame[-1:])
            assert slow.recv(65_536).startswith(b"HTTP/1.1 201")
        assert process.wait(30) == 0
        assert time.monotonic() - signalled_s >= DRAIN_S
    with serving("--data-dir", tmp_path) as (_, url):
        feed = httpx.get(f"{url}/v1/feed", params={"after": last_id}, trust_env=False).json()
        assert [m["message"]["message_id"] for m in feed["messages"]] == ["m2", "slow"]


def test_a_second_signal_ends_the_waiting_and_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    for signals, code in (([signal.SIGTERM, signal.SIGTERM], 0), ([signal.SIGINT], 130)):
        # Longer than the process is waited for.
        with serving("--data-dir", tmp_path, drain_s=60) as (process, url):
            assert published(url, 1).status_code in (200, 201)
            for each in signals:
                process.send_signal(each)
                time.sleep(0.3)
            assert process.wait(30) == code


def test_workers_drain_too(postgres_stores: PostgresStores, tmp_path: Path) -> None:
    database_url = postgres_stores.new_url()
    with serving("--data-dir", tmp_path, "--database", database_url, "--workers", 2) as (
        process,
        url,
    ):
        assert published(url, 1).status_code == 201
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        codes = {httpx.get(f"{url}/readyz", trust_env=False).status_code for _ in range(6)}
        assert codes == {503}
        assert published(url, 2).status_code == 201
        assert process.wait(30) == 0
