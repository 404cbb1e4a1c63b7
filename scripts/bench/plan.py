"""Hold the plan's step time and bytes to real runs of the ddp recipe, on nodes with a network each on one machine.

    make plan CHECK=1
    make bench PARTS=plan
    python -m scripts.bench.plan --nodes 2 4 --mbit 100 1000 --rounds 5

Each node is a network namespace (as root on Linux) whose link lets a set rate through; its rank is the recipe's
own code over gloo. The prediction knows nothing of those runs. It is made of how long as many processes as there
are nodes take to compute a step, side by side on these cores, without any exchange; of what all-reduces of one
number and of a bucket's size take on those links, alone and beside computing; and of how much they slow computing
down. docs/plan.md has the figures.
Exit status 0; 1: a run failed; 2: bad usage, or no root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from recipes.common.errors import UserError
from recipes.common.options import non_negative_float, one_of, positive_int
from recipes.common.process.entry import exit_status
from recipes.ddp import train
from scripts.bench.figures import Figure, spread, unmeasured
from scripts.bench.programs import in_namespaces, measure_inside
from scripts.lab import network
from scripts.launch.command import CommandParser, command, parse
from scripts.plan.model import Cluster, Compute, Gradient, Link, Method, step
from scripts.plan.workload import kind_of, look_at, timed_step

MODULE = "scripts.bench.plan"

PACKET_SHARE = 1448 / 1514
"""Of the bytes that a limited link counts: it cuts what it sends into packets of 1,500 bytes."""

MODEL = "squeezenet1_1"
"""1.2 M parameters in 26 layers of about the same work: buckets come all along backward."""

IMAGE_SIZE, LOCAL_BATCH, BUCKET_MB = 64, 4, 1.0
BUCKET_BYTES = int(BUCKET_MB * 2**20)

COMPUTE_S = 2.0
"""How long ranks compute side by side, without any exchange."""

RUN_S, FEWEST, MOST = 4.0, 6, 40
"""About how long the steps of a run take, and how many there are at least and at most."""

MOST_LOAD = 0.95
TIMEOUT_S = 300.0

STEP_GOAL, BYTES_GOAL = "<= 1.15", "<= 1.02"


def words_of_recipe(args: Namespace, nodes: int, folder: Path) -> list[str]:
    """Return the ddp recipe's options: the same samples a rank at any number of nodes."""
    words = ["--data", "synthetic", "--image-size", str(IMAGE_SIZE), "--num-samples", "1000"]
    words += ["--model", args.model, "--bucket-cap-mb", str(BUCKET_MB)]
    words += ["--global-batch-size", str(nodes * LOCAL_BATCH), "--no-tensorboard", "--log-every", "1000"]
    return [*words, "--device", "cpu", "--runs-dir", str(folder), "--overwrite", "--no-async-checkpoints"]


# ---- one rank


