"""resnet50 on one GPU: the recipe with all that makes it fast, against plain eager loops and the roofline."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from scripts.bench.figures import Figure, ratio, take_turns, unmeasured
from scripts.bench.programs import contender, recipe

PART = "gpu"
BATCH = 256
STEPS = 60
OPTIONS = ("--model", "resnet50", "--data", "synthetic", "--image-size", "224", "--num-samples", "2048")
FAST = ("--amp", "bf16", "--channels-last", "--compile")

TRAINING_FLOP = 3 * 2 * 4.09e9
"""Of a 224 x 224 image in resnet50: 4.09 G multiply-adds forward (He et al. 2016), twice as many backward."""


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure images per second with the data on the GPU, and the memory that they take."""
    name = "resnet50, 224, bf16, channels_last, compiled: images/s"
    if not torch.cuda.is_available():
        return [unmeasured(PART, name, "there is no GPU")]
    options = [*OPTIONS, "--global-batch-size", str(BATCH), "--epochs", "1000", "--max-steps"]
    memory: list[float] = []

    def ours() -> float:
        result = recipe("single", folder, [*options, str(STEPS + 1), *FAST])
        memory.append(result["peak_memory_bytes"])
        return result["samples_per_s"]

    def plain(*words: str) -> float:
        step_ms = contender(
            "bare_step", ["--steps", str(STEPS), *words, "--", *options, str(STEPS), "--no-channels-last"]
        )
        return 1000 * BATCH / step_ms["step_ms"]

    values = take_turns(
        {
            "ours": ours,
            "fp32": plain,
            "tf32": lambda: plain("--tf32"),
            # As many images as the tensor cores could do if there were nothing but products of large matrices.
            "roofline": lambda: contender("matmul", [])["tflops"] * 1e12 / TRAINING_FLOP,
        },
        rounds,
    )
    ours_s = f"{median(values['ours']):,.0f} images/s, peak memory {median(memory) / 2**30:.1f} GiB"
    peers = {
        "fp32": "eager fp32 loop on ready tensors",
        "tf32": "eager TF32 loop on ready tensors",
        "roofline": "bf16 matrix products",
    }
    return [
        Figure(
            PART,
            name,
            *ratio(values, "ours", against),
            "",
            peer,
            f"{ours_s} against {median(values[against]):,.0f} images/s",
        )
        for against, peer in peers.items()
    ]
