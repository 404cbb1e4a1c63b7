"""Run recipes as real processes with real ranks, and read what they recorded.

Processes come from the fork server of fork_server.py, which has torch and the recipes imported: a rank starts in
milliseconds. `run_ranks` plays the launcher: it sets the variables that torchrun would set.
`Command` runs a command line as a user would, and finds every process that it starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from recipes.common.process.node import Node
from scripts.drill.job import find_processes
from scripts.launch import horovod as horovod_agent
from scripts.launch.local import free_port
from scripts.launch.runs import last_step
from scripts.launch.runs import read_metrics as metrics

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.executable).parent
"""Where the packages of these tests' Python have their commands, such as torchrun."""
TEXT_DIR = ROOT / "recipes" / "configs"
"""A folder of text: 5,000 bytes to train on, and 900 to evaluate, which takes little time."""
TIMEOUT_S = 120.0 * max(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), os.getloadavg()[0] / (os.cpu_count() or 1)
)
"""Bound for processes that hang, longer if tests or other work share the cores.

A test of a promised time has its own bound.
"""

MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_orte_execute_quiet": "1",  # -q of Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # PRTE: from Open MPI 5 on
}
"""Variables with which mpirun starts processes as root and more of them than there are cores."""

_context = multiprocessing.get_context("forkserver")
torch.set_num_threads(1)  # threads that spin while they wait would take the other workers' cores


