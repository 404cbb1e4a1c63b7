"""One rank of a job that submitit has started: the recipe with its environment, and the way back into the queue.

slurm/submit.py pickles a `Training` and submits it; submitit calls it in every task, a task for each rank.

A signal before the time limit or a preemption takes two steps. submitit's own handler would requeue at once, in
the middle of a step, on one rank. Here the recipe has the signal: all ranks vote, leave after the same step, and
main() returns with a checkpoint written. Only then rank 0 has Slurm requeue the job, to go on by --resume auto.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from recipes.common.errors import PortTakenError, UserError
from recipes.common.process.entry import exit_status
from recipes.common.process.parent import LAUNCHER_PID
from recipes.common.process.signals import Stop
from scripts.launch.fabric import fabric_environment
from scripts.launch.stopped_status import CLOCKS_S, run

SIGNAL = signal.SIGUSR1
"""The signal for "checkpoint and requeue": the recipes' own, where submitit's default is USR2."""


class Training:
    """Train one run on all ranks of a job; picklable.

    Args:
        recipe: the recipe's name.
        argv: its options.
        run_dir: runs/NAME, where the record is.
        max_requeues: how often the job may be put back into the queue.
        script: the variables of a script that runs in the recipe's place (scripts/launch/script.py).
    """

    def __init__(
        self,
        recipe: str,
        argv: list[str],
        run_dir: Path,
        max_requeues: int,
        script: dict[str, str] | None = None,
    ) -> None:
        self.recipe, self.argv, self.run_dir, self.max_requeues = recipe, argv, run_dir, max_requeues
        self.script = script

    def __call__(self) -> None:
        """Train; a refusal, or a run that was stopped before its end, ends the process with a status."""
        if status := self.run_script(self.script) if self.script else self.train():
            sys.exit(status)

    def train(self) -> int:
        """Run this rank of the recipe; return its status, or put the job back into the queue and exit."""
        before = self.stamp()

        def train() -> None:
            set_environment()
            importlib.import_module(f"recipes.{self.recipe}.train").main(self.argv_of_this_start())

        status = exit_status(train)
        if os.environ["RANK"] == "0":  # what comes of the job is rank 0's to decide
            status = self.end(status, is_complete=self.stamp() != before)
        return status

    def run_script(self, script: dict[str, str]) -> int:
        """Run this rank of a script in a process of its own, and end as docs/your-own.md says."""
        begin = time.time() - CLOCKS_S
        try:
            set_environment()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.status
        env = {**os.environ, **script, LAUNCHER_PID: str(os.getpid())}
        if restarts():
            env["RESUME"] = "auto"
        status, received = run([sys.executable, "-m", "scripts.launch.script", script["SCRIPT"], *self.argv], env)
        if os.environ["RANK"] != "0":
            return 0 if received else status
        is_time_up = SIGNAL in received and not is_preempted()
        if is_time_up and not has_written(self.run_dir, begin):
            print(
                f"error: the job's time is up, and it has written nothing to {self.run_dir} since its start, so "
                "that it is not requeued; write checkpoints to RUN_DIR, or give it more TIME",
                flush=True,
            )
            is_time_up = False
        return self.requeue_or_leave(status, bool(received), is_time_up)

    def end(self, status: int, is_complete: bool) -> int:
        """Return rank 0's status once main() has returned, or put the job back into the queue and exit."""
        is_stopped = not (status or is_complete) and (self.run_dir / "config.json").exists()  # the probe has none
        return self.requeue_or_leave(status, is_stopped, Stop.received == SIGNAL)

    def requeue_or_leave(self, status: int, is_stopped: bool, is_time_up: bool) -> int:
        """Return rank 0's status, or put the job back into the queue and exit.

        The status is left beside the logs: Slurm may report another rank's.
        """
        import submitit

        left = self.max_requeues - restarts()
        is_requeued = status == PortTakenError.status  # each start of the job has another port
        if is_stopped:  # else, after TERM: by scancel, or by Slurm, which puts the job back by itself
            is_requeued, status = is_time_up or is_preempted(), 1
        if is_requeued and left > 0:
            subprocess.run(["scontrol", "requeue", job_id()], check=True, timeout=60)
            sys.exit(255)
        if is_stopped and is_requeued:
            print("error: the job was stopped before its end, and --max-requeues allows no more", flush=True)
        status_path(submitit.JobEnvironment().paths.submitted_pickle).write_text(str(status))
        return status

    def argv_of_this_start(self) -> list[str]:
        """Return the options: a job that begins again goes on with its own record, whatever it began from."""
        is_begun = (self.run_dir / "config.json").exists()
        return [*self.argv, "--resume", "auto"] if restarts() and is_begun else self.argv

    def stamp(self) -> tuple[int, int] | None:
        """Return what tells result.json from an earlier one, None where there is none."""
        path = self.run_dir / "result.json"
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def job_id() -> str:
    """Return this job, as 101_3 in an array: the array's last task has the number of the whole array to itself."""
    import submitit

    return str(submitit.JobEnvironment().job_id)


def restarts() -> int:
    """Return how often Slurm has put this job back into the queue, for whatever reason."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def has_written(run_dir: Path, begin: float) -> bool:
    """Whether there is a file in a run's folder, beside the launcher's logs, that is newer than a time."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and run_dir / "slurm" not in path.parents)
    return any(path.stat().st_mtime >= begin for path in files)


def status_path(submitted: Path) -> Path:
    """Return the file in which rank 0 of a job leaves its exit status, from that of the job's pickle."""
    return submitted.with_name(submitted.name.replace("_submitted.pkl", "_status"))


def set_environment() -> None:
    """Tell this rank who it is, where rank 0 is, and by which network; raises fabric.sh's UserError."""
    import submitit

    # Without set_cuda_visible_devices=False each rank would see one GPU and still be told LOCAL_RANK 1, 2, ...:
    # recipes take the GPU of their local rank among those that the node has for the job. MASTER_PORT is kept as it
    # is: the job's script has chosen it anew for this start, where submitit's own would be the same at each.
    # overwrite: ranks of a launcher around `sbatch` may show through.
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    # Slurm binds a task to its own cores where --cpus-per-task says how many; elsewhere a node's tasks share them.
    sharing = "1" if "SLURM_CPUS_PER_TASK" in os.environ else os.environ["LOCAL_WORLD_SIZE"]
    environment, said = fabric_environment(FABRIC="auto", TASK_PROCESSES=sharing)
    print(said, end="", file=sys.stderr, flush=True)
    os.environ.update(environment)


def is_preempted() -> bool:
    """Whether Slurm takes the nodes for another job (which it may announce by TERM, as it does a scancel)."""
    command = ["scontrol", "show", "job", job_id(), "--oneliner"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return "PreemptTime=" in shown and "PreemptTime=None" not in shown
