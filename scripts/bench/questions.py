"""What the page of the benchmarks answers: a question for each part, with a small picture of its figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.figures import AGAIN, Figure, number, spread
from scripts.drill.faults import FAULTS, ROUNDS
from scripts.drill.trial import ELASTIC_STEP_S, NOTICE_S


@dataclass(frozen=True)
class Question:
    """A question that a user has, and what answers it."""

    name: str
    """Of its picture."""
    text: str
    parts: tuple[str, ...]
    headline: str
    """How the name of the figure begins that answers it, and after a | its peer."""
    answer: str
    """With that figure's {measured} and {limit}, and {met} of {judged} goals."""
    chinese: str = ""
    """For README.zh-CN.md: with it, the question stands in both READMEs."""

    @property
    def is_time(self) -> bool:
        """Whether its figures are seconds with a bound each; else they are held to a limit."""
        return self.parts == ("drill",)

    def rows(self, figures: Sequence[Figure]) -> list[Figure]:
        """Return what its picture shows: the figures that are measured over their limit, but for bytes."""
        own = [one for one in figures if one.part in self.parts and not one.name.startswith("bytes")]
        return [one for one in own if one.is_limit and one.measured is not None]

    def figure(self, figures: Sequence[Figure]) -> Figure | None:
        """Return the figure that answers it, where that was measured."""
        name, _, peer = self.headline.partition("|")
        own = [one for one in figures if one.part in self.parts and one.measured is not None]
        return next((one for one in own if one.name.startswith(name) and one.peer.startswith(peer)), None)

    def limit(self, figures: Sequence[Figure]) -> str:
        """Return how far that figure is from its limit, in words."""
        head = self.figure(figures)
        if head and self.is_time:
            return f"{head.goal} s"
        limit = next((one for one in self.rows(figures) if head and one.name == head.name), None)
        return f"{number(limit.share[0])} of {limit.peer}" if limit else f"limit {AGAIN}"

    def said(self, figures: Sequence[Figure]) -> str:
        """Return the answer in words."""
        head = self.figure(figures)
        goals = [one.is_met for one in figures if one.part in self.parts and one.is_met is not None]
        facts = {"limit": self.limit(figures), "met": sum(goals), "judged": len(goals)}
        said = self.answer.format(measured=number(head.measured), **facts) if head else AGAIN
        return said[0].upper() + said[1:]


QUESTIONS = (
    Question(
        "loop",
        "How fast is my loop?",
        ("small-data", "step", "gpu"),
        "LeNet fp32, 1 process|usual eager loop",
        "{measured} times the samples/s of the usual loop; {limit}",
        "训练循环的速度",
    ),
    Question(
        "node",
        "What does a second node cost?",
        ("scaling", "wire"),
        "step at 1 Gbit/s, ddp-fp32, 2 nodes",
        "the speed of ddp on 2 nodes with 1 Gbit/s is {limit}",
        "第二个节点的代价",
    ),
    Question(
        "overlap",
        "Does the exchange hide behind computing?",
        ("overlap",),
        "step, ddp fp32, computing 1 x",
        "where both take as long, the speed is {limit}",
    ),
    Question(
        "images",
        "What do images cost?",
        ("jpeg", "remote"),
        "normalised batches|torchvision",
        "{measured} times torchvision's images/s on one core; {limit}",
        "读取图像的代价",
    ),
    Question(
        "failure",
        "How long does a failure take?",
        ("drill",),
        "lose-node",
        "an elastic job that loses a node trains again after {measured} s",
        "一次故障耽误的时间",
    ),
    Question(
        "checkpoint",
        "What do a checkpoint and a start cost?",
        ("checkpoint", "launch"),
        "stall|a synchronous",
        "training stands still for {measured} of a synchronous save's time",
    ),
    Question(
        "plan",
        "How right is the plan?",
        ("plan",),
        "predicted step time",
        "{met} of {judged} predictions are within their goals",
    ),
)


def drill_figures(text: str) -> list[Figure]:
    """Return from the tables of docs/drill.md how long each fault has taken that has a bound."""
    figures = []
    for name, fault in FAULTS.items():
        rows = re.findall(rf"^{name} +\d+ +([\d.]+|-) +([\d.]+|-) +", text, re.MULTILINE)
        is_elastic = fault.then == ROUNDS
        seconds = [float(row[is_elastic]) for row in rows if row[is_elastic] != "-"]
        if not seconds or rows[0][0] == "-":  # a fault that a job rides out ends nothing
            continue
        end, bound_s = ("trains again", ELASTIC_STEP_S) if is_elastic else ("has ended", NOTICE_S)
        figures.append(
            Figure(
                "drill", f"{name}, until it {end}", *spread(seconds), f"<= {bound_s:g}", "its bound", is_limit=True
            )
        )
    return figures


MARKERS = "sD^vP"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 1.5, 2, 5)


def draw(question: Question, figures: Sequence[Figure], path: Path) -> None:
    """Draw the figures that have a limit, and their peers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    rows = question.rows(figures)
    if not rows:
        return
    figure, axis = plt.subplots(figsize=(7, 1.7 + 0.24 * len(rows)), layout="constrained", dpi=100)
    markers: dict[str, str] = {}
    for y, row in enumerate(rows):
        middle, low, high = row.values if question.is_time else row.share
        goal = float(row.goal.split()[1]) if row.goal else 1.0
        limit = goal if question.is_time else 1.0
        axis.plot([middle, limit], [y, y], color="0.85", zorder=1)
        axis.plot([low, high], [y, y], color="C0", linewidth=3, alpha=0.4)
        label = "measured, goal missed" if row.is_met is False else "measured"
        axis.plot(middle, y, "o", color="C3" if row.is_met is False else "C0", label=label)
        axis.plot(limit, y, "|", color="black", markersize=12, markeredgewidth=2, label="limit")
        if row.goal and not question.is_time:
            axis.plot(
                1 / goal if row.goal.startswith("<=") else goal, y, "|", color="C2", markersize=12, label="goal"
            )
        for one in figures:
            if (one.part, one.name) == (row.part, row.name) and not one.is_limit and one.measured:
                label = one.peer.split(",")[0]
                marker = markers.setdefault(label, MARKERS[len(markers) % len(MARKERS)])
                axis.plot(middle / one.share[0], y, marker, color="0.45", fillstyle="none", label=label)
        axis.text(1.01, y, number(middle), va="center", fontsize=8, transform=axis.get_yaxis_transform())
    axis.set_yticks(range(len(rows)), [textwrap.shorten(row.name, 52, placeholder=" ...") for row in rows])
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    if question.is_time:
        axis.set_xlim(left=0)
    else:
        axis.set_xscale("log")
        ticks = (*TICKS, 0.7, 0.8, 0.9) if axis.get_xlim()[0] > 0.4 else TICKS
        axis.xaxis.set(major_locator=FixedLocator(ticks), major_formatter="{x:g}", minor_locator=NullLocator())
    axis.set_xlabel("seconds" if question.is_time else "share of the limit", fontsize=8)
    title = textwrap.fill(f"{question.text} {question.said(figures)}", 94)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))
    figure.legend(kinds.values(), kinds, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
