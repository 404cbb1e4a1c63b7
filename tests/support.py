"""Run recipes as real processes with real ranks, and read what they recorded.

Processes come from a fork server that has torch and the recipes imported, so that a rank starts in
milliseconds. `run_ranks` plays the launcher: it sets the variables that torchrun would set.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.utils.tensorboard", "recipes.single.train", "recipes.ddp.train", "recipes.pipeline.train"]
)


@dataclass(frozen=True)
class Outcome:
    """What a group of ranks did."""

    statuses: list[int]
    """Exit status of each rank, negative for a signal."""
    outputs: list[str]
    """What each rank printed, standard output and error together."""

    @property
    def text(self) -> str:
        """All ranks' output, each line marked with its rank."""
        return "\n".join(f"[{i}] {line}" for i, text in enumerate(self.outputs) for line in text.splitlines())


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """The processes of one job: start them, signal or kill some, then wait for all."""

    def __init__(
        self, recipe: str, argv: list[str], world_size: int, folder: Path, nodes: int = 1, **env: str
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        local_world_size = world_size // nodes
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
        }
        self.processes = []
        for rank in range(world_size):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % local_world_size)}
            process = _context.Process(target=_run_rank, args=(recipe, argv, own, folder / f"rank{rank}.txt"))
            process.start()
            self.processes.append(process)

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        path = self.folder / f"rank{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_text(self, text: str, rank: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a rank has printed the text; a process that ends first, or the bound, fails the test."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output(rank):
            alive = self.processes[rank].is_alive()
            assert alive, f"rank {rank} ended before it printed {text!r}:\n{self.output(rank)}"
            assert time.monotonic() < deadline, f"rank {rank} did not print {text!r}:\n{self.output(rank)}"
            time.sleep(0.01)

    def send(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            assert pid
            os.kill(pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Wait for all ranks; one that outlives the bound is killed and fails the test."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
            process.join()
        outcome = Outcome(
            [process.exitcode or 0 for process in self.processes],
            [self.output(rank) for rank in range(len(self.processes))],
        )
        assert not hung, f"ranks {hung} still ran after {timeout_s} s:\n{outcome.text}"
        return outcome


def _run_rank(recipe: str, argv: list[str], env: dict[str, str], output: Path) -> None:
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    from recipes.common.entry import exit_status

    module = importlib.import_module(f"recipes.{recipe}.train")
    status = exit_status(lambda: module.main(argv))
    sys.stdout.flush()
    sys.exit(status)


def run_ranks(
    recipe: str, argv: list[str], world_size: int, folder: Path, nodes: int = 1, check: bool = True, **env: str
) -> Outcome:
    """Run a recipe with world_size ranks to its end; with check, every rank must end with status 0."""
    outcome = Ranks(recipe, argv, world_size, folder, nodes, **env).wait()
    assert not check or not any(outcome.statuses), outcome.text
    return outcome


def train(recipe: str, folder: Path, world_size: int, *argv: str, nodes: int = 1, **env: str) -> Path:
    """Train with every step logged and without TensorBoard; return the run's folder."""
    name = f"{recipe}-{world_size}"
    words = ["--runs-dir", str(folder), "--name", name, "--log-every", "1", "--no-tensorboard", *argv]
    run_ranks(recipe, words, world_size, folder / f"output-{name}", nodes, **env)
    return folder / name


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Return the loss of every logged step, in the order of the steps, which must be complete from 1 on."""
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def accuracies(run: Path) -> list[float]:
    """Return the test accuracy of every epoch."""
    return [line["test_accuracy"] for line in metrics(run) if "test_accuracy" in line]


def newest_checkpoint(run: Path) -> dict[str, Any]:
    """Return the content of a run's newest checkpoint."""
    path = max((run / "checkpoints").glob("step-*.pt"))
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the model of a run's newest checkpoint."""
    model: dict[str, torch.Tensor] = newest_checkpoint(run)["model"]
    return model


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two state dicts with the same names and shapes."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
