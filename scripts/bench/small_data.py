"""Small data on a CPU: LeNet on 60,000 images of 28x28; the recipes, the usual loop, two frameworks, the limit.

The images are synthetic, of ten classes, in files of Fashion-MNIST's format: nothing is downloaded, and all
contenders read the same data. They start from the same weights and take the samples in the same order. Each one
runs in its own processes, which together have one thread per core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from recipes.common.data import load_data
from recipes.common.models.models import build_model
from recipes.common.seeding import permutation
from recipes.single.train import options
from scripts.bench.figures import Figure, Rounds, process_count_text, speed_figure, take_turns, unmeasured
from scripts.bench.programs import contender, recipe
from scripts.launch.cores import count_cores

SAMPLES, SIDE, CLASSES = 60_000, 28, 10
BATCH_SIZE, STEPS, LOG_EVERY = 256, 200, 10
PEERS = {"lightning": "Lightning", "accelerate": "accelerate"}
COMPARED = 30
"""Steps whose losses are compared. Later ones diverge, as rounding moves an activation across a ReLU's zero."""


def write_data(folder: Path) -> None:
    """Write noisy images of distinguishable classes as the four files of Fashion-MNIST."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(CLASSES, 1, 7, 7, generator=generator)
    shapes = torch.nn.functional.interpolate(coarse, (SIDE, SIDE), mode="bilinear").squeeze(1)
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", SAMPLES), ("t10k", 1000)):
        labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = torch.rand(count, SIDE, SIDE, generator=generator)
        images = (255 * (0.4 * shapes[labels] + 0.6 * noise)).to(torch.uint8)
        # A third of the labels are random: the loss stays large compared with rounding errors.
        labels = torch.where(torch.rand(count, generator=generator) < 1 / 3, labels.flip(0), labels)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels.to(torch.uint8))):
            # The idx format: two zeros, 8 (bytes), the number of dimensions; then each dimension, big-endian.
            header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())


def recipe_words(data_dir: Path) -> list[str]:
    """Return the options with which the recipes run."""
    steps = f"--epochs 1 --max-steps {STEPS} --log-every {LOG_EVERY} --lr-schedule constant --warmup-steps 0"
    words = f"--data fashion-mnist --global-batch-size {BATCH_SIZE} --device cpu {steps}".split()
    return [*words, "--data-dir", str(data_dir)]


class Bench:
    """The contenders on one folder of data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data_dir, self.start = folder, folder / "data", folder / "start.pt"
        self.losses: dict[str, list[float]] = {}
        """For each contender, the losses of every LOG_EVERY-th step of its last run."""
        write_data(self.data_dir)
        args = options(recipe_words(self.data_dir))
        data = load_data(args, torch.device("cpu"), on_bad_image=print)
        pixels = data.train.inputs.float()  # type: ignore[attr-defined]
        start = {
            "weights": [parameter.detach() for parameter in build_model(args, data).parameters()],
            "order": permutation(SAMPLES, args.seed, 0),
            "mean": float(pixels.mean()),
            "std": float(pixels.std()),
        }
        torch.save(start, self.start)

    def ours(self, name: str, processes: int, *more: str) -> float:
        """Run single, or ddp if there are several processes, as `make run` does; return its samples/s."""
        words = [*recipe_words(self.data_dir), *more]
        result = recipe("ddp" if processes > 1 else "single", self.folder, words, processes=processes)
        self.losses[name] = result["losses"]
        return result["samples_per_s"]

    def other(self, name: str, program: str, processes: int, *more: str, steps: int = STEPS) -> float:
        """Run a module of scripts.bench.contenders; return its samples/s."""
        words = ["--data-dir", str(self.data_dir), "--begin-with", str(self.start)]
        words += ["--batch-size", str(BATCH_SIZE), "--steps", str(steps), *more]
        result = contender(program, words, processes)
        self.losses[name] = result["losses"][LOG_EVERY - 1 :: LOG_EVERY]
        return result["samples_per_s"]

    def bare(self, processes: int, amp: str = "none") -> float:
        """Run only the recipe's model on ready tensors, under DDP if processes > 1; return its samples/s."""
        words = ["--steps", str(STEPS), "--", *recipe_words(self.data_dir), "--amp", amp]
        return 1000 * BATCH_SIZE / contender("bare_step", words, processes)["step_ms"]

    def best_workers(self, processes: int) -> int:
        """Return the number of workers per process with which the usual loop is fastest here."""
        most = count_cores() // processes
        choices = [0, *(2**i for i in range(most.bit_length()))]
        speed = {n: self.other("try", "lenet", processes, "--workers", str(n), steps=40) for n in choices}
        return max(speed, key=lambda n: speed[n])


