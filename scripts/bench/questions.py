"""What the page of the benchmarks answers: a question for each part, with a small picture of its figures."""

# ruff: noqa: RUF001 - Chinese has its own commas
from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.figures import NOT_MEASURED, Figure, median_and_range, number
from scripts.drill.faults import FAULTS, ROUNDS
from scripts.drill.trial import ELASTIC_STEP_S, END_BOUND_S


@dataclass(frozen=True)
class Question:
    """A user's question, and the figures that answer it."""

    name: str  # in the file name of its picture
    text: str
    parts: tuple[str, ...]
    headline: str  # the answering figure: the beginning of its name and, after a |, of its peer
    answer: str  # a template, with the fields that said() fills in
    limit: str = ""  # follows the answer if the figure's limit was measured
    chinese: tuple[str, ...] = ()
    """Question, answer and limit in Chinese. A question that has them appears in both READMEs."""

    @property
    def is_time(self) -> bool:
        """Whether its figures are seconds, each with a bound; other figures are compared with a limit."""
        return self.parts == ("drill",)

    def rows(self, figures: Sequence[Figure]) -> list[Figure]:
        """Return the figures of its picture: all that were measured against a limit, except bytes."""
        own = [one for one in figures if one.part in self.parts and not one.name.startswith("bytes")]
        return [one for one in own if one.is_limit and one.measured is not None]

    def figure(self, figures: Sequence[Figure]) -> Figure | None:
        """Return the figure that answers it; None if that was not measured."""
        name, _, peer = self.headline.partition("|")
        own = [one for one in figures if one.part in self.parts and one.measured is not None]
        return next((one for one in own if one.name.startswith(name) and one.peer.startswith(peer)), None)

    def said(self, figures: Sequence[Figure], is_chinese: bool = False) -> str:
        """Return the answer in words.

        The templates may use these fields of the figure: {measured}, the same in percent {part}, {bound} and
        {note}; {percent}, its speed as a share of the limit, and {times}, the inverse; and {met}, the number of
        goals met of those {judged}.
        """
        head = self.figure(figures)
        if head is None or head.measured is None:
            return "本次未测" if is_chinese else NOT_MEASURED
        _, answer, limit = (*self.chinese, "", "")[:3] if is_chinese else ("", self.answer, self.limit)
        held = next((one.share[0] for one in self.rows(figures) if one.name == head.name), None)
        goals = [one.is_met for one in figures if one.part in self.parts and one.is_met is not None]
        return (answer if held is None else answer + limit).format(
            measured=number(head.measured),
            part=f"{head.measured:.1%}",
            bound=head.goal.removeprefix("<= "),
            note=f" ({head.note})" if head.note else "",
            percent=f"{held or 0:.0%}",
            times=number(1 / held) if held else "-",
            met=sum(goals),
            judged=len(goals),
        )


QUESTIONS = (
    Question(
        "loop",
        "How fast is the training loop?",
        ("small-data", "step"),
        "LeNet fp32, 1 process|usual eager loop",
        "LeNet trains {measured} times as fast as in the usual PyTorch loop with a DataLoader{note}",
        ", and at {percent} of the speed of forward, backward and step alone",
        (
            "训练循环有多快？",
            "LeNet 的训练速度是带 DataLoader 的常见 PyTorch 循环的 {measured} 倍",
            "，达到只做前向、反向和更新时的 {percent}",
        ),
    ),
    Question(
        "gpu",
        "How much of a GPU is used?",
        ("gpu",),
        "resnet50, 224|bf16 matrix products",
        "A GPU trains resnet50 at {part} of the speed of matrix products alone{note}",
    ),
    Question(
        "node",
        "What does a second node cost?",
        ("scaling", "wire"),
        "step at 1 Gbit/s, ddp-fp32, 2 nodes",
        "On 2 nodes with a link of 1 Gbit/s, a step of ddp takes {times} times the lower bound{note}",
        chinese=(
            "第二个节点的代价是多少？",
            "两个节点以 1 Gbit/s 相连时，ddp 的一步用时是下限的 {times} 倍",
        ),
    ),
    Question(
        "images",
        "What do images cost?",
        ("jpeg", "remote"),
        "normalised batches|torchvision",
        "One core decodes, crops and normalises {measured} times as many JPEGs as torchvision's ImageFolder{note}",
        ", at {percent} of the speed of Huffman decoding alone",
        (
            "读取图像的代价是多少？",
            "单核解码、裁剪并归一化 JPEG 的速度是 torchvision 的 ImageFolder 的 {measured} 倍",
            "，达到仅做霍夫曼解码的 {percent}",
        ),
    ),
    Question(
        "failure",
        "How long does a failure take?",
        ("drill",),
        "lose-node",
        "An elastic job that loses a node trains again after {measured} s; the bound is {bound} s",
        chinese=(
            "一次故障耽误多久？",
            "弹性作业失去一个节点后，经过 {measured} 秒重新开始训练；上限为 {bound} 秒",
        ),
    ),
    Question(
        "checkpoint",
        "What do a checkpoint and a start cost?",
        ("checkpoint", "launch"),
        "stall|a synchronous",
        "An asynchronous save stops training for {part} of the time of a synchronous one{note}",
    ),
    Question(
        "plan",
        "How right is the plan?",
        ("plan",),
        "predicted step time",
        "{met} of {judged} predictions are within their goals: 15% for the time of a step, 2% for the bytes sent",
    ),
)


