"""One GPU: an epoch of LeNet, resnet50 and gpt-small with all that makes them fast, and resnet50 from JPEGs.

resnet50 is compared with eager loops, gpt-small with itself in eager fp32, and both with the roofline. LeNet's
kernels take less time than their launch: it is measured with and without CUDA graphs, and compared with the epoch
time that the third tutorial reports.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from scripts.bench import jpeg, small_data
from scripts.bench.figures import Figure, Rounds, median_and_range, speed_figure, turns, unmeasured
from scripts.bench.programs import contender, logged_rates, parse_result, recipe, run
from scripts.launch.command import warn
from scripts.launch.cores import count_cores

BATCH, STEPS, IMAGES, CLASSES = 256, 60, 2048, 1000
OPTIONS = ("--device", "cuda", "--model", "resnet50", "--image-size", "224", "--epochs", "1000")
RESIDENT = ("--data", "synthetic", "--num-samples", str(IMAGES))
FAST = ("--amp", "bf16", "--compile")
GRAPHS = ("--compile", "--compile-mode", "reduce-overhead")

TRAINING_FLOP = 3 * 2 * 4.09e9
"""Per image of 224 x 224 in resnet50: 4.09 G multiply-adds forward (He et al. 2016), twice as many backward."""

SEQUENCES, LENGTH = 16, 1024
TOKEN_FLOP = 6 * 85e6 + 6 * 12 * 768 * LENGTH
"""Per token that gpt-small trains on: 6 for each weight, and for causal attention 6 for each layer, number of a
token's vector and position, half as many as without a mask (Chowdhery et al. 2022, appendix B)."""

LENET_GOAL = "<= 4.1"
"""LeNet on Fashion-MNIST, batch 256, one GPU, as the tutorial on data parallelism from scratch reports it."""

RESNET = "resnet50, 224, bf16, channels_last, compiled: images/s"
GPT = f"gpt-small, sequences of {LENGTH:,}, bf16, compiled: tokens/s"
LENET = "LeNet, 60,000 images, batch 256: seconds of an epoch"
JPEGS = "resnet50 from JPEGs"
ROOFLINE, ON_GPU = "bf16 matrix products", "the same with the images on the GPU"

FAULTS = (LookupError, OSError, RuntimeError, ValueError)
"""What fails in a contender, such as a command that ends with an error or prints no result."""


def measure(rounds: int, folder: Path) -> Iterator[Figure]:
    """Yield seconds of an epoch of LeNet, images/s and peak memory of resnet50, and tokens/s of gpt-small.

    Each figure comes as soon as it is measured: a run that is stopped keeps those before. LeNet takes a minute and
    has a goal; the others take several, most of which torch compiles. JPEGs, which need most of the machine, come
    last.
    """
    models = {LENET: lenet, RESNET: resnet, GPT: gpt, JPEGS: jpegs}
    for name, model in models.items():
        goal = LENET_GOAL if name == LENET else ""
        if not torch.cuda.is_available():
            yield unmeasured(name, "there is no GPU", goal)
            continue
        try:
            yield from model(rounds, folder)
        except FAULTS as error:
            warn(f"{name}: {error}")
            yield unmeasured(name, last_line(error), goal)


