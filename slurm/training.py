"""One rank of a job that submitit has started: a recipe, or a script in its place, with its environment.

slurm/submit.py pickles a `Training` and submits it; submitit calls it in every task, a task for each rank.

A signal before the time limit or a preemption takes two steps. submitit's own handler would requeue at once, in
the middle of a step, on one rank. Here the recipe has the signal: all ranks vote, leave after the same step, and
main() returns with a checkpoint written. Rank 0 leaves how it has ended, and once all ranks have, the batch script
decides what becomes of the job: end_submitted of slurm/job.sh, which also asks all nodes for broken GPUs.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

from recipes.common.process.entry import exit_status
from recipes.common.process.parent import LAUNCHER_PID
from recipes.common.process.signals import Stop
from scripts.launch.fabric import fabric_environment
from scripts.launch.processes import run

SIGNAL = signal.SIGUSR1
"""The signal for "checkpoint and requeue": the recipes' own, where submitit's default is USR2."""


class Training:
    """Train one run on all ranks of a job; picklable.

    Args:
        recipe: the recipe's name.
        argv: its options.
        run_dir: runs/NAME, where the record is.
        script: the variables of a script that runs in the recipe's place (scripts/launch/script.py).
    """

    def __init__(self, recipe: str, argv: list[str], run_dir: Path, script: dict[str, str] | None = None) -> None:
        self.recipe, self.argv, self.run_dir, self.script = recipe, argv, run_dir, script
        self.status = 0
        self.received: signal.Signals | None = None

    def __call__(self) -> None:
        """Run this rank; a bad end ends the process with a status."""
        status = exit_status(self.run) or self.status
        if os.environ["RANK"] == "0":
            name = self.received.name.removeprefix("SIG") if self.received else ""
            Path(os.environ["STATUS_FILE"]).write_text(f"{status} {name}\n")
        if status:
            sys.exit(status)

    def run(self) -> None:
        """Run the recipe or the script; raises UserError for what either or the network's settings refuse."""
        set_environment()
        is_restart = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        if self.script is None:
            # A job that begins again goes on with its own record, whatever it began from.
            resume = ["--resume", "auto"] if is_restart and (self.run_dir / "config.json").exists() else []
            importlib.import_module(f"recipes.{self.recipe}.train").main([*self.argv, *resume])
            self.received = Stop.received
            return
        env = {**os.environ, **self.script, LAUNCHER_PID: str(os.getpid())}
        if is_restart:
            env["RESUME"] = "auto"
        command = [sys.executable, "-m", "scripts.launch.script", self.script["SCRIPT"], *self.argv]
        status, received = run(command, env)
        self.status = 0 if received else status  # as docs/your-own.md says
        self.received = SIGNAL if SIGNAL in received else signal.SIGTERM if received else None


def set_environment() -> None:
    """Tell this rank who it is, where rank 0 is, and by which network; raises fabric.sh's UserError."""
    import submitit

    # Without set_cuda_visible_devices=False each rank would see one GPU and still be told LOCAL_RANK 1, 2, ...:
    # recipes take the GPU of their local rank among those that the node has for the job. The batch script has set
    # MASTER_ADDR to an address that resolves, and MASTER_PORT anew for each start.
    # overwrite: variables of a launcher around `sbatch` may be set.
    ranks = submitit.helpers.TorchDistributedEnvironment()  # takes MASTER_PORT from the environment
    ranks.master_addr = os.environ["MASTER_ADDR"]
    ranks.export(set_cuda_visible_devices=False, overwrite=True)
    # Slurm binds a task to its own cores where --cpus-per-task says how many; elsewhere a node's tasks share them.
    sharing = "1" if "SLURM_CPUS_PER_TASK" in os.environ else os.environ["LOCAL_WORLD_SIZE"]
    environment, said = fabric_environment(FABRIC="auto", TASK_PROCESSES=sharing)
    print(said, end="", file=sys.stderr, flush=True)
    os.environ.update(environment)