def drill_figures(text: str) -> list[Figure]:
    """Return a figure for each fault in docs/drill.md's tables that interrupts a job: its seconds and bound."""
    figures = []
    for name, fault in FAULTS.items():
        rows = re.findall(rf"^{name} +\d+ +([\d.]+|-) +([\d.]+|-) +", text, re.MULTILINE)
        is_elastic = fault.then == ROUNDS
        seconds = [float(row[is_elastic]) for row in rows if row[is_elastic] != "-"]
        if not seconds or rows[0][0] == "-":  # the job survives this fault: there is no end to time
            continue
        end, bound_s = ("trains again", ELASTIC_STEP_S) if is_elastic else ("has ended", END_BOUND_S)
        title, goal = f"{name}, until it {end}", f"<= {bound_s:g}"
        figures.append(Figure(title, *median_and_range(seconds), goal, "its bound", is_limit=True, part="drill"))
    return figures


MARKERS = "sD^vP"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 1.5, 2, 5)


def draw_row(axis: Any, y: int, row: Figure, peers: list[Figure], markers: dict[str, str], is_time: bool) -> None:
    """Draw a figure with its limit and its goal in a row, and its peers, each with the marker of its name."""
    middle, low, high = row.values if is_time else row.share
    goal = float(row.goal.split()[1]) if row.goal else 1.0
    limit = goal if is_time else 1.0
    axis.plot([middle, limit], [y, y], color="0.85", zorder=1)
    axis.plot([low, high], [y, y], color="C0", linewidth=3, alpha=0.4)
    label = "measured, goal missed" if row.is_met is False else "measured"
    axis.plot(middle, y, "o", color="C3" if row.is_met is False else "C0", label=label)
    axis.plot(limit, y, "|", color="black", markersize=12, markeredgewidth=2, label="limit")
    if row.goal and not is_time:
        at = 1 / goal if row.goal.startswith("<=") else goal
        axis.plot(at, y, "|", color="C2", markersize=12, label="goal")
    for one in peers:
        label = one.peer.split(",")[0]
        marker = markers.setdefault(label, MARKERS[len(markers) % len(MARKERS)])
        axis.plot(middle / one.share[0], y, marker, color="0.45", fillstyle="none", label=label)
    axis.text(1.01, y, number(middle), va="center", fontsize=8, transform=axis.get_yaxis_transform())


def draw(question: Question, figures: Sequence[Figure], path: Path) -> None:
    """Draw the figures that have a limit, and their peers; draw nothing if there are none."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import FixedLocator, NullLocator

    rows = question.rows(figures)
    if not rows:
        return
    picture = Picture(figsize=(7, 1.7 + 0.24 * len(rows)), layout="constrained", dpi=100)
    axis = picture.subplots()
    markers: dict[str, str] = {}
    for y, row in enumerate(rows):
        same = [one for one in figures if (one.part, one.name) == (row.part, row.name)]
        peers = [one for one in same if not one.is_limit and one.measured]
        draw_row(axis, y, row, peers, markers, question.is_time)
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
    share = "speed, as a share of the most that the machine allows"
    axis.set_xlabel("seconds" if question.is_time else share, fontsize=8)
    picture.suptitle(question.text, x=0.01, ha="left", fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))
    picture.legend(kinds.values(), kinds, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    picture.savefig(path, metadata={"Software": None})
