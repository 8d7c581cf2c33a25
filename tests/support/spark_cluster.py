"""A Spark standalone cluster on loopback: one master, workers, each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from pipeline.session import java_home

_REPOSITORY = Path(__file__).parents[2]
_START_SECONDS_MAX = 60
_DEPLOY = "org.apache.spark.deploy"


@dataclass(frozen=True, slots=True)
class Cluster:
    """`url` is the value for `--master`; `workers` are process IDs."""

    url: str
    workers: tuple[int, ...]
    environment: dict[str, str]

    def executors(self) -> list[int]:
        """Process IDs of the executors that run now: the children of the workers."""
        return [pid for worker in self.workers for pid in children_of(worker)]


@contextmanager
def spark_cluster(folder: Path, workers_count: int) -> Iterator[Cluster]:
    """A running cluster whose logs lie in `folder`; gone at the end of the block."""
    environment = cluster_environment(folder)
    port = _free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as running:

        def start(name: str, *arguments: str) -> int:
            log = running.enter_context((folder / f"{name}.log").open("wb"))
            script = Path(pyspark.__file__).parent / "bin" / "spark-class"
            process = subprocess.Popen(
                [script, *arguments], env=environment, cwd=folder, stdout=log, stderr=log
            )
            running.callback(process.wait)
            running.callback(process.kill)
            return process.pid

        at = ("--host", "127.0.0.1", "--webui-port", "0")
        start("master", f"{_DEPLOY}.master.Master", "--port", str(port), *at)
        sizes = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / "work"))
        pids = tuple(
            start(f"worker{number}", f"{_DEPLOY}.worker.Worker", url, *at, *sizes)
            for number in range(workers_count)
        )
        _wait_for(folder, workers_count)
        yield Cluster(url, pids, environment)


def cluster_environment(folder: Path) -> dict[str, str]:
    """The environment in which local Spark processes find Java, Python, this code and each other."""
    home = java_home(os.environ, folder)
    return {
        **os.environ,
        **({} if home is None else {"JAVA_HOME": home}),
        "PYTHONPATH": str(_REPOSITORY),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def children_of(parent: int) -> list[int]:
    """Process IDs whose parent is `parent`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(after_name[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def _wait_for(folder: Path, workers_count: int) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while (folder / "master.log").read_text().count("Registering worker") < workers_count:
        assert time.monotonic() < deadline, (folder / "master.log").read_text()
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
