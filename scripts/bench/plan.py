"""Compare the plan's step time and bytes with real runs of ddp, on nodes with a network each on one machine.

    make plan CHECK=1
    make bench PARTS=plan

Each node is a network namespace (scripts/bench/namespaces.py) with a link of a set rate; its rank runs the ddp
recipe over gloo. The prediction uses no result of these runs, only measurements on the same nodes: the time of a
step that computes without any exchange, on all nodes at once; the times of an all-reduce of one number and of a
bucket, alone and while computing; and how much it slows computing. docs/plan.md has the figures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from recipes.common.process.entry import run_main
from recipes.ddp import train
from scripts.bench.figures import Figure, median_and_range
from scripts.bench.programs import TIMEOUT_S
from scripts.lab.network import Network
from scripts.launch.cores import count_cores
from scripts.plan.cost_model import Cluster, Compute, Gradient, Link, Method, Step, step
from scripts.plan.workload import count_workload, kind_of, timed_step

NODES, MBIT = (1, 2, 4, 8), (100, 300, 1000)

MODEL = "squeezenet1_1"
"""1.2 M parameters in 26 layers of similar work: buckets become ready throughout backward."""

IMAGE_SIZE, LOCAL_BATCH, BUCKET_MB = 64, 4, 1.0
BUCKET_BYTES = int(BUCKET_MB * 2**20)

COMPUTE_S = 2.0
"""How long the ranks compute at the same time, without any exchange."""

RUN_S, FEWEST, MOST = 4.0, 6, 40
"""Approximate time of all steps of a run, and the minimum and maximum number of steps."""

MOST_LOAD = 0.95


def recipe_words(nodes: int, folder: Path) -> list[str]:
    """Return the ddp recipe's options; the batch per rank is the same at any number of nodes."""
    data = f"--data synthetic --image-size {IMAGE_SIZE} --num-samples 1000 --model {MODEL} --device cpu"
    more = f"--global-batch-size {nodes * LOCAL_BATCH} --bucket-cap-mb {BUCKET_MB} --log-every 1000 --overwrite"
    words = f"{data} {more} --no-async-checkpoints --no-tensorboard --name run".split()
    return [*words, "--runs-dir", str(folder)]


# ---- one rank


