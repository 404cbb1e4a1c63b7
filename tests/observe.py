"""What the tests of the contract change and observe in each rank, beside what a recipe records itself."""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.common import data, loop, options
from recipes.common.job import Job
from recipes.common.models import blocks, models
from recipes.common.watch import watch


class NormNet(nn.Sequential):
    """A convolution with batch norm, and a classifier: the smallest model whose buffers change in training."""

    def __init__(self, channels: int, image_size: int, num_classes: int) -> None:
        side = image_size // 2
        super().__init__(
            *(nn.Conv2d(channels, 4, kernel_size=3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(4 * side * side, num_classes)),
        )


def smooth_resnet18(own: data.Data) -> nn.Module:
    """Return torchvision's resnet18 for small images, with SiLU in place of ReLU.

    A ReLU's slope jumps at 0: in runs that round differently, an input is now and then on different sides of it.
    """
    from torchvision.models import resnet18  # the import takes over a second

    model = resnet18(num_classes=own.num_classes)
    model.conv1, model.maxpool = nn.Conv2d(own.input.shape[0], 64, 3, padding=1, bias=False), nn.Identity()
    for module in [model, *model.layer1, *model.layer2, *model.layer3, *model.layer4]:
        module.relu = nn.SiLU()
    return model


def some_digits(args: Any) -> Any:
    """Return --num-samples digits for training, and an eighth of that number for the test."""
    splits = all_digits(args)
    counts = (args.num_samples, max(1, args.num_samples // 8))
    return tuple((images[:n], labels[:n]) for (images, labels), n in zip(splits, counts, strict=True))


all_digits = data._digits
CHANGES: list[tuple[Any, str, Any]] = [
    (data, "_digits", some_digits),
    (options, "ONLY_FOR", {**options.ONLY_FOR, "num_samples": ("digits", "synthetic")}),
    (models, "BUILT_IN_MODELS", {**models.BUILT_IN_MODELS, "norm": NormNet}),
    (models, "MIN_IMAGE_SIZE", {**models.MIN_IMAGE_SIZE, "norm": 2}),
    # Notes are sent by time: slow steps, as on a busy machine, have several each.
    (watch, "NOTE_INTERVAL_S", 10.0),
]
"""Objects, names of their attributes, and the values that these have in the tests."""


def compute_in_double() -> None:
    """Make ddp compute in float64, where rounding hides nothing; losses are logged in float32."""
    build_model, batches = loop.build_model, data.TensorSplit.batches
    changes: list[tuple[Any, str, Any]] = [
        (loop, "build_model", lambda *args: build_model(*args).double()),
        (data.TensorSplit, "batches", lambda *args: ((x.double(), targets) for x, targets in batches(*args))),
        (Job, "loss", lambda job, *batch: job.data.task.loss_sum(*batch) / job.args.global_batch_size),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


def sent_bytes() -> int:
    """Return the bytes that this process has sent or queued on the TCP connections that are open now."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            if not str(path.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed by now, or not a TCP socket
            continue
        # struct tcp_info of linux/tcp.h: tcpi_notsent_bytes, tcpi_bytes_sent, tcpi_bytes_retrans.
        (unsent,), (sent, again) = struct.unpack_from("I", info, 144), struct.unpack_from("QQ", info, 200)
        total += unsent + sent - again
    return total


def observe_steps(folder: Path) -> None:
    """Make this rank write after each step its number, the random seed, the bytes sent and blocks run so far.

    The blocks are those that --activation-checkpointing makes run again in backward.
    """
    for owner, name, value in CHANGES:
        setattr(owner, name, value)
    count_step, checkpoint, again = Job.count_step, blocks.checkpoint, []
    blocks.checkpoint = lambda block, *args, **how: again.append(block) or checkpoint(block, *args, **how)
    file = open(folder / f"steps{os.environ['RANK']}.jsonl", "w", buffering=1)  # noqa: SIM115 (for all steps)

    def observed(job: Job) -> None:
        count_step(job)
        line = {"step": job.position.step, "seed": torch.initial_seed(), "sent_bytes": sent_bytes()}
        file.write(json.dumps({**line, "again": len(again)}) + "\n")

    Job.count_step = observed  # type: ignore[method-assign]


def observations(folder: Path, world_size: int) -> list[list[dict[str, Any]]]:
    """Return what each rank has written after each step."""
    files = [folder / f"steps{rank}.jsonl" for rank in range(world_size)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def sent_per_step(folder: Path, world_size: int, first: int = 2, last: int = 1000) -> list[float]:
    """Return, for each rank, the median number of bytes that it sends per step, over steps first to last."""
    return [
        statistics.median(
            b["sent_bytes"] - a["sent_bytes"] for a, b in itertools.pairwise(lines) if first <= b["step"] <= last
        )
        for lines in observations(folder, world_size)
    ]
