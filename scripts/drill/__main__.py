"""The fire drill: plant faults in real jobs on this machine, and measure how they are survived.

    make drill
    make drill FAULTS="kill-rank truncate" SEED=3
    make drill ROUNDS=50

Each fault gets a job of its own on local nodes, of ddp or of fsdp with sharded checkpoints, with a network for
each node where root allows. The fault comes at a drawn step to a drawn victim; the job has to notice, to end
everywhere, and, started again with --resume auto, to end with the very weights of a job that nothing has
disturbed. Prints a table, writes runs/drill-001/drill.json.
Exit status 0: all faults were survived; 1: not all, and the last lines name them; 2: bad usage.
docs/drill.md says what each fault and each column is.
"""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.options import non_negative_int
from scripts.drill.faults import FAULTS, Fault, why_not
from scripts.drill.trial import START_S, Figures, Setting, Trial
from scripts.lab import network
from scripts.launch.command import ROOT, CommandParser, check_names, command, count, next_folder, parse
from scripts.launch.runs import measured_on

INTERVAL = 20
"""Steps between two checkpoints."""

WIDTHS = {
    "fault": 11,
    "at step": 8,
    "noticed s": 10,
    "again s": 8,
    "lost": 5,
    "weights": 8,
    "left": 5,
    "starts": 7,
    "victim": 0,
}


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the drill's options; raises UserError."""
    parser = CommandParser("python -m scripts.drill", (__doc__ or "").split("\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"some of {', '.join(FAULTS)} (all)")
    parser.add_argument("--nodes", type=count, default=2, help="local nodes of one process each (2)")
    parser.add_argument("--rounds", type=count, help="so many faults, drawn at random: a soak")
    parser.add_argument(
        "--seed", type=non_negative_int, default=0, help="decides on faults, steps and victims (0)"
    )
    parser.add_argument("--steps", type=count, default=400, help="steps of a job (400)")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs", help="where drill-001 is made")
    parser.add_argument("--plain", action="store_true", help="plain processes, also where root allows networks")
    args = parse(parser, argv)
    if args.nodes < 2:
        raise UserError(f"NODES: a drill needs at least 2 nodes, got {args.nodes}")
    if args.steps < 4 * INTERVAL + 4:
        raise UserError(f"--steps: a fault needs four checkpoints, {4 * INTERVAL + 4} steps, got {args.steps}")
    args.faults = check_names("FAULTS", args.faults, list(FAULTS))
    return args


def choose(args: Namespace, has_network: bool) -> tuple[list[Fault], dict[str, str]]:
    """Return the faults to plant, and why others cannot be planted here; raises UserError for those asked for."""
    reasons = {name: reason for name, fault in FAULTS.items() if (reason := why_not(fault, has_network))}
    for name in args.faults:
        if name in reasons:
            raise UserError(f"{name} cannot be planted here: {reasons[name]}")
    possible = [FAULTS[name] for name in args.faults or FAULTS if name not in reasons]
    if not args.rounds:
        return possible, {} if args.faults else reasons
    chance = random.Random(args.seed)
    return [chance.choice(possible) for _ in range(args.rounds)], {}


def row(figures: Figures) -> list[str]:
    """Return a line of the table."""
    return [
        figures.fault,
        str(figures.at_step),
        "-" if figures.noticed_s is None else f"{figures.noticed_s:.1f}",
        "-" if figures.training_again_s is None else f"{figures.training_again_s:.1f}",
        "-" if figures.steps_lost is None else str(figures.steps_lost),
        figures.weights or "-",
        str(len(figures.left_over)),
        str(figures.starts),
        figures.victim + (f"; world sizes {figures.world_sizes}" if len(set(figures.world_sizes)) > 1 else ""),
    ]


def show(cells: Sequence[str]) -> None:
    """Print a line of the table."""
    texts = [cell.ljust(width) for cell, width in zip(cells, WIDTHS.values(), strict=True)]
    print("  ".join(texts).rstrip(), flush=True)


def undisturbed(setting: Setting, fault: Fault) -> Path:
    """Run the job of a fault without it, unless there is one already; return its record."""
    name = f"undisturbed-{fault.recipe}-{fault.model}"
    if (setting.folder / name).exists():
        return setting.folder / name
    options = setting.options(fault, setting.folder, name, 60)
    job = setting.launch(fault.recipe, options, setting.folder / "log.txt", False, {})
    status = job.wait(START_S)
    job.kill()
    if status != 0:
        print(job.text, file=sys.stderr)
        raise UserError(f"the undisturbed job ended with status {status}: there is nothing to compare with")
    return setting.folder / name


def facts(setting: Setting, is_plain: bool) -> dict[str, Any]:
    """Return where and with what the drill was run."""
    return {
        **measured_on("torch"),
        "nodes": setting.nodes,
        "seed": setting.seed,
        "steps": setting.steps,
        "checkpoint_every": setting.interval,
        "networks": not is_plain,
    }


def run_all(setting: Setting, faults: Sequence[Fault]) -> Iterator[Figures]:
    """Run a trial of each fault, with a line of the table for each, and yield its figures."""
    references = [undisturbed(setting, fault) for fault in faults]
    show(list(WIDTHS))
    for number, (fault, reference) in enumerate(zip(faults, references, strict=True), start=1):
        trial = Trial(setting, fault, number, reference)
        try:
            figures = trial.run()
        finally:
            trial.tidy()
        show(row(figures))
        if figures.failure:
            print(f"  not survived: {figures.failure} ({os.path.relpath(trial.folder)}/log.txt)", flush=True)
        yield figures


@command
def main(words: list[str]) -> int:
    """Run the drill; return its exit status."""
    args = parse_args(words)
    nodes = args.nodes
    is_plain = args.plain or bool(network.why_not())
    faults, reasons = choose(args, not is_plain)
    if not is_plain:
        network.enter("scripts.drill", words)
    folder = next_folder("drill", args.runs_dir.resolve())
    os.chdir(ROOT)
    setting = Setting(nodes, args.seed, args.steps, INTERVAL, folder, None if is_plain else network.Network(nodes))
    where = "plain processes" if is_plain else "a network for each node"
    print(
        f"drill {os.path.relpath(folder)}: {len(faults)} faults, {nodes} nodes, {where}, SEED={setting.seed}",
        flush=True,
    )
    done, about = [], {**facts(setting, is_plain), "left_out": reasons}
    for figures in run_all(setting, faults):
        done.append(figures)
        report = {**about, "faults": [one.as_dict() for one in done]}
        (folder / "drill.json").write_text(json.dumps(report, indent=2) + "\n")  # also of a soak that is stopped
    for name, reason in reasons.items():
        print(f"{name}: left out: {reason}")
    failed = [f"{i:03d}-{figures.fault}" for i, figures in enumerate(done, start=1) if figures.failure]
    if failed:
        print(f"error: not survived: {', '.join(failed)}; again: SEED={setting.seed}", file=sys.stderr)
        return 1
    print(f"all {len(done)} faults survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
