"""What a recipe adds to a step: its time divided by the time of a bare forward, backward and step."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, process_count_text, ratio, take_turns
from scripts.bench.programs import contender, recipe

BATCH, STEPS = 2, 50
"""A step takes about 60 ms on two cores. In longer steps, a recipe's overhead would be lost in the noise."""


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure `single` against a bare loop, and `ddp` with two processes against bare DDP."""
    return [_overhead(rounds, folder, name, processes) for name, processes in (("single", 1), ("ddp", 2))]


def _overhead(rounds: int, folder: Path, name: str, processes: int) -> Figure:
    data = f"--model resnet18 --data synthetic --image-size 16 --num-samples 1024 --global-batch-size {BATCH}"
    options = f"{data} --seed 1 --lr 0.001 --device cpu --epochs 1000 --max-steps".split()

    def ours() -> float:
        # samples_per_s leaves out the first step and the work at the end of each epoch.
        result = recipe(name, folder, [*options, str(STEPS + 1)], processes=processes)
        return 1000 * BATCH / result["samples_per_s"]

    def bare() -> float:
        return contender("bare_step", ["--steps", str(STEPS), "--", *options, str(STEPS)], processes)["step_ms"]

    values = take_turns({"ours": ours, "bare": bare}, rounds)
    times = f"{median(values['ours']):.1f} ms against {median(values['bare']):.1f} ms"
    what = f"{name}, {process_count_text(processes)}: time of a step"
    peer = "bare forward + backward + step" + (" under DDP" if processes > 1 else "")
    note = f"{times} (resnet18, batch {BATCH})"
    return Figure(what, *ratio(values, "ours", "bare"), "<= 1.02", peer, note, is_limit=True)