@dataclass(frozen=True)
class Outcome:
    """Exit statuses and outputs of a group of ranks."""

    statuses: list[int]
    """Exit status of each rank, negative for a signal."""
    outputs: list[str]
    """What each rank printed, standard output and error together."""

    @property
    def text(self) -> str:
        """All ranks' output, each line marked with its rank."""
        return "\n".join(f"[{i}] {line}" for i, text in enumerate(self.outputs) for line in text.splitlines())

    @property
    def errors(self) -> list[str]:
        """The lines that begin with `error: `, of all ranks."""
        return [line for text in self.outputs for line in text.splitlines() if line.startswith("error: ")]

    @property
    def refusal(self) -> str:
        """The one error line of a refused job, whose ranks all end with status 2."""
        assert (set(self.statuses), len(self.errors), "Traceback" in self.text) == ({2}, 1, False), self.text
        return self.errors[0]


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Wait until the condition holds; after timeout_s, fail the test with `what`, which may be a function.

    Checking the condition (with a command, or over all processes) takes about a tenth of the time, so that it
    leaves the cores to what is waited for.
    """
    deadline = time.monotonic() + timeout_s
    asked_at = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"not within {timeout_s} s: {what() if callable(what) else what}"
        time.sleep(min(max(0.01, 9 * (now - asked_at)), 0.5))
        asked_at = time.monotonic()


@dataclass(frozen=True)
class Interrupt:
    """A signal that ranks get at an exact place; from outside, it would arrive at another place each time."""

    number: signal.Signals
    count: int
    """With where="step", the signal comes after this many steps of the run; with "fsync", in this call to it.

    The other places inject a fault instead of a signal: with "loss", this call's loss is nan; with "gradient", the
    loss is finite but its gradient is nan; with "optimizer_step", this step is skipped. 0: every time (except with
    "optimizer_step").
    """
    ranks: list[int] | None = None
    """The ranks that get it; None: all."""
    where: str = "step"
    sleep_s: float = 0.0
    """If not 0, sleep this long instead of sending the signal."""


FIRST_STEP_LEFT_OUT = Interrupt(signal.SIGCONT, 1, where="optimizer_step")
"""As fp16's scaler leaves it out: LeNet's first gradients, times its scale of 2^16, overflow."""


class Ranks:
    """The processes of one job: start them, signal or kill some, then wait for all.

    With file_limit_bytes, a write beyond that size of a file fails, as on a full disk. Each rank calls setup(), if
    given, before its recipe, and gets own_argv[rank] in addition to argv. Without Horovod, its test is skipped.
    """

    alive: list[Ranks] = []  # noqa: RUF012 (the tests' own list of what is to be ended)

    def __init__(
        self,
        recipe: str,
        argv: list[str],
        world_size: int,
        folder: Path,
        nodes: int = 1,
        file_limit_bytes: int | None = None,
        interrupt: Interrupt | None = None,
        setup: Callable[[], object] | None = None,
        own_argv: dict[int, list[str]] | None = None,
        **env: str,
    ) -> None:
        if recipe == "horovod":
            from tests.conftest import need_horovod  # here, as each rank imports this file

            need_horovod()
        self.folder = folder
        self.alive.append(self)
        folder.mkdir(parents=True, exist_ok=True)
        local_world_size = world_size // nodes
        port = free_port()
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",  # for processes that ranks start: wait() makes those that hang print stacks
            **env,
        }
        self.processes = []
        self.servers = contextlib.ExitStack()
        for rank in range(world_size):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % local_world_size)}
            if recipe == "horovod":  # all on one node; the ranks connect through Horovod's rendezvous server
                node = Node(1, 0, world_size, "127.0.0.1", port, rdzv_timeout_s=60)
                if rank == 0:
                    horovod_port = self.servers.enter_context(horovod_agent.rendezvous(node))
                own = {**horovod_agent.environment(node, rank, horovod_port), "HOROVOD_GLOO_IFACE": "lo", **own}
            output = folder / f"rank{rank}.txt"
            output.unlink(missing_ok=True)
            own_interrupt = interrupt if interrupt and rank in (interrupt.ranks or range(world_size)) else None
            words = [*argv, *(own_argv or {}).get(rank, [])]
            arguments = (recipe, words, own, output, file_limit_bytes, own_interrupt, setup)
            process = _context.Process(target=_run_rank, args=arguments)
            process.start()
            self.processes.append(process)

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        path = self.folder / f"rank{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_text(self, text: str, rank: int = 0) -> None:
        """Wait until a rank has printed the text; fail the test if it ends first, or after TIMEOUT_S."""

        def is_printed() -> bool:
            alive = self.processes[rank].is_alive()
            printed = self.output(rank)
            assert alive or text in printed, f"rank {rank} ended before it printed {text!r}:\n{printed}"
            return text in printed

        wait_until(is_printed, TIMEOUT_S, lambda: f"{text!r} of rank {rank}:\n{self.output(rank)}")

    def wait_for_step(self, run: Path, step: int) -> None:
        """Wait until rank 0 has logged the step; fail the test if a rank ends first, or after TIMEOUT_S."""

        def is_logged() -> bool:
            ended = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
            assert not ended, f"ranks {ended} ended before step {step}:\n{self.output(ended[0])}"
            return last_step(run) >= step

        wait_until(is_logged, TIMEOUT_S, f"step {step} of {run}")

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for process in self.processes:
            process.kill()
            process.join()
        self.servers.close()
        if self in self.alive:
            self.alive.remove(self)

    def send(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            assert pid
            os.kill(pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S, check: bool = False) -> Outcome:
        """Wait for all ranks; after timeout_s, kill those that still run and fail the test.

        With check, every rank must end with status 0.
        """
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hung:
            _print_stacks(self.processes[rank].pid)
        self.kill()
        outcome = Outcome(
            [process.exitcode or 0 for process in self.processes],
            [self.output(rank) for rank in range(len(self.processes))],
        )
        assert not hung, f"ranks {hung} still ran after {timeout_s} s:\n{outcome.text}"
        assert not check or not any(outcome.statuses), f"statuses {outcome.statuses}:\n{outcome.text}"
        return outcome


def _print_stacks(pid: int | None) -> None:
    """Make a hanging process and all that it has started print their stacks, which ends them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
        for each in tree:
            each.send_signal(signal.SIGABRT)
        psutil.wait_procs(tree, timeout=5)


