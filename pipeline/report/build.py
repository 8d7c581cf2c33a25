"""`snapshot report`: compute the tables, draw the pictures, write the page."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyspark import StorageLevel

from pipeline import manifest as manifests
from pipeline.progress import step
from pipeline.publish import published, write_file
from pipeline.report.page import page
from pipeline.report.pictures import pictures
from pipeline.report.tables import TABLES
from pipeline.snapshot import read_entries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_MAX = 1_000_000  # rows of one table: a spreadsheet's limit; the queries are unbounded


def write_report(spark: SparkSession, snapshot: Path, out: Path) -> dict[str, pa.Table]:
    """Make the folder `out` with index.html, pictures and tables; returns the tables.

    Raises ManifestError, and PublishError if `out` exists.
    """
    manifest = manifests.load(snapshot)
    entries = read_entries(spark, snapshot)
    slim = entries.drop("frame", "frame_hash", "content").persist(StorageLevel.DISK_ONLY)
    tables: dict[str, pa.Table] = {}
    with published(out.absolute()) as folder:
        for table, query in TABLES.items():
            with step(spark, f"Report {table}"):
                source = entries if table == "equivocations" else slim
                tables[table] = query(source).limit(ROWS_MAX).toArrow()
            _write_table(folder, table, tables[table])
        name = snapshot.absolute().name
        drawn = pictures(tables, f"{name}, exported {_moment(manifest.created_at)}")
        for picture, content in drawn.items():
            write_file(folder, f"{picture}.png", content)
        write_file(folder, "index.html", page(name, manifest, tables, drawn, ROWS_MAX).encode())
    slim.unpersist()
    return tables


def _moment(iso: str) -> str:
    """A UTC time to the minute."""
    return f"{iso[:16].replace('T', ' ')} UTC"


def _write_table(folder: Path, name: str, table: pa.Table) -> None:
    for kind, write in (("parquet", pq.write_table), ("csv", pyarrow.csv.write_csv)):
        sink = BytesIO()
        write(table, sink)
        write_file(folder, f"{name}.{kind}", sink.getvalue())