def run_rank(args: Namespace) -> None:
    """Measure, then train under each compression; rank 0 writes what was measured."""
    dist.init_process_group("gloo")
    nodes, words = dist.get_world_size(), words_of_recipe(args, dist.get_world_size(), args.rank)
    options = train.options(words)
    kind = kind_of(options, None, None)
    figures = probe(timed_step(options, kind, LOCAL_BATCH, torch.device("cpu")))
    if dist.get_rank() == 0:
        (args.rank / "probe.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    buckets_s = look_at(options, kind).parameter_bytes / BUCKET_BYTES * figures.get("bucket_s", 0.0)
    step_s = max(figures.get("busy_step_s", 0.0), figures["forward_s"] + figures["backward_s"], buckets_s)
    steps = args.steps or min(MOST, max(FEWEST, round(RUN_S / step_s)))
    for compression in args.compression if nodes > 1 else ["none"]:
        # A port of its own for each: the other ranks may come before rank 0 has closed the last store.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        train.main([*words, "--name", compression, "--grad-compression", compression, "--max-steps", str(steps)])


def probe(do_step: Callable[[], list[float]]) -> dict[str, float]:
    """Return the mean times of computing beside other ranks and of exchanges; call it on all ranks."""
    do_step()
    dist.barrier()
    seconds: list[list[float]] = []
    end = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < end or len(seconds) < 3:
        seconds.append(do_step())
    means = mean_over_ranks([fmean(values) for values in zip(*seconds, strict=True)])
    figures = dict(zip(("forward_s", "backward_s", "optimizer_s"), means, strict=True))
    if dist.get_world_size() > 1:
        for times in (2, 20):  # the first two are left out
            begin = time.perf_counter()
            for _ in range(times):
                dist.all_reduce(torch.zeros(1))
            figures["small_s"] = (time.perf_counter() - begin) / times
        bucket = torch.zeros(BUCKET_BYTES // 4)
        figures["bucket_s"], _ = time_buckets(bucket, 6, lambda: None)
        number = min(60, max(4, round(COMPUTE_S / figures["bucket_s"])))
        figures["busy_bucket_s"], figures["busy_step_s"] = time_buckets(bucket, number, do_step)
    return figures


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return the means of the ranks' numbers; call it on all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def time_buckets(bucket: torch.Tensor, number: int, compute: Callable[[], object]) -> list[float]:
    """Return the mean times of an all-reduce and of computing beside it; call it on all ranks.

    All of them are under way at once, as DDP has its buckets; the backend takes them one or two at a time.
    """
    dist.barrier()
    begin, steps = time.perf_counter(), 0
    works = [dist.all_reduce(bucket, async_op=True) for _ in range(number)]
    while not works[-1].is_completed():
        step_begin = time.perf_counter()
        compute()
        steps += 1
        if time.perf_counter() - step_begin < 1e-4:
            time.sleep(1e-4)  # nothing to compute
    end = time.perf_counter()
    for work in works:
        work.wait()
    return mean_over_ranks([(end - begin) / number, (end - begin) / steps])


# ---- all points


def predict(
    probed: dict[str, float], gradients: Sequence[Gradient], nodes: int, compression: str
) -> dict[str, float]:
    """Return the plan's step time and bytes of a node, from what was measured apart from such a step."""
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
    method = Method("ddp", "ring", grad_compression=compression, bucket_cap_mb=BUCKET_MB)
    found = step(gradients, compute, cluster, method, control_alpha_s=cluster.network.alpha_s)
    return {"step_s": found.step_s, "sent_bytes": found.sent_bytes_per_node, "compute_s": found.compute_s}


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; raises UserError."""
    parser = CommandParser(f"python -m {MODULE}", (__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=positive_int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument(
        "--mbit", type=non_negative_float, nargs="+", default=[100, 300, 1000], metavar="X", help="0: no limit"
    )
    kinds = ("none", "fp16", "bf16")
    parser.add_argument(
        "--compression", type=one_of(*kinds), nargs="+", default=["none"], metavar="KIND", help=", ".join(kinds)
    )
    parser.add_argument("--model", default=MODEL, help="of the recipe's")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="medians are over them")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="of a run (about four seconds of them)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="all figures, as JSON")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # be a rank, and write to this folder
    args = parse(parser, argv)
    if max(args.nodes) > 64:
        raise UserError(f"--nodes: at most 64 on one machine, got {max(args.nodes)}")
    args.words = list(argv)
    return args


def run_ranks(net: network.Network, nodes: int, mbit: float, args: Namespace, folder: Path) -> None:
    """Run a rank on each node, with links of a set rate; 0: no limit."""
    limited = range(nodes if mbit else 0)
    for node in limited:
        net.narrow(node, f"{mbit:g}mbit")
    rank = [sys.executable, "-m", MODULE, *args.words, "--rank", str(folder)]
    try:
        net.run_ranks(rank, nodes, max(1, len(os.sched_getaffinity(0)) // nodes), TIMEOUT_S)
    finally:
        for node in limited:
            net.restore(node)


def measure_points(args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return prediction and truth of every point: lists over the rounds."""
    options = train.options(words_of_recipe(args, 1, folder))
    gradients = look_at(options, kind_of(options, None, None)).gradients
    net = network.Network(max(args.nodes))
    points: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for nodes in args.nodes:
        for mbit in args.mbit if nodes > 1 else [0.0]:
            points[nodes, mbit] = [
                {"nodes": nodes, "mbit": mbit, "compression": kind, "predicted": [], "real": [], "probes": []}
                for kind in (args.compression if nodes > 1 else ["none"])
            ]
    for _ in range(args.rounds):
        for (nodes, mbit), own in points.items():
            run_ranks(net, nodes, mbit, args, folder)
            probed = json.loads((folder / "probe.json").read_text())
            # A limited link cuts what it sends into packets before it is counted, an unlimited one after that.
            headless = PACKET_SHARE if mbit else 1.0
            for point in own:
                result = json.loads((folder / point["compression"] / "result.json").read_text())
                step_s = nodes * LOCAL_BATCH / result["samples_per_s"]
                point["real"].append({"step_s": step_s, "sent_bytes": result["sent_bytes_per_step"] * headless})
                point["predicted"].append(predict(probed, gradients, nodes, point["compression"]))
                point["probes"].append(probed)
                print(line_of(point), flush=True)
    return [point for own in points.values() for point in own]


def error_of(point: dict[str, Any], key: str = "step_s") -> list[float]:
    """Return predicted over real of each round, less one."""
    pairs = zip(point["predicted"], point["real"], strict=True)
    return [expected[key] / real[key] - 1 if real[key] else 0.0 for expected, real in pairs]


def line_of(point: dict[str, Any]) -> str:
    """Return a point's figures so far in words."""
    predicted, real = (1e3 * median(one["step_s"] for one in point[kind]) for kind in ("predicted", "real"))
    compute = 1e3 * median(one["compute_s"] for one in point["predicted"])
    rate = f"{point['mbit']:g} Mbit/s" if point["mbit"] else "no limit"
    sent = f"{median(error_of(point, 'sent_bytes')):+.1%}" if point["nodes"] > 1 else "-"
    return (
        f"{point['nodes']} nodes, {rate}, {point['compression']}: computing {compute:.0f} ms, step predicted "
        f"{predicted:.0f} ms, real {real:.0f} ms, error {median(error_of(point)):+.1%}, of the bytes {sent}"
    )


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Return a figure for the step time of each point, and one for the bytes of all."""
    if reason := network.why_not(narrow=True):
        return [unmeasured("plan", "predicted step time", reason, STEP_GOAL)]
    points = in_namespaces(MODULE, rounds, folder)
    figures = []
    for point in points:
        ratios = [max(1 + error, 1 / (1 + error)) for error in error_of(point)]
        predicted, real = (1e3 * median(one["step_s"] for one in point[kind]) for kind in ("predicted", "real"))
        rate = f" at {point['mbit']:g} Mbit/s" if point["nodes"] > 1 else ""
        name = f"predicted step time, {point['nodes']} node{'s' if point['nodes'] > 1 else ''}{rate}"
        note = f"predicted {predicted:.0f} ms, real {real:.0f} ms; the larger over the smaller"
        figures.append(Figure("plan", name, *spread(ratios), STEP_GOAL, "the real step", note, is_limit=True))
    sent = [1 / (1 + error) for point in points if point["nodes"] > 1 for error in error_of(point, "sent_bytes")]
    note = "of all points; the votes on stopping are in it"
    return [
        *figures,
        Figure(
            "plan", "bytes sent over the plan's", *spread(sent), BYTES_GOAL, "the real bytes", note, is_limit=True
        ),
    ]


@command
def main(words: list[str]) -> int:
    """Measure every point and say how far off the plan is."""
    args = parse_args(words)
    if args.rank:
        return exit_status(lambda: run_rank(args))

    def work(folder: Path) -> list[dict[str, Any]]:
        points = measure_points(args, folder)
        print("\n".join(["", *(line_of(point) for point in points)]))
        worst = max(abs(median(error_of(point))) for point in points)
        print(f"largest error of a step time: {worst:.1%}")
        return points

    return measure_inside(MODULE, words, args.result, work)


if __name__ == "__main__":
    sys.exit(main())