def contenders(bench: Bench, processes: int, workers: int) -> dict[str, Callable[[], float]]:
    """Return, by name, a function that runs each contender and returns its samples/s."""
    loading = ("--workers", str(workers))
    return {
        "ours": lambda: bench.ours(f"{processes}-ours", processes),
        "ours bf16": lambda: bench.ours(f"{processes}-ours-bf16", processes, "--amp", "bf16"),
        "plain": lambda: bench.other(f"{processes}-plain", "lenet", processes, *loading),
        **{p: partial(bench.other, p, f"with_{p}", processes, *loading) for p in filter(find_spec, PEERS)},
        "bare": lambda: bench.bare(processes),
        "bare bf16": lambda: bench.bare(processes, amp="bf16"),
    }


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure with one process and with two, each with its share of the cores."""
    bench = Bench(folder)
    figures = []
    for processes in (1, 2):
        workers = bench.best_workers(processes)
        values = take_turns(contenders(bench, processes, workers), rounds)
        figures += [*figures_of(values, processes, workers), difference(bench, processes)]
    return figures


def figures_of(values: Rounds, processes: int, workers: int) -> list[Figure]:
    """Return the ratios of speed."""

    def figure(precision: str, ours: str, against: str, goal: str, peer: str, is_limit: bool = False) -> Figure:
        name = f"LeNet {precision}, {process_count_text(processes)}"
        return speed_figure(name, values, ours, against, goal, peer, is_limit=is_limit)

    ddp = " and DDP" if processes > 1 else ""
    loop = f"usual eager loop in fp32, DataLoader with {workers} workers{ddp}"
    bare = f"bare compute{ddp} on ready tensors"
    # Two processes on two cores wait for the one that was disturbed: only DDP on ready tensors has a goal then.
    goals = (">= 1.8", ">= 2.6") if processes == 1 else ("", "")
    return [
        figure("fp32", "ours", "plain", goals[0], loop),
        figure("bf16", "ours bf16", "plain", goals[1], loop),
        *(
            figure("fp32", "ours", peer, "", title)
            if peer in values
            else unmeasured(f"LeNet fp32, {process_count_text(processes)}", f"{peer} is not installed")
            for peer, title in PEERS.items()
        ),
        figure("fp32", "ours", "bare", ">= 0.95", bare, True),
        figure("bf16", "ours bf16", "bare bf16", ">= 0.95", bare, True),
    ]


def difference(bench: Bench, processes: int) -> Figure:
    """Return a figure for the largest relative difference from the losses of the usual loop in one process."""
    logged = COMPARED // LOG_EVERY
    pairs = zip(bench.losses[f"{processes}-ours"][:logged], bench.losses["1-plain"][:logged], strict=True)
    largest = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    note = f"of every {LOG_EVERY}th of the first {COMPARED} steps"
    name = f"LeNet fp32, {process_count_text(processes)}: largest relative difference of the loss"
    reason = "a difference, not a speed"
    return Figure(name, largest, goal="<= 0.0001", peer="usual loop", note=note, no_limit=reason)
