"""One fault in one job: plant it, wait for the job's end, restart the job if that is due, and measure."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scripts.drill import faults
from scripts.drill.faults import ERROR, FAULTS, RIDES, ROUNDS, STAYS, STOPPED, Fault, NotSurvivedError, expect
from scripts.drill.job import Job, Steps
from scripts.lab.network import Network
from scripts.launch.runs import differences, read_losses

CHECKPOINT_INTERVAL = 20
"""Steps between two checkpoints."""

END_BOUND_S = 15.0
"""A fault that ends the job has to end it on every node within this time."""

ELASTIC_NOTICE_S, ELASTIC_STEP_S = 10.0, 30.0
"""An elastic job has to notice a fault within the first time, and to do a new step within the second."""

JOB_TIMEOUT_S = 300.0
"""Time limit for a job to begin, and for the undisturbed rest of a job to end."""

TRIAL_ERRORS = (OSError, ValueError, LookupError, RuntimeError, subprocess.SubprocessError, psutil.Error)

RESTARTS = 3
"""Number of times that a job may be restarted after one fault."""


@dataclass(frozen=True)
class Setting:
    """The settings that all trials of a drill share."""

    nodes: int
    seed: int
    steps: int
    folder: Path
    network: Network | None

    def launch(self, fault: Fault, run: Path, log: Path, *more: str, is_elastic: bool = False, **env: str) -> Job:
        """Start a fault's job, with a low learning rate, so that rounding errors do not grow with the steps."""
        words = ["--nodes", str(self.nodes), "--nproc-per-node", "1"]
        if self.network:
            words += ["--networks", self.network.option()]
        if is_elastic:
            words += ["--min-nodes", str(max(1, self.nodes - 1)), "--max-restarts", "4"]
        words += ["--", "--runs-dir", str(run.parent), "--name", run.name]
        options = f"--model {fault.model} --seed {self.seed} --max-steps {self.steps} --epochs 100000 --lr 0.001"
        options += f" --checkpoint-every {CHECKPOINT_INTERVAL} --log-every 1 --deterministic --no-tensorboard"
        options += " --device cpu"
        words += options.split()
        if fault.recipe == "fsdp":
            words.append("--sharded-checkpoints")
        return Job(fault.recipe, [*words, *more], log, env)


@dataclass
class Figures:
    """The figures of a trial: a row of the table, and an object in the JSON file."""

    fault: str
    victim: str = ""
    at_step: int = 0
    noticed_s: float | None = None
    """From the fault to the end of the job on all nodes, or of the round; None if the job continues through it."""
    training_again_s: float | None = None
    """From the fault to the next new step; if the job continues through it, the longest pause between steps."""
    steps_lost: int | None = None  # that were done and have to be done again
    weights: str = ""  # "equal" to the undisturbed run's, bit for bit; else the largest difference of a loss
    left_over: list[str] = field(default_factory=list)
    starts: int = 0
    world_sizes: list[int] = field(default_factory=list)
    failure: str = ""  # why the fault was not survived


