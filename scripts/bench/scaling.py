"""Scaling at equal threads: samples/s of the ddp recipe with 1, 2 and 4 processes of one thread each.

Each process is a node with its own network (scripts/bench/namespaces.py) and unlimited links. The batch per
process is the same at every number of processes. The limit is the same number of processes, at once on the same
cores, that compute the same and exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import harmonic_mean

from scripts.bench.figures import Figure, process_count_text, speed_figure, take_turns
from scripts.bench.programs import bare_step_ms, logged_rates, recipe_command, run
from scripts.lab.network import Network

PROCESSES = (1, 2, 4)
RANK_BATCH, STEPS, LOG_EVERY = 16, 8, 2


def options(processes: int) -> list[str]:
    """Return a recipe's options: resnet18 on images of 32x32, which computes for longer than it exchanges."""
    data = "--model resnet18 --data synthetic --image-size 32 --num-samples 1024"
    steps = f"--global-batch-size {RANK_BATCH * processes} --max-steps {STEPS} --log-every {LOG_EVERY}"
    return f"{data} {steps} --lr 0.001 --device cpu".split()


def ours(net: Network, folder: Path, processes: int) -> float:
    """Run the recipe; return samples/s over its logged windows, without the first LOG_EVERY steps."""
    command = recipe_command("ddp", folder / "run", options(processes), processes, net)
    run(command, {"OMP_NUM_THREADS": "1"})
    return harmonic_mean(logged_rates(folder)[1:])


def alone(net: Network, processes: int) -> float:
    """Run as many bare loops at once; return rank 0's samples/s, times the number of processes."""
    step_ms = bare_step_ms(net, processes, 1, ["--steps", str(STEPS)], options(processes))
    return 1000 * RANK_BATCH * processes / step_ms


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure the recipe and the bare loops in turns, at each number of processes."""
    net = Network(max(PROCESSES))
    contenders: dict[str, Callable[[], float]] = {}
    for processes in PROCESSES:
        contenders[f"{processes}"] = partial(ours, net, folder, processes)
        contenders[f"{processes} alone"] = partial(alone, net, processes)
    values = take_turns(contenders, rounds)
    found = []
    for processes in PROCESSES:
        peers = {f"{processes} alone": "as many bare loops that exchange nothing"}
        peers |= {"1": "one process"} if processes > 1 else {}
        name = f"{process_count_text(processes)} of a thread each: samples/s"
        for against, peer in peers.items():
            found.append(speed_figure(name, values, f"{processes}", against, "", peer, is_limit=against != "1"))
    return found
