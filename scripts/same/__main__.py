"""Run a training script at 1, 2 and 3 processes and say whether it trains the same, or what differs and why.

    make same SCRIPT=train.py ARGS="--batch-size {local_batch}" GLOBAL_BATCH=48
    python -m scripts.same train.py --global-batch 48 -- --batch-size {local_batch}

ARGS may have {local_batch}, {global_batch}, {world_size}, {run_dir}, a folder of the run's own, and {resume}.
docs/same.md has what is compared. Exit status 0: the same to rounding; 1: it differs; 2: bad usage.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from recipes.common.errors import UserError, nearest
from recipes.common.options import positive_float, positive_int
from scripts.launch.command import CommandParser, command, parse
from scripts.same import compare, ranks
from scripts.same.causes import CAUSES
from scripts.same.compare import Finding, Rounding, Run
from scripts.same.ranks import CONTEXT, Job

PLACEHOLDERS = ("local_batch", "global_batch", "world_size", "run_dir", "resume")
STOP_SHARE = 0.6
"""The share of its steps after which a run is killed, to be resumed."""


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; what follows -- is the script's. Raises UserError."""
    parser = CommandParser("python -m scripts.same", (__doc__ or "").split("\n")[0])
    parser.add_argument(
        "script", nargs="?", default="", metavar="SCRIPT", help="a file, or a module's dotted name"
    )
    parser.add_argument(
        "--global-batch", type=positive_int, metavar="N", help="samples of a step over all processes"
    )
    parser.add_argument(
        "--world-sizes", default="1 2 3", metavar='"1 2 3"', help="numbers of processes; 1 is first"
    )
    parser.add_argument("--resume", default="none", metavar="auto", help="auto: also kill a run, and resume it")
    parser.add_argument("--stop-after", type=positive_int, metavar="N", help="steps until the kill (60%% of all)")
    parser.add_argument(
        "--launch", default="", metavar="COMMAND", help="start ranks by it, not from a fork server"
    )
    parser.add_argument("--loss", default="", metavar="REGEX", help="finds the losses in a line: its first group")
    parser.add_argument("--timeout-s", type=positive_float, default=600.0, metavar="S", help="the end of a run")
    args = parse(parser, argv)
    check_args(args)
    return args


