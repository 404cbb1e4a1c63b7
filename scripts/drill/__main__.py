"""The fire drill: plant faults in real jobs on this machine, and measure how they are survived.

    make drill
    make drill FAULTS="kill-rank truncate" SEED=3
    make drill ROUNDS=50

Each fault gets its own job on local nodes: ddp, or fsdp with sharded checkpoints. As root, each node has its own
network. The fault hits a random victim at a random step. The job has to continue, or to end on all nodes and be
restarted with --resume auto; in the end, its weights have to be those of an undisturbed job. Prints a table and
writes runs/drill-001/drill.json.
Exit status 0: all faults were survived; 1: not all, and the last lines name them; 2: bad usage.
docs/drill.md describes the faults and the columns.
"""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from recipes.common.arguments import non_negative_int, positive_int
from recipes.common.errors import UserError
from recipes.common.folders import replace_text
from scripts.drill.faults import FAULTS, why_not
from scripts.drill.trial import CHECKPOINT_INTERVAL, JOB_TIMEOUT_S, Figures, Setting, Trial
from scripts.lab import network
from scripts.launch.command import (
    ROOT,
    CommandParser,
    check_names,
    command,
    count,
    next_folder,
    parse,
    temporary_folder,
)
from scripts.launch.runs import measured_on

LEAST_STEPS = 4 * CHECKPOINT_INTERVAL + 4
TITLES = ("fault", "at step", "noticed s", "again s", "lost", "weights", "left", "starts", "victim")
LINE = "{:<11}  {:<8}  {:<10}  {:<8}  {:<5}  {:<8}  {:<5}  {:<7}  {}"


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the drill's options; raises UserError."""
    parser = CommandParser("python -m scripts.drill", __doc__)
    add = parser.add_argument
    add("faults", nargs="*", metavar="FAULT", help=f"some of {', '.join(FAULTS)} (all)")
    add("--nodes", type=count, default=2, help="local nodes of one process each")
    add("--rounds", type=count, help="number of faults, drawn at random: a soak")
    add("--seed", type=non_negative_int, default=0, help="seed of faults, steps and victims")
    add("--steps", type=positive_int, default=400, help="steps of a job")
    add("--runs-dir", type=Path, default=ROOT / "runs", help="parent folder of drill-001")
    add("--plain", action="store_true", help="processes without network namespaces, also as root")
    args = parse(parser, argv)
    if args.nodes < 2:
        raise UserError(f"NODES: a drill needs at least 2 nodes, got {args.nodes}")
    if args.steps < LEAST_STEPS:
        raise UserError(f"--steps: a fault needs four checkpoints, {LEAST_STEPS} steps, got {args.steps}")
    args.faults = check_names("FAULTS", args.faults, list(FAULTS))
    return args


def choose(args: Namespace, has_network: bool) -> tuple[list[str], dict[str, str]]:
    """Return the faults to plant, and why others cannot be; raises UserError if one that was asked for cannot."""
    reasons = {name: reason for name, fault in FAULTS.items() if (reason := why_not(fault, has_network))}
    for name in args.faults:
        if name in reasons:
            raise UserError(f"{name} cannot be planted here: {reasons[name]}")
    possible = [name for name in args.faults or FAULTS if name not in reasons]
    chance = random.Random(args.seed)
    drawn = [chance.choice(possible) for _ in range(args.rounds)] if args.rounds else possible
    return drawn, {} if args.faults else reasons


def show(figures: Figures) -> None:
    """Print a trial's row of the table."""
    seconds = ["-" if s is None else f"{s:.1f}" for s in (figures.noticed_s, figures.training_again_s)]
    lost = "-" if figures.steps_lost is None else figures.steps_lost
    sizes = f"; world sizes {figures.world_sizes}" if len(set(figures.world_sizes)) > 1 else ""
    counts = (len(figures.left_over), figures.starts, figures.victim + sizes)
    line = LINE.format(figures.fault, figures.at_step, *seconds, lost, figures.weights or "-", *counts)
    print(line.rstrip(), flush=True)


def undisturbed(setting: Setting, name: str) -> Path:
    """Run a fault's job without the fault, unless that has been done; return its run folder."""
    fault = FAULTS[name]
    run = setting.folder / f"undisturbed-{fault.recipe}-{fault.model}"
    if not run.exists():
        job = setting.launch(fault, run, setting.folder / "log.txt")
        try:
            status = job.wait(JOB_TIMEOUT_S)
        finally:
            job.kill()
        if status is None:
            raise UserError(f"the undisturbed job did not end within {JOB_TIMEOUT_S:.0f} s; lower --steps")
        if status != 0:
            print(job.text, file=sys.stderr)
            raise UserError(f"the undisturbed job ended with status {status}: there is nothing to compare with")
    return run


def run_all(setting: Setting, names: Sequence[str]) -> Iterator[Figures]:
    """Run a trial of each fault, print its row of the table, and yield its figures."""
    references = [undisturbed(setting, name) for name in names]
    print(LINE.format(*TITLES), flush=True)
    for number, (name, reference) in enumerate(zip(names, references, strict=True), start=1):
        trial = Trial(setting, name, number, reference)
        figures = trial.run()
        show(figures)
        if figures.failure:
            print(f"  not survived: {figures.failure} ({os.path.relpath(trial.folder)}/log.txt)", flush=True)
        yield figures


@command
def main(words: list[str]) -> int:
    """Run the drill; return its exit status."""
    args = parse_args(words)
    has_network = not (args.plain or network.why_not())
    names, reasons = choose(args, has_network)
    if has_network:
        network.enter("scripts.drill", words)
    folder = next_folder("drill", args.runs_dir.resolve())
    os.chdir(ROOT)
    networks = network.Network(args.nodes) if has_network else None
    setting = Setting(args.nodes, args.seed, args.steps, folder, networks)
    where = "a network for each node" if has_network else "plain processes"
    size = f"{len(names)} fault{'s' * (len(names) > 1)}, {args.nodes} nodes"
    print(f"drill {os.path.relpath(folder)}: {size}, {where}, SEED={args.seed}", flush=True)
    about = {"nodes": args.nodes, "seed": args.seed, "steps": args.steps, "checkpoint_every": CHECKPOINT_INTERVAL}
    about |= {**measured_on("torch"), "networks": has_network, "left_out": reasons}
    done: list[Figures] = []
    with temporary_folder() as os.environ["TMPDIR"]:  # for what killed jobs leave
        for figures in run_all(setting, names):
            done.append(figures)
            rows = [{**asdict(one), "survived": not one.failure} for one in done]
            report = json.dumps({**about, "faults": rows}, indent=2)
            replace_text(folder / "drill.json", report + "\n")  # each time, for a soak that is stopped
    for name, reason in reasons.items():
        print(f"{name}: left out: {reason}")
    failed = [f"{i:03d}-{figures.fault}" for i, figures in enumerate(done, start=1) if figures.failure]
    if failed:
        print(f"error: not survived: {', '.join(failed)}; again: SEED={args.seed}", file=sys.stderr)
        return 1
    print("1 fault survived" if len(done) == 1 else f"all {len(done)} faults survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
