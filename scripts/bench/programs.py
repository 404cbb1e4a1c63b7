"""Start the contenders: each in processes of its own and with a bound."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lab.network import Network
from scripts.launch.command import ROOT
from scripts.launch.cores import count_cores
from scripts.launch.runs import read_losses

TIMEOUT_S = 600.0

_numbers = itertools.count(1)


def run(command: Sequence[str], env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Run a command and return its standard output.

    Raises:
        RuntimeError: it failed (the message has its last lines) or took too long.
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
    """Return this process's environment without the variables that a calling make sets."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}


def recipe(name: str, folder: Path, options: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """Run a recipe as `make run` does; return its result.json, and the losses of its logged steps as "losses"."""
    run_name = f"{name}-{next(_numbers)}"
    command = [sys.executable, "-m", "scripts.launch.local", name, "--nproc-per-node", str(processes)]
    command += ["--", "--runs-dir", str(folder), "--name", run_name]
    run([*command, "--no-tensorboard", *options])
    result = json.loads((folder / run_name / "result.json").read_text())
    return {**result, "losses": list(read_losses(folder / run_name).values())}


def contender(name: str, options: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """Run a module of scripts.bench.contenders, under torchrun if processes > 1, and return its result.

    It prints its result as a JSON object on a line of its own; libraries may print other lines.

    Raises:
        RuntimeError: it failed, took too long or printed no such line.
    """
    module = f"scripts.bench.contenders.{name}"
    if processes == 1:
        command = [sys.executable, "-m", module, *options]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(processes), "-m", module, *options]
    return parse_result(command, run(command, threads(processes)))


def parse_result(command: Sequence[str], printed: str) -> dict[str, Any]:
    """Return the last JSON object that a contender has printed on a line of its own; RuntimeError without one."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    raise RuntimeError(f"{' '.join(command)} printed no result, but: {printed!r}")


def bare_step_ms(
    net: Network, processes: int, threads: int, flags: Sequence[str], options: Sequence[str]
) -> float:
    """Return rank 0's milliseconds of a bare step, while as many processes do the same on a node each."""
    words = [sys.executable, "-m", "scripts.bench.contenders.bare_step", "--alone", *flags, "--", *options]
    return float(parse_result(words, net.run_ranks(words, processes, threads, TIMEOUT_S)[0])["step_ms"])


def threads(processes: int) -> dict[str, str]:
    """Return the environment that gives each process its share of the cores, as `make run` does."""
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // processes)), "GOMP_SPINCOUNT": "10000"}
