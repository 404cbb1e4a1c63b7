"""Start the contenders and what shows a claim: each in processes of its own and with a bound."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import killpg
from pathlib import Path
from typing import IO, Any

from scripts.lab.network import Network
from scripts.launch.command import ROOT
from scripts.launch.cores import count_cores
from scripts.launch.processes import INTERRUPT_GRACE_S
from scripts.launch.runs import read_losses, read_metrics

TIMEOUT_S = 600.0
"""Time limit of a contender."""


@contextlib.contextmanager
def process_group(
    command: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own while the block runs; then kill what is left of its process group.

    All that it prints goes to `output`, or to this process's output. If the block raises, also for Ctrl-C, the
    group gets SIGINT first: pytest then stops what its tests have started.
    """
    streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
    own = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}
    process = subprocess.Popen(command, cwd=ROOT, env={**own, **env}, start_new_session=True, **streams)
    try:
        yield process
    except BaseException:  # Ctrl-C may come twice
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            killpg(process.pid, signal.SIGINT)
            process.wait(INTERRUPT_GRACE_S)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_program(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float, shows: bool = False
) -> tuple[int, str]:
    """Run a command with a time limit; return its status and its output, or "" if that is shown instead."""
    with tempfile.TemporaryFile() as output:
        try:
            with process_group(command, env, None if shows else output) as process:
                process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return 128 + signal.SIGKILL, f"took longer than {timeout_s:g} s"
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; raises RuntimeError, with its last lines, if it fails or is late."""
    status, output = run_program(command, env or {}, TIMEOUT_S)
    if status:
        words = "\n".join(output.splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{words}")
    return output


@contextlib.contextmanager
def running(
    command: Sequence[str], is_reached: Callable[[], bool], env: Mapping[str, str], pause_s: float = 0.05
) -> Iterator[None]:
    """Start a command, run the block once is_reached(), asked every pause_s, and then wait for the command's end.

    Raises RuntimeError, with the end of its output, if it failed, took too long or ended before that.
    """
    deadline = time.monotonic() + TIMEOUT_S
    with tempfile.NamedTemporaryFile() as output, process_group(command, env, output.file) as process:
        said = Path(output.name)
        while not is_reached():
            has_ended = process.poll() is not None
            if (has_ended and not is_reached()) or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} did no such step:\n{said.read_text()[-1000:]}")
            time.sleep(pause_s)
        yield
        if process.wait(deadline - time.monotonic()):
            raise RuntimeError(f"{' '.join(command)} failed:\n{said.read_text()[-1000:]}")


def recipe_command(
    name: str, run: Path, options: Sequence[str], processes: int, net: Network | None = None
) -> list[str]:
    """Return what runs a recipe as `make run` does, with its record in `run`; with networks, a process a node."""
    shape = ["--nproc-per-node", str(processes)]
    if net:
        shape = ["--nodes", str(processes), "--nproc-per-node", "1", "--networks", net.option()]
    place = ["--runs-dir", str(run.parent), "--name", run.name, "--overwrite", "--no-tensorboard"]
    return [sys.executable, "-m", "scripts.launch.local", name, *shape, "--", *place, *options]


def recipe(name: str, folder: Path, options: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """Run a recipe as `make run` does; return its result.json, and the losses of its logged steps as "losses"."""
    record = folder / "run"
    run(recipe_command(name, record, options, processes))
    return json.loads((record / "result.json").read_text()) | {"losses": list(read_losses(record).values())}


def logged_rates(folder: Path) -> list[float]:
    """Return the samples/s between the logged steps of the last run in folder/run, as recipe() makes them."""
    return [row["samples_per_s"] for row in read_metrics(folder / "run") if "loss" in row]


def contender_command(name: str, options: Sequence[str], processes: int) -> list[str]:
    """Return what runs a module of scripts.bench.contenders, under torchrun if processes > 1."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *torchrun * (processes > 1), "-m", f"scripts.bench.contenders.{name}", *options]


def contender(name: str, options: Sequence[str], processes: int = 1) -> dict[str, Any]:
    """Run a module of scripts.bench.contenders, under torchrun if processes > 1, and return its result.

    It prints its result as a JSON object on a line of its own; libraries may print other lines.
    Raises RuntimeError if it failed, took too long or printed no such line.
    """
    command = contender_command(name, options, processes)
    return parse_result(command, run(command, threads(processes)))


def parse_result(command: Sequence[str], printed: str) -> dict[str, Any]:
    """Return the last JSON object that a contender has printed on a line of its own; RuntimeError without one."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    raise RuntimeError(f"{' '.join(command)} printed no result, but: {printed!r}")


def bare_step_ms(
    net: Network, processes: int, threads: int, flags: Sequence[str], options: Sequence[str], key: str = "step_ms"
) -> float:
    """Return rank 0's milliseconds of a bare step, while as many processes do the same on a node each.

    `key`: step_ms for their mean, median_ms for their median.
    """
    command = contender_command("bare_step", ["--alone", *flags, "--", *options], 1)
    return float(parse_result(command, net.run_ranks(command, processes, threads, TIMEOUT_S)[0])[key])


def threads(processes: int) -> dict[str, str]:
    """Return the environment that gives each process its share of the cores, as `make run` does."""
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // processes)), "GOMP_SPINCOUNT": "10000"}
