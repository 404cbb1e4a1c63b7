"""How long it takes from `make run` to the first step, over a bare torchrun that imports torch and does one."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, ratio, take_turns
from scripts.bench.programs import TIMEOUT_S, process_group, threads

PROCESSES = 2


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure `make run` of ddp with two processes, up to its first logged step."""
    numbers = itertools.count(1)

    def ours() -> float:
        name = f"launch-{next(numbers)}"
        options = f"--device cpu --max-steps 2 --log-every 1 --no-tensorboard --runs-dir {folder} --name {name}"
        command = ["make", "--silent", "run", "RECIPE=ddp", f"NPROC_PER_NODE={PROCESSES}", f"ARGS={options}"]
        return _seconds(command, lambda _: "loss" in _text(folder / name / "metrics.jsonl"))

    def bare() -> float:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(PROCESSES), "-m", "scripts.bench.contenders.first_step"]
        return _seconds(command, lambda output: "first step" in _text(output))

    values = take_turns({"ours": ours, "bare": bare}, rounds, warm_up=True)
    note = f"{median(values['ours']):.2f} s against {median(values['bare']):.2f} s, {PROCESSES} processes"
    peer = "torchrun of a script that imports torch"
    name = "make run RECIPE=ddp: time to the first step"
    return [Figure(name, *ratio(values, "ours", "bare"), "<= 1.3", peer, note, is_limit=True)]


def _seconds(command: Sequence[str], is_reached: Callable[[Path], bool]) -> float:
    """Return the seconds from a command's start to its first step, after waiting for its end.

    Raises RuntimeError if it does no step within the time limit, or fails.
    """
    with tempfile.NamedTemporaryFile() as file:
        output = Path(file.name)
        begin = time.perf_counter()
        with process_group(command, threads(PROCESSES), file.file) as process:
            while not is_reached(output):
                has_ended = process.poll() is not None
                if (has_ended and not is_reached(output)) or time.perf_counter() > begin + TIMEOUT_S:
                    raise RuntimeError(f"{' '.join(command)} did no step:\n{output.read_text()[-1000:]}")
                time.sleep(0.005)
            seconds = time.perf_counter() - begin
            if process.wait(TIMEOUT_S):
                raise RuntimeError(f"{' '.join(command)} failed:\n{output.read_text()[-1000:]}")
    return seconds


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
