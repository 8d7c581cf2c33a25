"""The pictures of a report, drawn from its tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

_SIZE_INCHES = (8.0, 3.2)
_DOTS_PER_INCH = 120
_PALETTE = mpl.color_sequences["tab10"]
_CHANNELS_SHOWN = len(_PALETTE) - 1  # the last colour is for all others
_LABEL_CHARACTERS = 40


def pictures(tables: dict[str, pa.Table]) -> dict[str, bytes]:
    """PNG files by name; a table without rows gives no picture."""
    drawn: dict[str, tuple[str, Callable[[Axes, pa.Table], None]]] = {
        "messages": ("activity", _draw_messages),
        "growth": ("activity", _draw_growth),
        "lags": ("lags", _draw_lags),
        "graphs": ("graphs", _draw_graphs),
    }
    return {
        name: _png(draw, tables[table])
        for name, (table, draw) in drawn.items()
        if tables[table].num_rows
    }


def _png(draw: Callable[[Axes, pa.Table], None], table: pa.Table) -> bytes:
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, table)
    sink = BytesIO()
    with warnings.catch_warnings():
        # Names may be in scripts that the font lacks: boxes stand for them, in silence.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(sink, format="png")
    return sink.getvalue()


def _draw_messages(axes: Axes, activity: pa.Table) -> None:
    """Messages of each day, the largest channels in colours of their own."""
    days, rows = np.unique(activity["day"].to_numpy(), return_inverse=True)
    bottom = np.zeros(len(days))
    for number, (name, is_in) in enumerate(_largest_channels(activity)):
        heights = np.bincount(
            rows[is_in], activity["messages"].to_numpy()[is_in], minlength=len(days)
        )
        axes.bar(days.astype(str), heights, bottom=bottom, label=name, color=_PALETTE[number])
        bottom += heights
    axes.set_title("Messages by day of arrival", loc="left")
    axes.tick_params("x", rotation=45)
    legend = axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    for label in legend.get_texts():
        label.set_parse_math(False)  # a channel's dollars are no formula


def _largest_channels(activity: pa.Table) -> list[tuple[str, NDArray[np.bool_]]]:
    totals = activity.group_by("channel_id").aggregate([("messages", "sum")])
    totals = totals.sort_by([("messages_sum", "descending")])
    shown = totals["channel_id"][:_CHANNELS_SHOWN].to_pylist()
    channels = activity["channel_id"]
    parts = [(_label(each), pc.equal(channels, each).to_numpy()) for each in shown]
    if totals.num_rows > len(shown):
        others = pc.invert(pc.is_in(channels, pa.array(shown))).to_numpy()
        parts.append((f"{totals.num_rows - len(shown)} others", others))
    return parts


def _label(channel_id: str) -> str:
    """A name in quotes; of a long one its beginning and its end, where names differ."""
    quoted, half = repr(channel_id), _LABEL_CHARACTERS // 2
    return quoted if len(quoted) <= _LABEL_CHARACTERS else f"{quoted[:half]}…{quoted[-half + 1 :]}"


def _draw_growth(axes: Axes, activity: pa.Table) -> None:
    by_day = activity.group_by("day").aggregate([("messages", "sum"), ("frame_bytes", "sum")])
    by_day = by_day.sort_by("day")
    days = by_day["day"].to_numpy().astype(str)
    axes.plot(days, np.cumsum(by_day["messages_sum"].to_numpy()), color=_PALETTE[0])
    axes.set_title("All messages so far (blue), MB of frames (orange)", loc="left")
    axes.tick_params("x", rotation=45)
    right = axes.twinx()
    right.plot(days, np.cumsum(by_day["frame_bytes_sum"].to_numpy()) / 1e6, color=_PALETTE[1])


def _draw_lags(axes: Axes, lags: pa.Table) -> None:
    days = lags["day"].to_numpy().astype(str)
    order = np.argsort(days, kind="stable")
    for name, marker in (("lag_s_median", "o"), ("lag_s_p95", "^")):
        axes.plot(days[order], lags[name].to_numpy()[order], marker, ms=4, alpha=0.5, label=name)
    axes.set_title("Delivery lag of each channel and day, in seconds", loc="left")
    axes.tick_params("x", rotation=45)
    axes.set_yscale("symlog")
    axes.legend(frameon=False)


def _draw_graphs(axes: Axes, graphs: pa.Table) -> None:
    axes.plot(graphs["width"].to_numpy(), graphs["depth"].to_numpy(), "o", alpha=0.6)
    axes.set_title("Causal graphs: one dot per channel", loc="left")
    axes.set_xlabel("width, messages at one distance")
    axes.set_ylabel("depth, messages")
    axes.set_xscale("log")
    axes.set_yscale("log")
