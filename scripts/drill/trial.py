"""One fault in one job: plant it, see the job to its end, start it again where that is due, take the figures."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scripts.drill.faults import ERROR, RIDES, ROUNDS, STOPPED, Fault, NotPlantedError, build_clock
from scripts.drill.job import Job, Steps, environment_of
from scripts.lab.network import Network
from scripts.launch.runs import differences, read_losses

NOTICE_S = 15.0
"""A fault that ends the job has to end it on every node within this."""

ELASTIC_NOTICE_S, ELASTIC_STEP_S = 10.0, 30.0
"""An elastic job has to notice a fault within the first, and to have done a new step within the second."""

START_S = 300.0
"""How long a job may take to begin, and an undisturbed rest of it to end."""

TROUBLE = (OSError, ValueError, LookupError, RuntimeError, subprocess.SubprocessError, psutil.Error)

RESTARTS = 3
"""How often a job may be started again after one fault."""


@dataclass(frozen=True)
class Setting:
    """What all trials of a drill share."""

    nodes: int
    seed: int
    steps: int
    interval: int
    folder: Path
    network: Network | None

    def options(self, fault: Fault, runs_dir: Path, name: str, timeout_s: float) -> list[str]:
        """Return the options of a fault's job: gentle steps, so that rounding does not grow with them."""
        words = {
            "--runs-dir": runs_dir,
            "--name": name,
            "--model": fault.model,
            "--seed": self.seed,
            "--max-steps": self.steps,
            "--epochs": 100000,
            "--lr": 0.001,
            "--checkpoint-every": self.interval,
            "--log-every": 1,
            "--timeout-s": timeout_s,
            "--device": "cpu",
        }
        pairs = [str(word) for pair in words.items() for word in pair]
        return [*pairs, "--deterministic", "--no-tensorboard", *fault.options]

    def launch(self, recipe: str, options: list[str], log: Path, is_elastic: bool, env: dict[str, str]) -> Job:
        """Start a job."""
        words = ["--nodes", str(self.nodes), "--nproc-per-node", "1"]
        if self.network:
            words += ["--networks", self.network.option()]
        if is_elastic:
            words += ["--min-nodes", str(max(1, self.nodes - 1)), "--max-restarts", "4"]
        return Job(recipe, words, options, log, env)


@dataclass
class Figures:
    """What a trial gives: a row of the table, an object of the JSON."""

    fault: str
    victim: str = ""
    at_step: int = 0
    noticed_s: float | None = None
    """From the fault to the end of the job on all nodes, or of the round; None where it rides the fault out."""
    training_again_s: float | None = None
    """From the fault to the next new step; where it rides the fault out, the longest pause between two steps."""
    steps_lost: int | None = None
    """Done, and to be done again."""
    weights: str = ""
    """equal: bit for bit those of the undisturbed run; else the largest relative difference of a loss."""
    left_over: list[str] = field(default_factory=list)
    starts: int = 0
    world_sizes: list[int] = field(default_factory=list)
    failure: str = ""
    """Why the fault was not survived."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with whether the fault was survived."""
        return {**asdict(self), "survived": not self.failure}


class NotSurvivedError(Exception):
    """The job did not do what it has to; the message says what."""


