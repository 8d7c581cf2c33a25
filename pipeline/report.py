"""`snapshot report`: compute the tables, draw the pictures, write the page."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray
from pyspark import StorageLevel

from pipeline import manifest as manifests
from pipeline.manifest import Manifest, published, write_file
from pipeline.queries import TABLES
from pipeline.session import step
from pipeline.tables import read_entries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# ---- pictures

_SIZE_INCHES = (8.0, 3.4)
_DOTS_PER_INCH = 120
_PALETTE = mpl.color_sequences["tab10"]
_CHANNELS_SHOWN = len(_PALETTE) - 1  # a tenth bar is for all others
_LABEL_CHARACTERS = 40
_NARROW = 20  # below this ratio of its ends a logarithmic axis has no round numbers
_SECONDS = {0: "0", 1: "1 s", 60: "1 min", 3_600: "1 h", 86_400: "1 d", 30 * 86_400: "30 d"}

_DAYS_NAMED = 8
_DAYS_APART = 60
_HALF_DAY = np.timedelta64(16, "h")  # and room for half a bar
_COUNT = FuncFormatter(lambda value, _: f"{value:,.0f}")

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

_Draw = Callable[[Axes, pa.Table], None]


def pictures(tables: dict[str, pa.Table], caption: str) -> dict[str, bytes]:
    """PNG files by name, each with the caption; pictures without enough data are left out."""
    activity, lags, graphs = tables["activity"], tables["lags"], tables["graphs"]
    days_count = pc.count_distinct(activity["day"]).as_py()
    drawn: list[tuple[str, bool, _Draw, pa.Table]] = [
        ("messages", days_count > 1, _draw_days, activity),
        ("messages", days_count == 1, _draw_channels, activity),
        ("growth", days_count > 1, _draw_growth, activity),
        ("lags", lags.num_rows > 0, _draw_lags, lags),
        ("graphs", graphs.num_rows > 0, _draw_graphs, graphs),
    ]
    return {name: _png(draw, table, caption) for name, shows, draw, table in drawn if shows}


def _png(draw: _Draw, table: pa.Table, caption: str) -> bytes:
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, table)
    _plain(figure.supxlabel(caption, x=0.995, ha="right", fontsize="x-small", color="gray"))
    sink = BytesIO()
    with warnings.catch_warnings():
        # Names can use scripts that the font lacks: draw boxes without a warning.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(sink, format="png")
    return sink.getvalue()


def _draw_days(axes: Axes, activity: pa.Table) -> None:
    """Messages of each day, the largest channels in colours of their own."""
    days, rows = np.unique(activity["day"].to_numpy(), return_inverse=True)
    bottom = np.zeros(len(days))
    for number, (name, is_in) in enumerate(_largest_channels(activity)):
        heights = np.bincount(
            rows[is_in], activity["messages"].to_numpy()[is_in], minlength=len(days)
        )
        axes.bar(
            days,
            heights,
            # Gaps between hundreds of bars would look like stripes.
            width=0.8 if len(days) <= _DAYS_APART else 1.0,
            bottom=bottom,
            label=name,
            color=_PALETTE[number] if number < _CHANNELS_SHOWN else "lightgray",
        )
        bottom += heights
    axes.set_title("Messages by day of arrival", loc="left")
    _date_axis(axes, days)
    _count_axis(axes)
    handles, labels = axes.get_legend_handles_labels()
    # From top to bottom, as the bars are stacked.
    legend = axes.legend(
        handles[::-1],
        labels[::-1],
        fontsize="x-small",
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    for label in legend.get_texts():
        _plain(label)


def _draw_channels(axes: Axes, activity: pa.Table) -> None:
    """Messages of a single day, a bar for each channel, the largest on top.

    All others are a sentence: a bar of thousands of channels would leave the rest no length.
    """
    parts = _largest_channels(activity)
    counts = [int(activity["messages"].to_numpy()[is_in].sum()) for _, is_in in parts]
    if len(parts) > _CHANNELS_SHOWN:
        axes.set_xlabel(f"and {counts.pop():,} messages in {parts.pop()[0]}", fontsize="small")
    bars = axes.barh(range(len(parts)), counts, color=_PALETTE[: len(parts)])
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=3, fontsize="x-small")
    axes.set_yticks(range(len(parts)), [name for name, _ in parts], fontsize="x-small")
    for label in axes.get_yticklabels():
        _plain(label)
    axes.invert_yaxis()
    axes.set_title(f"Messages by channel, all of {activity['day'][0].as_py()}", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(_COUNT)


def _largest_channels(activity: pa.Table) -> list[tuple[str, NDArray[np.bool_]]]:
    """The channels with a colour of their own, the largest first, and all others."""
    totals = activity.group_by("channel_id").aggregate([("messages", "sum")])
    totals = totals.sort_by([("messages_sum", "descending"), ("channel_id", "ascending")])
    shown = totals["channel_id"][:_CHANNELS_SHOWN].to_pylist()
    channels = activity["channel_id"]
    parts = [(_label(each), pc.equal(channels, each).to_numpy()) for each in shown]
    if totals.num_rows > len(shown):
        others = pc.invert(pc.is_in(channels, pa.array(shown))).to_numpy()
        parts.append((f"{totals.num_rows - len(shown):,} others", others))
    return parts


def _label(channel_id: str) -> str:
    """A name in quotes; a long one is shortened to its beginning and its end, where names differ."""
    quoted, half = repr(channel_id), _LABEL_CHARACTERS // 2
    return quoted if len(quoted) <= _LABEL_CHARACTERS else f"{quoted[:half]}…{quoted[-half + 1 :]}"


def _draw_growth(axes: Axes, activity: pa.Table) -> None:
    by_day = activity.group_by("day").aggregate([("messages", "sum"), ("frame_bytes", "sum")])
    by_day = by_day.sort_by("day")
    days = by_day["day"].to_numpy()
    messages = np.cumsum(by_day["messages_sum"].to_numpy())
    axes.fill_between(days, messages, color=_PALETTE[0], alpha=0.3, linewidth=0)
    axes.set_title("All messages so far", loc="left")
    axes.set_ylabel("messages", color=_PALETTE[0])
    _date_axis(axes, days)
    _count_axis(axes)
    right = axes.twinx()
    right.spines["top"].set_visible(False)
    frame_bytes = np.cumsum(by_day["frame_bytes_sum"].to_numpy())
    unit, size = next(
        (each for each in _UNITS if frame_bytes[-1] >= each[1]),
        _UNITS[-1],
    )
    right.plot(
        days, frame_bytes / size, color=_PALETTE[1], marker="." if len(days) <= _DAYS_NAMED else ""
    )
    right.set_ylabel(f"{unit} of frames", color=_PALETTE[1])
    right.set_ylim(bottom=0)


def _draw_lags(axes: Axes, lags: pa.Table) -> None:
    days = lags["day"].to_numpy()
    for name, label, marker in (
        ("lag_s_median", "half of the messages", "o"),
        ("lag_s_p95", "95 % of the messages", "^"),
    ):
        axes.plot(days, lags[name].to_numpy(), marker, ms=4, alpha=0.5, label=label)
    axes.set_title("Time until another sender names a message, by channel and day", loc="left")
    _date_axis(axes, days)
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_locator(FixedLocator([-3_600, -60, -1, *_SECONDS]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_duration))
    every = np.concatenate([lags["lag_s_median"].to_numpy(), lags["lag_s_p95"].to_numpy()])
    axes.set_ylim(min(0, 2 * every.min()), 2 * max(1, every.max()))
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _duration(seconds: float, _position: int | None) -> str:
    text = _SECONDS.get(round(abs(seconds)), f"{abs(seconds):g} s")
    return f"−{text}" if seconds < 0 else text


def _draw_graphs(axes: Axes, graphs: pa.Table) -> None:
    widths, depths = graphs["width"].to_numpy(), graphs["depth"].to_numpy()
    axes.plot(widths, depths, "o", alpha=0.6)
    axes.set_title("Causal graphs: one dot for each channel", loc="left")
    axes.set_xlabel("width: messages at one distance from the beginning")
    axes.set_ylabel("depth: longest chain")
    for values, axis, set_scale, set_limits in (
        (widths, axes.xaxis, axes.set_xscale, axes.set_xlim),
        (depths, axes.yaxis, axes.set_yscale, axes.set_ylim),
    ):
        if values.min() > 0 and values.max() >= _NARROW * values.min():
            set_scale("log")
        else:
            set_limits(0, 1.1 * values.max() + 1)
            axis.set_major_locator(MaxNLocator(integer=True))
        axis.set_major_formatter(_COUNT)


def _date_axis(axes: Axes, days: NDArray[np.datetime64]) -> None:
    """Whole days: each of a few, or round dates among many."""
    each = np.unique(days)
    axes.set_xlim(each[0] - _HALF_DAY, each[-1] + _HALF_DAY)
    if len(each) <= _DAYS_NAMED:
        axes.set_xticks(each, each.astype(str), fontsize="small")
    else:
        locator = AutoDateLocator(maxticks=_DAYS_NAMED)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]


def _count_axis(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(_COUNT)


def _plain(text: Text) -> None:
    """Draw the text literally: dollar signs in a channel's name do not start a formula."""
    text.set_parse_math(False)


# ---- the report

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
