"""Run recipes one after another on the same data, model, seed and global batch, and compare them.

    make compare RECIPES="single ddp" NODES=2
    python -m scripts.bench.compare single ddp --nodes 2 --nproc-per-node 1 -- --epochs 10

Writes runs/compare-001/: a run of each recipe, table.md, and compare.png (loss, differences, samples per second).
The others are compared with the first recipe. Set OMP_NUM_THREADS=1 to give each process one thread.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.process.entry import USAGE_STATUS
from scripts.launch.command import (
    ONE_PROCESS,
    RECIPE_OPTIONS,
    ROOT,
    CommandParser,
    check_recipe,
    command,
    count,
    next_folder,
    parse,
)
from scripts.launch.local import assign_gpus
from scripts.launch.processes import run_in_foreground
from scripts.launch.runs import differences, read_losses, read_metrics
from scripts.launch.tables import Column, table

SMALLEST_DIFFERENCE = 1e-9
"""Smaller differences are drawn as this one: fp32 cannot resolve them, and zero has no logarithm."""

TARGET_ACCURACY = 0.97
"""The column "s to 97%" is the training time up to the first epoch that reaches this test accuracy."""

COLUMNS = (
    Column("recipe", "recipe"),
    Column("processes", "world_size"),
    Column("samples/s", "samples_per_s", "{:,.0f}"),
    Column("s per epoch", "epoch_s", "{:.3f}"),
    Column(f"s to {TARGET_ACCURACY:.0%}", "target_s", "{:.2f}"),
    Column("peak memory, MB", "peak_memory_mb", "{:,.0f}"),
    Column("kB sent per process and step", "sent_kb", "{:,.1f}"),
    Column("test accuracy", "test_result", "{:.4f}"),
    Column("largest loss difference", "difference", "{:.1e}"),
)


def read_run(folder: Path) -> dict[str, Any]:
    """Return the figures of a completed run's row in the table, and its losses by step."""
    result = json.loads((folder / "result.json").read_text())
    headline, sent = result["headline"], result["sent_bytes_per_step"]
    epochs = [row for row in read_metrics(folder) if row["kind"] == "epoch"]
    reached = [row["train_s"] for row in epochs if (row.get("test_accuracy") or 0) >= TARGET_ACCURACY]
    return {
        "recipe": result["recipe"],
        "world_size": result["world_size"],
        "samples_per_s": result["samples_per_s"],
        "epoch_s": result["samples"] / result["epochs"] / speed if (speed := result["samples_per_s"]) else None,
        "target_s": reached[0] if reached else None,
        "peak_memory_mb": result["peak_memory_bytes"] / 1e6,
        "sent_kb": None if sent is None else sent / result["world_size"] / 1e3,
        "test_title": headline.replace("_", " "),
        "test_result": result[headline],
        "losses": read_losses(folder),
    }


def difference(losses: dict[int, float], reference: dict[int, float], steps: int) -> float | None:
    """Return the largest relative difference of two loss curves up to step `steps`; None if they share no step."""
    return max((value for step, value in differences(losses, reference).items() if step <= steps), default=None)


