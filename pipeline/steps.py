"""The steps of a verb: functions that run as Spark tasks, and progress bars on a terminal."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

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
