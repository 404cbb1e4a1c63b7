"""Measure speed side by side: the recipes against bare loops, the limits of the machine, and the peers.

    make bench
    make bench PARTS="launch step" ROUNDS=3

Prints the goal, the measured value and the peer of every figure, and writes each as soon as it is measured to
docs/benchmarks/DATE-DEVICE.json (--output FILE), from which `make report` renders the page. A part that this
machine cannot measure reports why. A missed goal is not an error: people judge it.
Exit status 0 whatever the figures are; 1: a part failed; 2: bad usage.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from recipes.common.errors import UserError
from recipes.common.folders import replace_text
from recipes.common.record.provenance import hardware, versions
from scripts.bench.claims import FIGURES, revision
from scripts.bench.figures import PARTS, Figure, table
from scripts.bench.namespaces import measure
from scripts.bench.report import read_run
from scripts.launch.command import CommandParser, check_names, command, count, make_folder, parse
from scripts.launch.runs import measured_on

PEERS = ("torch", "torchvision", "horovod", "mpi4py", "lightning", "accelerate", "simplejpeg")


def facts() -> dict[str, Any]:
    """Return the facts of a measurement made now: date, hardware and versions."""
    here = hardware()
    memory_gb = round(psutil.virtual_memory().total / 2**30)
    of_gpus = {name: versions()[name] for name in ("cuda", "nccl", "driver")} if here["gpus"] else {}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {**here, "cpu": here["cpu"] or here["machine"], "memory_gb": memory_gb},
        "versions": {**measured_on(*PEERS)["versions"], **{name: of for name, of in of_gpus.items() if of}},
    }


def read_output(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Read an earlier run's output, if any; raises UserError if it is of another day, machine or version."""
    if not path.exists():
        return {"figures": [], "parts": {}}
    old = read_run(path).facts
    if any(old[key] != about[key] for key in ("date", "hardware", "versions")):
        raise UserError(f"{path} is of another day, machine or version; give another --output FILE, or remove it")
    return old


def write(
    part: str, figures: Sequence[Figure], rounds: int, about: dict[str, Any], path: Path, is_complete: bool = False
) -> None:
    """Write a part's figures to the file; keep those of other parts from an earlier run of the same day.

    Figures of a part that is not complete replace no larger number of them from an earlier run.
    """
    old = read_output(path, about)
    if not is_complete and len(figures) < sum(row["part"] == part for row in old["figures"]):
        return
    rows = [row for row in old["figures"] if row["part"] != part] + [figure.as_dict() for figure in figures]
    measured = {"rounds": rounds, "revision": revision()}
    parts = {**old["parts"], part: measured}
    rows.sort(key=lambda row: [*PARTS, row["part"]].index(row["part"]))
    replace_text(path, json.dumps({**old, **about, "parts": parts, "figures": rows}, indent=2) + "\n")


@command
def main(argv: list[str]) -> int:
    """Measure the parts, print the table and write the file; return 1 if a part failed, else 0."""
    parser = CommandParser("python -m scripts.bench", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (all)")
    parser.add_argument("--rounds", type=count, default=5, help="most rounds of a part; medians are over them")
    parser.add_argument("--output", type=Path, help="where the figures go (docs/benchmarks/DATE-DEVICE.json)")
    args = parse(parser, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the running command, as Ctrl-C does
    parts, about = check_names("PARTS", args.parts, list(PARTS)) or PARTS, facts()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    output = args.output or FIGURES / f"{time.strftime('%Y-%m-%d')}-{device}.json"
    read_output(output, about)  # refuse before the work, not after it
    make_folder(output.parent)
    figures: list[Figure] = []
    failed = []
    for part in parts:
        rounds = min(args.rounds, PARTS[part])
        print(f"bench: {part}, {rounds} round{'s' * (rounds > 1)}", flush=True)
        begin, found = time.monotonic(), list[Figure]()
        try:
            for figure in measure(part, rounds):
                found.append(figure)
                write(part, found, rounds, about, output)  # each at once: the next one may never come
            write(part, found, rounds, about, output, is_complete=True)
        except (ImportError, LookupError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            # A failure of one part must not lose the others, which may take hours.
            print(f"error: {part}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed.append(part)
        finally:  # also after Ctrl-C
            if found:
                figures += found
                print(f"{table(found)}\n({time.monotonic() - begin:.0f} s)\n", flush=True)
    if figures:
        print(f"{table(figures)}\nwrote {os.path.relpath(output)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
