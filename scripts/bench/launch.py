"""How long it takes from `make run` to the first step, compared with a bare torchrun of one step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, ratio, take_turns
from scripts.bench.programs import contender_command, running, threads

PROCESSES = 2


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure `make run` of ddp with two processes, up to its first logged step."""
    numbers = itertools.count(1)

    def ours() -> float:
        name = f"launch-{next(numbers)}"
        options = f"--device cpu --max-steps 2 --log-every 1 --no-tensorboard --runs-dir {folder} --name {name}"
        metrics = folder / name / "metrics.jsonl"
        command = ["make", "--silent", "run", "RECIPE=ddp", f"NPROC_PER_NODE={PROCESSES}", f"ARGS={options}"]
        return _seconds(command, lambda: metrics.exists() and "loss" in metrics.read_text())

    def bare() -> float:
        done = folder / f"done-{next(numbers)}"
        return _seconds(contender_command("first_step", [str(done)], PROCESSES), done.exists)

    values = take_turns({"ours": ours, "bare": bare}, rounds, warm_up=True)
    note = f"{median(values['ours']):.2f} s against {median(values['bare']):.2f} s, {PROCESSES} processes"
    peer = "torchrun of a script that imports torch"
    name = "make run RECIPE=ddp: time to the first step"
    return [Figure(name, *ratio(values, "ours", "bare"), "<= 1.3", peer, note, is_limit=True)]


def _seconds(command: Sequence[str], is_reached: Callable[[], bool]) -> float:
    """Return the seconds from a command's start to its first step, after waiting for its end."""
    begin = time.perf_counter()
    with running(command, is_reached, threads(PROCESSES), pause_s=0.005):
        return time.perf_counter() - begin
