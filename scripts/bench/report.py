"""Render what `make bench` and `make evidence` have written: pages, pictures, and the short table of README.md.

    make report

Reads docs/benchmarks/*.json; writes docs/benchmarks/README.md, a picture beside each of them, and what stands
between the two markers in README.md; and docs/evidence.md, from docs/claims.toml and docs/evidence.json. The same
files give the same text, which a test holds.
Exit status 0; 2: there is nothing to render, or a file that is no benchmark's.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from scripts.bench import claims
from scripts.bench.figures import TITLES, Figure, cell, describe, number
from scripts.launch.command import ROOT, command

FOLDER = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

HEAD = """# Benchmarks

Written by `make report` from the files that `make bench` leaves beside it; the newest run comes first. A figure is
measured side by side with what it is held against: contenders take turns in each round, and the median over the
rounds stands with the least and the largest. A goal that is not met says "no", and stays one.
"""


@dataclass(frozen=True)
class Run:
    """A file of figures."""

    path: Path
    facts: dict[str, Any]
    figures: tuple[Figure, ...]

    @property
    def date(self) -> str:
        """When it was measured."""
        return str(self.facts["date"])

    @property
    def device(self) -> str:
        """What it was measured on, in words."""
        return describe(self.facts["hardware"])


def read_runs(folder: Path) -> list[Run]:
    """Return the runs of a folder, the newest first; raises UserError for a file that is none."""
    known = {field.name for field in fields(Figure)}
    runs = []
    for path in sorted(folder.glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            rows = [{key: value for key, value in row.items() if key in known} for row in facts["figures"]]
            run = Run(path, facts, tuple(Figure(**row) for row in rows))
            _ = run.date, run.device, run.facts["versions"], run.facts["rounds"], run.facts["revision"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{path} is no benchmark's file: {type(error).__name__}: {error}") from None
        runs.append(run)
    runs.sort(key=lambda run: run.path.name)
    runs.sort(key=lambda run: run.date, reverse=True)  # stable: files of a day stay in the order of their names
    return runs


def parts_of(run: Run) -> dict[str, list[Figure]]:
    """Return a run's figures by part, in the order of the file."""
    parts: dict[str, list[Figure]] = {}
    for figure in run.figures:
        parts.setdefault(figure.part, []).append(figure)
    return parts


def rows_of(figures: Sequence[Figure]) -> list[str]:
    """Return the lines of a part's table."""
    rows = [f"| {' | '.join(map(cell, figure.cells()))} |" for figure in figures]
    return [f"| {' | '.join(TITLES)} |", "| --- " * len(TITLES) + "|", *rows]


def section(run: Run) -> list[str]:
    """Return a run's part of the page."""
    versions = ", ".join(f"{name} {version}" for name, version in run.facts["versions"].items())
    goals = [figure.is_met for figure in run.figures if figure.is_met is not None]
    lines = [
        f"## {run.date}, {run.path.stem.removeprefix(run.date).strip('-') or 'run'}",
        "",
        f"{run.device}. {versions}. Revision {run.facts['revision']}, {run.facts['rounds']} rounds; "
        f"{sum(goals)} of {len(goals)} goals met ([figures]({run.path.name})).",
        "",
    ]
    if goals:
        lines += [f"![Figures of the run over their goals]({run.path.stem}.png)", ""]
    for part, figures in parts_of(run).items():
        lines += [f"### {part}", "", *rows_of(figures), ""]
    return lines


def page(runs: Sequence[Run], others: Sequence[str]) -> str:
    """Return docs/benchmarks/README.md; others are pages of the same folder that people have written."""
    lines = [HEAD]
    if others:
        lines += ["Beside it: " + ", ".join(f"[{name}]({name})" for name in others) + ".", ""]
    for run in runs:
        lines += section(run)
    return "\n".join(lines).rstrip() + "\n"


def short_figures(run: Run) -> list[Figure]:
    """Return the first figure with a goal of each part."""
    judged = [[figure for figure in figures if figure.is_met is not None] for figures in parts_of(run).values()]
    return [figures[0] for figures in judged if figures]


def short_table(runs: Sequence[Run]) -> str:
    """Return README.md's table: of the newest run, the first figure with a goal of each part."""
    run = runs[0]
    lines = ["| what | goal | measured | against |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {one.part}: {cell(one.name)} | {one.goal} | {number(one.measured)} | {cell(one.peer)} |"
        for one in short_figures(run)
    ]
    where = f"{run.date}, {run.device}; [all figures](docs/benchmarks/README.md), `make bench` measures yours."
    return "\n".join([*lines, "", where])


def between_markers(text: str, content: str) -> str:
    """Return a document with the content between the two markers; raises UserError where it has none."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise UserError(f"README.md needs one line {BEGIN} and one line {END} after it")
    return pattern.sub(lambda _: f"{BEGIN}\n{content}\n{END}" if content else f"{BEGIN}\n{END}", text)


def render(folder: Path, readme: str) -> tuple[str, str]:
    """Return the page and README.md for the files of a folder; raises UserError."""
    runs = read_runs(folder)
    if not runs:
        raise UserError(f"no benchmark in {folder}: `make bench` writes one")
    others = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    return page(runs, others), between_markers(readme, short_table(runs))


def evidence() -> str:
    """Return docs/evidence.md: the claims of the documents, and the figures of README.md's table."""
    newest = read_runs(FOLDER)[:1]
    benchmark = [(figure, run.facts) for run in newest for figure in short_figures(run)]
    return claims.page(claims.read_claims(), claims.read_outcomes(), benchmark)


def gain(figure: Figure) -> float:
    """Return by how much a figure is better than its goal; below 1 it is worse."""
    sign, value = figure.goal.split()
    assert figure.measured is not None
    if sign == ">=":
        return figure.measured / float(value)
    return float(value) / figure.measured if figure.measured > 0 else float("inf")


def plot(run: Run, path: Path) -> None:
    """Draw how far each figure with a goal is from it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [figure for figure in run.figures if figure.is_met is not None]
    if not shown:
        return
    gains = [min(gain(figure), 10.0) for figure in shown]
    figure, axis = plt.subplots(figsize=(11, 1.2 + 0.32 * len(shown)), layout="constrained")
    colors = ["C2" if one.is_met else "C3" for one in shown]
    bars = axis.barh([f"{one.part}: {one.name}"[:80] for one in shown], gains, color=colors, height=0.6)
    axis.bar_label(
        bars, labels=[f"{number(one.measured)}  (goal {one.goal})" for one in shown], padding=3, fontsize=8
    )
    axis.axvline(1.0, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlim(0, 1.35 * max([1.0, *gains]))
    axis.set(xlabel="better than the goal by this factor", title=f"{run.date}, {run.device}"[:110])
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


@command
def main(argv: list[str]) -> None:
    """Write the page, the pictures and README.md's table."""
    text, readme = render(FOLDER, README.read_text(encoding="utf-8"))
    for run in read_runs(FOLDER):
        plot(run, run.path.with_suffix(".png"))
    (FOLDER / "README.md").write_text(text, encoding="utf-8")
    README.write_text(readme, encoding="utf-8")
    claims.PAGE.write_text(evidence(), encoding="utf-8")
    print("wrote docs/benchmarks/README.md, its pictures, the table in README.md, and docs/evidence.md")


if __name__ == "__main__":
    sys.exit(main())
