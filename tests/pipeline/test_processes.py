"""Real processes: a Spark cluster, and drivers and executors that are killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pipeline import manifest as manifests
from tests.support.snapshots import conversation, fill_store
from tests.support.spark_cluster import Cluster, cluster_environment, spark_cluster
from tests.support.streams import streamed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_spark")]

_Found = TypeVar("_Found")
MESSAGES = 8_000
FILE_ROWS = 200  # 40 tasks: there is always a middle to be killed in
SECONDS_MAX = 600


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = f"sqlite:///{tmp_path_factory.mktemp('store') / 'sdstore.db'}"
    fill_store(made, conversation(seed=11), MESSAGES, days=4)
    return made


def start(folder: Path, *arguments: str, master: str | None = None) -> subprocess.Popen[bytes]:
    """A verb of `sdstore snapshot` as a process of its own."""
    flags = [] if master is None else ["--master", master]
    return subprocess.Popen(
        [sys.executable, "-m", "sdstore", "snapshot", *arguments, *flags],
        env=cluster_environment(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(folder: Path, *arguments: str, master: str | None = None) -> dict[str, Any]:
    """The verb's JSON; fails unless it ends well."""
    process = start(folder, *arguments, "--json", master=master)
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, err.decode()
    answer: dict[str, Any] = json.loads(out)
    return answer


def wait_until(look: Callable[[], _Found], process: subprocess.Popen[bytes]) -> _Found:
    """The first true result of `look`; fails if the process ends before."""
    deadline = time.monotonic() + SECONDS_MAX
    while not (found := look()):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def export(url: str, target: Path) -> tuple[str, ...]:
    return ("export", str(target), "--database", url, "--file-rows", str(FILE_ROWS))


def files_in(partial: Path) -> int:
    return len(list(partial.glob("entries/*/*.parquet")))


@pytest.fixture(scope="module")
def snapshot(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of that store, for tests that only read it."""
    folder = tmp_path_factory.mktemp("snapshot")
    run(folder, *export(url, folder / "snapshot"))
    return folder / "snapshot"


@pytest.mark.parametrize("files", [0, 20])
def test_a_killed_export_leaves_no_half_snapshot_and_the_next_one_finishes(
    url: str, tmp_path: Path, files: int
) -> None:
    target, partial = tmp_path / "snapshot", tmp_path / ".snapshot.partial"
    process = start(tmp_path, *export(url, target))
    wait_until(lambda: partial.exists() and files_in(partial) >= files, process)
    kill(process)
    assert not target.exists()
    assert run(tmp_path, *export(url, target))["entries"]["count"] == MESSAGES
    assert run(tmp_path, "verify", str(target))["findings"] == []
    assert not partial.exists()


def test_a_killed_restore_is_started_again_and_ends_equal(
    url: str, snapshot: Path, tmp_path: Path
) -> None:
    restore, database = restore_into(tmp_path / "new.db", snapshot)
    for rows in (1, MESSAGES // 2):
        process = start(tmp_path, *restore)
        wait_until(lambda least=rows: rows_in(database) >= least, process)  # type: ignore[misc]
        kill(process)
        assert rows_in(database) < MESSAGES
    held = rows_in(database)
    assert run(tmp_path, *restore)["written_count"] == MESSAGES - held
    assert_copied(url, database)


def restore_into(database: Path, snapshot: Path) -> tuple[tuple[str, ...], Path]:
    """The verb that restores the snapshot there, and the file."""
    return ("restore", str(snapshot), "--database", f"sqlite:///{database}"), database


def assert_copied(url: str, database: Path) -> None:
    """The file holds what the store at `url` does."""
    assert run(database.parent, "diff", url, f"sqlite:///{database}")["equal"]
    assert claims_in(database) == claims_in(Path(url.removeprefix("sqlite:///"))) > 0


def rows_in(database: Path) -> int:
    return int(ask(database, "SELECT count(*) FROM messages") or 0)


def claims_in(database: Path) -> int:
    return int(ask(database, "SELECT count(*) FROM published_claims") or 0)


def ask(database: Path, sql: str) -> Any:
    if not database.exists():
        return None
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchone()[0]
    except sqlite3.OperationalError:
        return None
    finally:
        connection.close()


def test_a_stream_that_is_killed_in_a_batch_goes_on_and_writes_every_entry_once(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    def stream() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.streams", url, str(tmp_path)],
            env=cluster_environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    process = stream()
    wait_until(lambda: batches(tmp_path, "commits") and files_out(tmp_path) > 22, process)
    kill(process)
    # A batch was under way; whatever it had written, it counts for nothing.
    assert batches(tmp_path, "offsets") == batches(tmp_path, "commits") + 1
    process = stream()
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, err.decode()
    seqs = [row["seq"] for row in streamed(spark, tmp_path).select("seq").collect()]
    assert sorted(seqs) == list(range(1, MESSAGES + 1))


def batches(folder: Path, state: str) -> int:
    return len(list((folder / "checkpoint" / state).glob("[0-9]*")))


def files_out(folder: Path) -> int:
    return len(list((folder / "out").glob("*.parquet")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with spark_cluster(tmp_path_factory.mktemp("cluster"), workers_count=2) as running:
        yield running


def test_a_cluster_exports_verifies_and_compares(
    cluster: Cluster, url: str, tmp_path: Path
) -> None:
    made = run(tmp_path, *export(url, tmp_path / "a"), master=cluster.url)
    assert made["entries"]["count"] == MESSAGES
    assert run(tmp_path, "verify", "a", master=cluster.url)["findings"] == []
    assert run(tmp_path, "diff", "a", url)["equal"]


def test_an_export_survives_an_executor_that_is_killed(
    cluster: Cluster, url: str, tmp_path: Path
) -> None:
    target, partial = tmp_path / "snapshot", tmp_path / ".snapshot.partial"
    process = start(tmp_path, *export(url, target), master=cluster.url)
    wait_until(lambda: partial.exists() and files_in(partial) >= 2, process)
    victims = cluster.executors()
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, err.decode()
    assert run(tmp_path, "verify", str(target))["findings"] == []
    assert manifests.load(target).entries.count == MESSAGES


@pytest.mark.parametrize("after_s", [0, 0.7, 2])
def test_ctrl_c_while_spark_starts_leaves_no_process_behind(
    url: str, tmp_path: Path, after_s: float
) -> None:
    """A JVM that is still starting hears nothing of the end of the program that started it."""
    with start(tmp_path, "export", str(tmp_path / "snapshot"), "--database", url) as export:
        deadline_s = time.monotonic() + 60
        while not (started := descendants(export.pid)):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        time.sleep(after_s)
        started |= descendants(export.pid)
        export.send_signal(signal.SIGINT)
        export.communicate(timeout=60)
    assert export.returncode == 130
    deadline_s = time.monotonic() + 30
    while any(Path(f"/proc/{each}").exists() for each in started):
        assert time.monotonic() < deadline_s, started
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    left = [pid]
    while left:
        try:
            children = Path(f"/proc/{left[-1]}/task/{left.pop()}/children").read_text().split()
        except OSError:
            continue
        left += map(int, children)
        found.update(map(int, children))
    return found
