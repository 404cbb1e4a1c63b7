"""A plan as people read it: lines, a table over node counts, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, and how a row's figure is shown."""

    title: str
    key: str
    form: str
    factor: float = 1.0


COLUMNS = (
    Column("nodes", "nodes", "{:,.0f}"),
    Column("GPUs", "ranks", "{:,.0f}"),
    Column("global batch", "global_batch_size", "{:,.0f}"),
    Column("step, ms", "step_s", "{:,.1f}", 1e3),
    Column("exposed, ms", "exposed_s", "{:,.1f}", 1e3),
    Column("limit", "limit", "{}"),
    Column("efficiency", "efficiency", "{:.1%}"),
    Column("samples/s", "samples_per_s", "{:,.0f}"),
    Column("sent per node and step, MB", "sent_bytes_per_node", "{:,.1f}", 1e-6),
    Column("checkpoint every, min", "interval_s", "{:,.1f}", 1 / 60),
    Column("useful time", "useful_share", "{:.1%}"),
    Column("hours", "hours", "{:,.2f}"),
    Column("cost", "cost", "{:,.0f}"),
)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table in columns of equal width."""
    lines = [[column.title for column in COLUMNS]]
    for row in rows:
        values = [(column, row[column.key]) for column in COLUMNS]
        lines.append(
            [column.form.format(v * column.factor if isinstance(v, int | float) else v) for column, v in values]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    texts = ["| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    texts.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return "\n".join(texts)


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
    right.set(yscale="log", ylabel="hours", title="Time and cost of the whole job")
    costs = right.twinx()
    costs.plot(nodes, [row["cost"] for row in rows], "s--", color="C3", label="cost")
    costs.set_ylabel("cost")
    costs.set_ylim(bottom=0)
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("nodes")
    figure.legend(
        *[a + b for a, b in zip(*[x.get_legend_handles_labels() for x in (right, costs)], strict=True)],
        loc="outside lower right",
        fontsize=8,
        ncols=2,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
