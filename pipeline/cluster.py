"""Run a function on every item of a list, as Spark tasks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pipeline.progress import step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def on_cluster(
    spark: SparkSession, title: str, work: Callable[[_Item], _Result], items: Sequence[_Item]
) -> list[_Result]:
    """`work` of every item, in order; one task each, repeated elsewhere when its worker dies.

    So `work` must be safe to run twice, and it and its results travel by pickle.
    """
    if not items:
        return []
    with step(spark, title):
        tasks = spark.sparkContext.parallelize(items, len(items))
        return tasks.map(partial(_without_gc, work)).collect()


def _without_gc(work: Callable[[_Item], _Result], item: _Item) -> _Result:
    """Tasks make millions of small objects and no cycles; looking for cycles costs a third."""
    gc.disable()
    try:
        return work(item)
    finally:
        gc.enable()
