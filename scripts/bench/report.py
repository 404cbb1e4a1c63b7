"""Render what `make bench` and `make evidence` have written: pages, pictures, and the short table of README.md.

    make report

Reads docs/benchmarks/*.json and the tables of docs/drill.md; writes docs/benchmarks/README.md, a picture for each
question, and the text between the two markers in README.md and README.zh-CN.md. Also writes docs/evidence.md, from
docs/claims.toml and docs/evidence.json. The same files always give the same text; a test checks this.
Exit status 0; 2: there is nothing to render, or a file is not a benchmark's.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.folders import replace_text
from scripts.bench import claims
from scripts.bench.figures import NOT_MEASURED, TITLES, Figure, describe_machine, table_lines
from scripts.bench.questions import QUESTIONS, draw, drill_figures
from scripts.launch.command import ROOT, command

READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
DRILL = ROOT / "docs" / "drill.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

HEAD = """# Benchmarks

How fast this code is, on the machine named below: compared with what others do, and with the most that the
machine allows. Each section answers one question in a sentence. Its table, which unfolds, has all figures.

- **Measured** is a ratio to what the column "against" names. It is a ratio of speeds: 2.13 is 2.13 times as fast.
  For bytes, for what the name calls a time, and where the goal begins with `<=`, it is a ratio of bytes or times:
  less is better. The note has the two values, or the unit of a figure that is not a ratio.
- **Limit** marks a comparison with the most that the machine allows, such as sending the gradients alone.
- **Goal** is what we want to reach; "met" is "no" where it was missed.
- The programs take turns in each round. Tables have the median over the rounds, the least and the largest value.
  Bytes are measured once: the node that sends most, and the range over the nodes.
- In the pictures, a row is our speed divided by the limit; the band goes from the least to the largest value, and
  the axis is logarithmic. Figures without a limit, or whose limit was not measured, are only in the tables.

`make bench` measures your machine and writes a file into this folder; `make report` writes this page from these
files. The newest run comes first.
"""


@dataclass(frozen=True)
class Run:
    """The figures of one file that `make bench` has written."""

    path: Path
    facts: dict[str, Any]
    figures: tuple[Figure, ...]

    @property
    def date(self) -> str:
        """The date of the measurement."""
        return str(self.facts["date"])

    def of_most_parts(self, fact: str) -> str:
        """Return the rounds or the revision of most parts, then of the others."""
        by_part = {part: measured[fact] for part, measured in self.facts["parts"].items()}
        [(most, _)] = Counter(by_part.values()).most_common(1)
        others = ", ".join(f"{part} {value}" for part, value in by_part.items() if value != most)
        return f"{most} ({others})" if others else f"{most}"

    @property
    def device(self) -> str:
        """The machine that it was measured on, in words."""
        return describe_machine(self.facts["hardware"])


def read_run(path: Path) -> Run:
    """Read a file of figures; raises UserError if it is not a benchmark's file."""
    known = {field.name for field in fields(Figure)}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        rows = [{key: value for key, value in row.items() if key in known} for row in facts["figures"]]
        run = Run(path, facts, tuple(Figure(**row) for row in rows))
        _ = run.date, run.device, run.facts["versions"], run.of_most_parts("rounds"), run.of_most_parts("revision")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is not from make bench ({type(error).__name__}: {error}); remove it") from None
    return run


def read_runs(folder: Path) -> list[Run]:
    """Return the runs of a folder, newest first; raises UserError if a file is not a benchmark's."""
    runs = [read_run(path) for path in folder.glob("*.json")]
    runs.sort(key=lambda run: run.path.name)
    runs.sort(key=lambda run: run.date, reverse=True)  # stable: files of the same day stay sorted by name
    return runs


def score(figures: Sequence[Figure]) -> str:
    """Return how many goals are met, in words."""
    met = [figure.is_met for figure in figures if figure.goal]
    missing = f", {met.count(None)} not measured" if None in met else ""
    return f"{met.count(True)} of {len(met)} goals met{missing}"


def sections(figures: Sequence[Figure], stem: str) -> list[str]:
    """Return the lines of each question that has figures: its answer, its picture, and a table of them."""
    lines = []
    for question in QUESTIONS:
        own = [figure for figure in figures if figure.part in question.parts]
        if not own:
            continue
        said = question.said(own)
        picture = [f"![{question.text} {said}]({stem}{question.name}.png)", ""] if question.rows(own) else []
        lines += [f"### {question.text}", "", f"{said[0].upper()}{said[1:]}.", "", *picture]
        if missing := [part for part in question.parts if part not in {figure.part for figure in own}]:
            lines += [f"{NOT_MEASURED[0].upper()}{NOT_MEASURED[1:]}: {', '.join(missing)}.", ""]
        lines += [f"<details><summary>{len(own)} figures; {score(own)}</summary>", ""]
        lines += [*table_lines(TITLES, (figure.cells() for figure in own)), "", "</details>", ""]
    return lines


