"""Progress bars on a terminal; they count rows if possible, else Spark tasks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_POLL_S = 0.2  # smooth enough to the eye; asking Spark costs a millisecond

Count = Callable[[], tuple[int, int]]
"""(done, total) in the unit of the bar."""


@contextmanager
def step(
    spark: SparkSession, title: str, count: Count | None = None, unit: str = "tasks"
) -> Iterator[None]:
    """Name the Spark jobs started inside `title`, and show their progress.

    `count` returns the progress in `unit`; without it the bar counts the Spark tasks planned so far.
    """
    context = spark.sparkContext
    group = f"sdstore-{uuid4().hex}"
    context.setJobGroup(group, title)
    try:
        if not sys.stderr.isatty():
            yield
            return
        with bar() as shown, _followed(shown, title, unit, count or (lambda: tasks(spark, group))):
            yield
    finally:
        context.setLocalProperty("spark.jobGroup.id", "")
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
    """Done and total, as in "131,072 of 400,000 rows"; only done if the total is unknown."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if task.total is None:
            return Text(f"{task.completed:,.0f} {unit}" if task.completed else "")
        return Text(f"{task.completed:,.0f} of {task.total:,.0f} {unit}")


@contextmanager
def _followed(shown: Progress, title: str, unit: str, count: Count) -> Iterator[None]:
    task = shown.add_task(title, total=None, unit=unit)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            done, total = count()
            # Spark can plan more tasks, so the bar is full only when the step ends.
            shown.update(task, completed=done, total=total if total > done else None)

    watcher = threading.Thread(target=follow, name="spark-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    done, total = count()
    shown.update(task, completed=max(done, total), total=max(done, total))


def tasks(spark: SparkSession, group: str) -> tuple[int, int]:
    """(finished, planned) tasks of all jobs of `group` so far.

    In a finished job, stages that never ran a task were skipped.
    """
    tracker: Any = spark.sparkContext.statusTracker()
    done = total = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in job.stageIds if job else ():
            stage = tracker.getStageInfo(stage_id)
            if stage is None:
                continue
            has_run = stage.numCompletedTasks or stage.numActiveTasks
            if has_run or job.status == "RUNNING":
                done, total = done + stage.numCompletedTasks, total + stage.numTasks
    return done, total
