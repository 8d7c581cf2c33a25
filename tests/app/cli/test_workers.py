"""`sdstore serve --workers N`: several processes over one PostgreSQL database are one node."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.postgres_server import PostgresServer, own_postgres
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import command, process
from tests.support.server import AS_OPERATOR, PROTOBUF, running_node
from tests.support.stores import PostgresStores

SECONDS_MAX = 60
ASKED_AGAIN = 12
"""Connections after which each of two workers has answered, but for one run in thousands."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that the tests may stop."""
    with own_postgres() as running:
        yield running


@pytest.fixture
def database(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new database of that server, which runs again at the end."""
    name = f"d{abs(hash(request.node.name))}"
    execute(server.url, f"CREATE DATABASE {name}")
    try:
        yield server.url.replace("/postgres?", f"/{name}?")
    finally:
        if not answers(server.url):
            server.start()


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[call-overload]


def answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@contextmanager
def serving(
    database_url: str, data_dir: Path, workers: int, *more: object
) -> Iterator[tuple[int, str]]:
    """The process and the URL of a node of several workers; its log is DATA_DIR/log."""
    arguments = ("--port", 0, "--database", database_url, "--data-dir", data_dir, "--json")
    with (
        (data_dir / "log").open("wb") as log,
        # The sockets of a service that is killed stay behind in there.
        tempfile.TemporaryDirectory(prefix="sdstore-", ignore_cleanup_errors=True) as scratch,
        subprocess.Popen(
            command("serve", *arguments, "--workers", workers, *more),
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"TMPDIR": scratch},
        ) as running,
    ):
        assert running.stdout is not None
        try:
            yield running.pid, json.loads(running.stdout.readline())["url"]
        finally:
            running.kill()


def workers_of(pid: int) -> set[int]:
    """The processes below one that run a node."""
    found = set()
    for child in children_of(pid):
        with suppress(OSError):  # it ended meanwhile
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(child)
    return found


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
        f"{url}/v1/messages",
        content=frame,
        headers=PROTOBUF,
        trust_env=False,
        auth=AS_OPERATOR,
        timeout=30,
    ).status_code


def readiness(url: str) -> set[int]:
    """The statuses of `/readyz`, each on its own connection; 0 if no answer comes in time."""

    def ask() -> int:
        try:
            return httpx.get(
                f"{url}/readyz", trust_env=False, auth=AS_OPERATOR, timeout=5
            ).status_code
        except httpx.TransportError:
            return 0

    return {ask() for _ in range(ASKED_AGAIN)}


def found(url: str) -> list[int]:
    page = httpx.get(
        f"{url}/v1/feed?limit=1000", trust_env=False, auth=AS_OPERATOR, timeout=30
    ).json()
    return [int(item["message"]["lamport_timestamp"]) for item in page["messages"]]


@pytest.mark.parametrize("database", [(), ("--database", "sqlite:///store.db")])
def test_several_workers_over_sqlite_are_refused_with_what_to_do(
    tmp_path: Path, database: tuple[str, ...]
) -> None:
    ended = process("serve", "--workers", 3, "--data-dir", tmp_path, *database)
    assert ended.code == 2
    assert "workers (flag): one process serves SQLite" in ended.err
    assert "use PostgreSQL (--database postgresql://...), or leave workers at 1" in ended.err
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("workers", [1, 2])
def test_ready_means_that_the_database_answered_a_moment_ago_whichever_worker_is_asked(
    server: PostgresServer, database: str, tmp_path: Path, workers: int
) -> None:
    with serving(database, tmp_path, workers) as (_, url):
        assert readiness(url) == {200}
        server.stop()
        time.sleep(4)  # nobody reads or writes meanwhile
        assert readiness(url) == {503}
        reason = httpx.get(f"{url}/readyz", trust_env=False, auth=AS_OPERATOR).json()
        assert reason["code"] == "not_ready"
        assert "database" in reason["detail"]
        # The counters are still reported, and at once.
        assert (
            httpx.get(f"{url}/metrics", trust_env=False, auth=AS_OPERATOR, timeout=4).status_code
            == 200
        )
        server.start()
        wait_until(lambda: readiness(url) == {200})
        log = tmp_path / "log"
        wait_until(lambda: log.read_text().count("ready again") == workers)
        lines = log.read_text().splitlines()
    # One line for each change of each worker, one at the start, and no other.
    assert sum("not ready: the database" in line for line in lines) == workers
    assert len(lines) == 2 * workers + 1, lines


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_workers_that_die_while_the_database_is_away_say_so_and_come_back_with_it(
    server: PostgresServer, database: str, tmp_path: Path
) -> None:
    with serving(database, tmp_path, 2) as (pid, url):
        assert publish(url, 1) == 201
        server.stop()
        before = workers_of(pid)
        for each in before:
            os.kill(each, signal.SIGKILL)
        wait_until(lambda: not is_running(pid) or len(workers_of(pid) - before) == 2)
        assert is_running(pid), (tmp_path / "log").read_text()
        # With no worker that has a database: somebody answers, and what is the matter.
        wait_until(lambda: readiness(url) == {503})
        assert httpx.get(f"{url}/livez", trust_env=False, auth=AS_OPERATOR).status_code == 200
        refused = httpx.get(f"{url}/v1/feed", trust_env=False, auth=AS_OPERATOR)
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        assert int(refused.headers["retry-after"]) > 0
        server.start()
        wait_until(lambda: readiness(url) == {200})
        assert publish(url, 2) == 201
        assert found(url) == [1, 2]
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_running(pid))


def churn(server: PostgresServer, database: str, data_dir: Path, seed: int, steps: int) -> None:
    """Stop and start the database and kill workers in any order; in the end all is as it was."""
    rng = random.Random(seed)
    acknowledged: list[int] = []
    with serving(database, data_dir, 2) as (pid, url):
        for step in range(steps):
            what = rng.choice(["stop", "start", "kill one", "kill all", "publish"])
            running = workers_of(pid)
            if what == "stop" and answers(server.url):
                server.stop()
            elif what == "start" and not answers(server.url):
                server.start()
            elif what == "kill all" or (what == "kill one" and running):
                for each in running if what == "kill all" else [rng.choice(sorted(running))]:
                    os.kill(each, signal.SIGKILL)
            elif what == "publish" and answers(server.url) and 200 in readiness(url):
                wait_until(lambda: readiness(url) == {200})
                acknowledged += [step] if publish(url, step) == 201 else []
            time.sleep(rng.choice([0, 0.3, 1.5]))
            assert is_running(pid), (seed, step, what, (data_dir / "log").read_text())
        if not answers(server.url):
            server.start()
        wait_until(lambda: readiness(url) == {200})
        assert publish(url, steps) == 201
        assert found(url) == [*acknowledged, steps]
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_running(pid))


def test_the_service_outlives_any_order_of_stops_starts_and_kills(
    server: PostgresServer, database: str, tmp_path: Path
) -> None:
    churn(server, database, tmp_path, seed=random.SystemRandom().getrandbits(32), steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_service_outlives_many_orders_of_stops_starts_and_kills(
    server: PostgresServer, database: str, tmp_path: Path, seed: int
) -> None:
    churn(server, database, tmp_path, seed, steps=30)


def test_a_worker_that_dies_at_each_start_is_tried_again_after_growing_pauses(
    database: str, tmp_path: Path
) -> None:
    with serving(database, tmp_path, 2) as (pid, url):
        secret = (tmp_path / "node.secret").read_bytes()
        (tmp_path / "node.secret").write_bytes(b"short")
        os.kill(max(workers_of(pid)), signal.SIGKILL)
        log = tmp_path / "log"
        wait_until(lambda: not is_running(pid) or "starts in 1.00 s" in log.read_text())
        assert is_running(pid), log.read_text()
        pauses = re.findall(r"another one starts in ([0-9.]+) s", log.read_text())
        assert pauses[-3:] == ["0.25", "0.50", "1.00"], pauses
        # The other one serves meanwhile.
        assert publish(url, 1) == 201
        (tmp_path / "node.secret").write_bytes(secret)
        wait_until(lambda: restored(url))
        assert publish(url, 2) == 201


def restored(url: str) -> bool:
    """Whether all workers serve."""
    ready = httpx.get(f"{url}/readyz", trust_env=False, auth=AS_OPERATOR)
    return set(ready.json().get("workers", {}).values()) == {"serving"}


def test_a_schema_that_a_newer_version_wrote_ends_the_service_when_a_worker_meets_it(
    database: str, tmp_path: Path
) -> None:
    with serving(database, tmp_path, 2) as (pid, _):
        execute(database, "UPDATE alembic_version SET version_num = '9999'")
        os.kill(max(workers_of(pid)), signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
    assert "9999" in (tmp_path / "log").read_text()


def asked(url: str, path: str) -> list[httpx.Response]:
    """Answers to the same question on connections of their own: of every worker."""
    return [
        httpx.get(f"{url}{path}", trust_env=False, auth=AS_OPERATOR, timeout=30)
        for _ in range(ASKED_AGAIN)
    ]


def known_peers(url: str) -> set[str]:
    """The lists of peers that the workers give."""
    return {
        " ".join(peer["url"] for peer in answer.json()["peers"])
        for answer in asked(url, "/v1/peers")
        if answer.status_code == 200
    }


def test_peers_and_syncs_are_the_same_whichever_worker_is_asked(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    (tmp_path / "workers").mkdir()
    with (
        running_node(tmp_path / "peer") as peer,
        serving(postgres_stores.new_url(), tmp_path / "workers", 2) as (pid, url),
    ):
        peer.publish(Message("m", "c", lamport_timestamp=1, content=b"hi"))
        added = httpx.post(
            f"{url}/v1/peers", json={"url": peer.url}, trust_env=False, auth=AS_OPERATOR
        )
        assert added.status_code == 201
        assert known_peers(url) == {peer.url}
        assert {answer.status_code for answer in asked(url, added.headers["location"])} == {200}
        httpx.post(
            f"{url}/v1/peers", json={"url": f"{peer.url}/x"}, trust_env=False, auth=AS_OPERATOR
        )
        started = httpx.post(
            f"{url}/v1/syncs",
            json={"peer_url": "http://127.0.0.1:1"},
            trust_env=False,
            auth=AS_OPERATOR,
        )
        assert started.status_code == 202
        where = started.headers["location"]
        assert {answer.json().get("id") for answer in asked(url, where)} == {started.json()["id"]}
        for answer in asked(url, f"{where}/events"):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert "event: end" in answer.text
        # So is a refusal.
        assert {a.json()["code"] for a in asked(url, "/v1/syncs/nope")} == {"not_found"}
        for victim in sorted(workers_of(pid)):  # also the one that holds the peers
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(workers_of(pid)) == 2 and readiness(url) == {200})
        wait_until(lambda: known_peers(url) == {f"{peer.url} {peer.url}/x"})
        gone = httpx.delete(f"{url}{added.headers['location']}", trust_env=False, auth=AS_OPERATOR)
        assert gone.status_code == 204
        assert known_peers(url) == {f"{peer.url}/x"}


def test_each_scrape_has_the_metrics_of_every_worker(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    with serving(postgres_stores.new_url(), tmp_path, 2) as (pid, url):
        assert {publish(url, number) for number in range(20)} == {201}
        for answer in asked(url, "/metrics"):
            stored = {}
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    if sample.name == "sdstore_ingest_entries_total":
                        stored[sample.labels.get("worker")] = sample.value
            assert sum(stored.values()) == 20, stored
            assert stored.keys() == {"0", "1"}
            names = [line.split()[2] for line in answer.text.splitlines() if "# TYPE" in line]
            assert len(names) == len(set(names))
            assert 'sdstore_worker_up{worker="1"} 1.0' in answer.text
        os.kill(max(workers_of(pid)), signal.SIGKILL)
        wait_until(lambda: len(workers_of(pid)) == 2 and readiness(url) == {200})

        def restarts() -> set[float]:
            return {
                sum(
                    sample.value
                    for family in text_string_to_metric_families(answer.text)
                    for sample in family.samples
                    if sample.name == "sdstore_worker_restarts_total"
                )
                for answer in asked(url, "/metrics")
            }

        wait_until(lambda: restarts() == {1.0})
        ready = {"status": "ready", "workers": {"0": "serving", "1": "serving"}}
        wait_until(
            lambda: httpx.get(f"{url}/readyz", trust_env=False, auth=AS_OPERATOR).json() == ready
        )