def _spoil(interrupt: Interrupt) -> None:
    """Patch this process so that a loss or its gradient is nan, or an optimizer step is skipped."""
    from recipes.common import job, loop

    owner: Any = loop if interrupt.where == "optimizer_step" else job.Job
    name = "optimizer_step" if interrupt.where == "optimizer_step" else "loss"
    original, calls = getattr(owner, name), 0

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        factor = float("nan") if interrupt.count in (0, calls) else 1.0
        if interrupt.where == "loss":
            return original(*args, **kwargs) * factor
        if interrupt.where == "gradient":
            loss = original(*args, **kwargs)
            loss.register_hook(lambda gradient: gradient * factor)
            return loss
        if calls == interrupt.count:
            return args[2].zero_grad()
        return original(*args, **kwargs)

    setattr(owner, name, spoilt)


def _send_at(interrupt: Interrupt) -> None:
    """Patch this process so that it gets the signal when it reaches the place."""
    from recipes.common.job import Job

    owner, name = (Job, "count_step") if interrupt.where == "step" else (os, interrupt.where)
    original, calls = getattr(owner, name), 0

    def watched(first: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(first)
        if interrupt.count in (0, first.position.step if interrupt.where == "step" else calls):
            time.sleep(interrupt.sleep_s) if interrupt.sleep_s else os.kill(os.getpid(), interrupt.number)
        return result

    setattr(owner, name, watched)


def _run_rank(
    recipe: str,
    argv: list[str],
    env: dict[str, str],
    output: Path,
    file_limit_bytes: int | None = None,
    interrupt: Interrupt | None = None,
    setup: Callable[[], object] | None = None,
) -> None:
    is_fault = interrupt is not None and interrupt.where in ("loss", "gradient", "optimizer_step")
    if interrupt and not is_fault:
        _send_at(interrupt)
    if file_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    os.environ.update(env)
    torch.set_num_threads(1)
    from recipes.common.process import entry

    if env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]:
        entry.REFUSAL_GRACE_S = 0.0  # nobody ends ranks before rank 0 has printed, no other node prints it
    if setup:
        setup()
    module = importlib.import_module(f"recipes.{recipe}.train")
    if interrupt and is_fault:
        _spoil(interrupt)
    status = entry.run_main(lambda: module.main(argv))
    sys.stdout.flush()
    sys.exit(status)


def run_ranks(recipe: str, argv: list[str], world_size: int, folder: Path, **how: Any) -> Outcome:
    """Run a recipe with world_size ranks until it ends; every rank must end with status 0."""
    return Ranks(recipe, argv, world_size, folder, **how).wait(check=True)


def words_for(folder: Path, name: str, *argv: str) -> list[str]:
    """Return the options of a run that logs every step, without TensorBoard."""
    return ["--runs-dir", str(folder), "--name", name, "--log-every", "1", "--no-tensorboard", *argv]


def start_run(recipe: str, folder: Path, world_size: int, *argv: str, name: str = "run", **how: Any) -> Ranks:
    """Start the ranks of a run, with every step logged and without TensorBoard: folder / name."""
    return Ranks(recipe, words_for(folder, name, *argv), world_size, folder / f"output-{name}", **how)


def train(recipe: str, folder: Path, world_size: int, *argv: str, **how: Any) -> Path:
    """Train with every step logged and without TensorBoard; return the run's folder."""
    name = f"{recipe}-{world_size}"
    start_run(recipe, folder, world_size, *argv, name=name, **how).wait(check=True)
    return folder / name


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two trees of dicts, lists, tensors and plain values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def launches(run: Path, key: str = "world_size") -> list[Any]:
    """Return a fact of each launch of a run so far, from config.json."""
    path = run / "config.json"
    return [launch[key] for launch in json.loads(path.read_text())["launches"]] if path.exists() else []


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the content of each file in a folder and those below it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(run: Path, after: int = 0) -> list[float]:
    """Return the loss of every logged step; the steps must be after + 1, after + 2 and so on, without gaps."""
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(after + 1, after + 1 + len(lines)))
    return [line["loss"] for line in lines]


