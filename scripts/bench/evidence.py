"""Run what shows the documents' claims, and write docs/evidence.md.

    make evidence
    make evidence CLAIMS="one-curve exact-evaluation" ARGS="--numprocesses 2"
    make test-all ARGS=--junit-xml=report.xml; make evidence REPORT=report.xml

Runs the tests of docs/claims.toml in one run of pytest, then its commands. Keeps the outcome of each claim in
docs/evidence.json, with commit, date and machine, and renders the page as `make report` does. ARGS go to pytest.
REPORT takes the tests' results from an earlier run of this commit. If all tests of a claim skip (no GPU or Slurm),
or one of them did not run, its row stays as it is. Exit status 0; 1: a claim does not hold; 2: bad usage, or the
tests did not run to completion.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree

from recipes.common.errors import UserError
from recipes.common.folders import replace_text
from scripts.bench.__main__ import facts
from scripts.bench.claims import OUTCOMES, PAGE, Claim, machine, read_claims, read_outcomes, revision
from scripts.bench.programs import run_program
from scripts.bench.report import evidence
from scripts.launch.command import ROOT, CommandParser, check_names, command, parse

if TYPE_CHECKING:
    import pytest

TIMEOUT_S = 1800
"""Time limit of a claim's command."""

TESTS_TIMEOUT_S = 3 * 3600
"""Time limit of the tests of all claims together."""


class Case(NamedTuple):
    """The outcome of a test."""

    name: str  # folders, file, class and function, joined by dots; parameters follow in brackets
    outcome: str  # passed, failed or skipped
    reason: str = ""  # why it was skipped
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The outcome of a run of tests."""

    cases: list[Case]
    date: str
    revision: str
    on: str  # the machine


def properties(config: pytest.Config) -> dict[str, str]:
    """Return a report's properties: commit, machine, the named tests, and options that leave tests out."""
    chosen = {"-m": "markexpr", "-k": "keyword", "--maxfail": "maxfail", "--last-failed": "lf"}
    chosen |= {"--deselect": "deselect", "--ignore": "ignore", "--ignore-glob": "ignore_glob"}
    partial = [f"{flag} {value}" for flag, name in chosen.items() if (value := config.getoption(name, None))]
    given = config.args if config.args_source is config.ArgsSource.ARGS else ()
    said = {"partial": ", ".join(partial), "tests": " ".join(sorted(given))}
    return {"revision": revision(), "on": machine(facts()), **said}


def read_report(path: Path, tests: Sequence[str] = ()) -> Report:
    """Read a report of pytest's --junit-xml, to which tests/conftest.py adds properties.

    `tests` are the files, folders and tests that pytest was asked to run; empty: all. Raises UserError if the
    report is missing or invalid, is of other tests, or they did not run to completion.
    """
    try:
        suite = next(ElementTree.parse(path).iter("testsuite"))
        given = {one.attrib["name"]: one.attrib["value"] for one in suite.findall("properties/property")}
        about = suite.attrib["timestamp"][: len("2026-01-31")], given["revision"], given["on"]
        status, partial, chosen = int(given["status"]), given["partial"], given["tests"]
    except (OSError, ElementTree.ParseError, StopIteration, KeyError, ValueError) as error:
        fix = "give one of make test-all ARGS=--junit-xml=report.xml"
        raise UserError(f"{path} is not a report of these tests ({error}); {fix}") from None
    if chosen != " ".join(sorted(tests)):
        partial = ", ".join(filter(None, [partial, chosen or "no name of a test"]))
    if partial:
        raise UserError(f"{path}: {partial} has left tests out; run all of them")
    if status not in (0, 1):
        raise UserError(f"{path}: its tests did not run to their end (pytest's status {status}); run them again")
    cases: dict[str, Case] = {}
    for case in suite.iter("testcase"):
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        marks = {mark.tag: mark.get("message") or "" for mark in case}
        outcome = "failed" if {"failure", "error"} & set(marks) else "skipped" if "skipped" in marks else "passed"
        if name not in cases or outcome == "failed":  # a test that passed can still fail in its teardown
            cases[name] = Case(name, outcome, marks.get("skipped", ""), float(case.get("time") or 0))
    return Report(list(cases.values()), *about)