def last_line(error: Exception) -> str:
    """Return the last line of an error's text, which names the cause, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def photo_steps(workers: int) -> int:
    """Return the steps of a run on JPEGs. Its last STEPS are measured: without those that workers read ahead.

    Each worker reads two batches ahead while torch compiles in the first step, which takes longer than to decode
    them. They would be most of STEPS.
    """
    return STEPS * (1 + math.ceil((1 + 2 * workers) / STEPS))


def write_dataset(folder: Path, steps: int) -> None:
    """Write JPEGs of as many classes, and as many for the test, as the synthetic data: torch compiles one model.

    All steps are one epoch: each epoch begins with a wait until a worker has decoded a whole batch.
    """
    jpeg.write_photos(folder / "originals", IMAGES)
    originals = list((folder / "originals").rglob("*.jpg"))
    for split, count in (("train", BATCH * steps), ("val", IMAGES // 8)):
        for number in range(count):
            path = folder / split / f"{number % CLASSES}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(originals[number % len(originals)])


def train_resnet(folder: Path, steps: int, *more: str) -> dict[str, Any]:
    """Train resnet50 with all that makes it fast, and return its result."""
    size = ("--global-batch-size", str(BATCH), "--max-steps", str(steps))
    return recipe("single", folder, [*OPTIONS, *more, *size, *FAST, "--channels-last"])


def resnet(rounds: int, folder: Path) -> Iterator[Figure]:
    """Measure resnet50 with the images on the GPU."""
    memory: list[float] = []

    def ours() -> float:
        result = train_resnet(folder, STEPS + 1, *RESIDENT)
        memory.append(result["peak_memory_bytes"])
        return result["samples_per_s"]

    def plain(*words: str) -> float:
        size = ("--global-batch-size", str(BATCH), "--max-steps", str(STEPS))
        of_recipe = [*OPTIONS, *RESIDENT, *size, "--no-channels-last"]
        step_ms = contender("bare_step", ["--steps", str(STEPS), *words, "--", *of_recipe])["step_ms"]
        return 1000 * BATCH / step_ms

    contenders = {
        "ours": ours,
        "roofline": lambda: roofline(TRAINING_FLOP),
        "tf32": lambda: plain("--tf32"),
        "fp32": plain,
    }
    pairs = {
        ("ours", "roofline"): (RESNET, ROOFLINE),
        ("ours", "tf32"): (RESNET, "eager TF32, on ready tensors"),
        ("ours", "fp32"): (RESNET, "eager fp32, on ready tensors"),
    }
    for figure in ratios(contenders, rounds, pairs, "images/s"):
        if figure.measured is not None:
            figure = replace(figure, note=f"{figure.note}; peak memory {max(memory, default=0) / 2**30:.1f} GiB")
        yield figure


def jpegs(rounds: int, folder: Path) -> Iterator[Figure]:
    """Measure resnet50 from JPEGs against the same with the images on the GPU."""
    cores = count_cores()
    steps = photo_steps(cores)
    write_dataset(folder / "photos", steps)
    photos = ("--data", "imagefolder", "--data-dir", str(folder / "photos"), "--workers", str(cores))

    def from_photos(*more: str) -> float:
        train_resnet(folder, steps, *photos, "--log-every", str(STEPS), *more)
        return logged_rates(folder)[-1]

    contenders = {
        "resident": lambda: train_resnet(folder, STEPS + 1, *RESIDENT)["samples_per_s"],
        "JPEGs": from_photos,
        "JPEGs, decoded by the GPU": lambda: from_photos("--decode", "gpu"),
    }
    pairs = {
        ("JPEGs", "resident"): (f"{JPEGS}, decoded by {cores} cores: images/s", ON_GPU),
        ("JPEGs, decoded by the GPU", "resident"): (f"{JPEGS}, decoded by the GPU: images/s", ON_GPU),
    }
    yield from ratios(contenders, rounds, pairs, "images/s")


def gpt(rounds: int, folder: Path) -> Iterator[Figure]:
    """Measure the tokens/s of gpt-small."""
    options = ["--device", "cuda", "--data", "text", "--model", "gpt-small", "--seq-len", str(LENGTH)]
    options += ["--global-batch-size", str(SEQUENCES), "--max-steps", str(STEPS + 1)]

    def tokens_per_s(*more: str) -> float:
        return LENGTH * recipe("single", folder, [*options, *more])["samples_per_s"]

    ours, limit = partial(tokens_per_s, *FAST), partial(roofline, TOKEN_FLOP)
    contenders: dict[str, Callable[[], float]] = {"ours": ours, "roofline": limit, "fp32": tokens_per_s}
    pairs = {("ours", "roofline"): (GPT, ROOFLINE), ("ours", "fp32"): (GPT, "eager fp32, by the same recipe")}
    yield from ratios(contenders, rounds, pairs, "tokens/s")


def ratios(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    pairs: Mapping[tuple[str, str], tuple[str, str]],
    unit: str,
) -> Iterator[Figure]:
    """Yield a figure for the speeds of each pair of contenders, once both are measured or one has failed.

    A pair has the figure's name and the second contender in words.
    """
    values: Rounds = {}
    faults: dict[str, str] = {}
    left = dict(pairs)
    for one, outcome in results_of(contenders, rounds):
        if isinstance(outcome, str):
            faults[one] = outcome
        else:
            values[one] = outcome
        for pair, (name, peer) in list(left.items()):
            if failed := faults.keys() & set(pair):
                yield unmeasured(name, f"{faults[min(failed)]} ({peer})")
            elif values.keys() >= set(pair):
                yield speed_figure(name, values, *pair, "", peer, unit, is_limit=peer in (ROOFLINE, ON_GPU))
            else:
                continue
            del left[pair]
        if not left:
            return


def results_of(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> Iterator[tuple[str, list[float] | str]]:
    """Yield each contender's name and, after its last round, its values or, once it has failed, the reason.

    One that has failed is not called again. None needs a warm-up: no time includes a process's first step, in
    which torch compiles or loads its kernels.
    """
    faults: dict[str, str] = {}

    def attempt(name: str) -> float:
        try:
            return math.nan if name in faults else contenders[name]()
        except FAULTS as error:
            warn(f"{name}: {error}")
            faults[name] = last_line(error)
            return math.nan

    ended: set[str] = set()
    for name, own in turns({name: partial(attempt, name) for name in contenders}, rounds):
        if name not in ended and (name in faults or len(own) == rounds):
            ended.add(name)
            yield name, faults.get(name, own)


def roofline(flop: float) -> float:
    """Return how many samples per second, of `flop` operations each, large matrix products alone would allow."""
    return matmul_tflops() * 1e12 / flop


@cache
def matmul_tflops() -> float:
    """Return the peak TFLOP/s of the GPU's tensor cores, which the doctor measures once, in its own process."""
    command = [sys.executable, "-m", "scripts.doctor.torch_facts"]
    device = parse_result(command, run(command))["devices"][0]
    if not device["tflops"]:
        raise RuntimeError(f"{device['device']}: {device.get('error', 'it is no GPU')}")
    return device["tflops"]


def lenet(rounds: int, folder: Path) -> Iterator[Figure]:
    """Measure an epoch of the tutorial's training on the GPU, in eager mode and with CUDA graphs."""
    small_data.write_data(folder / "small")
    options = ["--device", "cuda", "--data", "fashion-mnist", "--data-dir", str(folder / "small")]
    options += ["--epochs", "20", "--global-batch-size", "256", "--log-every", "100"]

    def epoch_s(*more: str) -> float:
        recipe("single", folder, [*options, *more])
        return small_data.SAMPLES / median(logged_rates(folder))  # the second step records CUDA graphs

    peer = "the tutorial's epoch, on its authors' GPU"
    reason = "kernels shorter than their launch"
    ways: dict[str, Callable[[], float]] = {"eager": epoch_s, "CUDA graphs": lambda: epoch_s(*GRAPHS)}
    for how, outcome in results_of(ways, rounds):
        name = f"{LENET}, {how}"
        if isinstance(outcome, str):
            yield unmeasured(name, outcome, LENET_GOAL)
        else:
            yield Figure(name, *median_and_range(outcome), LENET_GOAL, peer, no_limit=reason)
