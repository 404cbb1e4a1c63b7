"""Be a container's first process, and tell a run that was stopped before its end from one that has come to it.

    STOPPED_STATUS=143 python -m scripts.launch.stopped_status ddp --name mine --runs-dir /runs --resume auto

scripts/launch.sh calls it where STOPPED_STATUS is set. A recipe that is told to stop writes a checkpoint and
leaves with status 0, on all nodes. Slurm's batch script looks further; a Kubernetes Job takes the 0 of a drained
node for "done" and never starts it again. So it ends with STOPPED_STATUS here, a failure, and the restart goes on
from the checkpoint. Signals are passed on, and what lost its parent is reaped, as befits a first process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.common.errors import UserError
from recipes.common.options import read_number
from recipes.common.process.parent import LAUNCHER_PID
from scripts.launch import script
from scripts.launch.command import command
from scripts.launch.processes import run

CLOCKS_S = 2.0
"""How far a file server's clock may be behind."""


def option(name: str, default: str, words: Sequence[str]) -> str:
    """Return the last value of an option among words, --name x or --name=x; else that of their --config file."""
    value = None
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            value = words[i + 1]
        elif word.startswith(f"{name}="):
            value = word.removeprefix(f"{name}=")
    if value is None and name != "--config" and not script.is_set():
        value = words_in(option("--config", "", words)).get(name.removeprefix("--"))
    return default if value is None else value


def words_in(path: str) -> dict[str, str]:
    """Return the flags of a recipe's configuration file; nothing that the recipe itself refuses."""
    if not path:
        return {}
    try:
        from recipes.common.config_file import read_config

        content = read_config(Path(path))
    except ImportError:
        raise UserError(f"--config {path}: {sys.executable} has no PyYAML to read it by; install it") from None
    except UserError:
        return {}
    return {flag: value for flag, value in content.items() if isinstance(value, str)}


def has_finished(options: Sequence[str], begin: float) -> bool | None:
    """Whether these options' run has come to its end since begin; None where no record tells."""
    name = option("--name", "", options)
    folder = Path(option("--runs-dir", "runs", options)) / name
    if not name or not (folder / "config.json").exists():
        return None  # no run at all, or its record is not on this node
    result = folder / "result.json"
    return result.exists() and result.stat().st_mtime >= begin


@command
def main(argv: list[str]) -> int:
    """Run scripts/launch.sh with the arguments; return the status that the container is to end with."""
    stopped_status = read_number("STOPPED_STATUS", 0, at_least=1)
    begin = time.time() - CLOCKS_S
    env = {name: value for name, value in os.environ.items() if name != "STOPPED_STATUS"}
    env[LAUNCHER_PID] = str(os.getpid())
    status, was_stopped = run(["scripts/launch.sh", *argv], env)
    finished = None if script.is_set() else has_finished(argv, begin)
    if status == 0 and (finished is False or (finished is None and was_stopped)):
        print(f"stopped before its end: status {stopped_status}, so that a restart goes on", flush=True)
        return stopped_status
    return status


if __name__ == "__main__":
    sys.exit(main())
