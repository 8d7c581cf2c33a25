"""A node over PostgreSQL whose reads do not get an answer says so, to probes and to callers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from app.server.limits import DEFAULT_LIMITS
from bench.postgres_server import own_postgres
from tests.support.federation import message
from tests.support.server import RunningNode, running_node
from tests.support.stores import PostgresStores

QUICK = replace(DEFAULT_LIMITS, database_read_s=1, database_wait_s=1)
CAUSES = ("stopping", "damage", "writing", "database", "tokens")


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def is_ready(node: RunningNode) -> bool:
    return node.http.get("/readyz").is_success


def causes_of(node: RunningNode) -> dict[str, float]:
    """The metric by its label."""
    lines = node.http.get("/metrics").text.splitlines()
    found = [line.split('"') for line in lines if line.startswith("sdstore_ready{")]
    return {label: float(value.strip("} ")) for _, label, value in found}


def assert_reads_give_up(node: RunningNode) -> None:
    for path in ("/v1/messages/m1", "/v1/feed"):
        started_s = time.monotonic()
        refused = node.http.get(path)
        assert time.monotonic() - started_s < 10  # a busy machine is slower
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
    assert "the database" in refused.json()["detail"]


@pytest.mark.parametrize("table", ["messages", "frames", "channels"])
def test_a_node_whose_tables_are_locked_is_not_ready_until_they_are_free(
    postgres_stores: PostgresStores, tmp_path: Path, table: str
) -> None:
    url = postgres_stores.new_url()
    with running_node(tmp_path, database_url=url) as node, psycopg.connect(url) as other:
        assert causes_of(node) == dict.fromkeys(CAUSES, 1)
        other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")  # type: ignore[call-overload]
        wait_until(lambda: not is_ready(node), 8)
        assert causes_of(node) == dict.fromkeys(CAUSES, 1) | {"database": 0}
        other.rollback()
        wait_until(lambda: is_ready(node), 8)
        assert causes_of(node) == dict.fromkeys(CAUSES, 1)


def test_a_read_of_a_locked_table_gives_up_and_says_why(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    url = postgres_stores.new_url()
    with running_node(tmp_path, QUICK, database_url=url) as node, psycopg.connect(url) as other:
        node.publish(message(1))
        other.execute("LOCK TABLE messages IN ACCESS EXCLUSIVE MODE")
        assert_reads_give_up(node)
        problem = node.http.get("/v1/messages/m1").json()
        assert problem["detail"] == "the database did not answer a read within 1 s"
        other.rollback()
        assert node.http.get("/v1/messages/m1").is_success


@contextmanager
def stopped(url: str) -> Iterator[None]:
    """All processes of a server are paused."""
    with psycopg.connect(url) as connection:
        server = int(Path(f"/proc/{connection.info.backend_pid}/stat").read_text().split()[3])
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    pids = [server, *map(int, children)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            # The server, going on, ends a worker that was too slow to start.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_read_gives_up_while_the_server_is_stopped_and_works_when_it_goes_on(
    tmp_path: Path,
) -> None:
    with own_postgres() as server, running_node(tmp_path, QUICK, database_url=server.url) as node:
        node.publish(message(1))
        with stopped(server.url):
            assert_reads_give_up(node)
            wait_until(lambda: not is_ready(node), 8)
            assert causes_of(node)["database"] == 0
        wait_until(lambda: is_ready(node), 15)
        wait_until(lambda: node.http.get("/v1/messages/m1").is_success, 15)