def check_args(args: Namespace) -> None:
    """Raise UserError where the options do not make a set of runs."""
    if not args.script:
        raise UserError("SCRIPT is empty; name the script: make same SCRIPT=train.py")
    is_module = re.fullmatch(r"[\w.]+", args.script) and not args.script.endswith(".py") and find(args.script)
    if not Path(args.script).is_file() and not is_module:
        raise UserError(f"SCRIPT {args.script}: there is no such file; give its path from {Path.cwd()}")
    check_syntax(args)
    sizes = args.world_sizes.split()
    if not all(size.isdigit() and 1 <= int(size) <= 64 for size in sizes):
        raise UserError(f"WORLD_SIZES {args.world_sizes!r}: expected numbers from 1 to 64, such as '1 2 3'")
    args.sizes = sorted({1, *map(int, sizes)})
    if args.resume not in ("none", "auto"):
        raise UserError(f"RESUME {args.resume!r}: invalid choice; RESUME=auto kills a run and resumes it")
    if len(args.sizes) == 1 and args.resume == "none":
        raise UserError("WORLD_SIZES has only 1; add another number of processes, such as '1 2'")
    used = {name for word in [*args.options, args.launch] for name in re.findall(r"\{(\w+)\}", word)}
    if unknown := sorted(used - {*PLACEHOLDERS}):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise UserError(
            f"ARGS: unknown placeholder {{{unknown[0]}}}{nearest(unknown[0], PLACEHOLDERS)}; use {known}"
        )
    if used & {"local_batch", "global_batch"} and not args.global_batch:
        raise UserError("ARGS has {local_batch}: give the samples of a step, such as GLOBAL_BATCH=48")
    for size in args.sizes:
        if "local_batch" in used and args.global_batch % size:
            good = math.lcm(*args.sizes) * -(-args.global_batch // math.lcm(*args.sizes))
            raise UserError(f"GLOBAL_BATCH {args.global_batch}: {size} processes do not divide it; use {good}")


def check_syntax(args: Namespace) -> None:
    """Raise UserError where LOSS is no regular expression with a group, or LAUNCH no command of a shell."""
    try:
        if args.loss and not re.compile(args.loss).groups:
            raise re.error("no group")
    except re.error as error:
        raise UserError(
            f"LOSS {args.loss!r}: {error}; give a regular expression such as 'loss is ([-+.0-9e]+)'"
        ) from None
    try:
        shlex.split(args.launch)
    except ValueError as error:
        raise UserError(f"LAUNCH {args.launch!r}: {error}") from None


def find(module: str) -> bool:
    """Whether a module of that name can be imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@dataclass
class Session:
    """Runs of one script, each in a folder of its own."""

    args: Namespace
    folder: Path
    numbers: count[int] = field(default_factory=count)

    def run(self, world_size: int, shared: Path | None = None, **variables: str) -> Run:
        """Run the script to its end; `shared` is its {run_dir}, by default a new one. Returns what it recorded."""
        folder = self.folder / f"run{next(self.numbers)}"
        own = shared or self.folder / f"{folder.name}-files"
        own.mkdir(exist_ok=True)
        resume = "auto" if any(own.iterdir()) else "none"
        values = {"global_batch": str(self.args.global_batch), "world_size": str(world_size), "run_dir": str(own)}
        values |= {"local_batch": str((self.args.global_batch or 0) // world_size), "resume": resume}
        variables |= {"RUN_DIR": str(own), "RESUME": resume}

        def fill(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], text)

        job = Job(self.args.script, [fill(word) for word in self.args.options], fill(self.args.launch))
        statuses = ranks.run(job, world_size, folder, self.args.timeout_s, **variables)
        return compare.load(folder, world_size, statuses, self.args.loss)

    def replay(self, run: Run) -> Run:
        """Run the script in one process on the batches that another run drew."""
        path = self.folder / f"replay{run.world_size}.json"
        path.write_text(compare.dump_batches(run))
        return self.run(1, SAME_REPLAY=str(path))


@dataclass
class Result:
    """What all runs together show."""

    runs: list[Run]
    findings: list[Finding] = field(default_factory=list)
    rounding: Rounding | None = None
    largest: float = 0.0
    """The largest relative difference of a gradient that was accepted."""
    is_resumed: bool = False


def examine(session: Session) -> Result:
    """Run the script at every world size, and stopped and resumed; return what differs. Raises UserError."""
    args = session.args
    first = session.run(1)
    if failure := first.failure():
        raise UserError(f"SCRIPT {args.script} fails at 1 process, {failure.what}; fix it, or ARGS")
    if not any("loss" in name or args.loss for name in first.series):
        hint = "print `loss 2.3` in a line, or give LOSS='(regular expression)'"
        raise UserError(f"SCRIPT {args.script} prints no loss that can be read; {hint}")
    result = Result([first], rounding=Rounding(first, session.run(1, SAME_CONTROL="1")))
    assert result.rounding
    for size in args.sizes[1:]:
        run = session.run(size)
        result.runs.append(run)
        replay = session.replay(run) if compare.needs_replay(run, first) else None
        found = compare.compare(run, first, replay, result.rounding)
        result.findings += found
        result.largest = max(result.largest, compare.largest_difference(run, replay or first))
    if args.resume == "auto":
        result.findings += examine_resume(session, result)
    return result


def examine_resume(session: Session, result: Result) -> list[Finding]:
    """Kill a run at the smallest world size above 1, resume it, and return what it then does otherwise."""
    whole = result.runs[min(1, len(result.runs) - 1)]
    if whole.failure() or not whole.num_steps:
        return []
    result.is_resumed = True
    steps = session.args.stop_after or max(1, round(STOP_SHARE * whole.num_steps))
    if steps >= whole.num_steps:
        raise UserError(f"STOP_AFTER {steps}: the script has {whole.num_steps} steps; use fewer")
    shared = session.folder / "resumed-files"
    session.run(whole.world_size, shared, SAME_STOP_AFTER=str(steps))
    return compare.check_resumed(session.run(whole.world_size, shared), whole)


def join(items: Sequence[object]) -> str:
    """Return "1, 2 and 3"."""
    texts = [str(item) for item in items]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def table(runs: list[Run]) -> list[str]:
    """Return a line for each run: its steps, and the first and last value of what it prints."""
    lines = []
    for run in runs:
        parts = [f"{s.name} {s.values[0]:.4g} to {s.values[-1]:.4g}" for s in run.series.values() if s.values]
        lines.append(f"{run.world_size:>9}  {run.num_steps:>5}  {', '.join(parts)}")
    return ["processes  steps  printed", *lines]


def verdict(result: Result) -> list[str]:
    """Return what was found, the notes last."""
    sizes = join([run.world_size for run in result.runs])
    lines = []
    if not any(not finding.is_note for finding in result.findings):
        assert result.rounding
        measured = result.rounding.gradient[-1]
        is_partial = any(finding.cause in ("uncontrolled", "chaotic") for finding in result.findings)
        what = "no difference found, but not all was compared," if is_partial else "same to rounding"
        lines = [f"{what} at {sizes} processes{', and resumed' * result.is_resumed}"]
        if result.largest or measured:
            lines += [f"  gradients differ by up to {result.largest:.0e}; by {measured:.0e} in the control run"]
    for is_note in (False, True):
        for cause in dict.fromkeys(f.cause for f in result.findings if f.is_note == is_note):
            found = [finding for finding in result.findings if finding.cause == cause]
            about = CAUSES[cause]
            at = join(list(dict.fromkeys(finding.world_size for finding in found)))
            lines += [f"{'note' if is_note else 'differs'} at {at} processes: {found[0].what}"]
            lines += [f"  cause  {about.summary} [{cause}]", f"  fix    {about.fix}"]
            if about.quote:
                lines += [f"  doc    {about.source}: “{about.quote}”"]
    return lines


@command
def main(argv: list[str]) -> int:
    """Run, print the table and the verdict, and return the exit status."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="same-") as folder:
        result = examine(Session(args, Path(folder)))
    print("\n".join([*table(result.runs), "", *verdict(result)]))
    return int(any(not finding.is_note for finding in result.findings))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    CONTEXT.set_forkserver_preload(["scripts.same.observe", "torch._dynamo"])
    sys.exit(main())
