"""Scaling at equal threads: samples/s of the ddp recipe with 1, 2 and 4 processes of one thread each.

    python -m scripts.bench scaling

Each process is a node with a network of its own (scripts/lab/network.py, as root on Linux), its links without a
limit, and has as many samples of a batch as the others. The limit is as many processes, at once on the same cores,
that compute the same and exchange nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.bench.figures import Figure, of, speed_figure, take_turns, unmeasured
from scripts.bench.programs import in_namespaces, run
from scripts.lab import network
from scripts.launch.runs import read_metrics

PROCESSES = (1, 2, 4)
RANK_BATCH, STEPS, LOG_EVERY = 16, 12, 4
MOST_ROUNDS = 3
"""A round takes a minute and a half."""

TIMEOUT_S = 600


def options(processes: int) -> list[str]:
    """Return the options of a recipe; resnet18 on images of 32x32 computes for longer than it exchanges."""
    words = ["--model", "resnet18", "--data", "synthetic", "--image-size", "32", "--num-samples", "1024"]
    words += ["--global-batch-size", str(RANK_BATCH * processes), "--lr", "0.001", "--device", "cpu"]
    return [*words, "--max-steps", str(STEPS), "--log-every", str(LOG_EVERY)]


def ours(net: network.Network, folder: Path, processes: int) -> float:
    """Run the recipe; return its samples/s after the first logged steps."""
    command = [sys.executable, "-m", "scripts.launch.local", "ddp", "--nodes", str(processes)]
    command += ["--nproc-per-node", "1", "--networks", net.option(), "--", *options(processes), "--no-tensorboard"]
    run([*command, "--runs-dir", str(folder), "--name", "run", "--overwrite"], {"OMP_NUM_THREADS": "1"}, TIMEOUT_S)
    logged = [line["samples_per_s"] for line in read_metrics(folder / "run") if "loss" in line]
    return sum(logged[1:]) / len(logged[1:])


def alone(net: network.Network, processes: int) -> float:
    """Run as many bare loops at once; return the samples/s of all."""
    command = [sys.executable, "-m", "scripts.bench.contenders.bare_step", "--alone", "--steps", str(STEPS), "--"]
    said = net.run_ranks([*command, *options(processes)], processes, 1, TIMEOUT_S)
    found = next(line for line in reversed(said[0].splitlines()) if line.startswith("{"))
    return 1000 * RANK_BATCH * processes / json.loads(found)["step_ms"]


def figures(rounds: int, folder: Path) -> list[Figure]:
    """Measure in turns; call it within namespaces of its own."""
    net = network.Network(max(PROCESSES))
    contenders: dict[str, Callable[[], float]] = {}
    for count in PROCESSES:
        contenders |= {f"{count}": partial(ours, net, folder, count), f"{count} alone": partial(alone, net, count)}
    values = take_turns(contenders, rounds)
    found = []
    for count in PROCESSES:
        name = f"{of(count)} of a thread each: samples/s"
        peers = {f"{count} alone": "as many bare loops that exchange nothing"}
        peers |= {"1": "one process"} if count > 1 else {}
        found += [
            speed_figure("scaling", name, values, f"{count}", against, "", peer, is_limit=against != "1")
            for against, peer in peers.items()
        ]
    return found


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Return the figures of this part; the work is done by a process in namespaces of its own."""
    if reason := network.why_not():
        return [unmeasured("scaling", f"{of(max(PROCESSES))} of a thread each: samples/s", reason)]
    found = in_namespaces("scripts.bench.scaling", min(rounds, MOST_ROUNDS), folder / "scaling.json")
    return [Figure(**row) for row in found]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in namespaces of this process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.scaling")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args(words)
    network.enter("scripts.bench.scaling", words)
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        args.result.write_text(json.dumps([vars(each) for each in figures(args.rounds, Path(folder))]))


if __name__ == "__main__":
    main()
