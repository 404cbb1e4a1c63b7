"""Run recipes one after another on the same data, model, seed and global batch, and set them side by side.

    make compare RECIPES="single ddp" NODES=2
    python -m scripts.compare single ddp --nodes 2 --nproc-per-node 1 -- --epochs 10

writes runs/compare-001/: a run of each recipe, table.md, compare.png (loss curves, samples per second) and
compare.html, a page that needs nothing beside it. The first recipe is the one that the others are held against.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.local import ONE_PROCESS, ROOT, USAGE_STATUS, check_recipe, count, refuse

TARGET_ACCURACY = 0.97
"""Test accuracy whose first epoch "time to accuracy" tells."""


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, and how a run's figure is shown."""

    title: str
    key: str
    form: str


COLUMNS = (
    Column("recipe", "recipe", "{}"),
    Column("processes", "world_size", "{}"),
    Column("samples/s", "samples_per_s", "{:,.0f}"),
    Column("s per epoch", "epoch_s", "{:.3f}"),
    Column(f"s to {TARGET_ACCURACY:.0%}", "target_s", "{:.2f}"),
    Column("peak memory, MB", "peak_memory_mb", "{:,.0f}"),
    Column("kB sent per process and step", "sent_kb", "{:,.1f}"),
    Column("test accuracy", "test_accuracy", "{:.4f}"),
    Column("largest loss difference", "difference", "{:.1e}"),
)


