"""Minimal training: forward, backward and step on ready batches; no data, no record, no checks.

    python -m scripts.bench.contenders.bare_step --steps 100 -- --model resnet18 --data synthetic

Options after -- are those of the recipe that it is compared with. Under torchrun it trains with plain DDP, or
with --horovod with plain Horovod; with --alone, each process computes by itself. --without-backward leaves out
what can run beside an exchange. --tf32 lets a GPU multiply float32 matrices in TF32.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from recipes.common.arguments import Parser
from recipes.common.data import load_data
from recipes.common.models.models import build_model
from recipes.common.optim import autocast, optimizer_class
from recipes.common.process.memory import keep_freed_memory
from recipes.common.process.ranks import connect_within
from recipes.ddp.train import options
from scripts.launch.agent import read_node
from scripts.launch.command import parse
from scripts.launch.horovod import environment, rendezvous

READY = 16
"""Number of batches that are prepared and used in turn; fewer if the data set has fewer."""


@contextlib.contextmanager
def horovod() -> Iterator[Any]:
    """Connect this process, a node's only one, with the others by Horovod; the block gets horovod.torch."""
    node = read_node()
    os.environ.update(environment(node, 0, node.master_port))
    with rendezvous(node, node.master_port) if node.node_rank == 0 else contextlib.nullcontext():
        import horovod.torch as hvd

        connect_within(node.master_addr, node.master_port, node.rdzv_timeout_s)  # else Horovod aborts this process
        hvd.init()
        yield hvd
        hvd.barrier()
        hvd.shutdown()


def main() -> None:
    """Time steps with the options of the command line."""
    parser = Parser("python -m scripts.bench.contenders.bare_step", __doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--horovod", choices=("none", "fp16"), help="the compression of gradients")
    parser.add_argument("--without-backward", action="store_true")
    own_args = parse(parser, sys.argv[1:])
    keep_freed_memory()  # as the recipes do
    with horovod() if own_args.horovod else contextlib.nullcontext() as hvd:
        measure(own_args, hvd)


def measure(own_args: argparse.Namespace, hvd: Any) -> None:
    """Print the milliseconds of a step; hvd is horovod.torch, or None to train without it.

    step_ms is the mean, median_ms the median over windows of --log-every steps, as a recipe logs its speed. On a
    GPU, where steps are only queued, the median means nothing.
    """
    steps: int = own_args.steps
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = own_args.tf32
    torch.backends.cudnn.benchmark = True  # as the recipes do
    args = options(own_args.options)
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and not hvd:
        dist.init_process_group("gloo")
    data = load_data(args, device, on_bad_image=print)
    model = build_model(args, data).to(device)
    is_ddp = world_size > 1 and not own_args.alone and not hvd
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if is_ddp else model
    make, settings = optimizer_class(args)
    optimizer = make(model.parameters(), **settings)
    if hvd:
        model.to(memory_format=torch.contiguous_format)  # as Horovod needs it
        compression = getattr(hvd.Compression, own_args.horovod)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    size = args.global_batch_size // world_size
    indices = torch.arange(min(READY, len(data.train) // size) * size)
    ready = itertools.cycle(list(data.train.batches(indices.split(size), 0)))

    def step(has_backward: bool) -> None:
        images, labels = next(ready)
        with autocast(args, device):
            loss = cross_entropy(ddp(images), labels)
        if has_backward:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()

    for count, has_backward in ((3, True), (steps, not own_args.without_backward)):  # the first is the warm-up
        times = [time.perf_counter()]
        for _ in range(count):
            step(has_backward)
            times.append(time.perf_counter())
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - times[0]
    if int(os.environ.get("RANK", "0")) == 0:
        every = min(args.log_every, steps)
        middle = median(end - begin for begin, end in itertools.pairwise(times[::every])) / every
        print(json.dumps({"step_ms": 1000 * seconds / steps, "median_ms": 1000 * middle}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
