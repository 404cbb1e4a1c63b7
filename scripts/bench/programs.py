"""Start the contenders: each in processes of its own and with a bound."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from scripts.lab import network
from scripts.launch.command import ROOT
from scripts.launch.cores import count_cores
from scripts.launch.runs import read_losses

TIMEOUT_S = 600.0

_numbers = itertools.count(1)


def run(command: Sequence[str], env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Run a command and return what it printed.

    Raises:
        RuntimeError: it failed or took too long; the message has its last lines.
    """
    own = own_environment() | (env or {})
    try:
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} took longer than {timeout_s:.0f} s") from None
    if done.returncode:
        words = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{words}")
    return done.stdout


def own_environment() -> dict[str, str]:
    """Return this process's environment without what a make that called it has left there."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}


def in_namespaces(module: str, rounds: int, folder: Path, *words: str) -> Any:
    """Return what a module of scripts measures, which calls measure_inside(), in namespaces of its own.

    Raises:
        RuntimeError: it failed, and has said why.
    """
    command, result = [sys.executable, "-m", module, "--rounds", str(rounds)], folder / "result.json"
    if status := subprocess.run([*command, "--result", str(result), *words], cwd=ROOT).returncode:
        raise RuntimeError(f"{module} ended with status {status}")
    return json.loads(result.read_text())


def measure_inside(
    module: str, argv: Sequence[str], result: Path | None, work: Callable[[Path], Any], narrow: bool = True
) -> int:
    """Do the work of a module in namespaces of this process's own; return the exit status.

    What it returns goes to the result as JSON, if one is wanted. The folder that it is called with goes away.

    Raises:
        UserError: there can be none here.
    """
    if reason := network.why_not(narrow):
        raise UserError(f"{module} cannot run here: {reason}")
    network.enter(module, argv)
    with tempfile.TemporaryDirectory(prefix="bench-inside-") as folder:
        try:
            found = work(Path(folder))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if result:
        result.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def recipe(name: str, folder: Path, options: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """Run a recipe as `make run` does; return its result.json, and the logged losses of its steps as "losses"."""
    run_name = f"{name}-{next(_numbers)}"
    command = [sys.executable, "-m", "scripts.launch.local", name, "--nproc-per-node", str(processes)]
    command += ["--", "--runs-dir", str(folder), "--name", run_name]
    run([*command, "--no-tensorboard", *options])
    result = json.loads((folder / run_name / "result.json").read_text())
    return {**result, "losses": list(read_losses(folder / run_name).values())}


def contender(name: str, options: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """Run a module of scripts.bench.contenders, under torchrun where it has several processes.

    Its last line is a JSON object: what it has measured.
    """
    module = f"scripts.bench.contenders.{name}"
    if processes == 1:
        command = [sys.executable, "-m", module, *options]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(processes), "-m", module, *options]
    return json.loads(run(command, threads(processes)).splitlines()[-1])


def threads(processes: int) -> dict[str, str]:
    """Return the environment that gives each process its share of the cores, as `make run` does."""
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // processes)), "GOMP_SPINCOUNT": "10000"}
