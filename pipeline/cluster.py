"""Run a function on every item of a list, as Spark tasks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pipeline.progress import step

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
    total = sum(rows)
    done: Accumulator[int] = spark.sparkContext.accumulator(0)
    # A repeated task counts twice.
    with step(spark, title, lambda: (min(done.value, total), total), "rows"):
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