def assert_same_curve(run: Path, whole: Path) -> None:
    """Compare the losses of a run whose world size changed with an undisturbed run, which may have more steps.

    Another world size sums gradients in another order. That changes the last bit, and no more until it tips an
    activation over the edge of a ReLU or of a maximum: then a step's loss differs in the fifth digit.
    """
    ours = losses(run)
    pairs = zip(ours, losses(whole)[: len(ours)], strict=True)
    differences = torch.tensor([abs(a - b) / abs(b) for a, b in pairs], dtype=torch.float64)
    assert differences[:200].max() < 1e-5  # a tensor's max() is NaN if one value is; Python's need not be
    assert differences.max() < 2e-3


def accuracies(run: Path) -> list[float]:
    """Return the test accuracy of every epoch."""
    return [line["test_accuracy"] for line in metrics(run) if "test_accuracy" in line]


def newest_checkpoint(run: Path) -> dict[str, Any]:
    """Return the content of a run's newest checkpoint, on the CPU, also where the run's GPUs are not there."""
    path = max((run / "checkpoints").glob("step-*.pt"))
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the model of a run's newest checkpoint."""
    model: dict[str, torch.Tensor] = newest_checkpoint(run)["model"]
    return model


def optimizer_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors in a run's newest checkpoint, by the parameter's number and their name."""
    state = newest_checkpoint(run)["optimizer"]["state"]
    return {f"{number} {name}": value for number, values in state.items() for name, value in values.items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two state dicts with the same names and shapes; NaN if one is."""
    assert a.keys() == b.keys()
    return float(torch.stack([(a[name].double() - b[name].double()).abs().max() for name in a]).max())


def assert_same_end(run: Path, whole: Path) -> None:
    """Compare the last weights and optimizer state of two runs, and the one evaluation of each."""
    import pytest  # here, as each rank imports this file

    assert largest_difference(weights(run), weights(whole)) < 1e-5
    assert largest_difference(optimizer_tensors(run), optimizer_tensors(whole)) < 1e-5
    (ours,), (theirs,) = ([line for line in metrics(path) if "test_loss" in line] for path in (run, whole))
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
    if "test_bits_per_byte" in theirs:
        assert ours["test_bits_per_byte"] == pytest.approx(theirs["test_bits_per_byte"], rel=1e-5)


def assert_same_training(run: Path, whole: Path, after: int = 0) -> None:
    """Compare a run that began after a step with a whole one: the losses since, and the end."""
    import pytest  # here, as each rank imports this file

    assert losses(run, after) == pytest.approx(losses(whole)[after:], rel=1e-5)
    assert_same_end(run, whole)


def assert_same_run(run: Path, expected: Path) -> None:
    """Compare the losses, the accuracies and the last weights of two runs."""
    import pytest  # here, as each rank imports this file

    assert len(losses(run)) == len(losses(expected)) > 0
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)
    assert accuracies(run) == accuracies(expected)
    assert largest_difference(weights(run), weights(expected)) < 1e-5