def judge_tests(tests: Iterable[str], cases: Iterable[Case]) -> tuple[bool | None, str]:
    """Return whether a claim's tests passed (None: one did not run, or all skipped), and counts or a reason."""
    own: dict[str, Case] = {}
    for test in tests:
        name = test.removesuffix("/").replace(".py", "").replace("::", ".").replace("/", ".")
        # The test itself, the tests in it, and its file if that could not be imported.
        found = [
            case
            for case in cases
            if re.match(rf"{re.escape(name)}(?![^.[])", case.name)
            or (case.outcome == "failed" and name.startswith(f"{case.name}."))
        ]
        if not found:
            return None, f"{test} did not run"
        own.update({case.name: case for case in found})
    counts = Counter(case.outcome for case in own.values())
    reasons = list(dict.fromkeys(case.reason for case in own.values() if case.outcome == "skipped"))
    if set(counts) == {"skipped"}:
        return None, reasons[0]
    result = ", ".join(f"{counts[name]} {name}" for name in ("failed", "passed", "skipped") if counts[name])
    if reasons:
        result += f" ({', '.join(dict.fromkeys(reason.partition(':')[0] for reason in reasons))})"
    return not counts["failed"], f"{result}, {sum(case.seconds for case in own.values()):.0f} s"


def run_tests(claims: Iterable[Claim], arguments: Sequence[str]) -> Report | None:
    """Run the tests of all claims, if any, in one run of pytest; raises UserError if files change meanwhile."""
    # If a test's file or folder is named too, pytest still runs it once.
    chosen = sorted({test for claim in claims for test in claim.tests})
    if not chosen:
        return None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["scripts/dev/test.sh", "all", f"--junit-xml={report}", *chosen, *arguments]
        before = revision()
        status, output = run_program(words, {}, TESTS_TIMEOUT_S, shows=True)
        if status not in (0, 1):
            raise UserError(f"the tests did not run to their end{output and ': '}{output} (status {status})")
        found = read_report(report, chosen)
        if found.revision != before:
            raise UserError("files have changed while the tests ran; run them again")
        return found


def read_own_report(path: Path) -> Report:
    """Read a report of this commit's tests; raises UserError if it is of another commit or of changed files."""
    report, own = read_report(path), revision()
    fix = f"run them again: make test-all ARGS=--junit-xml={path}"
    if report.revision != own:
        raise UserError(f"REPORT {path}: its tests are of {report.revision}, and this is {own}; {fix}")
    if own.endswith("-dirty"):  # the report does not record those changes
        raise UserError(f"REPORT {path}: its tests ran on files that differ from the commit; commit, {fix}")
    return report


def judge_command(claim: Claim, status: int, output: str) -> tuple[bool, str]:
    """Return whether a command's status and output confirm the claim, and the faults or the figures found."""
    faults = [f"status {status}: {output.strip().splitlines()[-1:]}"] if status else claim.differences(output)
    found = [re.search(pattern, output, re.MULTILINE) for pattern in claim.finds.values()]
    held = ", ".join(match[1] for match in found if match) or "as printed" * claim.prints or "status 0"
    return not faults, "; ".join(faults) or held


@command
def main(argv: list[str]) -> int:
    """Check the named claims (default: all that are runnable) and write the page; return 1 if one fails."""
    parser = CommandParser("python -m scripts.bench.evidence", __doc__)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="some of docs/claims.toml (all)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="results of the tests, by --junit-xml")
    args = parse(parser, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the running command, as Ctrl-C does
    claims, outcomes = read_claims(), read_outcomes()
    runnable = [name for name, claim in claims.items() if claim.is_runnable]
    where = {"date": time.strftime("%Y-%m-%d"), "revision": revision(), "on": machine(facts())}
    outcomes = {name: outcomes[name] for name in runnable if name in outcomes}
    failed = []
    chosen = [claims[name] for name in check_names("CLAIMS", args.claims, list(claims)) or runnable]
    for claim in chosen:
        if claim.name not in runnable:
            raise UserError(f"CLAIMS: {claim.name} has nothing to run here; see its row in {PAGE.name}")
    report = read_own_report(args.report) if args.report else run_tests(chosen, args.options)
    # The commands come after the tests, one at a time.
    for claim in sorted(chosen, key=lambda claim: not claim.tests):
        begin = time.monotonic()
        if claim.tests and report:
            passed, result = judge_tests(claim.tests, report.cases)
            about = {**where, "date": report.date, "on": report.on}
        else:
            about = where
            passed, result = judge_command(claim, *run_program(shlex.split(claim.command), {}, TIMEOUT_S))
            result += f", {time.monotonic() - begin:.0f} s"
        said = "not run here" if passed is None else "holds" if passed else "FAILED"
        print(f"{claim.name}: {said}: {result}", flush=True)
        if passed is not None:
            outcomes[claim.name] = {"passed": passed, "result": result, "numbers": claim.numbers(), **about}
            in_order = {name: outcomes[name] for name in runnable if name in outcomes}
            replace_text(OUTCOMES, json.dumps(in_order, indent=1) + "\n")
            replace_text(PAGE, evidence())  # at once: after Ctrl-C, both agree
        if passed is False:
            failed.append(claim.name)
    replace_text(PAGE, evidence())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
