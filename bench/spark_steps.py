"""The cost of each step of a Spark program: seconds, and the memory of its driver and its JVM."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeline.manifest import Manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(slots=True)
class Step:
    """One step, measured once or more; peaks are of the worst run."""

    reads_all: bool
    seconds: list[float] = field(default_factory=list)
    driver_mb: int = 0
    jvm_mb: int = 0
    written: str = ""


class Steps:
    """The steps over a store of `rows_count` entries, by name, in the order of their first time."""

    def __init__(self, spark: SparkSession, rows_count: int) -> None:
        self._jvm = str(jvm_pid(spark))
        self._rows_count = rows_count
        self._steps: dict[str, Step] = {}

    def take(self, what: str, work: Callable[[], object], *, reads_all: bool = True) -> None:
        """Measure one call; of an export also which share of its bytes was written."""
        step = self._steps.setdefault(what, Step(reads_all))
        for process in ("self", self._jvm):
            forget_peak(process)
        start = time.perf_counter()
        made = work()
        step.seconds.append(time.perf_counter() - start)
        step.driver_mb = max(step.driver_mb, peak_mb("self"))
        step.jvm_mb = max(step.jvm_mb, peak_mb(self._jvm))
        if isinstance(made, Manifest):
            step.written = f"{made.bytes_written / made.table_bytes:.1%}"
        taken = f"{self._rows_count:,} rows, {what}: {step.seconds[-1]:.2f} s"
        print(taken, file=sys.stderr, flush=True)

    def table(self, limit: str | None = None) -> list[dict[str, Any]]:
        """A row for each step, with the median of its times.

        Steps that read all rows have a rate, related to that of the step `limit` if it is given.
        """
        rows = []
        for what, step in self._steps.items():
            seconds = median(step.seconds)
            rows.append(
                {
                    "rows": self._rows_count,
                    "what": what,
                    "seconds": seconds,
                    "rows/s": round(self._rows_count / seconds) if step.reads_all else "",
                    "of a plain copy": median(self._steps[limit].seconds) / seconds
                    if limit and step.reads_all
                    else "",
                    "written": step.written,
                    "driver MB": step.driver_mb,
                    "JVM MB": step.jvm_mb,
                }
            )
        return rows


def jvm_pid(spark: SparkSession) -> int:
    """The process that runs Spark's driver and, on one machine, its tasks."""
    pid: int = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr] # noqa: SLF001
    return pid


def forget_peak(process: str) -> None:
    """Let `peak_mb` count from what the process has in RAM now (proc(5): clear_refs)."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_mb(process: str) -> int:
    """The peak resident memory of a process since `forget_peak`, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return round(int(line.split()[1]) / 1024)
