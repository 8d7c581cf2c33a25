"""`snapshot report`: compute the tables, draw the pictures, write the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyspark import StorageLevel

from pipeline import manifest as manifests
from pipeline.folders import published, write_file
from pipeline.manifest import Manifest
from pipeline.pictures import pictures
from pipeline.queries import TABLES
from pipeline.steps import step
from pipeline.tables import read_entries

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


# ---- the page: the pictures, and the first rows of the tables

ROWS_SHOWN = 50

_TITLES = {
    "activity": "Messages, bytes and senders",
    "gaps": "Causal gaps: named in histories, not here",
    "equivocations": "IDs with several entries",
    "graphs": "Depth and width of causal graphs",
    "clocks": "Lamport clocks far from their neighbours",
    "lags": "Delivery lag: seconds until another sender names a message",
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #ddd;overflow-wrap:anywhere}
td.number{text-align:right}img{max-width:100%}h2{margin-top:2.5rem}.note{color:#666}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}th,td{border-color:#444}}
"""


def page(
    name: str,
    manifest: Manifest,
    tables: dict[str, pa.Table],
    pictures: Iterable[str],
    rows_max: int,
) -> str:
    """The HTML of the report on the snapshot `name`; pictures and tables, cut at `rows_max` rows, are
    files beside it."""
    images = "".join(f'<p><img src="{each}.png" alt="{each}"></p>' for each in pictures)
    sections = "".join(_section(each, table, rows_max) for each, table in tables.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Snapshot {escape(name)}</title><style>{_STYLE}</style>"
        f"<h1>Snapshot {escape(name)}</h1>"
        f"<p>{manifest.entries.count:,} messages up to number {manifest.watermark.seq:,}, "
        f"exported {escape(manifest.created_at)}, root <code>{escape(manifest.entries.root)}</code>"
        f"</p>{images}{sections}</html>\n"
    )


def _section(name: str, table: pa.Table, rows_max: int) -> str:
    links = " ".join(f'<a href="{name}.{kind}">{kind}</a>' for kind in ("csv", "parquet"))
    shown = min(ROWS_SHOWN, table.num_rows)
    note = f"{shown:,} of {table.num_rows:,} rows; all: {links}"
    if table.num_rows == rows_max:
        note = f"{shown:,} of the first {rows_max:,} rows; the rest is cut: {links}"
    heads = "".join(f"<th>{escape(column)}" for column in table.column_names)
    rows = "".join(
        "<tr>" + "".join(map(_cell, row.values())) for row in table.slice(0, shown).to_pylist()
    )
    body = f"<table><tr>{heads}{rows}</table>" if shown else ""
    return f'<h2>{escape(_TITLES[name])}</h2><p class="note">{note}</p>{body}'


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape(str(value))}"
    return f'<td class="number">{value:,}'
