"""Measure speed side by side: the recipes against bare loops, the limits of the machine, and the peers.

    make bench
    make bench PARTS="launch step" ROUNDS=7

Prints goal, measured and peer of every figure, and after each part writes docs/benchmarks/DATE-DEVICE.json
(--output FILE), from which `make report` renders the page. A part that this machine cannot measure says why. Goals
are judged by people. Exit status 0 whatever the figures are; 1: a part failed; 2: bad usage.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from recipes.common.record.facts import hardware, revision
from scripts.bench.figures import Figure, table
from scripts.launch.command import ROOT, CommandParser, check_names, command, count, parse
from scripts.launch.runs import measured_on

PARTS = (
    "small-data",
    "jpeg",
    "remote",
    "step",
    "overlap",
    "scaling",
    "wire",
    "launch",
    "checkpoint",
    "gpu",
    "plan",
)
"""Each is a module of this package with `measure(rounds, folder) -> list[Figure]`."""

PEERS = ("torch", "torchvision", "horovod", "mpi4py", "lightning", "accelerate", "simplejpeg")


def facts(rounds: int) -> dict[str, Any]:
    """Return when, on what and with which versions the figures were measured."""
    here, code = hardware(), revision() or "unknown"
    memory_gb = round(psutil.virtual_memory().total / 2**30)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
        "revision": code[:12] + "-dirty" * code.endswith("-dirty"),
        "hardware": {**here, "cpu": here["cpu"] or here["machine"], "memory_gb": memory_gb},
        "versions": measured_on(*PEERS)["versions"],
    }


def measure(part: str, rounds: int) -> list[Figure]:
    """Measure one part in a folder of its own."""
    module = importlib.import_module(f"scripts.bench.{part.replace('-', '_')}")
    with tempfile.TemporaryDirectory(prefix=f"bench-{part}-") as folder:
        return module.measure(rounds, Path(folder))


def write(figures: Sequence[Figure], about: dict[str, Any], path: Path) -> None:
    """Write the figures; those of other parts that an earlier run of the same day left there stay."""
    old = json.loads(path.read_text())["figures"] if path.exists() else []
    measured = {figure.part for figure in figures}
    kept = [figure for figure in old if figure["part"] not in measured]
    every = sorted(
        [*kept, *(figure.as_dict() for figure in figures)], key=lambda figure: PARTS.index(figure["part"])
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "figures": every}, indent=2) + "\n")


@command
def main(argv: list[str]) -> int:
    """Measure the parts, print the table, write the file; return the exit status."""
    parser = CommandParser("python -m scripts.bench", (__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (all)")
    parser.add_argument("--rounds", type=count, default=5, help="measured rounds; medians are over them (5)")
    parser.add_argument("--output", type=Path, help="where the figures go (docs/benchmarks/DATE-DEVICE.json)")
    args = parse(parser, argv)
    rounds, about = args.rounds, facts(args.rounds)
    device = "gpu" if torch.cuda.is_available() else "cpu"
    output = args.output or ROOT / "docs" / "benchmarks" / f"{time.strftime('%Y-%m-%d')}-{device}.json"
    figures: list[Figure] = []
    failed = []
    for part in check_names("PARTS", args.parts, PARTS) or PARTS:
        print(f"bench: {part}", flush=True)
        begin = time.monotonic()
        try:
            found = measure(part, rounds)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"error: {part}: {error}", file=sys.stderr, flush=True)
            failed.append(part)
            continue
        figures += found
        write(found, about, output)
        print(f"{table(found)}\n({time.monotonic() - begin:.0f} s)\n", flush=True)
    if figures:
        print(f"{table(figures)}\nwrote {os.path.relpath(output)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