@dataclass(frozen=True)
class Result:
    """Exit status and output of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines on standard error that begin with `error: `."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    @property
    def refusal(self) -> str:
        """The one line that a refused command prints on standard error; its status is 2."""
        assert (self.status, len(self.errors), self.stderr.count("\n")) == (2, 1, 1), self.stderr
        return self.errors[0]


def _restore_signals() -> None:
    """React to signals of a terminal like a command on one; in the background, or under nohup, it would not."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def has_ended(process: psutil.Process | int) -> bool:
    """Return whether a process has ended, or that of a pid; a container's init may leave it a zombie."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Command:
    """A command line as a user types it, and all processes that it starts, wherever they end up in the tree.

    An environment variable that each process inherits identifies them, even after their parents have ended.
    """

    alive: list[Command] = []  # noqa: RUF012 (the tests' own list of what is to be ended)

    def __init__(self, *argv: str, cwd: Path = ROOT, **env: str) -> None:
        self.mark = uuid.uuid4().hex
        # The variables of a make that has started pytest must not reach the command.
        inherited = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}
        # Files, not pipes: a leftover process that holds a pipe's end would hold up the test.
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**inherited, "TEST_COMMAND": self.mark, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            preexec_fn=_restore_signals,
        )
        self.alive.append(self)

    def processes(self, text: str = "", **variables: str) -> list[psutil.Process]:
        """Return its processes that still run, with this text in their command line and these variables."""
        return find_processes(text, TEST_COMMAND=self.mark, **variables)

    def wait_for_gone(self, within_s: float) -> None:
        """Wait until no process of this command is left; fail the test after within_s."""
        wait_until(
            lambda: not self.processes(), within_s, lambda: f"all processes gone: {self.processes()}\n{self.text}"
        )

    def wait_for_step(self, run: Path, step: int) -> None:
        """Wait until the run has logged the step; fail the test if the command ends first, or after TIMEOUT_S."""

        def is_logged() -> bool:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.text}"
            return last_step(run) >= step

        wait_until(is_logged, TIMEOUT_S, lambda: f"step {step} of {run}\n{self.text}")

    @property
    def text(self) -> str:
        """What has been printed so far, standard error last."""
        return self._read(self._out) + self._read(self._err)

    def _read(self, file: Any) -> str:
        # pread does not move the file offset, which the writing processes share.
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def wait(self, timeout_s: float = TIMEOUT_S, gone_within_s: float = 3.0, check: bool = False) -> Result:
        """Wait until the command ends; fail the test after timeout_s, or if a process is left over.

        With check, the command must end with status 0.
        """
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from None
        self.wait_for_gone(gone_within_s)
        self.alive.remove(self)
        assert not check or self.process.returncode == 0, f"status {self.process.returncode}:\n{self.text}"
        return Result(self.process.returncode, self._read(self._out), self._read(self._err))

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in [self.process, *self.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        if self in self.alive:
            self.alive.remove(self)


def run_command(*argv: str, timeout_s: float = TIMEOUT_S, check: bool = False, **env: str) -> Result:
    """Run a command until it ends; then no process of it may be left over. With check, its status must be 0."""
    return Command(*argv, **env).wait(timeout_s, check=check)


def write_program(path: Path, script: str) -> Path:
    """Write an executable script, of sh unless it begins with #!, and return its path."""
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def local(recipe: str, nodes: int, nproc_per_node: int, *options: str, **env: str) -> Command:
    """Start the command that `make run RECIPE= NODES= NPROC_PER_NODE=` starts."""
    counts = ("--nodes", str(nodes), "--nproc-per-node", str(nproc_per_node))
    return Command(sys.executable, "-m", "scripts.launch.local", recipe, *counts, "--", *options, **env)


def end_all() -> None:
    """End every process that a failed test has left behind."""
    for job in [*Ranks.alive, *Command.alive]:
        job.kill()


SIGNALLED = """
import multiprocessing.util as util, os, runpy, sys
start = util.spawnv_passfds
def start_and_signal(path, words, descriptors):
    pid = start(path, words, descriptors)
    if {child!r} in str(words):
        {send}
    return pid
util.spawnv_passfds = start_and_signal
sys.argv = [{module!r}, *{words}]
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def start_and_signal(child: str, send: str, module: str, *words: str) -> Command:
    """Start a module that executes `send` as soon as multiprocessing has started one of these child processes."""
    code = SIGNALLED.format(child=child, send=send, module=module, words=words)
    return Command(sys.executable, "-c", code, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
