"""Run a training script at 1, 2 and 3 processes and say whether it trains the same, or what differs and why.

    make same SCRIPT=train.py ARGS="--batch-size {local_batch}" GLOBAL_BATCH=48
    python -m scripts.same train.py --global-batch 48 -- --batch-size {local_batch}

ARGS may have {local_batch}, {global_batch}, {world_size}, {run_dir} (a folder of the run's own) and {resume}.
docs/same.md lists what is compared. Exit status 0: the same to rounding; 1: it differs; 2: bad usage.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from recipes.common.arguments import positive_float, positive_int
from recipes.common.errors import UserError, nearest
from scripts.launch.command import CommandParser, absolute, command, parse, temporary_folder
from scripts.launch.script import check_python, read_workdir
from scripts.same import checks, script_job
from scripts.same.causes import CAUSES, NOTES, Finding
from scripts.same.checks import Rounding, by_updates
from scripts.same.recorded_run import Run, load
from scripts.same.script_job import CONTEXT

PLACEHOLDERS = ("local_batch", "global_batch", "world_size", "run_dir", "resume")
PARTIAL = (
    *("not-printed", "zero-gradient", "uncontrolled", "not-replayed", "chaotic", "scaled-with-batch"),
    "generators-not-resumed",
)
"""Notes after which not all has been compared."""
NOT_COMPARED = ("scaled-with-batch", "uncontrolled", "not-replayed", "not-replicated")
"""Notes after which no gradients have been compared."""

KEEP_FILES = "if it goes on from a file of an earlier run, let it keep its files in {run_dir}"
UNREADABLE = "prints no loss that can be read; print `loss 2.3` in a line, or give LOSS='(regular expression)'"
ASCII_QUOTES = str.maketrans("“”", '""')
"""For a terminal of any encoding."""
STOP_SHARE = 0.6
"""Share of a run's steps after which it is killed, to be resumed."""


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; words after -- are the script's. Raises UserError."""
    epilog = "Options of the script come after --, such as -- --batch-size {local_batch}"
    parser = CommandParser("python -m scripts.same", __doc__, epilog)
    add = parser.add_argument
    add("script", nargs="?", default="", metavar="SCRIPT", help="a file, or a module's dotted name")
    add("--global-batch", type=positive_int, metavar="N", help="samples of a step over all processes")
    add("--world-sizes", default="1 2 3", metavar='"1 2 3"', help="numbers of processes, 1 first")
    add("--resume", default="none", choices=("none", "auto"), help="auto: also kill a run, and resume it")
    add("--stop-after", type=positive_int, metavar="N", help="steps until the kill (60%% of all)")
    starter = "command that starts the ranks, instead of torchrun's variables"
    add("--launch", default="", metavar="COMMAND", help=starter)
    add("--loss", default="", metavar="REGEX", help="regular expression whose first group is the loss in a line")
    add("--timeout-s", type=positive_float, default=600.0, metavar="S", help="longest time of a run")
    args = parse(parser, argv)
    check_variables(args)
    check_sizes(args)
    return args


def check_variables(args: Namespace) -> None:
    """Raise UserError if SCRIPT, WORKDIR, LOSS or LAUNCH is invalid; make SCRIPT absolute, set args.workdir."""
    if not args.script:
        raise UserError("SCRIPT is empty; name the script: make same SCRIPT=train.py")
    path = absolute(args.script)
    if path.is_file():
        check_python(path)
        args.script = str(path)
    elif args.script.endswith(".py") or not re.fullmatch(r"[\w.]+", args.script):  # else it is a module
        raise UserError(f"SCRIPT {args.script}: there is no such file; give its path from {Path.cwd()}")
    args.workdir = read_workdir()
    try:
        if args.loss and not re.compile(args.loss).groups:
            raise re.error("no group")
    except re.error as error:
        fix = "give a regular expression such as 'loss is ([-+.0-9e]+)'"
        raise UserError(f"LOSS {args.loss!r}: {error}; {fix}") from None
    try:
        shlex.split(args.launch)
    except ValueError as error:
        raise UserError(f"LAUNCH {args.launch!r}: {error}") from None


