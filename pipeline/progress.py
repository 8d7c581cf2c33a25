"""A progress bar per Spark stage, on a terminal only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_POLL_S = 0.2  # what still looks like movement; asking Spark costs a millisecond


@contextmanager
def step(spark: SparkSession, title: str) -> Iterator[None]:
    """Name the Spark jobs started inside `title`, and show how many of their tasks are done."""
    context = spark.sparkContext
    group = f"sdstore-{uuid4().hex}"
    context.setJobGroup(group, title)
    try:
        if not sys.stderr.isatty():
            yield
            return
        with _bar() as bar, _watched(spark, group, bar, title):
            yield
    finally:
        context.setLocalProperty("spark.jobGroup.id", "")
        context.setLocalProperty("spark.job.description", "")


def items(title: str, sequence: Sequence[_Item]) -> Iterator[_Item]:
    """The items of `sequence`, with a bar that shows how many are done."""
    with _bar() as bar:
        yield from bar.track(sequence, description=title)


def _bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def _watched(spark: SparkSession, group: str, bar: Progress, title: str) -> Iterator[None]:
    task = bar.add_task(title, total=None)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            done, total = _tasks(spark, group)
            bar.update(task, completed=done, total=total or None)

    watcher = threading.Thread(target=follow, name="spark-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        done, total = _tasks(spark, group)
        bar.update(task, completed=done, total=total or None)


def _tasks(spark: SparkSession, group: str) -> tuple[int, int]:
    """(finished, planned) tasks of all jobs of `group` so far; skipped stages plan none."""
    tracker = spark.sparkContext.statusTracker()
    done = total = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job else ():
            stage = tracker.getStageInfo(stage_id)
            if stage is not None and (stage.numCompletedTasks or stage.numActiveTasks):
                done, total = done + stage.numCompletedTasks, total + stage.numTasks
    return done, total