def page(runs: Sequence[Run], others: Sequence[str], drill: Sequence[Figure]) -> str:
    """Return the text of docs/benchmarks/README.md; others are hand-written pages of the same folder."""
    lines = [HEAD]
    if others:
        lines += ["Other pages: " + ", ".join(f"[{name}]({name})" for name in others) + ".", ""]
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.facts["versions"].items())
        revision, rounds = map(run.of_most_parts, ("revision", "rounds"))
        lines += [
            f"## {run.date}, {run.path.stem.removeprefix(run.date).strip('-') or 'run'}",
            "",
            f"{run.device}. {versions}. Revision {revision}, rounds {rounds}; "
            f"{score(run.figures)} ([figures]({run.path.name})). {run.facts.get('remark', '')}".rstrip(),
            "",
            *sections(run.figures, f"{run.path.stem}-"),
        ]
    lines += ["## The drill", "", "From the tables of [docs/drill.md](../drill.md).", "", *sections(drill, "")]
    return "\n".join(lines).rstrip() + "\n"


def answering(runs: Sequence[Run]) -> Run:
    """Return the newest run that answers a question of README.md: one of a GPU alone may answer none."""
    asked = [question for question in QUESTIONS if question.chinese]
    return next((run for run in runs if any(question.figure(run.figures) for question in asked)), runs[0])


def short_table(runs: Sequence[Run], drill: Sequence[Figure], is_chinese: bool) -> str:
    """Return the table of README.md, or of README.zh-CN.md, from the newest run that answers it and the drill."""
    run = answering(runs)
    figures = [*run.figures, *drill]
    titles = ("问题", "回答") if is_chinese else ("question", "answer")
    rows = [
        (question.chinese[0] if is_chinese else question.text, question.said(figures, is_chinese))
        for question in QUESTIONS
        if question.chinese
    ]
    more = "[全部数字](docs/benchmarks/README.md); `make bench` 测量你的机器。"
    more = more if is_chinese else "[all figures](docs/benchmarks/README.md), `make bench` measures yours."
    return "\n".join([*table_lines(titles, rows), "", f"{run.date}, {run.device}; {more}"])


def between_markers(text: str, content: str) -> str:
    """Return a document with the text between its markers replaced; raises UserError without exactly one pair."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise UserError(f"README.md needs one line {BEGIN} and one line {END} after it")
    return pattern.sub(lambda _: f"{BEGIN}\n{content}\n{END}", text)


def render(folder: Path, readmes: Sequence[str], drill: Sequence[Figure] = ()) -> tuple[str, list[str]]:
    """Return the texts of docs/benchmarks/README.md and of both READMEs, English first; raises UserError."""
    runs = read_runs(folder)
    if not runs:
        raise UserError(f"no benchmark in {folder}: `make bench` writes one")
    others = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    tables = [short_table(runs, drill, is_chinese) for is_chinese in (False, True)]
    return page(runs, others, drill), [between_markers(*pair) for pair in zip(readmes, tables, strict=False)]


def read_drill() -> list[Figure]:
    """Return the figures in the tables of docs/drill.md."""
    return drill_figures(DRILL.read_text(encoding="utf-8"))


def evidence() -> str:
    """Return the text of docs/evidence.md: the documents' claims, and the figures of README.md's table."""
    runs = read_runs(claims.FIGURES)
    benchmark = [
        (question.said(run.figures), figure, run.facts)
        for run in ([answering(runs)] if runs else [])
        for question in QUESTIONS
        if question.chinese and (figure := question.figure(run.figures))
    ]
    return claims.page(claims.read_claims(), claims.read_outcomes(), benchmark)


@command
def main(argv: list[str]) -> None:
    """Write docs/benchmarks/README.md, its pictures, the READMEs' tables and docs/evidence.md."""
    drill = read_drill()
    text, readmes = render(claims.FIGURES, [path.read_text(encoding="utf-8") for path in READMES], drill)
    for picture in claims.FIGURES.glob("*.png"):
        picture.unlink()
    for question in QUESTIONS:
        draw(question, drill, claims.FIGURES / f"{question.name}.png")
        for run in read_runs(claims.FIGURES):
            draw(question, run.figures, claims.FIGURES / f"{run.path.stem}-{question.name}.png")
    for path, content in zip((claims.FIGURES / "README.md", *READMES), (text, *readmes), strict=True):
        replace_text(path, content)
    replace_text(claims.PAGE, evidence())
    print("wrote docs/benchmarks/README.md, its pictures, the tables in the READMEs, and docs/evidence.md")


if __name__ == "__main__":
    sys.exit(main())