def read_run(folder: Path) -> dict[str, Any]:
    """Return a completed run's losses by step and the figures of its row."""
    result = json.loads((folder / "result.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "test_accuracy" in line]
    reached = [line["train_s"] for line in epochs if line["test_accuracy"] >= TARGET_ACCURACY]
    return {
        "recipe": result["recipe"],
        "world_size": result["world_size"],
        "samples_per_s": result["samples_per_s"],
        "epoch_s": result["train_s"] / len(epochs) if epochs else None,
        "target_s": reached[0] if reached else None,
        "peak_memory_mb": result["peak_memory_bytes"] / 1e6,
        "sent_kb": result["sent_bytes_per_step"] / result["world_size"] / 1e3,
        "test_accuracy": result["test_accuracy"],
        "losses": {line["step"]: line["loss"] for line in lines if "loss" in line},
    }


def difference(losses: dict[int, float], reference: dict[int, float], steps: int) -> float | None:
    """Return the largest relative difference of two loss curves over their first steps."""
    common = [step for step in reference if step in losses and step <= steps]
    if not common:
        return None
    return max(abs(losses[step] - reference[step]) / abs(reference[step]) for step in common)


def table(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the header and a row of text for each run; a figure that a run does not have is a dash."""
    rows = [[column.title for column in COLUMNS]]
    for run in runs:
        values = [(column.form, run[column.key]) for column in COLUMNS]
        rows.append(["-" if value is None else form.format(value) for form, value in values])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- |" + " ---: |" * (len(rows[0]) - 1))
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss curves and the samples per second of the runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    names = [f"{run['recipe']} x{run['world_size']}" for run in runs]
    styles = ("-", "--", ":", "-.")
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        steps = list(run["losses"])
        width = 5 - 4 * i / max(1, len(runs) - 1)  # the later lie on the earlier: thinner, so that all show
        left.plot(steps, list(run["losses"].values()), styles[i % 4], label=name, linewidth=width)
    left.set(xlabel="step", ylabel="training loss", yscale="log", title="The same curve from each recipe")
    left.legend()
    bars = right.barh(names, [run["samples_per_s"] for run in runs], color=[f"C{i}" for i in range(len(runs))])
    right.bar_label(bars, fmt="{:,.0f}", padding=3)
    right.invert_yaxis()
    right.set_xlim(0, 1.2 * max(run["samples_per_s"] for run in runs) or 1)
    right.set(xlabel="samples per second", title="Speed")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def page(title: str, notes: Sequence[str], rows: Sequence[Sequence[str]], picture: Path) -> str:
    """Return a page with the notes, the table and the picture in it."""
    image = base64.b64encode(picture.read_bytes()).decode("ascii")
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; }} img {{ max-width: 100%; }}
th, td {{ padding: .3em .8em; border-bottom: 1px solid #ccc; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
<h1>{html.escape(title)}</h1>
{"".join(f"<p>{html.escape(note)}</p>" for note in notes)}
<table><tr>{head}</tr>{body}</table>
<p><img alt="loss curves and samples per second" src="data:image/png;base64,{image}"></p>
</html>
"""


def notes_of(folder: Path, recipes: Sequence[str], nodes: int, processes: int, steps: int) -> list[str]:
    """Return the sentences that say what was compared, on what."""
    config = json.loads((folder / recipes[0] / "config.json").read_text())
    options, hardware, versions = config["options"], config["hardware"], config["versions"]
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return [
        f"Data {options['data']}, model {options['model']}, global batch {options['global_batch_size']}, seed "
        f"{options['seed']}; {nodes} node(s) of {processes} process(es) on one machine.",
        f"{hardware['cpus']} CPU cores ({hardware['machine']}), {gpus}; Python {versions['python']}, torch "
        f"{versions['torch']}.",
        "Samples per second leave out each run's first step and its evaluations. Peak memory is that of rank 0. "
        "Bytes are those of the machine's network interfaces while training, loopback included; shared memory and "
        "NVLink are not in them.",
        f"The largest loss difference is relative to {recipes[0]}, over the first {steps} steps: rounding grows "
        "with the steps, whatever the recipe.",
    ]


def next_folder(kind: str = "compare", runs: Path = ROOT / "runs") -> Path:
    """Make runs/compare-001, or the next free number."""
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while (runs / f"{kind}-{number:03d}").exists():
        number += 1
    folder = runs / f"{kind}-{number:03d}"
    folder.mkdir()
    return folder


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the tool's own arguments; what follows -- is the recipes'."""
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog="python -m scripts.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--nodes", default="1")
    parser.add_argument("--nproc-per-node", default="1")
    parser.add_argument("--steps", type=int, default=50, help="steps over which loss curves are compared")
    args = parser.parse_args(own)
    args.options = list(options)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, compare, write; return 0, or the status of the first recipe that failed."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if not args.recipes:
        refuse('RECIPES is empty; for example RECIPES="single ddp"')
    recipes = [check_recipe(name) for name in dict.fromkeys(args.recipes)]
    nodes, processes = count("NODES", args.nodes), count("NPROC_PER_NODE", args.nproc_per_node or "1")
    for word in args.options:
        if word.split("=")[0] in ("--name", "--runs-dir", "--resume"):
            refuse(f"{word.split('=')[0]} is set by compare itself; leave it out of ARGS")
    folder = next_folder()
    for recipe in recipes:
        alone = recipe in ONE_PROCESS
        print(f"--- {recipe}", flush=True)
        command = [sys.executable, "-m", "scripts.local", recipe]
        command += ["--nodes", "1" if alone else str(nodes), "--nproc-per-node", "1" if alone else str(processes)]
        command += ["--", "--runs-dir", str(folder), "--name", recipe, *args.options]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status:
            print(f"error: {recipe} ended with status {status}; its record is in {folder}", file=sys.stderr)
            return USAGE_STATUS if status == USAGE_STATUS else 1
    runs = [read_run(folder / recipe) for recipe in recipes]
    for run in runs:
        run["difference"] = difference(run["losses"], runs[0]["losses"], args.steps)
    rows, notes = table(runs), notes_of(folder, recipes, nodes, processes, args.steps)
    (folder / "table.md").write_text(markdown(rows) + "\n" + "\n".join(notes) + "\n")
    plot(runs, folder / "compare.png")
    (folder / "compare.html").write_text(page("Recipes side by side", notes, rows, folder / "compare.png"))
    print(markdown(rows))
    print(f"wrote {folder.relative_to(ROOT)}/table.md, compare.png and compare.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