def run_rank(folder: Path) -> None:
    """Measure, then train. Rank 0 writes the measurements to probe.json; the recipe writes the run."""
    dist.init_process_group("gloo")
    words = recipe_words(dist.get_world_size(), folder)
    options = train.options(words)
    kind = kind_of(options)
    figures = probe(timed_step(options, kind, LOCAL_BATCH, torch.device("cpu")))
    if dist.get_rank() == 0:
        (folder / "probe.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    buckets_s = count_workload(options, kind).parameter_bytes / BUCKET_BYTES * figures.get("bucket_s", 0.0)
    step_s = max(figures.get("busy_step_s", 0.0), figures["forward_s"] + figures["backward_s"], buckets_s)
    steps = min(MOST, max(FEWEST, round(RUN_S / step_s)))
    # A new port: other ranks may connect before rank 0 has closed the first store.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    train.main([*words, "--max-steps", str(steps)])


def probe(do_step: Callable[[], list[float]]) -> dict[str, float]:
    """Return the mean times of computing and of all-reduces, alone and together; call it on all ranks."""
    do_step()
    dist.barrier()
    seconds: list[list[float]] = []
    end = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end or len(seconds) < 3:
        seconds.append(do_step())
    means = mean_over_ranks([fmean(values) for values in zip(*seconds, strict=True)])
    probed = dict(zip(("forward_s", "backward_s", "optimizer_s"), means, strict=True))
    if dist.get_world_size() > 1:
        for times in (2, 20):  # the first two calls are the warm-up
            begin = time.perf_counter()
            for _ in range(times):
                dist.all_reduce(torch.zeros(1))
            probed["small_s"] = (time.perf_counter() - begin) / times
        bucket = torch.zeros(BUCKET_BYTES // 4)
        warm_up_s = time_buckets(bucket, 6)  # TCP raises its rate over some round trips
        number = min(60, max(6, round(COMPUTE_S / warm_up_s)))
        probed["bucket_s"] = time_buckets(bucket, number)
        probed["busy_bucket_s"], probed["busy_step_s"] = time_busy_buckets(bucket, number, do_step)
    return probed


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return each number's mean over the ranks; call it on all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def time_buckets(bucket: torch.Tensor, number: int) -> float:
    """Return the mean time of an all-reduce of a bucket; call it on all ranks.

    All `number` all-reduces are begun at once, as with DDP's buckets; the backend runs one or two at a time. The
    ranks sleep until the end: asking for it would take time of the cores that move the bytes.
    """
    dist.barrier()
    begin = time.perf_counter()
    for work in [dist.all_reduce(bucket, async_op=True) for _ in range(number)]:
        work.wait()
    return mean_over_ranks([(time.perf_counter() - begin) / number])[0]


def time_busy_buckets(bucket: torch.Tensor, number: int, compute: Callable[[], object]) -> list[float]:
    """Return the mean times of such an all-reduce and of a call of compute meanwhile; call it on all ranks.

    The last call of compute ends alone, and counts by the share of its time before the all-reduces ended.
    """
    dist.barrier()
    marks: list[float] = [time.perf_counter()]
    ends: list[float] = []
    works = [dist.all_reduce(bucket, async_op=True) for _ in range(number)]
    works[-1].get_future().add_done_callback(lambda _: ends.append(time.perf_counter()))
    while not ends:
        compute()
        marks.append(time.perf_counter())
    for work in works:
        work.wait()
    calls = sum((min(after, ends[0]) - before) / (after - before) for before, after in itertools.pairwise(marks))
    return mean_over_ranks([(ends[0] - marks[0]) / number, (ends[0] - marks[0]) / calls])


# ---- all points


def predict(probed: dict[str, float], gradients: Sequence[Gradient], nodes: int) -> Step:
    """Return the plan of a step, from the measurements of probe()."""
    compute = Compute(probed["forward_s"], probed["backward_s"], probed["optimizer_s"])
    cluster = Cluster(1, 1, Link(0.0, 1.0))
    if hops := 2 * (nodes - 1):
        alpha_s = probed["small_s"] / hops
        rate, busy_rate = (
            hops / nodes * BUCKET_BYTES / max(probed[key] - probed["small_s"], 1e-9)
            for key in ("bucket_s", "busy_bucket_s")
        )
        compute = replace(compute, load=min(MOST_LOAD, max(0.0, 1 - compute.total_s / probed["busy_step_s"])))
        cluster = Cluster(nodes, 1, Link(alpha_s, rate), loaded=Link(alpha_s, min(rate, busy_rate)))
    method = Method("ddp", device="cpu", bucket_cap_mb=BUCKET_MB)
    return step(gradients, compute, cluster, method, control_alpha_s=cluster.network.alpha_s)


def run_ranks(net: Network, nodes: int, mbit: int, folder: Path) -> None:
    """Run a rank on each node, on links of `mbit` Mbit/s (0: unlimited)."""
    rank = [sys.executable, "-m", "scripts.bench.plan", str(folder)]
    with net.narrowed(nodes, mbit) if mbit else contextlib.nullcontext():
        net.run_ranks(rank, nodes, max(1, count_cores() // nodes), TIMEOUT_S)


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Return a figure for the step time at each point, and one for the bytes at all points."""
    options = train.options(recipe_words(1, folder))
    gradients = count_workload(options, kind_of(options)).gradients
    net = Network(max(NODES))
    steps: dict[tuple[int, int], list[tuple[Step, float]]]  # by nodes and rate: predicted, and real seconds
    steps = {(1, 0): [], **{point: [] for point in itertools.product(NODES[1:], MBIT)}}
    sent: list[float] = []
    for (nodes, mbit), found in [*steps.items()] * rounds:
        run_ranks(net, nodes, mbit, folder)
        plan = predict(json.loads((folder / "probe.json").read_text()), gradients, nodes)
        result = json.loads((folder / "run" / "result.json").read_text())
        found.append((plan, nodes * LOCAL_BATCH / result["samples_per_s"]))
        if nodes > 1:
            sent.append(result["sent_bytes_per_step"] / plan.sent_bytes_per_node)
        figure = time_figure(nodes, mbit, found)
        print(f"  {figure.name}: {figure.note}", flush=True)
    note, peer = "of all points; the votes on stopping are in it", "the real bytes"
    return [
        *(time_figure(*point, found) for point, found in steps.items()),
        Figure("bytes sent over the plan's", *median_and_range(sent), "<= 1.02", peer, note, is_limit=True),
    ]


def time_figure(nodes: int, mbit: int, steps: Sequence[tuple[Step, float]]) -> Figure:
    """Return a figure for the error of a step's time: the larger of predicted and real over the smaller."""
    ratios = [max(plan.step_s / s, s / plan.step_s) for plan, s in steps]
    name = f"predicted step time, {nodes} node{'s' * (nodes > 1)}" + (f" at {mbit} Mbit/s" if mbit else "")
    times = ((plan.step_s, plan.compute_s, s) for plan, s in steps)
    plan_ms, compute_ms, real_ms = (1e3 * median(values) for values in zip(*times, strict=True))
    note = f"predicted {plan_ms:.0f} ms, of which {compute_ms:.0f} ms compute, real {real_ms:.0f} ms"
    note += "; the larger over the smaller"
    return Figure(name, *median_and_range(ratios), "<= 1.15", "the real step", note, is_limit=True)


if __name__ == "__main__":
    sys.exit(run_main(lambda: run_rank(Path(sys.argv[1]))))
