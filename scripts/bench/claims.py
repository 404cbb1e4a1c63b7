"""What the documents claim and what shows it: docs/claims.toml, and the page that `make evidence` writes from it.

A claim is a sentence or a figure of a document, copied to docs/claims.toml word by word, with one of these:

- tests: pytest's names of the tests that check it;
- command: what to run. It must exit with status 0; with `prints`, its output must contain the claim's text;
- record: a file with an earlier measurement, with its `command`, `date`, `commit` and machine (`on`);
- not_run: why nothing has shown it yet (together with tests: why they skip here).

With a command or a record, `finds` gives a pattern for each figure of the text. The pattern's group is the
measured value, which must round to the figure.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.record.provenance import revision as revision_of
from scripts.bench.figures import Figure, describe_machine, number, table_lines
from scripts.launch.command import ROOT

CLAIMS = ROOT / "docs" / "claims.toml"
OUTCOMES = ROOT / "docs" / "evidence.json"
PAGE = ROOT / "docs" / "evidence.md"
FIGURES = ROOT / "docs" / "benchmarks"

HEAD = """# Evidence

Each row is a claim of one of these pages, word by word. "Shown by" names the tests or the command that check it;
to repeat them, run `make test-all ARGS=FILE` or that command. "Result" is what they gave when they last ran, at
the commit and on the date of the row, on the machine that the letter in column "on" stands for
([machines](#machines)). "Recorded in" is an earlier measurement that a file keeps, with the commit that added the
file. "Not run": nobody has run it, or no record was kept.

`make evidence` runs all that this machine can and writes this page from [claims.toml](claims.toml) and
[evidence.json](evidence.json); `make evidence CLAIMS="NAME NAME"` reruns some rows.
"""


def revision() -> str:
    """Return the commit, with -dirty if tracked files other than claims, evidence and figures differ from it."""
    return revision_of(CLAIMS, (CLAIMS, OUTCOMES, PAGE, FIGURES), digits=12) or "unknown"


@dataclass(frozen=True)
class Claim:
    """A claim of a document."""

    name: str
    text: tuple[str, ...]  # parts of the document, which must contain each (line breaks are ignored)
    document: str = "README.md"
    tests: tuple[str, ...] = ()
    command: str = ""
    prints: bool = False
    finds: Mapping[str, str] = field(default_factory=dict)
    record: str = ""
    date: str = ""
    commit: str = ""
    on: str = ""
    not_run: str = ""

    @property
    def is_runnable(self) -> bool:
        """Whether `make evidence` can run it."""
        return bool(self.tests or (self.command and not self.record and not self.not_run))

    def differences(self, output: str) -> list[str]:
        """Return the figures (with prints: also the texts) that an output or a record does not confirm."""
        found = []
        for shown, pattern in self.finds.items():
            match = re.search(pattern, output, re.MULTILINE)
            if not match:
                found.append(f"{shown}: not measured")
            elif not rounds_to(match[1], shown):
                found.append(f"{shown}: measured {match[1]}")
        if self.prints:
            printed = " ".join(output.split())
            found += [f"not printed: {part}" for part in self.text if part not in printed]
        return found

    def numbers(self) -> list[str]:
        """Return the figures of its text. An outcome keeps them, because it confirms only these."""
        return re.findall(r"\d[\d,.]*(?:e-?\d+)?\b", " ".join(self.text))


def rounds_to(measured: str, shown: str) -> bool:
    """Return whether a number is within half a unit of the shown one's last significant digit (of 30: the 3)."""
    try:
        value, goal = (Decimal(text.replace(",", "")) for text in (measured, shown))
    except InvalidOperation:
        return measured == shown
    last = (goal if "." in shown else goal.normalize()).as_tuple().exponent
    return abs(value - goal) <= Decimal(10) ** int(last) / 2


def read_claims(path: Path = CLAIMS) -> dict[str, Claim]:
    """Read the claims, by name; raises UserError if the file is invalid, a key is unknown or text is missing."""
    known = {one.name for one in fields(Claim)} - {"name"}
    claims = {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; fix it, or take the last commit's") from None
    for name, given in found.items():
        wrong = [key for key in given if key not in known]
        if "text" not in given:
            wrong.append("text")
        if wrong:
            shown = f"{wrong[0]!r} is unknown or missing; a claim has {sorted(known)}"
            raise UserError(f"{path.name}: {name}: {shown}")
        values: dict[str, Any] = {**given, "tests": tuple(given.get("tests", "").split())}
        values["text"] = tuple([given["text"]] if isinstance(given["text"], str) else given["text"])
        claims[name] = Claim(name, **values)
    return claims


def read_outcomes() -> dict[str, dict[str, Any]]:
    """Read the outcome of each claim's last run, by name; empty if there is no file yet."""
    try:
        return json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
    except ValueError as error:
        raise UserError(f"{OUTCOMES} cannot be read: {error}; take the last commit's") from None


def machine(facts: Mapping[str, Any]) -> str:
    """Return the machine and the versions of a measurement, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{describe_machine(facts['hardware'])}; {versions}"


def row(claim: Claim, outcome: Mapping[str, Any] | None) -> list[str]:
    """Return a claim's cells: name, text, what shows it, commit, date, machine, result."""
    files: dict[str, list[str]] = {}
    for path, _, test in (test.partition("::") for test in claim.tests):
        files.setdefault(path, []).extend([f"`{test}`"] if test else [])
    shown_by = []
    for path, own in files.items():
        link = f"[{Path(path).name}](../{path})"
        shown_by.append(f"{link}: {', '.join(own)}" if own else link)
    if claim.command:
        shown_by.append(f"`{claim.command}`")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ... ".join(claim.text)).replace("**", "").strip("|* ")
    cells = [claim.name, text, "; ".join(shown_by)]
    if claim.record:
        return [*cells, claim.commit, claim.date, claim.on, f"recorded in `{claim.record}`"]
    if claim.is_runnable and outcome:
        result = outcome["result"] if outcome["passed"] else f"**FAILED**: {outcome['result']}"
        return [*cells, outcome["revision"], outcome["date"], outcome["on"], result]
    return [*cells, "", "", "", f"**not run**: {claim.not_run}" if claim.not_run else "**not run**"]


def benchmark_row(said: str, figure: Figure, facts: Mapping[str, Any]) -> list[str]:
    """Return the cells of an answer in README.md's table, with its figure and the facts of its run."""
    spread = f" ({number(figure.low)} .. {number(figure.high)})" if figure.low is not None else ""
    met = {True: ", goal met", False: ", goal not met", None: ""}[figure.is_met]
    goal = f", goal {figure.goal}" if figure.goal else ""
    result = f"{figure.name}, against {figure.peer}: {number(figure.measured)}{spread}{goal}{met}"
    command = f"`make bench PARTS={figure.part}`"
    revision = facts["parts"][figure.part]["revision"]
    return [f"bench {figure.part}", said, command, revision, facts["date"], machine(facts), result]


def page(
    claims: Mapping[str, Claim],
    outcomes: Mapping[str, Mapping[str, Any]],
    benchmark: Sequence[tuple[str, Figure, Mapping[str, Any]]] = (),
) -> str:
    """Return the text of docs/evidence.md; letters stand for machines, which its end lists."""
    documents: dict[str, list[list[str]]] = {"README.md": []}
    for claim in claims.values():
        documents.setdefault(claim.document, []).append(row(claim, outcomes.get(claim.name)))
    documents["README.md"] += [benchmark_row(*one) for one in benchmark]
    rows = [cells for found in documents.values() for cells in found]
    machines = list(dict.fromkeys(cells[5] for cells in rows if cells[5]))
    letters = {machine: chr(ord("A") + number) for number, machine in enumerate(machines)} | {"": ""}
    missing = sum("**not run**" in cells[6] for cells in rows)
    lines = [HEAD, f"{len(rows)} rows, {missing} of them not run.", ""]
    titles = ("name", "claim", "shown by", "commit", "date", "on", "result")
    for document, found in documents.items():
        shown = ((*cells[:5], letters[cells[5]], cells[6]) for cells in found)
        lines += [f"## [{document}](../{document})", "", *table_lines(titles, shown), ""]
    lines += ["## Machines", "", *(f"- {letters[machine]}: {machine}" for machine in machines)]
    return "\n".join(lines).rstrip() + "\n"
