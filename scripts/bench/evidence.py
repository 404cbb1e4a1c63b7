"""Run what shows the documents' claims, and write docs/evidence.md.

    make evidence
    make evidence CLAIMS="one-curve exact-evaluation" ARGS="--numprocesses 2"

Runs the tests and commands of docs/claims.toml, keeps what came of each in docs/evidence.json with commit, date
and machine, and renders the page, as `make report` does. ARGS go to pytest. Where all tests of a claim skip, for
want of a GPU or of Slurm, its row stays as it is. Exit status 0; 1: a claim does not hold; 2: bad usage.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from os import killpg

from recipes.common.errors import UserError
from scripts.bench import claims as documents
from scripts.bench.__main__ import facts
from scripts.bench.claims import OUTCOMES, Claim, read_claims, read_outcomes
from scripts.bench.programs import own_environment
from scripts.bench.report import evidence
from scripts.launch.command import ROOT, CommandParser, check_names, command, parse

TIMEOUT_S = 1800
"""The bound of a claim: all tests of a contract together take minutes."""

END_S = 30
"""How long a command may take to end by SIGINT."""


def revision() -> str:
    """Return the commit, with -dirty where files other than the claims and their evidence differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "describe", "--always", "--abbrev=12"], capture_output=True, text=True).stdout
    own = [f":!{path.relative_to(ROOT)}" for path in (documents.CLAIMS, OUTCOMES, documents.PAGE)]
    is_dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *own]).returncode
    return (commit.strip() or "unknown") + "-dirty" * bool(is_dirty)


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command with a bound; return its status and what it printed. Its process group ends with it.

    At the bound and at Ctrl-C it gets the signal of a Ctrl-C first: pytest then ends what its tests have started.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=own_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_S)
        except BaseException as error:  # Ctrl-C too, and it may come twice
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                killpg(process.pid, signal.SIGINT)
                process.wait(END_S)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return 128 + signal.SIGKILL, f"took longer than {TIMEOUT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def judge_tests(status: int, output: str) -> tuple[bool | None, str]:
    """Return whether pytest's run shows the claim, None where all tests were skipped; and the counts."""
    last = output.splitlines()[-1] if output.strip() else ""
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)}
    reasons = re.findall(r"^SKIPPED .*?: (.*)$", output, re.MULTILINE)
    if status == 0 and not counts.get("passed"):
        return None, (reasons or ["no test ran"])[0]
    result = ", ".join(f"{count} {what}" for what, count in counts.items())
    if reasons:
        result += f" ({', '.join(dict.fromkeys(reason.partition(':')[0] for reason in reasons))})"
    return status == 0, result or f"status {status}: {last[:100]}"


def judge_command(claim: Claim, status: int, output: str) -> tuple[bool, str]:
    """Return whether a command shows the claim, and what was found."""
    faults = [f"status {status}: {output.strip().splitlines()[-1:]}"] if status else claim.differences(output)
    found = [re.search(pattern, output, re.MULTILINE) for pattern in claim.finds.values()]
    held = ", ".join(match[1] for match in found if match) or "as printed" * claim.prints or "status 0"
    return not faults, "; ".join(faults) or held


def renew(claim: Claim, arguments: Sequence[str]) -> tuple[bool | None, str]:
    """Run what shows a claim; return whether it does, None where this machine cannot run it, and the result."""
    begin = time.monotonic()
    if claim.tests:
        passed, result = judge_tests(*run(["scripts/dev/test.sh", "all", "-rs", *claim.tests, *arguments]))
    else:
        passed, result = judge_command(claim, *run(shlex.split(claim.command)))
    return passed, result if passed is None else f"{result}, {time.monotonic() - begin:.0f} s"


@command
def main(argv: list[str]) -> int:
    """Renew the rows of the named claims, of all that can be run without names; write the page."""
    parser = CommandParser("python -m scripts.bench.evidence", (__doc__ or "").split("\n")[0])
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="some of docs/claims.toml (all)")
    args = parse(parser, argv)
    claims, outcomes = read_claims(), read_outcomes()
    runnable = [name for name, claim in claims.items() if claim.is_runnable]
    where = {"date": time.strftime("%Y-%m-%d"), "revision": revision(), "on": documents.machine(facts(1))}
    outcomes = {name: outcomes[name] for name in runnable if name in outcomes}
    failed = []
    for name in check_names("CLAIMS", args.claims, list(claims)) or runnable:
        if name not in runnable:
            raise UserError(f"CLAIMS: {name} has nothing to run here; see its row in {documents.PAGE.name}")
        try:
            passed, result = renew(claims[name], args.options)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        print(
            f"{name}: {'not run here' if passed is None else 'holds' if passed else 'FAILED'}: {result}",
            flush=True,
        )
        if passed is not None:
            outcomes[name] = {"passed": passed, "result": result, "numbers": claims[name].numbers(), **where}
            in_order = {one: outcomes[one] for one in runnable if one in outcomes}
            OUTCOMES.write_text(json.dumps(in_order, indent=1) + "\n")
            documents.PAGE.write_text(evidence(), encoding="utf-8")  # at once: Ctrl-C leaves both in step
        failed += [name] * (passed is False)
    documents.PAGE.write_text(evidence(), encoding="utf-8")
    print(f"wrote {documents.PAGE.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
