"""A plan as people read it: lines, a table over node counts, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.launch.command import Column

Row = dict[str, Any]


COLUMNS = (
    Column("nodes", "nodes", "{:,}"),
    Column("GPUs", "ranks", "{:,.0f}"),
    Column("global batch", "global_batch_size", "{:,.0f}"),
    Column("step, ms", "step_s", "{:,.1f}", 1e3),
    Column("exposed, ms", "exposed_s", "{:,.1f}", 1e3),
    Column("limit", "limit"),
    Column("efficiency", "efficiency", "{:.1%}"),
    Column("samples/s", "samples_per_s", "{:,.0f}"),
    Column("sent per node and step, MB", "sent_bytes_per_node", "{:,.1f}", 1e-6),
    Column("checkpoint every, min", "interval_s", "{:,.1f}", 1 / 60),
    Column("useful time", "useful_share", "{:.1%}"),
    Column("hours", "hours", "{:,.2f}"),
    Column("cost", "cost", "{:,.0f}"),
)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw step time, efficiency and cost over the number of nodes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    nodes = [row["nodes"] for row in rows]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    computed = [1e3 * row["compute_s"] for row in rows]
    left.stackplot(
        nodes,
        computed,
        [max(0.0, 1e3 * row["step_s"] - own) for row, own in zip(rows, computed, strict=True)],
        labels=["computing", "waiting for exchange, vote or input"],
        alpha=0.7,
    )
    left.set(ylabel="ms per step", title=title)
    left.legend(loc="lower right", fontsize=8)
    middle.plot(nodes, [row["efficiency"] for row in rows], "o-", label="scaling efficiency")
    middle.plot(nodes, [row["useful_share"] for row in rows], "s--", label="useful share of the time")
    middle.set(ylim=(0, 1.05), title="What of it counts")
    middle.legend(loc="lower left", fontsize=8)
    right.plot(nodes, [row["hours"] for row in rows], "o-", color="C2", label="hours")
    right.plot(nodes, [row["cost"] for row in rows], "s--", color="C3", label="cost")
    right.set(yscale="log", title="Hours and cost of the whole job")
    right.legend(loc="lower left", fontsize=8)
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("nodes")
    figure.savefig(path, dpi=110)
    plt.close(figure)
