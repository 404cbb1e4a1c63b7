"""Train a model, save it repeatedly in both ways, and read it back: what the checkpoints of a run cost.

python -m scripts.bench.contenders.save FOLDER --saves 6 -- --model resnet50 --optimizer adamw
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from recipes.common.arguments import Parser
from recipes.common.checkpoint.checkpoint import CheckpointFolder, CheckpointWriter, Position, pack
from recipes.common.checkpoint.reading import read_checkpoint
from recipes.common.data import load_data
from recipes.common.data.splits import Data
from recipes.common.models.models import build_model
from recipes.common.optim import build_optimizer
from recipes.common.options import Options
from recipes.common.restore import load_optimizer_state
from recipes.common.world.peers import Peers
from recipes.single.train import options
from scripts.launch.command import parse

READS = 2
"""For each save: a shared disk's speed varies more than memory's."""


def drop_from_memory(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_read(path: Path) -> float:
    """Return the seconds to read a file from the disk into new memory of torch, where a restore needs it."""
    drop_from_memory(path)
    begin = time.perf_counter()
    memory = torch.empty(path.stat().st_size, dtype=torch.uint8).numpy().data
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory[: 2**23]):
            memory = memory[count:]
    return time.perf_counter() - begin


def timed_load(path: Path) -> float:
    """Return the seconds that torch.load alone takes for a file on the disk."""
    drop_from_memory(path)
    begin = time.perf_counter()
    torch.load(path, map_location="cpu", weights_only=True)
    return time.perf_counter() - begin


def build(args: Options, device: torch.device) -> tuple[Data, nn.Module, Optimizer]:
    """Return the data, and a new model and its optimizer."""
    data = load_data(args, device, on_bad_image=print)
    model = build_model(args, data).to(device)
    return data, model, build_optimizer(args, model, Peers(device))


def timed_restore(path: Path, args: Options) -> float:
    """Return the seconds to restore a new model and optimizer from a checkpoint on the disk."""
    _, model, optimizer = build(args, torch.device("cpu"))
    drop_from_memory(path)
    begin = time.perf_counter()
    content = read_checkpoint(path)
    model.load_state_dict(content["model"])
    load_optimizer_state(optimizer, content["optimizer"])
    return time.perf_counter() - begin


WAYS: dict[str, Callable[[Path, Options], float]] = {
    "restore": timed_restore,
    "load": lambda path, args: timed_load(path),
    "read": lambda path, args: timed_read(path),
}
"""How a checkpoint is read; restore is a recipe's."""


def timed(way: str, path: Path, args: Options) -> float:
    """Return the seconds of one of WAYS."""
    return WAYS[way](path, args)


def copies(size: int, count: int) -> list[float]:
    """Return the seconds of each of `count` copies of `size` bytes between buffers that are already in use."""
    source, target, seconds = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8), []
    for _ in range(count):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Print the stalls of both kinds of save, the seconds of copies, restores and reads, and the file's size."""
    parser = Parser("python -m scripts.bench.contenders.save", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=int, default=6)
    own_args = parse(parser, sys.argv[1:])
    args = options(own_args.options)
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    data, model, optimizer = build(args, device)
    images, labels = next(iter(data.train.batches([torch.arange(args.global_batch_size)], 0)))

    def train(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while True:
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if time.perf_counter() > end:
                return

    def fail(error: Exception) -> None:
        raise SystemExit(f"error: {error}")

    train(0.0)
    writer = CheckpointWriter(CheckpointFolder(own_args.folder, keep=1).write, fail)
    write_s: list[float] = []
    begin_s: list[float] = []
    for i in range(2 * own_args.saves + 2):
        content = pack(args, Position(step=i + 1), model.state_dict(), optimizer.state_dict(), {})
        stalls_s = begin_s if i % 2 else write_s
        writer.begin(content, copies=stalls_s is begin_s)
        if stalls_s is write_s:
            writer.wait()
        if i > 1:  # the first save of each kind allocates memory that later ones reuse
            stalls_s.append(writer.stalls_s[-1])
            train(2 * max(write_s))
        writer.wait()  # else the next save would wait for this one
    assert writer.newest
    # As a job that resumes, each in a new process, whose memory nothing else has used.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        read = partial(timed, path=writer.newest, args=args)
        seconds = pool.map(read, list(WAYS) * READS * own_args.saves, chunksize=1)
    size = writer.newest.stat().st_size
    figures = {"write_s": write_s, "begin_s": begin_s, "copy_s": copies(size, own_args.saves), "bytes": size}
    figures |= {f"{way}_s": seconds[i :: len(WAYS)] for i, way in enumerate(WAYS)}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
