"""One GPU: resnet50 and gpt-small with all that makes them fast, resnet50 also from JPEGs, and an epoch of LeNet.

resnet50 is compared with eager loops, gpt-small with itself in eager fp32, and both with the roofline. LeNet's
kernels take less time than their launch: it is measured with and without CUDA graphs, and compared with the epoch
time that the third tutorial reports.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import torch

from scripts.bench import jpeg, small_data
from scripts.bench.figures import Figure, Rounds, median_and_range, speed_figure, take_turns, unmeasured
from scripts.bench.programs import contender, parse_result, recipe, run
from scripts.launch.command import warn
from scripts.launch.cores import count_cores
from scripts.launch.runs import read_metrics

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
ROOFLINE = "bf16 matrix products"


def measure(rounds: int, folder: Path) -> Iterator[Figure]:
    """Yield seconds of an epoch of LeNet, images/s and peak memory of resnet50, and tokens/s of gpt-small.

    The first takes a minute and has a goal; the others take several, most of which torch compiles.
    """
    for name, goal, model in ((LENET, LENET_GOAL, lenet), (RESNET, "", resnet), (GPT, "", gpt)):
        if not torch.cuda.is_available():
            yield unmeasured(name, "there is no GPU", goal)
            continue
        try:
            yield from model(rounds, folder)
        except (LookupError, OSError, RuntimeError, ValueError) as error:
            warn(f"{name}: {error}")
            yield unmeasured(name, str(error), goal)


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
    for half, count in (("train", BATCH * steps), ("val", IMAGES // 8)):
        for number in range(count):
            path = folder / half / f"{number % CLASSES}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(originals[number % len(originals)])


def resnet(rounds: int, folder: Path) -> list[Figure]:
    """Measure resnet50 with the data on the GPU and from JPEGs."""
    cores = count_cores()
    steps = photo_steps(cores)
    write_dataset(folder / "photos", steps)
    photos = ("--data", "imagefolder", "--data-dir", str(folder / "photos"), "--workers", str(cores))
    size = ("--global-batch-size", str(BATCH), "--max-steps")
    memory: list[float] = []

    def ours(steps: int, *more: str) -> float:
        result = recipe("single", folder, [*OPTIONS, *more, *size, str(steps), *FAST, "--channels-last"])
        memory.append(result["peak_memory_bytes"])
        return result["samples_per_s"]

    def from_photos(*more: str) -> float:
        ours(steps, *photos, "--log-every", str(STEPS), *more)
        return logged_rates(folder)[-1]

    def plain(*words: str) -> float:
        of_recipe = [*OPTIONS, *RESIDENT, *size, str(STEPS), "--no-channels-last"]
        step_ms = contender("bare_step", ["--steps", str(STEPS), *words, "--", *of_recipe])["step_ms"]
        return 1000 * BATCH / step_ms

    contenders: dict[str, Callable[[], float]] = {
        "ours": lambda: ours(STEPS + 1, *RESIDENT),
        "photos": from_photos,
        "photos, decoded by it": lambda: from_photos("--decode", "gpu"),
        "fp32": plain,
        "tf32": lambda: plain("--tf32"),
        "roofline": lambda: roofline(TRAINING_FLOP),
    }
    values, faults = measure_working(contenders, rounds)
    peak = f"images/s; peak memory {max(memory, default=0) / 2**30:.1f} GiB"
    peers = {
        "fp32": "eager fp32 loop on ready tensors",
        "tf32": "eager TF32 loop on ready tensors",
        "roofline": ROOFLINE,
        "photos": f"the same from JPEGs, decoded by {cores} cores",
        "photos, decoded by it": f"the same from JPEGs, read by {cores} processes and decoded by the GPU",
    }
    return ratios(RESNET, values, faults, peers, peak)


def logged_rates(folder: Path) -> list[float]:
    """Return the samples/s between the logged steps of the last run of recipe()."""
    return [row["samples_per_s"] for row in read_metrics(folder / "run") if "loss" in row]


def gpt(rounds: int, folder: Path) -> list[Figure]:
    """Measure the tokens/s of gpt-small."""
    options = ["--device", "cuda", "--data", "text", "--model", "gpt-small", "--seq-len", str(LENGTH)]
    options += ["--global-batch-size", str(SEQUENCES), "--max-steps", str(STEPS + 1)]

    def tokens_per_s(*more: str) -> float:
        return LENGTH * recipe("single", folder, [*options, *more])["samples_per_s"]

    ours, limit = partial(tokens_per_s, *FAST), partial(roofline, TOKEN_FLOP)
    values, faults = measure_working({"ours": ours, "fp32": tokens_per_s, "roofline": limit}, rounds)
    return ratios(GPT, values, faults, {"fp32": "the same in eager fp32", "roofline": ROOFLINE}, "tokens/s")


def ratios(name: str, values: Rounds, faults: dict[str, str], peers: dict[str, str], unit: str) -> list[Figure]:
    """Return a figure for the speed of "ours" against each of the peers, which are named by contender."""
    return [
        unmeasured(name, f"{faults.get('ours') or faults[contender]} ({peer})")
        if faults.keys() & {"ours", contender}
        else speed_figure(name, values, "ours", contender, "", peer, unit, is_limit=contender == "roofline")
        for contender, peer in peers.items()
    ]


def measure_working(contenders: Mapping[str, Callable[[], float]], rounds: int) -> tuple[Rounds, dict[str, str]]:
    """Return the rounds of the contenders that work, and why the others do not: these are not called again.

    None needs a warm-up: no time includes a process's first step, in which torch compiles or loads its kernels.
    """
    faults: dict[str, str] = {}

    def attempt(name: str) -> float:
        try:
            return math.nan if name in faults else contenders[name]()
        except RuntimeError as error:
            warn(f"{name}: {error}")
            faults[name] = str(error).strip().splitlines()[-1]
            return math.nan

    values = take_turns({name: partial(attempt, name) for name in contenders}, rounds)
    return {name: own for name, own in values.items() if name not in faults}, faults


def roofline(flop: float) -> float:
    """Return how many samples per second, of `flop` operations each, large matrix products alone would allow."""
    return matmul_tflops() * 1e12 / flop


def matmul_tflops() -> float:
    """Return the peak TFLOP/s of the GPU's tensor cores, which the doctor measures in a process of its own."""
    command = [sys.executable, "-m", "scripts.doctor.torch_facts"]
    device = parse_result(command, run(command))["devices"][0]
    if not device["tflops"]:
        raise RuntimeError(f"{device['device']}: {device.get('error', 'it is no GPU')}")
    return device["tflops"]


def lenet(rounds: int, folder: Path) -> list[Figure]:
    """Measure an epoch of the tutorial's training on the GPU, in eager mode and with CUDA graphs."""
    small_data.write_data(folder / "small")
    options = ["--device", "cuda", "--data", "fashion-mnist", "--data-dir", str(folder / "small")]
    options += ["--epochs", "20", "--global-batch-size", "256", "--log-every", "100"]

    def epoch_s(*more: str) -> float:
        recipe("single", folder, [*options, *more])
        return small_data.SAMPLES / median(logged_rates(folder))  # the second step records CUDA graphs

    values, faults = measure_working({"eager": epoch_s, "graphs": lambda: epoch_s(*GRAPHS)}, rounds)
    peer = "the tutorial's epoch, on its authors' GPU"
    reason = "kernels shorter than their launch"
    return [
        Figure(f"{LENET}, {how}", *median_and_range(values[name]), LENET_GOAL, peer, no_limit=reason)
        if name in values
        else unmeasured(f"{LENET}, {how}", faults[name], LENET_GOAL)
        for name, how in (("eager", "eager"), ("graphs", "CUDA graphs"))
    ]