def check_sizes(args: Namespace) -> None:
    """Raise UserError if world sizes, batches and placeholders are invalid or do not combine; set args.sizes."""
    sizes = args.world_sizes.replace(",", " ").split()
    if not all(size.isdecimal() and 1 <= int(size) <= 64 for size in sizes):
        raise UserError(f"WORLD_SIZES expects numbers from 1 to 64, such as '1 2 3', got {args.world_sizes!r}")
    args.sizes = sorted({1, *map(int, sizes)})
    if len(args.sizes) == 1 and args.resume == "none":
        raise UserError("WORLD_SIZES has only 1; add another number of processes, such as '1 2'")
    used = {name for word in [*args.options, args.launch] for name in re.findall(r"\{(\w+)\}", word)}
    for name in sorted(used.difference(PLACEHOLDERS)):
        if hint := nearest(name, PLACEHOLDERS, cutoff=0.8):  # others are the script's own, such as {epoch}
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise UserError(f"ARGS: unknown placeholder {{{name}}}{hint}; use {known}")
    if used & {"local_batch", "global_batch"} and not args.global_batch:
        raise UserError("ARGS has {local_batch}: give the samples of a step, such as GLOBAL_BATCH=48")
    if args.global_batch and not used & {"local_batch", "global_batch"}:
        fix = 'put it where the script takes its batch size, such as ARGS="--batch-size {local_batch}"'
        raise UserError(f"GLOBAL_BATCH is given, and ARGS has no {{local_batch}}: {fix}")
    for size in args.sizes:
        if "local_batch" in used and args.global_batch % size:
            good = math.lcm(*args.sizes) * -(-args.global_batch // math.lcm(*args.sizes))
            raise UserError(f"GLOBAL_BATCH {args.global_batch}: {size} processes do not divide it; use {good}")


@dataclass
class Session:
    """The runs of one script, each in its own folder, and what they show."""

    args: Namespace
    folder: Path
    numbers: count[int] = field(default_factory=count)
    runs: list[Run] = field(default_factory=list)  # the run at each world size
    findings: list[tuple[int, Finding]] = field(default_factory=list)  # each with the number of processes
    largest: float = 0.0  # the largest relative difference of a gradient from one process's
    measured: float = 0.0  # the same of the control run
    harmless: set[str] = field(default_factory=set)  # generators whose numbers in a step have no effect
    has_loss: bool = False  # whether the script prints a loss that can be read
    is_resumed: bool = False

    def run(self, world_size: int, run_dir: str = "", **variables: str) -> Run:
        """Run the script to its end, with a new {run_dir} unless one is given; return what it recorded."""
        number = next(self.numbers)
        own = self.folder / (run_dir or f"files{number}")
        own.mkdir(exist_ok=True)
        resume = "auto" if any(own.iterdir()) else "none"
        batch = self.args.global_batch or 0
        given = (batch // world_size, batch, world_size, own, resume)
        values = dict(zip(PLACEHOLDERS, map(str, given), strict=True))
        *words, launcher = (
            re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word)
            for word in (*self.args.options, self.args.launch)
        )
        if sys.stderr.isatty():
            what = f"run {number + 1}, processes: {world_size}, time limit: {self.args.timeout_s:g} s"
            print(f"same: {what}", file=sys.stderr, flush=True)
        folder, command = self.folder / f"run{number}", [self.args.script, *words]
        variables |= {"RUN_DIR": str(own), "RESUME": resume, "WORKDIR": str(self.args.workdir)}
        statuses = script_job.run(command, launcher, world_size, folder, self.args.timeout_s, **variables)
        return load(folder, world_size, statuses, self.args.loss)

    def examine(self) -> None:
        """Run the script at every world size, and resume it if asked for; compare the runs. Raises UserError."""
        first = self.run(1)
        if failure := first.failure():
            raise self.error(f"fails at 1 process, {failure.what}; fix it, or ARGS")
        self.has_loss = any("loss" in name or self.args.loss for name in first.series)
        if not self.has_loss and (self.args.loss or not first.steps):
            raise self.error(UNREADABLE if first.steps else f"{UNREADABLE}; {KEEP_FILES}")
        control = self.run(1, SAME_CONTROL="1")
        if len(control.steps) != len(first.steps):
            again = f"{len(control.steps) or 'none'} when it is started again"
            raise self.error(f"does {len(first.steps)} steps, and {again}; {KEEP_FILES}")
        if checks.begins_differently(control, first):
            fix = f"{KEEP_FILES}; otherwise seed its generators by a constant"
            raise self.error(f"begins with other weights when it is started again; {fix}")
        redrawn = self.run(1, SAME_OTHER_DRAWS="1") if checks.draws_in_step(first) else None
        rounding = Rounding(first, control, redrawn)
        self.measured, self.harmless = max(rounding.gradient, default=0.0), rounding.harmless
        self.runs = [first]
        for size in self.args.sizes[1:]:
            self.runs.append(self.run(size))
            self.examine_run(self.runs[-1], first, control, redrawn)
        if self.args.resume == "auto":
            self.examine_resume()

    def error(self, what: str) -> UserError:
        """Return the refusal of a script that cannot be compared."""
        return UserError(f"SCRIPT {self.args.script} {what}")

    def examine_run(self, run: Run, first: Run, control: Run, redrawn: Run | None) -> None:
        """Compare a run of several processes with one process, which may have to run again with its batches."""
        replay = None
        if checks.needs_replay(run, first):
            replay = self.replay(run.joint_batches())
        if by_step := checks.is_exchanged_in_step(run):
            run, first, control = map(by_updates, (run, first, control))
            replay, redrawn = replay and by_updates(replay), redrawn and by_updates(redrawn)
        rounding = Rounding(first, control, redrawn)
        found = checks.compare_runs(run, first, replay, rounding, is_divided=bool(self.args.global_batch))
        if not by_step:
            found = [self.explain_by_shares(one, run, rounding) for one in found]
        if not self.has_loss:
            if "not-replicated" in [one.cause for one in found]:
                raise self.error(UNREADABLE)  # nothing else can be compared
            found.append(Finding("not-printed", "loss"))
        self.findings += [(run.world_size, one) for one in found]
        self.largest = max(self.largest, checks.largest_gradient_difference(run, replay or first))

    def replay(self, batches: Mapping[int, object], **variables: str) -> Run:
        """Run the script at one process on these batches."""
        path = self.folder / f"replay{len([*self.folder.glob('replay*.json')])}.json"
        path.write_text(json.dumps(batches))
        return self.run(1, SAME_REPLAY=str(path), **variables)

    def explain_by_shares(self, found: Finding, run: Run, rounding: Rounding) -> Finding:
        """Return a finding, with a cause if one process on each rank's samples gets the gradients of the ranks."""
        if found.step is None or not run.batches(0):
            return found
        i, shares = found.step, []
        for rank in range(run.world_size):
            shares.append(self.replay(run.share_batches(rank, i), SAME_STOP_AFTER=str(i + 1)))
        is_mean = checks.is_mean_of_shares(run, i, shares, rounding)
        return replace(found, cause="batch-dependent") if is_mean else found

    def examine_resume(self) -> None:
        """Kill a run at the smallest world size above 1 (or at 1 if it is alone), resume it and compare."""
        whole = self.runs[min(1, len(self.runs) - 1)]
        if whole.failure() or not whole.steps:
            return
        steps = self.args.stop_after or max(1, round(STOP_SHARE * len(whole.steps)))
        if steps >= len(whole.steps):
            raise UserError(f"STOP_AFTER {steps}: the script has {len(whole.steps)} steps; use fewer")
        self.is_resumed = True
        self.run(whole.world_size, "resumed", SAME_STOP_AFTER=str(steps))
        resumed = self.run(whole.world_size, "resumed")
        if found := checks.check_resumed(resumed, whole, self.harmless):
            self.findings.append((whole.world_size, found))

    def table(self) -> list[str]:
        """Return a line for each run: its steps, and the first and last value of each printed series."""
        lines = ["processes  steps  printed"]
        for run in self.runs:
            parts = [f"{s.name} {s.values[0]:.4g} to {s.values[-1]:.4g}" for s in run.series.values()]
            lines.append(f"{run.world_size:>9}  {len(run.steps):>5}  {', '.join(parts)}")
        return lines

    def verdict(self) -> list[str]:
        """Return the lines of the verdict, notes last."""
        lines, causes = [], dict.fromkeys(one.cause for _, one in self.findings)
        if not self.is_different:
            is_whole = causes.keys().isdisjoint(PARTIAL)
            what = "same to rounding" if is_whole else "no difference found, but not all was compared,"
            resumed = ", and resumed" if self.is_resumed else ""
            lines = [f"{what} at {join(run.world_size for run in self.runs)} processes{resumed}"]
            if (self.largest or self.measured) and causes.keys().isdisjoint(NOT_COMPARED):
                control = f"by {self.measured:.0e} in the control run"
                lines += [f"  gradients differ by up to {self.largest:.0e}; {control}"]
        for cause in sorted(causes, key=lambda cause: cause in NOTES):
            about, kind = (NOTES[cause], "note") if cause in NOTES else (CAUSES[cause], "differs")
            seen = [(size, one.what) for size, one in self.findings if one.cause == cause]
            at = join(dict.fromkeys(size for size, _ in seen))
            first = f", first at {seen[0][0]}" if len({what for _, what in seen}) > 1 else ""
            lines += [f"{kind} at {at} processes{first}: {seen[0][1]}"]
            lines += [f"  cause  {about.summary} [{cause}]", f"  fix    {about.fix}"]
            if about.doc:
                lines += [f"  doc    {about.doc.translate(ASCII_QUOTES)}"]
        return lines

    @property
    def is_different(self) -> bool:
        """Whether any finding is more than a note."""
        return any(found.cause not in NOTES for _, found in self.findings)


def join(items: Iterable[object]) -> str:
    """Return "1, 2 and 3"."""
    *texts, last = map(str, items)
    return " and ".join(filter(None, [", ".join(texts), last]))


@command
def main(argv: list[str]) -> int:
    """Run, print the table and the verdict, and return the exit status."""
    args = parse_args(argv)
    script_job.choose_gpus(max(args.sizes))
    with temporary_folder() as folder:
        session = Session(args, Path(folder))
        session.examine()
    print("\n".join([*session.table(), "", *session.verdict()]))
    return int(session.is_different)


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["scripts.same.observe", "torch._dynamo"])
    sys.exit(main())