def columns_for(runs: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns; the title of the test result is the task's metric."""
    return [replace(one, title=runs[0]["test_title"]) if one.key == "test_result" else one for one in COLUMNS]


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the first run's loss, the other runs' relative differences from it, and all samples per second."""
    from matplotlib.figure import Figure

    first, *others = runs
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "speed"], ["difference", "speed"]], width_ratios=(3, 2))
    names = [f"{run['recipe']} x{run['world_size']}" for run in runs]
    colors = [f"C{i}" for i in range(len(runs))]
    axes["loss"].plot(list(first["losses"]), list(first["losses"].values()), color=colors[0])
    axes["loss"].set(ylabel="training loss", yscale="log", title=f"The loss of {names[0]} ...")
    axes["loss"].sharex(axes["difference"])
    axes["loss"].tick_params(labelbottom=False)
    for run, name, color in zip(others, names[1:], colors[1:], strict=True):
        found = differences(run["losses"], first["losses"])
        values = [max(value, SMALLEST_DIFFERENCE) for value in found.values()]
        axes["difference"].plot(list(found), values, color=color, label=name)
    axes["difference"].set(xlabel="step", ylabel="relative", yscale="log")
    axes["difference"].set_title("... and how far the others are from it")
    bars = axes["speed"].barh(names, [run["samples_per_s"] for run in runs], color=colors)
    axes["speed"].bar_label(bars, fmt="{:,.0f}", padding=3)
    axes["speed"].invert_yaxis()
    axes["speed"].set_xlim(0, 1.2 * max(run["samples_per_s"] for run in runs) or 1)
    axes["speed"].set(xlabel="samples per second", title="Speed; the colors are those of the curves")
    figure.savefig(path, dpi=110)


def notes_of(folder: Path, args: Namespace) -> list[str]:
    """Return the notes below the table: options, machine, versions, and how the figures are defined."""
    first = args.recipes[0]
    config = json.loads((folder / first / "config.json").read_text())
    options, hardware, versions = config["options"], config["hardware"], config["versions"]
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return [
        f"Data {options['data']}, model {options['model']}, global batch {options['global_batch_size']}, seed "
        f"{options['seed']}; {args.nodes} node(s) of {args.nproc_per_node} process(es) on one machine.",
        f"{hardware['cpus']} CPU cores ({hardware['machine']}), {gpus}; Python {versions['python']}, torch "
        f"{versions['torch']}. {first}: {'; '.join(config['launches'][-1]['ranks'])}.",
        "Samples per second leave out each run's first step and its evaluations. Peak memory is that of rank 0. "
        "Bytes are those of the machine's network interfaces while training, loopback included; shared memory is "
        "not in them. They are unknown on GPUs, whose traffic over NVLink and RDMA passes no interface.",
        f"The largest loss difference is relative to {first}, over the first {args.steps} steps: rounding grows "
        "with the steps, whatever the recipe.",
    ]


def check_options(recipes: Sequence[str], options: Sequence[str], processes: int) -> None:
    """Raise UserError if a recipe refuses the options or so many processes, or keeps no record to compare."""
    for word in options:
        if word.split("=")[0] in ("--name", "--runs-dir", "--resume"):
            raise UserError(f"{word.split('=')[0]} is set by compare itself; leave it out of ARGS")
    for recipe in recipes:
        try:
            args = importlib.import_module(f"recipes.{recipe}.train").options(list(options))
            keeps_record = hasattr(args, "runs_dir")
            if keeps_record:
                args.check_world_size(processes)
        except UserError as error:
            raise UserError(f"{recipe}: {error}") from None
        if not keeps_record:
            raise UserError(f"{recipe} trains nothing; leave it out of RECIPES")
        if args.evaluate:
            raise UserError("--evaluate trains nothing to compare; leave it out of ARGS")


@command
def main(argv: list[str]) -> int:
    """Run the recipes, compare them and write the results.

    The first recipe that fails ends it: return 2 if that recipe refused its options, else 1.
    """
    parser = CommandParser("python -m scripts.bench.compare", __doc__, RECIPE_OPTIONS)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--nodes", type=count, default=1, help="nodes on this machine")
    parser.add_argument("--nproc-per-node", type=count, help="processes per node (its GPUs, else 1)")
    parser.add_argument("--steps", type=int, default=50, help="steps over which loss curves are compared")
    args = parse(parser, argv)
    if not args.recipes:
        raise UserError('RECIPES is empty; for example RECIPES="single ddp"')
    recipes = args.recipes = [check_recipe(name) for name in dict.fromkeys(args.recipes)]
    shares = assign_gpus(args.nodes if set(recipes) - set(ONE_PROCESS) else 1, args.options)
    gpus = [gpu for share in shares for gpu in share]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # if nodes get none, nor does a recipe that is one process
    args.nproc_per_node = args.nproc_per_node or max(1, len(shares[0]))
    check_options(recipes, args.options, args.nodes * args.nproc_per_node)
    folder = next_folder("compare")
    for recipe in recipes:
        print(f"--- {recipe}", flush=True)
        # A comparison that is interrupted begins again.
        command = [sys.executable, "-m", "scripts.launch.local", recipe, "--how-to-resume="]
        env = dict(os.environ)
        if recipe in ONE_PROCESS:  # dataparallel on as many GPUs as the others
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: args.nodes * args.nproc_per_node])
        else:
            command += [f"--nodes={args.nodes}", f"--nproc-per-node={args.nproc_per_node}"]
        command += ["--", "--runs-dir", str(folder), "--name", recipe, *args.options]
        status = run_in_foreground(command, cwd=ROOT, env=env)
        if status:
            print(f"error: {recipe} ended with status {status}; its record is in {folder}", file=sys.stderr)
            return USAGE_STATUS if status == USAGE_STATUS else 1
        if not (folder / recipe / "result.json").exists():
            what = f"{recipe} was stopped before its end"
            print(f"error: {what}; its record is in {folder}, compare again", file=sys.stderr)
            return 1
    runs = [read_run(folder / recipe) for recipe in recipes]
    for run in runs:
        run["difference"] = difference(run["losses"], runs[0]["losses"], args.steps)
    text, notes = table(columns_for(runs), runs, left=1), notes_of(folder, args)
    (folder / "table.md").write_text(text + "\n\n" + "\n".join(notes) + "\n")
    plot(runs, folder / "compare.png")
    print(f"{text}\n\nwrote {folder.relative_to(ROOT)}/table.md and compare.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