class Trial:
    """A job with a fault."""

    def __init__(self, setting: Setting, name: str, number: int, reference: Path) -> None:
        self.setting, self.fault, self.reference = setting, FAULTS[name], reference
        self.chance = random.Random(f"{setting.seed} {number} {name}")
        self.folder = setting.folder / f"{number:03d}-{name}"
        self.runs_dir = self.folder / "runs"
        self.runs_dir.mkdir(parents=True)
        self.run_dir = self.runs_dir / "drill"
        self.is_small_disk = name == "disk-full" and setting.network is not None
        self.figures = Figures(name)
        self.repairs: list[Callable[[], object]] = []
        self.planted = 0.0
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
        """Draw a rank and return it with its process; if it has ended, take the nearest running one."""
        drawn, running = self.chance.randrange(self.setting.nodes), self.job.ranks()
        expect(running, "not planted: all ranks had ended")
        rank = min(running, key=lambda rank: abs(rank - drawn))
        return rank, running[rank]

    def launch(self, *more: str) -> None:
        """Start the job."""
        log, words = self.folder / "log.txt", ("--timeout-s", str(self.fault.timeout_s), *more)
        is_elastic = self.fault.is_elastic
        self.job = self.setting.launch(self.fault, self.run_dir, log, *words, is_elastic=is_elastic, **self.env)
        self.figures.starts += 1

    def run(self) -> Figures:
        """Run the trial to its end, and stop and undo everything that it started; return its figures."""
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as undo:
            undo.callback(self._clean_up)
            undo.callback(self.repair)
            try:
                if self.is_small_disk:
                    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(self.runs_dir)]
                    subprocess.run(mount, check=True)
                if self.fault.needs == "cc":
                    self.env = faults.prepare_clock(Path(scratch))
                self.launch()
                undo.callback(lambda: self.job.kill())  # the newest one: a job may be started again
                self.steps = Steps(self.run_dir)
                undo.callback(self.steps.end)
                self._run_fault()
            except NotSurvivedError as error:
                self.figures.failure = str(error)
            except TRIAL_ERRORS as error:
                # For example an unreadable record or checkpoint: the remaining faults are still planted.
                self.figures.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return self.figures

    def repair(self) -> None:
        """Undo the fault's effects on the machine."""
        while self.repairs:
            self.repairs.pop()()

    def _clean_up(self) -> None:
        """Unmount the small disk, and delete the folder of a trial that went well."""
        if self.runs_dir.is_mount():
            subprocess.run(["umount", "--lazy", str(self.runs_dir)], check=True)
        if not self.figures.failure:
            shutil.rmtree(self.folder)

    def _run_fault(self) -> None:
        self._plant()
        waits = {RIDES: self._wait_undisturbed, STAYS: self._wait_undisturbed, ROUNDS: self._wait_for_round}
        status = waits.get(self.fault.then, self._wait_for_end)()
        while status != 0 or not (self.run_dir / "result.json").exists():
            expect(self.figures.starts <= RESTARTS, f"not done after {RESTARTS} restarts (status {status})")
            status = self._restart()
        self._compare()

    def _plant(self) -> None:
        """Wait until the job reaches a random step, and plant the fault."""
        step = self.chance.randrange(2 * CHECKPOINT_INTERVAL + 1, self.setting.steps // 2)
        has_come = self.job.wait_for(lambda: self.steps.last() >= step, JOB_TIMEOUT_S)
        expect(has_come, f"the job did not reach step {step} (status {self.job.process.poll()})")
        self.figures.at_step, self.planted = self.steps.last(), time.monotonic()
        self.lines_before = self.job.text.count("elastic: ")
        self.figures.victim = self.fault.plant(self)

    def _wait_undisturbed(self) -> int:
        """Wait for the end of a job that the fault does not interrupt; return its exit status."""
        self._wait_for_success()
        expect(len(self.launches) == 1, "its ranks were started again, and should have gone on")
        self.figures.training_again_s = self.steps.longest_pause(self.planted)
        self.figures.steps_lost = 0
        return 0

    def _wait_for_round(self) -> int:
        """Wait for an elastic job's next round and for its end; return its exit status."""
        figures, lines = self.figures, self.lines_before
        is_noticed = self.job.wait_for(lambda: self.job.text.count("elastic: ") > lines, ELASTIC_NOTICE_S)
        expect(is_noticed, f"the loss was not noticed within {ELASTIC_NOTICE_S:.0f} s")
        figures.noticed_s = time.monotonic() - self.planted
        before = max(step for _, step in self.steps.seen)
        expect(self.job.wait_for(lambda: len(self.launches) > 1, JOB_TIMEOUT_S), "no second round began")
        self.repair()
        self._count_lost(before, 1)
        begun = time.monotonic()
        self._wait_for_success()
        first = self.steps.first_after(begun, self.launches[1]["step"])
        figures.training_again_s = first - self.planted if first else None
        is_in_time = first and first - self.planted <= ELASTIC_STEP_S
        expect(is_in_time, f"no new step within {ELASTIC_STEP_S:.0f} s")
        return 0

    def _wait_for_end(self) -> int:
        """Wait for the end of a job that the fault interrupts; return its exit status."""
        status = self._end_within(END_BOUND_S, "the job")
        self.figures.noticed_s = time.monotonic() - self.planted
        is_error = self.fault.then == ERROR and self.figures.fault != "two"
        expect(status != 0 or not is_error, "ended with status 0 in spite of the fault")
        is_stopped = self.fault.then == STOPPED
        expect(status == 0 or not is_stopped, f"ended with status {status} instead of a checkpoint and 0")
        return status

    def _restart(self) -> int:
        """Restart the job as a scheduler would, and wait for its end; return its exit status."""
        before, again = self.steps.last(), time.monotonic()
        self.repair()
        self.launch("--resume", "auto")
        has_begun = self.job.wait_for(lambda: len(self.launches) >= self.figures.starts, JOB_TIMEOUT_S)
        expect(has_begun, f"the restart did not begin (status {self.job.process.poll()})")
        self._count_lost(before, -1)
        status = self._end_within(JOB_TIMEOUT_S, "the restarted job")
        first = self.steps.first_after(again + 0.001, self.launches[-1]["step"])
        if self.figures.training_again_s is None and first:
            self.figures.training_again_s = first - self.planted
        return status

    def _wait_for_success(self) -> None:
        """Wait for the end of a job that continues, which has to have status 0."""
        status = self._end_within(JOB_TIMEOUT_S, "the job")
        expect(status == 0, f"ended with status {status}, and should have gone on")

    def _end_within(self, bound_s: float, what: str) -> int:
        status = self.job.wait(bound_s)
        if status is None:
            raise NotSurvivedError(f"{what} did not end within {bound_s:.0f} s")
        self.figures.left_over += self.job.left_over()
        expect(not self.figures.left_over, f"left over: {self.figures.left_over}")
        return status

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The record's entries of all launches so far."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run_dir / "config.json").read_text())["launches"]
        return []

    def _count_lost(self, before: int, launch: int) -> None:
        lost = max(0, before - self.launches[launch]["step"])
        self.figures.steps_lost = max(lost, self.figures.steps_lost or 0)
        bound = self.fault.intervals * CHECKPOINT_INTERVAL
        expect(lost <= bound, f"{lost} steps lost, more than {bound}")

    def _compare(self) -> None:
        """Compare the run with the undisturbed one."""
        self.figures.world_sizes = [launch["world_size"] for launch in self.launches]
        ours, theirs = read_losses(self.run_dir), read_losses(self.reference)
        difference = largest_difference(ours, theirs)
        is_equal = ours == theirs and equal_weights(self.run_dir, self.reference)
        self.figures.weights = "equal" if is_equal else f"{difference:.1e}"
        is_close = self.fault.then == ROUNDS and difference <= 1e-5
        expect(is_equal or is_close, f"weights differ; losses by {difference:.1e}")


def largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return the largest relative difference of a loss, or infinity if a step is missing."""
    return max(differences(ours, theirs).values()) if ours.keys() == theirs.keys() else float("inf")


def equal_weights(run: Path, other: Path) -> bool:
    """Return whether two runs' newest checkpoints have the same position, model and optimizer, bit for bit."""
    import torch  # takes a second or two, which a refusal need not wait for

    from recipes.common.checkpoint.reading import read_checkpoint
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
