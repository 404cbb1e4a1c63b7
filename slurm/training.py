"""One rank of a job that submitit has started: a recipe, or a script in its place, with its environment.

slurm/submit.py submits a `Run`; submitit pickles it, and calls it in every task, one task per rank.

A signal before the time limit or a preemption is handled in two steps. submitit's own handler would requeue at
once, in the middle of a step, on one rank. Here the signal is passed to the rank: all ranks vote, leave after the
same step, and write a checkpoint. Rank 0 records how it has ended. Once all ranks have ended, the batch script
decides what happens to the job (end_submitted in slurm/job.sh, which also asks all nodes for broken GPUs).
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from recipes.common.folders import replace_text
from scripts.launch.processes import run

SIGNAL = signal.SIGUSR1
"""The signal for "checkpoint and requeue": the recipes use USR1, where submitit's default is USR2."""

START = """
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) FABRIC=${FABRIC:-auto}
# Slurm binds a task to its own cores where --cpus-per-task says how many; elsewhere a node's tasks share them.
TASK_PROCESSES=$LOCAL_WORLD_SIZE
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then TASK_PROCESSES=1; fi
source scripts/launch/fabric.sh
exec "$PYTHON" -m "$@"
"""
"""Starts a rank, as slurm/ddp-srun.sbatch does; the batch script has set MASTER_ADDR and MASTER_PORT."""


@dataclass
class Run:
    """One run of the recipe, which becomes one job; calling it runs one of its ranks. It is picklable."""

    recipe: str
    argv: list[str]
    folder: Path
    """runs/NAME, where the record is."""
    point: dict[str, str] = field(default_factory=dict)
    """The values of this run in a sweep."""
    script: dict[str, str] | None = None
    """The variables of a script that runs instead of the recipe (scripts/launch/script.py)."""

    @property
    def program(self) -> str:
        """What runs: the script's path, or the recipe's name."""
        return self.script["SCRIPT"] if self.script else self.recipe

    def __call__(self) -> None:
        """Run this rank; if it fails, end the process with its status."""
        env = {**os.environ, "PYTHON": sys.executable}
        if self.script:
            is_restart = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
            words = ["scripts.launch.script", self.script["SCRIPT"], *self.argv]
            env |= self.script | ({"RESUME": "auto"} if is_restart else {})
        else:
            words = ["scripts.launch.hold_signals", f"recipes.{self.recipe}.train", *self.argv]
            if os.environ.get("RESUMES") and "--name" in self.argv:  # the probe has none, and keeps no record
                words += ["--resume", "auto"]
        # Use a separate group: some Slurm versions signal this whole group, and a script must get a signal once.
        status, received = run(["bash", "-c", START, "bash", *words], env, process_group=0)
        if self.script and received:
            status = 0  # as docs/your-own.md says
        if os.environ["SLURM_PROCID"] == "0":
            name = "USR1" if SIGNAL in received else "TERM" if received else ""
            try:
                replace_text(Path(os.environ["STATUS_FILE"]), f"{status} {name}\n")
            except OSError:  # as on a full disk: srun's status has to show that a signal stopped this rank
                status = status or int(bool(received))
        if status:
            sys.exit(status)
