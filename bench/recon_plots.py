"""Pictures of the reconciliation bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl

from bench.table import RESULTS

mpl.use("Agg")

from matplotlib import pyplot as plt


def plot_curves(rows: Sequence[Mapping[str, str | int | float]]) -> None:
    """bench/results/recon.png: bytes and ms over size and differences; bytes against rounds."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    labels = {"size": "elements (d = 1,000)", "differences": "differences"}
    for axis, (kind, label) in zip(axes, labels.items(), strict=False):
        some = [row for row in rows if row["over"] == kind]
        values = [row["value"] for row in some]
        axis.loglog(values, [row["bytes"] for row in some], "o-", label="bytes, both ways")
        axis.loglog(values, [row["ms"] for row in some], "s--", label="ms, both sides")
        for row in some:
            axis.annotate(f"{row['trips']} RT", (row["value"], row["bytes"]))
        axis.set_xlabel(label)
        axis.legend()
    some = [row for row in rows if row["over"] == "parts"]
    axes[2].plot([row["trips"] for row in some], [row["bytes"] for row in some], "o")
    for row in some:
        axes[2].annotate(f"{row['value']} parts", (row["trips"], row["bytes"]))
    axes[2].set_xlabel("round trips")
    axes[2].set_ylabel("bytes (d = 1,000)")
    figure.savefig(RESULTS / "recon.png", dpi=110)
    plt.close(figure)
