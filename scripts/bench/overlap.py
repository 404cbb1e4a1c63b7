"""The step: whether gradients travel while backward still computes, on links of 1 Gbit/s.

Two nodes, each with its own network (scripts/bench/namespaces.py) and one core, train resnet18 on images of
32x32 with the ddp recipe's own loop. Five things take turns in the same two processes:

compute         the same steps without the exchange of gradients (no_sync), on both nodes at once, because they
                share the machine's memory and cache
forward         the forward passes alone
update          the optimizer's steps alone
communication   all-reduces of tensors as large as DDP's buckets, converted to the type that is sent and back, a
                step's all begun at once, and no computing
step            the recipe as it is

The limit is the larger of two lower bounds from the same round. First, gradients exist only after forward, and the
update changes all weights or none: a step takes at least forward, communication and update, one after the other.
Second, a node's one core also does the network's work, most of it in the kernel: a step takes at least computing
plus a node's share of the cores' work for the communication.

The batch size sets how long computing takes: a quarter of the communication's time, the same, or twice as long.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import cast

import psutil
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from recipes.common.loop import train_until_evaluation
from recipes.common.optim import build_optimizer
from recipes.common.process.memory import keep_freed_memory
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import Stop
from recipes.common.world.world import World, join_world, leave_world
from recipes.ddp import train
from scripts.bench.figures import Figure, Rounds, ratio, take_turns
from scripts.bench.programs import TIMEOUT_S
from scripts.lab.network import Network

NODES, RATE_MBIT = 2, 1000
STEPS = 4
"""Steps per measurement: the number of batches in an epoch."""

SHARES = (0.25, 1.0, 2.0)
"""Ratios of computing time to communication time."""

PROBE_BATCH = 4
"""Batch size of a rank in the run that measures how long a sample takes."""

PRECISIONS = {"fp32": ("none", torch.float32), "fp16": ("fp16", torch.float16)}
"""For each name: the value of --grad-compression, and the type that is sent."""


class Trainer:
    """The recipe's own training with one batch size, a few steps at a time."""

    def __init__(self, world: World, batch: int, precision: str) -> None:
        compression, dtype = PRECISIONS[precision]
        size = batch * world.world_size
        words = f"--model resnet18 --data synthetic --image-size 32 --num-samples {STEPS * size} --device cpu"
        words += f" --global-batch-size {size} --lr 0.001 --epochs 1000000 --log-every 1000000"
        args = train.options([*words.split(), "--grad-compression", compression])
        self.job, self.technique = train.prepare(args, "ddp", world, Stop())
        self.ddp = cast(DistributedDataParallel, self.technique.module)
        self.share = torch.arange(batch)
        self.run()  # DDP rebuilds its buckets once, after the first backward
        # Bytes of fp32 gradients in each bucket, in the order in which DDP sends them.
        sizes = str(self.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")
        self.buckets, self.sent_type = [torch.zeros(int(size) // 4) for size in sizes], dtype
        copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self.ddp.parameters()]
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        self.optimizer = build_optimizer(args, torch.nn.ParameterList(copies), world)
        self.exchange_work_s: list[float] = []

    def run(self) -> None:
        """Train for one epoch of STEPS batches."""
        train_until_evaluation(self.job, self.technique)
        self.job.position.record_evaluation({}, 0.0)

    def compute(self) -> None:
        """Train for one epoch without exchanging gradients."""
        with self.ddp.no_sync():
            self.run()

    def forward(self) -> None:
        """Run only the forward pass, STEPS times."""
        images, labels = next(iter(self.job.data.train.batches([self.share], 0)))
        for _ in range(STEPS):
            cross_entropy(self.job.model(images), labels, reduction="sum")

    def update(self) -> None:
        """Run only the optimizer, STEPS times, on weights and gradients of the same sizes."""
        for _ in range(STEPS):
            self.optimizer.step()

    def communicate(self) -> None:
        """All-reduce the buckets of STEPS steps without training; record the cores' work per step."""
        begin = work_s()
        for _ in range(STEPS):
            begun = []
            for bucket in self.buckets:
                part = bucket.to(self.sent_type)
                begun.append((bucket, part, dist.all_reduce(part, async_op=True)))
            for bucket, part, work in begun:
                work.wait()
                if part is not bucket:
                    bucket.copy_(part)
        self.exchange_work_s.append((work_s() - begin) / STEPS / NODES)

    def measure(self, rounds: int) -> Rounds:
        """Run the contenders in turns; return the seconds per step of each, and of work, for each round."""
        contenders = {
            "compute": partial(seconds, self.compute),
            "forward": partial(seconds, self.forward),
            "update": partial(seconds, self.update),
            "communication": partial(seconds, self.communicate),
            "step": partial(seconds, self.run),
        }
        found = take_turns(contenders, rounds, warm_up=True)
        return {**found, "exchange_work": self.exchange_work_s[1:]}  # the first is of the warm-up


def seconds(work: Callable[[], None]) -> float:
    """Return the seconds per step of work that all ranks begin together; call it on all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) / STEPS


def work_s() -> float:
    """Return the seconds that the cores have worked: for the kernel's network too, but also for other programs."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def run_rank(precision: str, number: int, result: Path) -> None:
    """Measure all batch sizes with one precision in `number` rounds; rank 0 writes its own times to `result`."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})  # also for threads that start later
    keep_freed_memory()  # as the recipes do
    world = join_world(train.options(["--device", "cpu"]), read_ranks("ddp"))
    quick = Trainer(world, PROBE_BATCH, precision).measure(2)
    quickest = world.gather_objects([min(quick["compute"]) / PROBE_BATCH, min(quick["communication"])])
    sample_s, communication_s = (fmean(values) for values in zip(*quickest, strict=True))
    found = []
    for share in SHARES:
        batch = max(2, round(share * communication_s / sample_s))
        trainer = Trainer(world, batch, precision)
        sizes = [bucket.numel() * trainer.sent_type.itemsize for bucket in trainer.buckets]
        found.append({"share": share, "batch": batch, "buckets": sizes, "rounds": trainer.measure(number)})
    if world.rank == 0:
        result.write_text(json.dumps(found))
    leave_world(world)


def limits(rounds: Rounds) -> list[float]:
    """Return the lower bound of a step's seconds, for each round."""
    sums = (("forward", "communication", "update"), ("compute", "exchange_work"))
    first, second = ([sum(times) for times in zip(*map(rounds.get, names), strict=True)] for names in sums)
    return [*map(max, first, second)]


def figure(precision: str, share: float, batch: int, buckets: Sequence[int], rounds: Rounds) -> Figure:
    """Return the ratio of the step's time to its limit."""
    values = ratio({"step": rounds["step"], "limit": limits(rounds)}, "step", "limit")
    middle = {name: f"{1e3 * median(times):.0f} ms" for name, times in rounds.items()}
    sizes = " + ".join(f"{size / 1e6:.1f}" for size in buckets)
    note = (
        f"step {middle['step']}, compute {middle['compute']} with forward {middle['forward']} and update "
        f"{middle['update']}, communication {middle['communication']} with {middle['exchange_work']} of the "
        f"processor; {batch} samples a rank, buckets of {sizes} MB"
    )
    name = f"step, ddp {precision}, computing {share:g} x communication"
    return Figure(name, *values, "<= 1.15", "the best overlap on a core", note, is_limit=True)


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure each precision in two new processes."""
    net, found, result = Network(NODES), [], folder / "rounds.json"
    for precision in PRECISIONS:
        words = [precision, str(rounds), str(result)]
        with net.narrowed(NODES, RATE_MBIT):
            net.run_ranks([sys.executable, "-m", "scripts.bench.overlap", *words], NODES, 1, TIMEOUT_S)
        for row in json.loads(result.read_text()):
            found.append(figure(precision, **row))
            print(f"  {found[-1].name}: {found[-1].measured:.3f}; {found[-1].note}", flush=True)
    return found


if __name__ == "__main__":
    run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
