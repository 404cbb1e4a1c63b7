"""The step: whether gradients travel while backward still computes, on links of 1 Gbit/s.

Two nodes with a network each (scripts/bench/namespaces.py), one thread each, train resnet18 on images of 32x32 by
the ddp recipe's own loop. Three things take turns in the same two processes:

compute         the same steps with the exchange of gradients switched off (no_sync), on both nodes at once: they
                share the machine's memory and cache
communication   all-reduces of tensors of the sizes of DDP's buckets, all begun at once, and nothing computed
step            the recipe as it is

The limit is the longest of three, of the same round. No gradient is there before backward: forward, and then the
longer of backward and communication. And a node has one core, which does the network's work too: computing, and
the processor's time of the communication.

The batch decides how long computing takes: it is chosen so that it is a quarter of the communication, the same,
and twice as long.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from recipes.common.loop import train_one_epoch
from recipes.common.process.ranks import read_ranks
from recipes.common.process.signals import Stop
from recipes.common.world.world import World, join_world, leave_world
from recipes.ddp import train
from scripts.bench.figures import Figure, Rounds, ratio, take_turns
from scripts.lab.network import Network

NODES, RATE = 2, "1gbit"
STEPS = 4
"""Of one measurement: an epoch of so many batches."""

SHARES = (0.25, 1.0, 2.0)
"""Computing over communication."""

PROBE_BATCH = 4
"""Of a rank, to find out how long a sample takes."""

PRECISIONS = {"fp32": ("none", torch.float32), "fp16": ("fp16", torch.float16)}
"""By name: --grad-compression, and what travels."""

TIMEOUT_S = 600


class Trainer:
    """The recipe's own training of one batch size, ready to do a few steps at a time."""

    def __init__(self, world: World, batch: int, precision: str) -> None:
        compression, dtype = PRECISIONS[precision]
        words = ["--model", "resnet18", "--data", "synthetic", "--image-size", "32", "--device", "cpu"]
        words += ["--global-batch-size", str(batch * world.world_size), "--lr", "0.001", "--epochs", "1000000"]
        words += ["--num-samples", str(STEPS * batch * world.world_size), "--log-every", "1000000"]
        args = train.options([*words, "--grad-compression", compression])
        self.job, self.technique = train.prepare(args, "ddp", world, Stop())
        self.ddp = cast(DistributedDataParallel, self.technique.module)
        self.share = torch.arange(batch)
        self.run()  # the first backward puts the buckets together as they stay
        # Their bytes as fp32 gradients, in the order in which they travel.
        sizes = str(self.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")
        self.buckets = [torch.zeros(int(size) // 4, dtype=dtype) for size in sizes]
        self.exchange_cpu_s: list[float] = []

    def run(self) -> None:
        """Train an epoch of STEPS batches."""
        train_one_epoch(self.job, self.technique)
        self.job.position.record_evaluation({}, 0.0)

    def compute(self) -> None:
        """Train without the exchange."""
        with self.ddp.no_sync():
            self.run()

    def forward(self) -> None:
        """Do the first half of a step alone, as often."""
        images, labels = next(iter(self.job.data.train.batches([self.share], 0)))
        for _ in range(STEPS):
            cross_entropy(self.job.model(images), labels, reduction="sum")

    def communicate(self) -> None:
        """Exchange what as many steps exchange, without training; note the processor's time of one."""
        begin = time.process_time()
        for _ in range(STEPS):
            works = [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]
            for work in works:
                work.wait()
        self.exchange_cpu_s.append((time.process_time() - begin) / STEPS)

    def measure(self, rounds: int) -> Rounds:
        """Return by round the seconds of a step of each, which take turns."""
        contenders = {
            "compute": partial(seconds, self.compute),
            "forward": partial(seconds, self.forward),
            "communication": partial(seconds, self.communicate),
            "step": partial(seconds, self.run),
        }
        found = take_turns(contenders, rounds, warm_up=True)
        return {**found, "exchange_cpu": self.exchange_cpu_s[1:]}  # the first was the warm-up's


def seconds(work: Callable[[], None]) -> float:
    """Return the seconds of a step of what all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) / STEPS


def agreed(value: float) -> float:
    """Return the mean of the ranks' numbers."""
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number)
    return float(number) / dist.get_world_size()


def be_a_rank(precision: str, number: int, result: Path) -> None:
    """Measure all batch sizes of one precision in so many rounds; rank 0 writes them."""
    world = join_world(train.options(["--device", "cpu"]), read_ranks("ddp"))
    quick = Trainer(world, PROBE_BATCH, precision).measure(2)
    sample_s, communication_s = agreed(min(quick["compute"]) / PROBE_BATCH), agreed(min(quick["communication"]))
    found = []
    for share in SHARES:
        batch = max(2, round(share * communication_s / sample_s))
        trainer = Trainer(world, batch, precision)
        sizes = [bucket.nbytes for bucket in trainer.buckets]
        found.append({"share": share, "batch": batch, "buckets": sizes, "rounds": trainer.measure(number)})
    if world.rank == 0:
        result.write_text(json.dumps(found))
    leave_world(world)


def limits(rounds: Rounds) -> list[float]:
    """Return by round the seconds that no step is below."""
    names = ("compute", "forward", "communication", "exchange_cpu")
    return [
        max(forward + max(compute - forward, communication), compute + exchange_cpu)
        for compute, forward, communication, exchange_cpu in zip(*(rounds[name] for name in names), strict=True)
    ]


def figure(precision: str, share: float, batch: int, buckets: Sequence[int], rounds: Rounds) -> Figure:
    """Return the step's time over its limit."""
    values = ratio({"step": rounds["step"], "limit": limits(rounds)}, "step", "limit")
    middle = {name: f"{1e3 * median(times):.0f} ms" for name, times in rounds.items()}
    sizes = " + ".join(f"{size / 1e6:.1f}" for size in buckets)
    note = (
        f"step {middle['step']}, compute {middle['compute']} with forward {middle['forward']}, communication "
        f"{middle['communication']} with {middle['exchange_cpu']} of the processor; "
        f"{batch} samples a rank, buckets of {sizes} MB"
    )
    name = f"step, ddp {precision}, computing {share:g} x communication"
    return Figure("overlap", name, *values, "<= 1.15", "the best overlap on a core", note, is_limit=True)


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure both precisions, each in two processes of its own."""
    net, found, result = Network(NODES), [], folder / "rounds.json"
    for node in range(NODES):
        net.narrow(node, RATE, burst="256kb")
    for precision in PRECISIONS:
        words = [precision, str(rounds), str(result)]
        net.run_ranks([sys.executable, "-m", "scripts.bench.overlap", *words], NODES, 1, TIMEOUT_S)
        for row in json.loads(result.read_text()):
            found.append(figure(precision, **row))
            print(f"  {found[-1].name}: {found[-1].measured:.3f}; {found[-1].note}", flush=True)
    return found


if __name__ == "__main__":
    be_a_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