class Trial:
    """A job with a fault."""

    def __init__(self, setting: Setting, fault: Fault, number: int, reference: Path) -> None:
        self.setting, self.fault, self.reference = setting, fault, reference
        self.chance = random.Random(f"{setting.seed} {number} {fault.name}")
        self.folder = setting.folder / f"{number:03d}-{fault.name}"
        self.folder.mkdir()
        self.runs_dir = self.folder / "runs"
        self.runs_dir.mkdir()
        self.run_dir = self.runs_dir / "drill"
        self.is_small_disk = fault.name == "disk-full" and setting.network is not None
        self.figures = Figures(fault.name)
        self.repairs: list[Callable[[], object]] = []
        self.planted = 0.0
        self.clock = self.folder / "clock"
        self.env: dict[str, str] = {}
        self.job: Job

    @property
    def network(self) -> Network:
        """The nodes' networks, for faults that need them."""
        assert self.setting.network
        return self.setting.network

    def pick_node(self) -> int:
        """Draw a node."""
        return self.chance.randrange(self.setting.nodes)

    def pick_rank(self) -> tuple[int, psutil.Process]:
        """Draw a rank, the nearest one where it has ended."""
        drawn = self.chance.randrange(self.setting.nodes)
        running = {int(environment_of(process).get("RANK", -1)): process for process in self.job.ranks()}
        if not running:
            raise NotPlantedError("all ranks had ended")
        rank = min(running, key=lambda rank: abs(rank - drawn))
        return rank, running[rank]

    def launch(self, *more: str) -> None:
        """Start the job."""
        fault, log = self.fault, self.folder / "log.txt"
        options = [*self.setting.options(fault, self.runs_dir, "drill", fault.timeout_s), *more]
        self.job = self.setting.launch(fault.recipe, options, log, fault.then == ROUNDS, self.env)
        self.figures.starts += 1

    def run(self) -> Figures:
        """Run the trial to its end; nothing of it is left then."""
        if self.is_small_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(self.runs_dir)], check=True)
        with tempfile.TemporaryDirectory() as scratch:
            if self.fault.needs == "cc":
                self.clock.write_bytes(struct.pack("512d", *[0.0] * 512))
                self.env = {"LD_PRELOAD": build_clock(scratch), "DRILL_CLOCK": str(self.clock.resolve())}
            self.launch()
            self.steps = Steps(self.run_dir)
            try:
                self._go_through()
            except NotSurvivedError as error:
                self.figures.failure = str(error)
            except NotPlantedError as error:
                self.figures.failure = f"not planted: {error}"
            except TROUBLE as error:
                # A record or checkpoint that cannot be read, say: the faults after this one are still planted.
                self.figures.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            finally:
                self.job.kill()
                self.steps.end()
                self.repair()
        return self.figures

    def _go_through(self) -> None:
        self._plant()
        status = self._first_end()
        while status != 0 or not (self.run_dir / "result.json").exists():
            if self.figures.starts > RESTARTS:
                raise NotSurvivedError(f"not done after {RESTARTS} restarts (status {status})")
            before = self.steps.last()
            self.repair()
            again = time.monotonic()
            self.launch("--resume", "auto")
            if not self.job.wait_for(lambda: len(self.launches) > self.figures.starts - 1, START_S):
                raise NotSurvivedError(f"the restart did not begin (status {self.job.process.poll()})")
            self._count_lost(before, -1)
            status = self._end_within(START_S, "the restarted job")
            first = self.steps.first_after(again + 0.001, self.launches[-1]["step"])
            if self.figures.training_again_s is None and first:
                self.figures.training_again_s = first - self.planted
        self._compare()

    def _plant(self) -> None:
        """Let the job come to a drawn step, and plant the fault."""
        interval = self.setting.interval
        step = self.chance.randrange(2 * interval + 1, self.setting.steps // 2)
        if not self.job.wait_for(lambda: self.steps.last() >= step, START_S):
            raise NotSurvivedError(f"the job did not come to step {step} (status {self.job.process.poll()})")
        self.figures.at_step, self.planted = self.steps.last(), time.monotonic()
        self.lines_before = self.job.text.count("elastic: ")
        self.figures.victim = self.fault.plant(self)

    def _first_end(self) -> int:
        """Wait for what the fault is to bring about; return the job's exit status."""
        then, figures = self.fault.then, self.figures
        if then == RIDES:
            status = self._end_within(START_S, "the job")
            figures.training_again_s = self.steps.longest_pause(self.planted)
            if status != 0:
                raise NotSurvivedError(f"ended with status {status}, and should have gone on")
            figures.steps_lost = 0
        elif then == ROUNDS:
            is_noticed = lambda: self.job.text.count("elastic: ") > self.lines_before  # noqa: E731
            if not self.job.wait_for(is_noticed, ELASTIC_NOTICE_S):
                raise NotSurvivedError(f"the loss was not noticed within {ELASTIC_NOTICE_S:.0f} s")
            figures.noticed_s = time.monotonic() - self.planted
            at = max(step for seen, step in self.steps.seen if seen < time.monotonic())
            if not self.job.wait_for(lambda: len(self.launches) > 1, START_S):
                raise NotSurvivedError("no second round began")
            self.repair()
            self._count_lost(at, 1)
            begun = time.monotonic()
            status = self._end_within(START_S, "the job")
            first = self.steps.first_after(begun, self.launches[1]["step"])
            figures.training_again_s = first - self.planted if first else None
            if status != 0:
                raise NotSurvivedError(f"ended with status {status}, and should have gone on")
            if figures.training_again_s is None or figures.training_again_s > ELASTIC_STEP_S:
                raise NotSurvivedError(f"no new step within {ELASTIC_STEP_S:.0f} s")
        else:
            status = self._end_within(NOTICE_S, "the job")
            figures.noticed_s = time.monotonic() - self.planted
            if status == 0 and then == ERROR and self.fault.name != "two":
                raise NotSurvivedError("ended with status 0 in spite of the fault")
            if status != 0 and then == STOPPED:
                raise NotSurvivedError(f"ended with status {status} instead of a checkpoint and 0")
        return status

    def _end_within(self, bound_s: float, what: str) -> int:
        status = self.job.wait(bound_s)
        if status is None:
            raise NotSurvivedError(f"{what} did not end within {bound_s:.0f} s")
        self.figures.left_over += self.job.left_over()
        if self.figures.left_over:
            raise NotSurvivedError(f"left over: {self.figures.left_over}")
        return status

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The record's entry of each launch so far."""
        with contextlib.suppress(OSError, ValueError):
            launches: list[dict[str, Any]] = json.loads((self.run_dir / "config.json").read_text())["launches"]
            return launches
        return []

    def _count_lost(self, before: int, launch: int) -> None:
        lost = max(0, before - self.launches[launch]["step"])
        self.figures.steps_lost = max(lost, self.figures.steps_lost or 0)
        bound = self.fault.intervals * self.setting.interval
        if lost > bound:
            raise NotSurvivedError(f"{lost} steps lost, more than {bound}")

    def repair(self) -> None:
        """Undo what the fault has done to the machine."""
        while self.repairs:
            self.repairs.pop()()

    def _compare(self) -> None:
        """Hold the run against the undisturbed one."""
        self.figures.world_sizes = [launch["world_size"] for launch in self.launches]
        ours, theirs = read_losses(self.run_dir), read_losses(self.reference)
        difference = largest_difference(ours, theirs)
        is_equal = ours == theirs and equal_weights(self.run_dir, self.reference)
        self.figures.weights = "equal" if is_equal else f"{difference:.1e}"
        if not is_equal and (self.fault.then != ROUNDS or difference > 1e-5):
            raise NotSurvivedError(f"weights differ; losses by {difference:.1e}")

    def tidy(self) -> None:
        """Delete the record of a trial that went well."""
        if self.is_small_disk:
            subprocess.run(["umount", "--lazy", str(self.runs_dir)], check=True)
        if not self.figures.failure:
            shutil.rmtree(self.folder)


def largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return the largest relative difference of a loss, infinity where a step is missing."""
    return max(differences(ours, theirs).values()) if ours.keys() == theirs.keys() else float("inf")


def equal_weights(run: Path, other: Path) -> bool:
    """Whether two runs' newest checkpoints hold the same model and optimizer, bit for bit."""
    import torch  # a second or two, which a refusal must not cost

    from recipes.common.checkpoint.checkpoint import read_checkpoint
    from recipes.common.checkpoint.shard_files import read_whole

    def is_equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(is_equal, a, b))
        return bool(a == b)

    one, two = (read_whole(read_checkpoint(max(path.glob("checkpoints/step-*.pt")))) for path in (run, other))
    return all(is_equal(one[part], two[part]) for part in ("position", "model", "optimizer"))
