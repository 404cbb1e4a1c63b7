"""One rank of a job that submitit has started: the recipe with its environment, and the way back into the queue.

slurm/submit.py pickles a `Training` and submits it; submitit calls it in every task, a task for each rank.

A signal before the time limit or a preemption takes two steps. submitit's own handler would pickle and requeue at
once, in the middle of a step, on one rank. Here the recipe has the signal: all ranks vote, leave after the same
step, and main() returns with a checkpoint written. Only then submitit's handler is called, on rank 0. It asks
`checkpoint()` what to submit, which is the same training with `--resume auto`, and has Slurm requeue the job.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from recipes.common.entry import USAGE_STATUS, exit_status
from recipes.common.errors import PortTakenError
from recipes.common.parent import end_with_parent
from recipes.common.signals import Stop

SIGNAL = signal.SIGUSR1
"""The signal for "checkpoint and requeue": the recipes' own, where submitit's default is USR2."""


class Training:
    """Train one run on all ranks of a job; picklable, and submitted again for what is left.

    Args:
        recipe: the recipe's name.
        argv: its options.
        run_dir: runs/NAME, where the record is.
        requeues_left: how often the job may still be put back into the queue.
        is_restart: whether an earlier start of the job may have left a checkpoint.
    """

    def __init__(
        self, recipe: str, argv: list[str], run_dir: Path, requeues_left: int, is_restart: bool = False
    ) -> None:
        self.recipe, self.argv, self.run_dir = recipe, argv, run_dir
        self.requeues_left, self.is_restart = requeues_left, is_restart

    def __call__(self) -> dict[str, Any] | None:
        """Train; return the content of result.json on rank 0 (None where there is none, and on other ranks).

        A refusal, or a run that was stopped before its end and is not requeued, ends the process with a status.
        """
        # The recipe is about to put its own handler in the place of submitit's.
        requeue: Any = signal.getsignal(SIGNAL)
        set_environment()
        argv, before = self.argv_of_this_start(), self.stamp()
        module = importlib.import_module(f"recipes.{self.recipe}.train")
        status = exit_status(lambda: module.main(argv))
        if os.environ["RANK"] == "0":
            return self.end(status, is_complete=self.stamp() != before, requeue=requeue)
        if status:
            sys.exit(status)
        return None  # what comes of the job is rank 0's to decide

    def end(self, status: int, is_complete: bool, requeue: Any) -> dict[str, Any] | None:
        """End rank 0 once main() has returned: with a result, with a status, or by a new place in the queue."""
        if status == PortTakenError.status and self.requeues_left and "SLURM_JOB_ID" in os.environ:
            requeue(SIGNAL, None)  # each start of the job has another port
        if status:
            self.leave(status)
        if not (self.run_dir / "config.json").exists():
            return None  # the probe keeps no record
        if not is_complete:
            if Stop.received == SIGNAL or is_preempted():
                if self.requeues_left:
                    requeue(SIGNAL, None)
                print("error: the job was stopped before its end, and --max-requeues allows no more", flush=True)
            self.leave(1)  # after TERM: from scancel, or from Slurm that puts the job back by itself
        result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return result

    def checkpoint(self) -> Any:
        """Return what submitit shall run when the job starts again."""
        import submitit

        rest = Training(self.recipe, self.argv, self.run_dir, self.requeues_left - 1, is_restart=True)
        return submitit.helpers.DelayedSubmission(rest)

    def argv_of_this_start(self) -> list[str]:
        """Return the options: a job that begins again goes on with its own record, whatever it began from."""
        is_restart = self.is_restart or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        is_begun = (self.run_dir / "config.json").exists()
        return [*self.argv, "--resume", "auto"] if is_restart and is_begun else self.argv

    def stamp(self) -> tuple[int, int] | None:
        """Return what tells result.json from an earlier one, None where there is none."""
        path = self.run_dir / "result.json"
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None

    def leave(self, status: int) -> NoReturn:
        """End rank 0 with a status, and leave it beside the logs: Slurm may report another rank's."""
        import submitit

        status_path(submitit.JobEnvironment().paths.submitted_pickle).write_text(str(status))
        sys.exit(status)


def status_path(submitted: Path) -> Path:
    """Return the file in which rank 0 of a job leaves its exit status, from that of the job's pickle."""
    return submitted.with_name(submitted.name.replace("_submitted.pkl", "_status"))


def set_environment() -> None:
    """Tell this rank who it is, where rank 0 is, and by which network."""
    import submitit

    # Without set_cuda_visible_devices=False each rank would see one GPU and still be told LOCAL_RANK 1, 2, ...:
    # recipes take the GPU of their local rank among those that the node has for the job. MASTER_PORT is kept as it
    # is: the job's script has chosen it anew for this start, where submitit's own would be the same at each.
    # overwrite: ranks of a launcher around `sbatch` may show through.
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    if submitit.JobEnvironment().cluster == "local":
        end_with_parent()
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.update(network_environment())


def network_environment() -> dict[str, str]:
    """Return the environment that scripts/fabric.sh makes of this node's; end with its status where it refuses."""
    # Slurm binds a task to its own cores where --cpus-per-task says how many; elsewhere a node's tasks share them.
    sharing = "1" if "SLURM_CPUS_PER_TASK" in os.environ else os.environ["LOCAL_WORLD_SIZE"]
    defaults = {"FABRIC": "auto", "TASK_PROCESSES": sharing}
    done = subprocess.run(
        ["bash", "-c", "source scripts/fabric.sh >&2 && env -0"],
        env={**defaults, **os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    if done.returncode:
        sys.exit(USAGE_STATUS)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def is_preempted() -> bool:
    """Whether Slurm takes the nodes for another job (which it may announce by TERM, as it does a scancel)."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return False
    command = ["scontrol", "show", "job", job, "--oneliner"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return "PreemptTime=" in shown and "PreemptTime=None" not in shown
